"""The settings of a ``PolicyBridge``, checked before anything starts."""

from __future__ import annotations

from dataclasses import dataclass, fields

from slipstream.client import split_address
from slipstream.errors import RefusedError
from slipstream.serving.identity import NONE, ClientCredentials

DTYPES = ("bfloat16", "float16", "float32")
TRANSPORTS = ("auto", "shared_memory", "grpc")


@dataclass(frozen=True)
class ModulePaths:
    """The paths of a model's parts, for ``get_submodule``; empty: found by structure.

    Attributes:
        decoder_layers: the list of decoder layers, for example ``model.layers``.
        lm_head: the output projection.
        embed_tokens: the input embeddings.
        final_norm: set it when the loss does not call lm_head as a module (fused
            kernels): the final hidden state is then this module's output.
    """

    decoder_layers: str = ""
    lm_head: str = ""
    embed_tokens: str = ""
    final_norm: str = ""


@dataclass(frozen=True)
class BridgeConfig:
    """Settings of a ``PolicyBridge``. Bytes are bytes, times are seconds.

    Attributes:
        trainer: host:port of the draft trainer.
        run_id: names the run; the same id continues it.
        rollout_servers: host:port of each rollout server's control plane; empty
            takes the list that the trainer publishes to.
        trainer_credentials: for the trainer; they need the role feed.
        rollout_credentials: for the rollout servers, also those that the trainer names; they need
            the role operate.
        bytes_per_step: most bytes that are sent of one policy version; 0 turns capture off. A step
            is from one ``sync`` to the next: all ``capture`` windows between them share it, first
            come first served, and where it is spent they capture nothing. None: see ``bounds``.
        device_bytes: bound on the states that windows hold where the policy is, beside the pass
            that it is making: passes beyond it are thinned out to what ``bytes_per_step`` would
            choose of them, or shed as ``device_full`` while the copies are behind.
        outbox_bytes: bound on states that wait in host memory, unacknowledged ones included. None:
            see ``bounds``.
        states_dtype: cast hidden states to this before they are sent; empty keeps the policy's.
        transport: "shared_memory" or "grpc" for the states, or "auto": shared memory where both
            processes see the same. Where there is none, states go by gRPC with any of the three,
            and ``stats().transport_reason`` says why.
        shared_memory: directory in which the file of the outbox is made; the trainer's [server]
            shared_memory as it is mounted here.
        skip_unreachable_servers: push the policy to the rollout servers that can be reached, as
            long as one can, and count the others in ``stats().servers_left_out``; they serve an
            older policy when they come back, until the next sync. False: an unreachable server is
            an error, unless it joined after an earlier push and has taken no policy yet, or the
            trainer no longer lists it. With ``push_external`` it is always an error.
        policy_dtype: cast pushed policy weights to this; empty keeps the policy's. What the policy
            keeps in float32 beside narrower weights stays float32: its float32 tensors where most
            values are narrower, and what its transformers class keeps so (a router's
            ``e_score_correction_bias``), of float32 master weights too.
        seed: of the random order in which sequences are chosen.
        logit_scale: the factor by which the policy multiplies its lm_head's output; None: as its
            configuration says. The first window compares the policy's own logits with it.
        logit_soft_cap: the soft cap on its logits, 0 for none; None: as its configuration says.
        strict: raise what otherwise turns capture off: a policy that cannot be captured, a
            draft that does not fit it, a version that goes backwards, a call of ``ship`` that
            does not fit the forward pass. False: training goes on and
            ``stats().capture_off_reason`` says why.
        model_name: shown in the trainer's log.
        modules: module paths of models whose structure is not recognised.
        connect_seconds: how long the first sync may wait for the trainer's first answer.
        rpc_seconds: deadline of small calls (open a run, state, abort).
        announce_seconds: deadline of registering a policy version, in the background.
        sync_seconds: deadline of PrepareSync, and longest wait for CompleteSync before the bridge
            commits the policy itself.
        policy_seconds: deadline of staging the policy, and of committing it, per server.
        stall_seconds: a stream that waits this long for its first credit or for an acknowledgement
            is opened again.
        drain_seconds: how long ``close`` waits for acknowledgements.
        max_backoff_seconds: longest pause between two attempts to reach the trainer.

    Raises:
        RefusedError: a value of the wrong type or out of range.
    """

    trainer: str
    run_id: str
    rollout_servers: tuple[str, ...] = ()
    trainer_credentials: ClientCredentials = NONE
    rollout_credentials: ClientCredentials = NONE
    bytes_per_step: int | None = None
    device_bytes: int = 2 << 30
    outbox_bytes: int | None = None
    states_dtype: str = ""
    transport: str = "auto"
    shared_memory: str = "/dev/shm"
    skip_unreachable_servers: bool = False
    policy_dtype: str = "bfloat16"
    seed: int = 0
    logit_scale: float | None = None
    logit_soft_cap: float | None = None
    strict: bool = False
    model_name: str = ""
    modules: ModulePaths = ModulePaths()
    connect_seconds: float = 2.0
    rpc_seconds: float = 10.0
    announce_seconds: float = 60.0
    sync_seconds: float = 20.0
    policy_seconds: float = 120.0
    stall_seconds: float = 30.0
    drain_seconds: float = 5.0
    max_backoff_seconds: float = 5.0

    def __post_init__(self) -> None:
        _check_address("trainer", self.trainer)
        servers = self.rollout_servers
        if not isinstance(servers, tuple | list) or len(set(servers)) != len(servers):
            expected = 'a list of host:port, each once, as in ["rollouts:50061"]'
            raise RefusedError("rollout_servers", repr(servers), expected, "fix the value")
        object.__setattr__(self, "rollout_servers", tuple(servers))
        for address in servers:
            _check_address("rollout_servers", address)
            self.rollout_credentials.check_address(address, "rollout_servers")
        self.trainer_credentials.check("trainer_credentials.")
        self.trainer_credentials.check_address(self.trainer, "trainer")
        self.rollout_credentials.check("rollout_credentials.")
        for name, expected in (("run_id", "a name"), ("shared_memory", "a directory")):
            if not getattr(self, name):
                raise RefusedError(name, "an empty text", expected, f"set {name}")
        for name in ("strict", "skip_unreachable_servers"):
            if not isinstance(getattr(self, name), bool):
                found = repr(getattr(self, name))
                raise RefusedError(name, found, "True or False", "fix the value")
        for name, least in (
            ("bytes_per_step", 0),
            ("device_bytes", 1),
            ("outbox_bytes", 1),
            ("seed", 0),
        ):
            value = getattr(self, name)
            if value is None and name in ("bytes_per_step", "outbox_bytes"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise RefusedError(name, repr(value), f"a whole number >= {least}", "fix the value")
        for name, bound in (("logit_scale", 1e-9), ("logit_soft_cap", 0.0)):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if value is not None and not (number and bound <= value < 1e9):
                step = "copy it from the model's configuration"
                raise RefusedError(name, repr(value), f"a number >= {bound:g}, or None", step)
        for name, choices in (
            ("states_dtype", ("", *DTYPES)),
            ("policy_dtype", ("", *DTYPES)),
            ("transport", TRANSPORTS),
        ):
            if getattr(self, name) not in choices:
                expected = f"one of {', '.join(map(repr, choices))}"
                raise RefusedError(name, repr(getattr(self, name)), expected, "choose one")
        for name in (f.name for f in fields(self) if f.name.endswith("_seconds")):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if not number or not 0 < value < 1e6:
                raise RefusedError(name, repr(value), "seconds > 0", "fix the value")

    def bounds(self, device: str) -> tuple[int, int]:
        """``bytes_per_step`` and ``outbox_bytes`` for states on a device of this type.

        Where they are None: 1 GiB (32,768 tokens of a policy of 8 billion parameters) and 2 GiB on
        "cuda", else 64 MiB and 256 MiB. The first states that are shipped say which: a process may
        build this for others that have GPUs, and frameworks move a policy after the bridge was
        built.
        """
        step, outbox = (1 << 30, 2 << 30) if device == "cuda" else (64 << 20, 256 << 20)
        return (
            step if self.bytes_per_step is None else self.bytes_per_step,
            outbox if self.outbox_bytes is None else self.outbox_bytes,
        )


def _check_address(name: str, value: object) -> None:
    try:
        split_address(str(value))
    except ValueError as error:
        raise RefusedError(name, error, "host:port", "give a host and a port") from error
