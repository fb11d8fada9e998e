"""What a bridge is told when it is built, checked before anything starts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from slipstream.errors import RefusedError
from slipstream.security import NONE, ClientCredentials

DTYPES = ("bfloat16", "float16", "float32")
FLOAT8 = "float8_e4m3"
TRANSPORTS = ("auto", "shared_memory", "grpc")


@dataclass(frozen=True)
class ModulePaths:
    """Where a model keeps its parts, as ``get_submodule`` paths; empty means look for it.

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
        trainer_credentials: what is shown to the trainer; the role feed.
        rollout_credentials: what is shown to the rollout servers, those that the trainer names
            included; the role operate.
        bytes_per_step: most bytes one ``capture`` may ship; 0 turns capture off.
        outbox_bytes: bound on states that wait in host memory, unacknowledged ones included.
        states_dtype: cast hidden states to this before shipping; empty keeps the policy's.
            "float8_e4m3" ships a scale for each row with them; the trainer decodes to bfloat16.
            What that costs in acceptance: benchmarks/results/acceptance_curve_float8.json.
        transport: "shared_memory" or "grpc" for the states, or "auto": shared memory where both
            see the same. "shared_memory" is preferred, not insisted on: states go by gRPC where
            there is none, and ``stats().transport_reason`` says why.
        shared_memory: directory in which the trainer's ring is looked for; its [server]
            shared_memory as it is mounted here.
        policy_dtype: cast pushed policy weights to this; empty keeps the policy's.
        seed: of the default selector.
        strict: raise what otherwise turns capture off: a policy that cannot be captured, a
            draft that does not fit it, a version that goes backwards, a call of ``ship`` that
            does not fit the forward pass. Off, training goes on and
            ``stats().capture_off_reason`` says why.
        model_name: for people, in the trainer's log.
        modules: explicit module paths for models that are not found structurally.
        connect_seconds: how long the first sync may wait for the trainer's first answer.
        rpc_seconds: deadline of small calls (open a run, state, abort).
        announce_seconds: deadline of announcing a policy version, in the background.
        sync_seconds: deadline of PrepareSync and of CompleteSync, each.
        policy_seconds: deadline of staging the policy, and of committing it, per server.
        offer_seconds: longest that handing one sample to the outbox may take.
        stall_seconds: a stream whose first credit, or whose acknowledgements, are due and which has
            no news for this long is opened again.
        drain_seconds: how long ``close`` waits for acknowledgements.
        max_backoff_seconds: longest pause between two attempts to reach the trainer.

    Raises:
        RefusedError: a value that cannot be meant.
    """

    trainer: str
    run_id: str
    rollout_servers: tuple[str, ...] = ()
    trainer_credentials: ClientCredentials = NONE
    rollout_credentials: ClientCredentials = NONE
    bytes_per_step: int = 64 << 20
    outbox_bytes: int = 256 << 20
    states_dtype: str = ""
    transport: str = "auto"
    shared_memory: str = "/dev/shm"
    policy_dtype: str = "bfloat16"
    seed: int = 0
    strict: bool = False
    model_name: str = ""
    modules: ModulePaths = ModulePaths()
    connect_seconds: float = 2.0
    rpc_seconds: float = 10.0
    announce_seconds: float = 60.0
    sync_seconds: float = 20.0
    policy_seconds: float = 120.0
    offer_seconds: float = 0.1
    stall_seconds: float = 30.0
    drain_seconds: float = 5.0
    max_backoff_seconds: float = 5.0

    def __post_init__(self) -> None:
        _check_address("trainer", self.trainer)
        if not isinstance(self.rollout_servers, tuple):
            raise RefusedError(
                "rollout_servers", self.rollout_servers, "a tuple of host:port", "pass a tuple"
            )
        for address in self.rollout_servers:
            _check_address("rollout_servers", address)
        if len(set(self.rollout_servers)) != len(self.rollout_servers):
            raise RefusedError(
                "rollout_servers", self.rollout_servers, "each server once", "drop the double"
            )
        self.trainer_credentials.check("trainer_credentials.")
        self.trainer_credentials.check_address(self.trainer, "trainer")
        self.rollout_credentials.check("rollout_credentials.")
        for address in self.rollout_servers:
            self.rollout_credentials.check_address(address, "rollout_servers")
        if not self.run_id:
            raise RefusedError("run_id", "an empty text", "a name", "name the run")
        if not isinstance(self.strict, bool):
            raise RefusedError("strict", repr(self.strict), "True or False", "fix the value")
        _check_whole("bytes_per_step", self.bytes_per_step, 0)
        _check_whole("outbox_bytes", self.outbox_bytes, 1)
        _check_whole("seed", self.seed, 0)
        choices = {
            "states_dtype": ("", *DTYPES, FLOAT8),
            "policy_dtype": ("", *DTYPES),
            "transport": TRANSPORTS,
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                expected = ", ".join(repr(choice) for choice in allowed)
                raise RefusedError(
                    name, repr(getattr(self, name)), f"one of {expected}", "pick one"
                )
        if not self.shared_memory:
            raise RefusedError(
                "shared_memory", "an empty text", "a directory", 'or set transport = "grpc"'
            )
        for field in fields(self):
            if field.name.endswith("_seconds"):
                _check_seconds(field.name, getattr(self, field.name))

    @classmethod
    def from_dict(cls, values: Mapping[str, object]) -> BridgeConfig:
        """A configuration from plain values, as a file or a command line gives them.

        Raises:
            RefusedError: an unknown or a missing key, or a value ``BridgeConfig`` refuses.
        """
        known = dict(values)
        _check_keys("", known, {field.name for field in fields(cls)})
        for name in ("trainer", "run_id"):
            if name not in known:
                raise RefusedError(name, "nothing", "a value", f"set {name}")
        servers = known.get("rollout_servers", ())
        if isinstance(servers, list):
            known["rollout_servers"] = tuple(servers)
        modules = known.get("modules", ModulePaths())
        if isinstance(modules, Mapping):
            _check_keys("modules.", modules, {field.name for field in fields(ModulePaths)})
            known["modules"] = ModulePaths(**modules)
        for name in ("trainer_credentials", "rollout_credentials"):
            if isinstance(given := known.get(name), Mapping):
                known[name] = _credentials(name, given)
        return cls(**known)  # type: ignore[arg-type]


def _credentials(name: str, given: Mapping[str, object]) -> ClientCredentials:
    kinds = {field.name: field.type for field in fields(ClientCredentials)}
    _check_keys(f"{name}.", given, set(kinds))
    values: dict[str, object] = {}
    for key, value in given.items():
        wanted = bool if kinds[key] == "bool" else str
        if not isinstance(value, wanted):
            expected = "true or false" if wanted is bool else "a text"
            raise RefusedError(f"{name}.{key}", type(value).__name__, expected, "fix the value")
        values[key] = Path(str(value)) if kinds[key] == "Path | None" else value
    return ClientCredentials(**values)  # type: ignore[arg-type]


def _check_keys(prefix: str, values: Mapping[str, object], allowed: set[str]) -> None:
    for key in values:
        if key not in allowed:
            raise RefusedError(
                f"{prefix}{key}",
                "an unknown key",
                f"one of {', '.join(sorted(allowed))}",
                "remove it or fix its spelling",
            )


def _check_address(name: str, value: object) -> None:
    host, _, port = value.rpartition(":") if isinstance(value, str) else ("", "", "")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise RefusedError(name, repr(value), "host:port", "give a host and a port")


def _check_whole(name: str, value: object, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise RefusedError(name, repr(value), f"a whole number >= {least}", "fix the value")


def _check_seconds(name: str, value: object) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e6
    if not good:
        raise RefusedError(name, repr(value), "seconds > 0", "fix the value")
