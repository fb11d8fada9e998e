"""The keys of the trainer's TOML file, with their types and ranges.

One class per [section]; the rest of the trainer takes sections as they are. ``config_file`` reads
them. docs/operations.md describes every key.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
    model_validator,
)

from slipstream.client import split_address
from slipstream.errors import RefusedError
from slipstream.serving.identity import Access, ClientCredentials, Role, open_access

DNS, FILE = "dns:", "file:"
"""The prefixes of entries in ``publish.rollout_servers`` that stand for several addresses."""


def _relative_to_the_file(path: Path, info: ValidationInfo) -> Path:
    folder: Path | None = info.context
    return path if folder is None else folder / path


ConfigPath = Annotated[Path, Field(strict=False), AfterValidator(_relative_to_the_file)]
Files = Annotated[tuple[ConfigPath, ...], Field(strict=False)]
Names = Annotated[tuple[str, ...], Field(strict=False)]
Fraction = Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0.0, le=3600.0, allow_inf_nan=False)]
Port = Annotated[int, Field(ge=0, le=65535)]

HELD_OUT_MOST, HELD_OUT_LEAST = 0.25, 0.1
"""The shares of prompts that are held out where ``replay.held_out_fraction`` is not set."""
ENOUGH_PROMPTS = 8
"""The held-out prompts from which an interval over prompts is not wide merely for their number."""
ENOUGH_HELD_OUT = 32
"""The held-out prompts, or completions, that suffice: with more in the newest two policy versions
fewer are held out from then on, and with fewer in them the gate takes older versions, too."""


class Section(BaseModel):
    """Keys of one [section], each with its type and range."""

    # strict, so that "5" is not 5: a coerced value hides a typo.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class AccessConfig(Section):
    """[access]: the server's certificate, and which callers have which role. Paths, no secrets."""

    certificate: ConfigPath | None = None
    key: ConfigPath | None = None
    client_ca: ConfigPath | None = None
    feed_tokens: Files = ()
    observe_tokens: Files = ()
    operate_tokens: Files = ()
    feed_names: Names = ()
    observe_names: Names = ()
    operate_names: Names = ()


class CredentialsConfig(Section):
    """[credentials]: for the rollout servers. Paths, no secrets."""

    ca: ConfigPath | None = None
    certificate: ConfigPath | None = None
    key: ConfigPath | None = None
    token_file: ConfigPath | None = None
    server_name: str = ""
    allow_plaintext: bool = False


def access_of(config: TrainerConfig) -> Access:
    """Return what callers must present; ``config`` has absolute paths.

    Raises:
        RefusedError: a file cannot be used, a key is given without what it needs, or [server]
            would listen on the network without TLS or without asking who calls.
    """
    section, server = config.access, config.server
    return open_access(
        _access_key,
        server.host,
        certificate=section.certificate,
        key=section.key,
        client_ca=section.client_ca,
        tokens={role: getattr(section, f"{role}_tokens") for role in Role},
        names={role: getattr(section, f"{role}_names") for role in Role},
        allow_plaintext=server.allow_plaintext,
        allow_anonymous=server.allow_anonymous,
    )


def _access_key(name: str) -> str:
    if name.startswith("allow_"):
        return f"server.{name} = true"
    return f"server.{name}" if name == "host" else f"access.{name}"


def credentials_of(config: TrainerConfig) -> ClientCredentials:
    """Return the credentials for the rollout servers, their files checked.

    Raises:
        RefusedError: a file cannot be used, or a token would cross the network readable.
    """
    shown = ClientCredentials(**dict(config.credentials))
    shown.check("credentials.")
    for address in config.publish.rollout_servers:
        # The addresses in a file are checked when a channel to them is opened.
        if not address.startswith(FILE):
            shown.check_address(address, "publish.rollout_servers")
    return shown


DraftKind = Literal["eagle3", "mtp", "draft_model", "dflash", "dspark"]
"""The ``Drafter.name`` of every mechanism."""


class ServerConfig(Section):
    """[server]: where it listens, and what one client may use."""

    host: str = "127.0.0.1"
    port: Port = 50051
    metrics_port: Port = 9464
    max_streams: Annotated[int, Field(ge=1, le=256)] = 8
    max_sessions: Annotated[int, Field(ge=1, le=65536)] = 256
    max_calls: Annotated[int, Field(ge=1, le=256)] = 16
    calls_per_s: Annotated[float, Field(ge=1.0, allow_inf_nan=False)] = 500.0
    message_timeout_s: Seconds = 30.0
    stream_idle_s: Annotated[float, Field(gt=0.0, le=86400.0, allow_inf_nan=False)] = 900.0
    keepalive_s: Annotated[float, Field(ge=1.0, le=3600.0, allow_inf_nan=False)] = 20.0
    max_tokens_per_sample: Annotated[int, Field(ge=4)] = 2048
    receive_window_bytes: Annotated[int, Field(ge=4096)] | None = None
    shared_memory: str = "/dev/shm"
    shutdown_timeout_s: Seconds = 10.0
    allow_plaintext: bool = False
    allow_anonymous: bool = False


class DraftConfig(Section):
    """[draft]: the mechanism, the checkpoint it starts from and the folder of its releases."""

    kind: DraftKind = "eagle3"
    initial: ConfigPath
    registry: Annotated[ConfigPath, Field(validate_default=True)] = Path("releases")
    policy: ConfigPath | None = None
    keep_releases: Annotated[int, Field(ge=2)] = 16
    keep_bytes: Annotated[int, Field(ge=1)] = 64 << 30


class ReplayConfig(Section):
    """[replay]: how much is kept, where and for how long, and what is held out of training.

    Attributes:
        directory: folder of the samples; None for one in the registry.
        capacity_bytes: bound on the bytes of their blocks.
        held_out_fraction: share of prompts; of completions, where the versions within
            ``max_policy_lag`` have too few prompts for that; None: ``HELD_OUT_MOST`` at first, and
            less, down to ``HELD_OUT_LEAST``, once more are held out than the gate needs.
        max_epochs: how often a sample is drawn.
        max_policy_lag: policy versions that samples may be behind the newest.
        ledger_entries: number of sample ids that are remembered.
    """

    directory: ConfigPath | None = None
    capacity_bytes: Annotated[int, Field(ge=1)] = 1 << 30
    held_out_fraction: Annotated[float, Field(gt=0.0, lt=1.0, allow_inf_nan=False)] | None = None
    max_epochs: Annotated[int, Field(ge=1)] = 2
    max_policy_lag: Annotated[int, Field(ge=0)] = 4
    ledger_entries: Annotated[int, Field(ge=1)] = 262_144


class TrainingConfig(Section):
    """[training]: the optimizer, the training-time test and the processor's share.

    Attributes:
        optimizer: AdamW; or Muon for the matrices between layers, and AdamW for the rest.
        learning_rate: after warm-up.
        warmup_steps: steps of linear warm-up after every (re)start of the optimizer's moments. A
            fresh AdamW at full rate takes its first steps on one batch's signs, which costs a good
            draft acceptance.
        weight_decay: decoupled, on matrices only.
        grad_clip: bound on the global gradient norm.
        weight_averaging: decay per step of the exponential average of the weights that is gated
            and released; 0 releases the weights of the last step. A rate high enough to follow a
            moving policy leaves noise in the last step's weights that costs acceptance.
        target: what is minimised against the policy: forward KL, total variation, the negative
            log of the acceptance rate, or DSpark's sum of the first two (see ``drafters.loss``),
            which is the default with ``draft.kind`` "dspark".
        ttt_steps: depth K of the training-time test; at least the served draft length.
        step_weight_decay: step s has this to the power s as its weight.
        compute_dtype: type of matrix products; bfloat16 where ``device`` is "cuda". Weights,
            gradients and moments are float32 either way. On a CPU without AVX-512, products in
            bfloat16 take fifty times as long.
        cpu_kernels: whether the C kernels run: "auto" where they compile.
        compile: whether the loss's score function is compiled where ``device`` is "cuda": "auto"
            where it compiles and computes what eager computes.
        batch_tokens: tokens of one optimizer step; None: ``training.pace`` says.
        forward_tokens: tokens, padding included, of one forward pass; a step accumulates
            gradients over as many passes as its samples need. 8192 where ``device`` is "cuda".
        linger_s: how long to wait for more samples before a step that is not full.
        steps_per_candidate: optimizer steps between two gate decisions.
        candidate_seconds: seconds after which a gate decision is due even with fewer steps; four
            times those of the last decision where that is longer.
        threads: torch's threads.
        nice: niceness of the training thread.
        device: where the draft is trained.
        gpu_memory_fraction: share of the GPU's memory that this process never exceeds.
        state_every_steps: optimizer steps between two training states; 0 for none.
        state_seconds: least seconds between two training states. 120 where ``device`` is "cuda".
        seed: seed of the data order.
    """

    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: Positive = 1e-3
    warmup_steps: Annotated[int, Field(ge=0)] = 20
    weight_decay: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0
    grad_clip: Positive = 1.0
    weight_averaging: Fraction = 0.9
    target: Literal["kl", "tv", "lk", "dspark"] = "kl"
    ttt_steps: Annotated[int, Field(ge=1, le=16)] = 5
    step_weight_decay: Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)] = 0.8
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    cpu_kernels: Literal["auto", "on", "off"] = "auto"
    compile: Literal["auto", "off"] = "off"
    batch_tokens: Annotated[int, Field(ge=1)] | None = None
    forward_tokens: Annotated[int, Field(ge=1)] = 1024
    linger_s: Seconds = 0.2
    steps_per_candidate: Annotated[int, Field(ge=1)] = 50
    candidate_seconds: Seconds = 30.0
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    nice: Annotated[int, Field(ge=0, le=19)] = 5
    device: Literal["cpu", "cuda"] = "cpu"
    gpu_memory_fraction: Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)] = 1.0
    state_every_steps: Annotated[int, Field(ge=0)] = 20
    state_seconds: Annotated[float, Field(ge=0.0, le=3600.0, allow_inf_nan=False)] = 0.0
    seed: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_device(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and given.get("device") == "cuda":
            defaults = {
                "compute_dtype": "bfloat16",
                "forward_tokens": 8192,
                "state_seconds": 120.0,
            }
            return {**defaults, **given}
        return given

    @model_validator(mode="after")
    def _type_of_the_device(self) -> TrainingConfig:
        if self.device == "cuda" and self.compute_dtype != "bfloat16":
            raise RefusedError(
                "training.compute_dtype",
                self.compute_dtype,
                "bfloat16 with training.device = cuda, the type of flash attention there",
                "leave training.compute_dtype out",
            )
        return self


class GateSection(Section):
    """[gate]: what a candidate must prove on held-out states before it is promoted.

    Attributes:
        min_gain: least gain in acceptance length.
        confidence: level of the interval of that gain.
        min_anchors: held-out anchors without which nothing passes; None: ``needed_anchors``.
        newest_versions: policy versions whose held-out states count at least; older ones do while
            they have less than ``ENOUGH_HELD_OUT``.
        max_tokens: held-out tokens of one decision; more where one sample each of
            ``ENOUGH_PROMPTS`` prompts has more.
    """

    min_gain: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0
    confidence: Annotated[float, Field(gt=0.5, lt=1.0)] = 0.95
    min_anchors: Annotated[int, Field(ge=1)] | None = None
    newest_versions: Annotated[int, Field(ge=1)] = 2
    max_tokens: Annotated[int, Field(ge=1)] = 16384

    def needed_anchors(self, clusters: int) -> int:
        """Return the held-out anchors that a decision needs.

        The interval is over clusters (prompts or completions): with many of them, few anchors of
        each suffice.
        """
        if self.min_anchors is not None:
            return self.min_anchors
        return 200 if clusters < ENOUGH_PROMPTS else 60


class PublishConfig(Section):
    """[publish]: the fleet, how it drafts, and how long a phase may take.

    Attributes:
        rollout_servers: control planes.
        num_speculative_tokens: draft length that candidates are judged for; None: the longest that
            a server of the fleet says it drafts.
        draft_sample_method: how the fleet drafts; None: as that server says.
        on: whether a promoted release goes live with the policy's next sync or at once.
        state_timeout_s, stage_timeout_s, commit_timeout_s: deadline of each call; a commit with a
            policy has ``releases.rollout_client.POLICY_SECONDS``.
        reconcile_s: between two checks of what the servers serve; 0 for none.
        shared_registry: folder of storage that the servers see, too, with the registry in it: they
            read releases there. None: they are sent.
    """

    rollout_servers: Annotated[tuple[str, ...], Field(strict=False)] = ()
    num_speculative_tokens: Annotated[int, Field(ge=1, le=16)] | None = None
    draft_sample_method: Literal["probabilistic", "greedy"] | None = None
    on: Literal["sync", "promotion"] = "sync"
    state_timeout_s: Seconds = 5.0
    stage_timeout_s: Seconds = 60.0
    commit_timeout_s: Seconds = 10.0
    reconcile_s: Annotated[float, Field(ge=0.0, le=3600.0, allow_inf_nan=False)] = 2.0
    shared_registry: ConfigPath | None = None

    @field_validator("rollout_servers")
    @classmethod
    def _addresses(cls, entries: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        checked = []
        for entry in entries:
            try:
                if entry == FILE:
                    raise ValueError("file: without a path")
                if entry.startswith(FILE):
                    path = _relative_to_the_file(Path(entry.removeprefix(FILE)), info)
                    entry = f"{FILE}{path}"
                else:
                    split_address(entry.removeprefix(DNS))
            except ValueError as error:
                raise ValueError(f"host:port, dns:name:port or file:path ({error})") from None
            checked.append(entry)
        if len(set(checked)) != len(checked):
            raise ValueError("every address once")
        return tuple(checked)


class TrialConfig(Section):
    """[trial]: whether releases are on trial, and what their live acceptance must show."""

    enabled: bool = True
    min_drafts: Annotated[int, Field(ge=1)] = 300
    max_seconds: Seconds = 60.0
    alpha: Annotated[float, Field(gt=0.0, le=0.2, allow_inf_nan=False)] = 0.01
    max_loss: Fraction = 0.1
    design_effect: Annotated[float, Field(ge=1.0, allow_inf_nan=False)] = 8.0


class EconomyConfig(Section):
    """[economy]: when the draft is trained.

    Attributes:
        mode: "when-it-pays": while the expected saving exceeds the cost (see
            ``training.economy``); "always"; "never".
        training_share: of a second of training that the loop loses; None: on a CPU what training
            waits for the cores that it shares, as measured, and 1 on a GPU, as where they take
            turns on it. Where the trainer has its own devices: their number over the loop's times
            what such a device would earn elsewhere.
        horizon_versions: policy versions over which a better draft is expected to be served.
    """

    mode: Literal["when-it-pays", "always", "never"] = "when-it-pays"
    training_share: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] | None = None
    horizon_versions: Annotated[int, Field(ge=1)] = 20


class TrainerConfig(Section):
    """The whole file."""

    server: ServerConfig = ServerConfig()
    access: AccessConfig = AccessConfig()
    credentials: CredentialsConfig = CredentialsConfig()
    draft: DraftConfig
    replay: ReplayConfig = ReplayConfig()
    training: TrainingConfig = TrainingConfig()
    gate: GateSection = GateSection()
    publish: PublishConfig = PublishConfig()
    trial: TrialConfig = TrialConfig()
    economy: EconomyConfig = EconomyConfig()

    @model_validator(mode="before")
    @classmethod
    def _target_of_the_mechanism(cls, given: Any) -> Any:
        sections = given if isinstance(given, Mapping) else {}
        draft, training = (sections.get(name, {}) for name in ("draft", "training"))
        mappings = isinstance(draft, Mapping) and isinstance(training, Mapping)
        if mappings and draft.get("kind") == "dspark":
            return {**sections, "training": {"target": "dspark", **training}}
        return given

    @model_validator(mode="after")
    def _depth_covers_the_served_drafts(self) -> TrainerConfig:
        k, depth = self.publish.num_speculative_tokens, self.training.ttt_steps
        if k is not None and depth < k:
            # Acceptance drops at draft positions beyond the depth that was trained.
            raise RefusedError(
                "training.ttt_steps",
                depth,
                f"at least publish.num_speculative_tokens = {k}",
                "raise training.ttt_steps, or serve a shorter draft",
            )
        return self

    @model_validator(mode="after")
    def _registry_is_shared(self) -> TrainerConfig:
        shared, registry = self.publish.shared_registry, self.draft.registry
        if shared is not None and not registry.is_relative_to(shared):
            raise RefusedError(
                "publish.shared_registry",
                shared,
                f"a folder with draft.registry ({registry}) in it",
                "put the registry on the shared storage, or remove publish.shared_registry",
            )
        return self
