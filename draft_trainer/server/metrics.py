"""What ``/metrics`` serves: the trainer's counters, and its status at the time of the scrape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry, disable_created_metrics

from draft_trainer.counters import PREFIX, Counters
from slipstream.errors import Refusals
from slipstream.metrics import Fact, FactCollector, Value
from slipstream.security import REASONS
from slipstream.v1.draft_trainer_pb2 import TrainerStatus

TRANSPORTS = ("grpc", "shared_memory")
RELEASES = ("newest", "promoted", "served")
_NO_STEP = "No series before the first step."
_NO_GATE = "No series before the first gate result, or where it measured nothing."
_NO_POLICY = "No series before the first policy version."


def _optional(field: str) -> Callable[[TrainerStatus], Value]:
    return lambda status: getattr(status, field) if status.HasField(field) else None


def _figure(field: str) -> Callable[[TrainerStatus], float | None]:
    def read(status: TrainerStatus) -> float | None:
        gate = status.last_verdict
        return getattr(gate.gate, field) if gate.HasField("gate") else None

    return read


def _by(names: tuple[str, ...], *readers: Callable[[TrainerStatus], Value]) -> Any:
    return lambda status: {name: read(status) for name, read in zip(names, readers, strict=True)}


FACTS: tuple[Fact[TrainerStatus], ...] = (
    Fact(
        "training_failed",
        "1 once the training thread ended with an error.",
        lambda s: bool(s.training_error),
    ),
    Fact("streams", "Open streams of samples.", lambda s: s.streams, {"transport": TRANSPORTS}),
    Fact("sessions", "Open sessions of the current run.", lambda s: s.sessions),
    Fact("samples_pending", "Samples accepted, not trained on yet.", lambda s: s.samples_pending),
    Fact(
        "samples_held_out",
        "Samples that never train and feed the gate.",
        lambda s: s.samples_held_out,
    ),
    Fact(
        "samples_unsaved",
        "Samples trained on for the last time, kept until a training state has that.",
        lambda s: s.samples_unsaved,
    ),
    Fact("replay_bytes", "Bytes in the replay buffer.", lambda s: s.replay_bytes),
    Fact("replay_capacity_bytes", "Bound of the replay buffer.", lambda s: s.replay_capacity_bytes),
    Fact(
        "replay_directory",
        "1; the label is the path where the samples are kept.",
        lambda s: {s.replay_directory: 1},
        {"directory": ()},
    ),
    Fact("loss", f"Training loss of the last step. {_NO_STEP}", _optional("loss")),
    Fact(
        "expected_acceptance",
        "Expected acceptance in [0, 1] at each TTT step, 0-based, of the last training step. "
        + _NO_STEP,
        lambda s: {str(step): value for step, value in enumerate(s.step_acceptance)},
        {"step": ()},
    ),
    Fact("idle", "1 while there is nothing to train on.", lambda s: s.idle),
    Fact(
        "draft_version",
        "Draft version: the newest release, the promoted one, and the last that the whole fleet "
        "served.",
        _by(RELEASES, *map(_optional, ("newest_release", "promoted_release", "served_release"))),
        {"which": RELEASES},
    ),
    Fact(
        "trained_against_policy_version",
        "Newest policy version that these releases were trained on. No series for a release that "
        "was trained on none, or whose manifest cannot be read.",
        _by(
            RELEASES,
            _optional("trained_against_policy_version"),
            _optional("promoted_trained_against"),
            _optional("served_trained_against"),
        ),
        {"which": RELEASES},
    ),
    Fact(
        "policy_version", f"Newest policy version known. {_NO_POLICY}", _optional("policy_version")
    ),
    Fact(
        "policy_timestamp_seconds",
        "Unix time at which the newest policy version was registered with this process. No series "
        "until one is, also after a restart.",
        _optional("policy_registered_at"),
    ),
    Fact(
        "draft_served_timestamp_seconds",
        "Unix time at which the fleet was put on the release that it serves. No series until this "
        "process has done so.",
        _optional("served_at"),
    ),
    Fact(
        "draft_staleness_versions",
        "Policy versions that the served release is behind the newest one; a release that was "
        f"trained on none counts as trained on version 0. {_NO_POLICY}",
        _optional("served_staleness"),
    ),
    Fact(
        "draft_staleness_seconds",
        "Time since the policy moved past what the served release was trained on; 0 while it has "
        f"not. Counted from this process's start at the earliest. {_NO_POLICY}",
        _optional("served_staleness_seconds"),
    ),
    Fact(
        "gate_acceptance_length",
        "Expected acceptance length on held-out states at the last gate result; an estimate, not "
        f"what is served. {_NO_GATE}",
        _by(
            ("candidate", "incumbent"),
            _figure("candidate_acceptance_length"),
            _figure("incumbent_acceptance_length"),
        ),
        {"which": ("candidate", "incumbent")},
    ),
    Fact(
        "gate_half_width",
        f"Half width of the paired difference's interval. {_NO_GATE}",
        _figure("difference_half_width"),
    ),
    Fact(
        "gate_anchors",
        f"Held-out anchors of the last gate result. {_NO_GATE}",
        _figure("anchors"),
    ),
    Fact(
        "servers",
        "Rollout servers when they were last asked: `known` ones, `reachable` of them, `ready` of "
        "these, and `current`: reachable ones on the release that they should serve. No series "
        "before that.",
        lambda s: s.servers_by_state,
        {"state": ("known", "reachable", "ready", "current")},
    ),
    Fact("trial_running", "1 while a release is on trial.", lambda s: s.HasField("trial")),
)


def facts(refusals: Refusals) -> tuple[Fact[TrainerStatus], ...]:
    """What is read from the status, and the calls that were refused."""
    return (
        Fact(
            "calls_refused",
            "Calls that ended with an error, by gRPC status.",
            lambda _: refusals.by_method,
            {"method": (), "code": ()},
            "counter",
        ),
        Fact(
            "access_refused",
            "Calls without the right to make them.",
            lambda _: refusals.by_reason,
            {"reason": REASONS},
            "counter",
        ),
        *FACTS,
    )


def trainer_registry(
    counters: Counters, status: Callable[[], TrainerStatus], refusals: Refusals
) -> CollectorRegistry:
    """Everything that a trainer measures."""
    disable_created_metrics()
    registry = counters.registry
    registry.register(FactCollector(PREFIX, facts(refusals), status))
    return registry
