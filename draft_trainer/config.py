"""What ``draft-trainer serve --config FILE`` reads: TOML, every key checked before anything starts.

Paths are relative to the folder of the configuration file, so that a run does
not depend on where it was started.

What every section of a configuration file has in common.

[access] and [credentials]: whom the trainer lets in, and what it shows to rollout servers.

How a head is trained, and what one step of it says.

The learning rate of every optimizer step, from two counters and nothing else.
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar, get_args

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from draft_trainer.releases.fleet import FILE, members_of
from slipstream.client import MAX_MESSAGE_BYTES
from slipstream.errors import RefusedError
from slipstream.security import (
    Access,
    AccessRefusals,
    Allowed,
    ClientCredentials,
    FieldNames,
    Role,
    TlsFiles,
    TlsPaths,
    TokenFiles,
    check_exposure,
)

ConfigPath = Annotated[Path, Field(strict=False)]


class Section(BaseModel):
    """Keys of one [section], each with its type and range."""

    # strict: "5" is not 5. A config that is coerced hides the typo that made it.
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


S = TypeVar("S", bound=Section)
Files = Annotated[tuple[ConfigPath, ...], Field(strict=False)]
Names = Annotated[tuple[str, ...], Field(strict=False)]


class AccessConfig(Section):
    """[access]: the server's certificate, and who may call what. Only paths, never secrets."""

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
    """[credentials]: what is shown to the rollout servers. Only paths, never secrets."""

    ca: ConfigPath | None = None
    certificate: ConfigPath | None = None
    key: ConfigPath | None = None
    token_file: ConfigPath | None = None
    server_name: str = ""
    allow_plaintext: bool = False


def beneath(base: Path, section: S) -> S:
    """A section with its relative paths below ``base``."""
    changed: dict[str, object] = {}
    for name in type(section).model_fields:
        value = getattr(section, name)
        if isinstance(value, Path):
            changed[name] = base / value
        elif isinstance(value, tuple) and value and isinstance(value[0], Path):
            changed[name] = tuple(base / path for path in value)
    return section.model_copy(update=changed)


def access_of(config: TrainerConfig, count: Callable[[str], None]) -> Access:
    """What callers are asked for; everything is read and checked here.

    Args:
        config: with absolute paths.
        count: told the reason of every refusal.

    Raises:
        RefusedError: a file cannot be used, a key is given without what it needs, or [server]
            would listen on the network without TLS or without asking who calls.
    """
    section, server = config.access, config.server
    names = {role: getattr(section, f"{role}_names") for role in Role}
    for key, given, needed in (
        ("certificate", section.certificate, "key"),
        ("key", section.key, "certificate"),
        ("client_ca", section.client_ca, "certificate"),
        ("names", any(names.values()) or None, "client_ca"),
    ):
        if given is not None and getattr(section, needed) is None:
            key = next(f"{r}_names" for r in Role if names[r]) if key == "names" else key
            raise RefusedError(
                f"access.{key}",
                f"a value, and access.{needed} without one",
                "both",
                f"set access.{needed}",
            )
    tls = None
    if section.certificate is not None and section.key is not None:
        tls = TlsFiles(
            TlsPaths(section.certificate, section.key, section.client_ca),
            FieldNames("access.certificate", "access.key", "access.client_ca"),
        )
    files = {role: getattr(section, f"{role}_tokens") for role in Role}
    access = Access(tls, TokenFiles(files, "access.{role}_tokens"), names, AccessRefusals(count))
    check_exposure(
        server.host,
        access,
        Allowed(
            server.allow_plaintext,
            server.allow_anonymous,
            host_key="server.host",
            certificate_key="access.certificate and access.key",
            tokens_key="access.feed_tokens, access.observe_tokens and access.operate_tokens",
            plaintext_key="server.allow_plaintext = true",
            anonymous_key="server.allow_anonymous = true",
        ),
    )
    return access


def credentials_of(config: TrainerConfig) -> ClientCredentials:
    """What is shown to the rollout servers, its files checked.

    Raises:
        RefusedError: a file cannot be used, or a token would cross the network readable.
    """
    section = config.credentials
    shown = ClientCredentials(
        section.ca,
        section.certificate,
        section.key,
        section.token_file,
        section.server_name,
        section.allow_plaintext,
    )
    shown.check("credentials.")
    for address in config.publish.rollout_servers:
        # A file's addresses are looked at one by one, when a channel to them is opened.
        if address.startswith("file:"):
            continue
        shown.check_address(address, "publish.rollout_servers")
    return shown


Fraction = Annotated[float, Field(ge=0.0, lt=1.0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
Seconds = Annotated[float, Field(gt=0.0, le=3600.0, allow_inf_nan=False)]
Port = Annotated[int, Field(ge=0, le=65535)]
S_CONFIG = TypeVar("S_CONFIG", bound=BaseModel)


class ServerConfig(Section):
    """[server]: where it listens and what one client may hold."""

    host: str = "127.0.0.1"
    port: Port = 50051
    metrics_port: Port = 9464
    max_streams: Annotated[int, Field(ge=1, le=256)] = 8
    max_sessions: Annotated[int, Field(ge=1, le=65536)] = 256
    max_calls: Annotated[int, Field(ge=1, le=256)] = 16
    calls_per_s: Annotated[float, Field(ge=1.0, allow_inf_nan=False)] = 500.0
    max_message_bytes: Annotated[int, Field(ge=1 << 20, le=MAX_MESSAGE_BYTES)] = MAX_MESSAGE_BYTES
    message_timeout_s: Seconds = 30.0
    stream_idle_s: Annotated[float, Field(gt=0.0, le=86400.0, allow_inf_nan=False)] = 900.0
    keepalive_s: Annotated[float, Field(ge=1.0, le=3600.0, allow_inf_nan=False)] = 20.0
    max_tokens_per_sample: Annotated[int, Field(ge=4)] = 2048
    receive_window_bytes: Annotated[int, Field(ge=4096)] = MAX_MESSAGE_BYTES
    shared_memory: str = "/dev/shm"
    ring_bytes: Annotated[int, Field(ge=1 << 16)] = 64 << 20
    shutdown_timeout_s: Seconds = 10.0
    allow_plaintext: bool = False
    allow_anonymous: bool = False


class DraftConfig(Section):
    """[draft]: the mechanism, the checkpoint it starts from and the folder of its releases."""

    kind: Literal["eagle3"] = "eagle3"
    initial: ConfigPath
    registry: ConfigPath
    policy: ConfigPath | None = None
    keep_releases: Annotated[int, Field(ge=2)] = 16
    keep_bytes: Annotated[int, Field(ge=1)] = 64 << 30


class ReplayConfig(Section):
    """[replay]: how much is kept, where and for how long, and what is held out of training."""

    directory: ConfigPath | None = None
    capacity_bytes: Annotated[int, Field(ge=1)] = 1 << 30
    held_out_fraction: Annotated[float, Field(gt=0.0, lt=1.0, allow_inf_nan=False)] = 0.1
    max_epochs: Annotated[int, Field(ge=1)] = 2
    max_policy_lag: Annotated[int, Field(ge=0)] = 4
    ledger_entries: Annotated[int, Field(ge=1)] = 262_144


class TrainingConfig(Section):
    """[training]: the optimizer, the training-time test and the processor's share."""

    optimizer: Literal["adamw", "muon"] = "adamw"
    learning_rate: Positive = 1e-3
    warmup_steps: Annotated[int, Field(ge=0)] = 20
    weight_decay: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0
    grad_clip: Positive = 1.0
    weight_averaging: Fraction = 0.0
    target: Literal["kl", "tv", "lk"] = "kl"
    ttt_steps: Annotated[int, Field(ge=1, le=16)] = 5
    step_weight_decay: Annotated[float, Field(gt=0.0, le=1.0, allow_inf_nan=False)] = 0.8
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    cpu_kernels: Literal["auto", "on", "off"] = "auto"
    batch_tokens: Annotated[int, Field(ge=1)] = 4096
    forward_tokens: Annotated[int, Field(ge=1)] = 1024
    linger_s: Seconds = 0.2
    steps_per_candidate: Annotated[int, Field(ge=1)] = 50
    threads: Annotated[int, Field(ge=1, le=1024)] = 1
    nice: Annotated[int, Field(ge=0, le=19)] = 5
    device: Literal["cpu", "cuda"] = "cpu"
    rank_timeout_s: Seconds = 300.0
    state_every_steps: Annotated[int, Field(ge=0)] = 20
    seed: Annotated[int, Field(ge=0)] = 0


class GateSection(Section):
    """[gate]: what a candidate must prove on held-out states before it is promoted."""

    min_gain: Annotated[float, Field(ge=0.0, allow_inf_nan=False)] = 0.0
    confidence: Annotated[float, Field(gt=0.5, lt=1.0)] = 0.95
    min_anchors: Annotated[int, Field(ge=1)] = 200
    newest_versions: Annotated[int, Field(ge=1)] = 2
    max_tokens: Annotated[int, Field(ge=1)] = 16384


class PublishConfig(Section):
    """[publish]: the fleet, how it drafts, and how long a phase may take."""

    rollout_servers: Annotated[tuple[str, ...], Field(strict=False)] = ()
    num_speculative_tokens: Annotated[int, Field(ge=1, le=16)] = 3
    draft_sample_method: Literal["probabilistic", "greedy"] = "probabilistic"
    on: Literal["sync", "promotion"] = "sync"
    state_timeout_s: Seconds = 5.0
    stage_timeout_s: Seconds = 60.0
    commit_timeout_s: Seconds = 10.0
    reconcile_s: Annotated[float, Field(ge=0.0, le=3600.0, allow_inf_nan=False)] = 2.0
    max_draft_lag: Annotated[int, Field(ge=0)] = 0

    @field_validator("rollout_servers")
    @classmethod
    def _addresses(cls, addresses: tuple[str, ...]) -> tuple[str, ...]:
        try:
            members_of(addresses)
        except ValueError as error:
            raise ValueError(f"host:port, dns:name:port or file:path ({error})") from None
        if len(set(addresses)) != len(addresses):
            raise ValueError("every address once")
        return addresses


class CanaryConfig(Section):
    """[canary]: who gets a release first, and what live acceptance must show."""

    share: Annotated[float, Field(ge=0.0, le=1.0, allow_inf_nan=False)] = 1.0
    min_drafts: Annotated[int, Field(ge=1)] = 300
    max_seconds: Seconds = 60.0
    alpha: Annotated[float, Field(gt=0.0, le=0.2, allow_inf_nan=False)] = 0.01
    max_loss: Fraction = 0.1
    design_effect: Annotated[float, Field(ge=1.0, allow_inf_nan=False)] = 8.0


class RecordingConfig(Section):
    """[recording]: keeps accepted samples on disk too, for ``draft-trainer init`` and ``fit``."""

    directory: ConfigPath | None = None
    capacity_bytes: Annotated[int, Field(ge=1)] = 16 << 30
    shard_bytes: Annotated[int, Field(ge=1)] = 256 << 20
    queue_bytes: Annotated[int, Field(ge=1)] = 256 << 20
    offer_timeout_s: Seconds = 0.05


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
    canary: CanaryConfig = CanaryConfig()
    recording: RecordingConfig = RecordingConfig()

    @model_validator(mode="after")
    def _depth_covers_the_served_drafts(self) -> TrainerConfig:
        k, depth = self.publish.num_speculative_tokens, self.training.ttt_steps
        if depth < k:
            # Acceptance falls at draft positions beyond the depth that was trained.
            raise RefusedError(
                "training.ttt_steps",
                depth,
                f"at least publish.num_speculative_tokens = {k}",
                "raise training.ttt_steps, or serve a shorter draft",
            )
        return self


def load_config(path: Path) -> TrainerConfig:
    """Read, check and resolve a configuration file.

    Raises:
        RefusedError: no such file, not TOML, or a key that is unknown, missing,
            of the wrong type or out of range; ``field`` is the dotted key.
    """
    config = parse_config(read_toml(path))
    base = path.resolve().parent
    servers = tuple(
        f"{FILE}{base / entry.removeprefix(FILE)}" if entry.startswith(FILE) else entry
        for entry in config.publish.rollout_servers
    )
    publish = config.publish.model_copy(update={"rollout_servers": servers})
    sections = ("access", "credentials", "draft", "recording", "replay")
    return config.model_copy(
        update={name: beneath(base, getattr(config, name)) for name in sections}
        | {"publish": publish}
    )


def read_toml(path: Path) -> dict[str, object]:
    """The content of a configuration file. Raises RefusedError: no such file, or not TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RefusedError(
            "--config", f"{path} ({error.strerror})", "a readable TOML file", "check the path"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RefusedError(
            "--config", f"{path}: {error}", "valid TOML in UTF-8", "fix that place"
        ) from error


def parse_config(raw: Mapping[str, object]) -> TrainerConfig:
    """Check a parsed file. Raises RefusedError naming the first wrong key and all others."""
    return validated(TrainerConfig, raw)


def validated(model: type[S_CONFIG], raw: Mapping[str, object]) -> S_CONFIG:
    """``raw`` as a ``model``. Raises RefusedError naming the first wrong key and all others."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=True)
        refusal = _refusal_of(model, details[0])
        if len(details) > 1:
            others = ", ".join(_key(detail) for detail in details[1:])
            refusal.next_step += f" (also wrong: {others})"
        raise RefusedError(
            refusal.field, refusal.found, refusal.expected, refusal.next_step
        ) from None


def _key(detail: ErrorDetails) -> str:
    return ".".join(str(part) for part in detail["loc"])


def _refusal_of(model: type[BaseModel], detail: ErrorDetails) -> RefusedError:
    key = _key(detail)
    if detail["type"] == "missing":
        kind = "a [section]" if len(detail["loc"]) == 1 else "a value"
        return RefusedError(key, "nothing", f"{kind} for this required key", f"add {key}")
    if detail["type"] == "extra_forbidden":
        known = _known_keys(model, detail)
        near = difflib.get_close_matches(str(detail["loc"][-1]), known, n=1)
        hint = f"rename it to {near[0]}" if near else "remove it"
        return RefusedError(key, "an unknown key", f"one of {known}", hint)
    expected = detail["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    return RefusedError(key, repr(detail["input"]), expected, f"fix {key}")


def _known_keys(model: type[BaseModel], detail: ErrorDetails) -> list[str]:
    for part in detail["loc"][:-1]:
        annotation = model.model_fields[str(part)].annotation
        candidates = [annotation, *get_args(annotation)]
        model = next(c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel))
    return sorted(model.model_fields)


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then a constant rate, or a cosine to a floor over a known number of steps.

    Attributes:
        peak: the rate after warm-up.
        warmup_steps: steps of linear warm-up after every (re)start of the optimizer's moments.
        decay_steps: applied steps, warm-up included, after which the floor is reached; 0 for a
            constant rate, which is what a policy that goes on moving needs.
        decay_share: the cosine takes this share of ``decay_steps``, the last; before it the rate is
            constant. In (0, 1].
        floor: the last rate as a share of ``peak``, in [0, 1].
    """

    peak: float
    warmup_steps: int = 0
    decay_steps: int = 0
    floor: float = 0.1
    decay_share: float = 1.0

    def __post_init__(self) -> None:
        if not self.peak > 0:
            raise RefusedError("learning_rate", self.peak, "above 0", "raise it")
        if self.warmup_steps < 0:
            raise RefusedError("warmup_steps", self.warmup_steps, "at least 0", "raise it")
        if self.decay_steps and self.decay_steps <= self.warmup_steps:
            raise RefusedError(
                "decay_steps",
                self.decay_steps,
                f"0, or more than warmup_steps = {self.warmup_steps}",
                "train for more steps, or warm up for fewer",
            )
        if not 0.0 <= self.floor <= 1.0:
            raise RefusedError("decay_floor", self.floor, "in [0, 1]", "give a share of the rate")
        if not 0.0 < self.decay_share <= 1.0:
            raise RefusedError("decay_share", self.decay_share, "in (0, 1]", "lower it")

    def rate(self, step: int, since_restart: int) -> float:
        """The rate of the next optimizer step.

        Args:
            step: steps applied so far.
            since_restart: those of them since the moments were last made anew.
        """
        warmth = min((since_restart + 1) / (self.warmup_steps + 1), 1.0)
        if not self.decay_steps:
            return self.peak * warmth
        begin = max(self.decay_steps * (1.0 - self.decay_share), self.warmup_steps)
        done = (step - begin) / (self.decay_steps - begin)
        cosine = 0.5 * (1.0 + math.cos(math.pi * min(max(done, 0.0), 1.0)))
        return self.peak * warmth * (self.floor + (1.0 - self.floor) * cosine)


Optimizer = Literal["adamw", "muon"]


@dataclass(frozen=True)
class LearnerConfig:
    """How the head is trained. Nothing in a step is drawn at random, so there is no seed here.

    Attributes:
        optimizer: "adamw", or "muon" for the matrices between hidden states; see
            ``HeadOptimizer``.
        learning_rate: AdamW's, and by its scale Muon's, after warm-up.
        warmup_steps: optimizer steps of linear warm-up after every (re)start of the moments. A
            fresh AdamW at full rate takes its first steps on one batch's signs and threw a good
            head back by 6 % of its acceptance length.
        decay_steps: 0 for a constant rate, or the steps of an offline fit; see ``Schedule``.
        decay_share: share of those steps, the last ones, over which the rate falls.
        decay_floor: the last rate of a decaying schedule as a share of ``learning_rate``.
        weight_decay: decoupled, on matrices only.
        betas: AdamW's.
        grad_clip: bound on the global gradient norm.
        weight_averaging: decay per step of the exponential average of the weights that is judged
            and released; 0 releases the weights of the last step. A rate high enough to follow a
            moving policy leaves a noise in the last step's weights that costs acceptance.
        target: what is minimised against the policy: forward KL, total variation or the negative
            log of the acceptance rate (see ``soft_targets``).
        ttt_steps: depth K of the training-time test; at least the served draft length.
        step_weight_decay: step s weighs this to the power s.
        compute_dtype: float32 or bfloat16. Weights, gradients and moments are float32 either way.
        max_batch_tokens: tokens, padding included, of one forward pass; a step accumulates
            gradients over as many passes as its samples need.
    """

    optimizer: Optimizer = "adamw"
    learning_rate: float = 1e-3
    warmup_steps: int = 20
    decay_steps: int = 0
    decay_share: float = 1.0
    decay_floor: float = 0.1
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    grad_clip: float = 1.0
    weight_averaging: float = 0.0
    target: Literal["kl", "tv", "lk"] = "kl"
    ttt_steps: int = 5
    step_weight_decay: float = 0.8
    compute_dtype: torch.dtype = torch.float32
    max_batch_tokens: int = 4096

    def __post_init__(self) -> None:
        if self.optimizer not in ("adamw", "muon"):
            raise RefusedError("optimizer", self.optimizer, "adamw or muon", "set one of them")
        if self.compute_dtype not in (torch.float32, torch.bfloat16):
            raise RefusedError(
                "compute_dtype", self.compute_dtype, "float32 or bfloat16", "set one of them"
            )
        if not 0.0 <= self.weight_averaging < 1.0:
            raise RefusedError("weight_averaging", self.weight_averaging, "in [0, 1)", "lower it")
        for name in ("learning_rate", "grad_clip", "ttt_steps", "step_weight_decay"):
            if not getattr(self, name) > 0:
                raise RefusedError(name, getattr(self, name), "above 0", "raise it")
        _ = self.schedule

    @property
    def schedule(self) -> Schedule:
        """The learning rate of every step."""
        return Schedule(
            self.learning_rate,
            self.warmup_steps,
            self.decay_steps,
            self.decay_floor,
            self.decay_share,
        )


@dataclass(frozen=True)
class StepMetrics:
    """One call of ``Learner.step``, over all ranks.

    Per-step tuples have K entries, NaN where nothing was valid.

    Attributes:
        skipped: True when nothing was learned: no valid anchor, or a non-finite number (only the
            latter counts in ``Learner.steps_skipped``).
        loss: the weighted loss that was minimised.
        step_loss: its mean per TTT step.
        step_acceptance: mean of sum over x of min(p, q) per TTT step, in [0, 1].
        step_top1: share of anchors with argmax q = argmax p, per TTT step.
        outside_mass: the policy's mean probability outside the draft vocabulary at step 0.
        grad_norm: before clipping.
        learning_rate: of this step.
        anchors: step-0 anchors.
        tokens: tokens of the samples.
        seconds: wall time.
        policy_version: newest policy version among the samples.
    """

    skipped: bool
    loss: float
    step_loss: tuple[float, ...]
    step_acceptance: tuple[float, ...]
    step_top1: tuple[float, ...]
    outside_mass: float
    grad_norm: float
    learning_rate: float
    anchors: int
    tokens: int
    seconds: float
    policy_version: int


def learner_config(training: TrainingConfig) -> LearnerConfig:
    """[training] as the learner takes it; at a constant rate."""
    return LearnerConfig(
        optimizer=training.optimizer,
        learning_rate=training.learning_rate,
        warmup_steps=training.warmup_steps,
        weight_decay=training.weight_decay,
        grad_clip=training.grad_clip,
        weight_averaging=training.weight_averaging,
        target=training.target,
        ttt_steps=training.ttt_steps,
        step_weight_decay=training.step_weight_decay,
        compute_dtype=getattr(torch, training.compute_dtype),
        max_batch_tokens=training.forward_tokens,
    )
