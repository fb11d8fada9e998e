"""The content of ``/metrics``: the trainer's counters, and its status at the scrape."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, disable_created_metrics

from draft_trainer.counters import PREFIX, Counters
from draft_trainer.drafters.expected_acceptance import SPANS
from draft_trainer.server.diagnosis import PARTS, PROBLEM
from slipstream.errors import Refusals
from slipstream.metrics import Fact, FactCollector, Value
from slipstream.serving.identity import REASONS
from slipstream.v1.draft_trainer_pb2 import TrainerStatus

TRANSPORTS = ("grpc", "shared_memory")
_NO_STEP = "No series before the first step."
_NO_GATE = "No series before the first gate result, or where it measured nothing."
_NO_POLICY = "No series before the first policy version."
_NO_FIGURE = "No series while not known."


def _field(name: str) -> Callable[[TrainerStatus], Value]:
    has_presence = TrainerStatus.DESCRIPTOR.fields_by_name[name].has_presence

    def read(status: TrainerStatus) -> Value:
        absent = has_presence and not status.HasField(name)  # type: ignore[arg-type]
        return None if absent else getattr(status, name)

    return read


def _gate(name: str) -> Callable[[TrainerStatus], Value]:
    def read(status: TrainerStatus) -> float | None:
        result = status.last_verdict
        return getattr(result.gate, name) if result.HasField("gate") else None

    return read


def _by_position(status: TrainerStatus) -> Value:
    return {
        (which, str(span.first_position)): getattr(span, f"{which}_acceptance_length")
        for span in status.last_verdict.gate.by_position
        for which in ("candidate", "incumbent")
    }


def _is(name: str, text: str, field: str = "") -> Fact[TrainerStatus]:
    """A gauge that is a field of the status, of the same name unless ``field`` says otherwise."""
    return Fact(name, text, _field(field or name))


def _which(
    name: str, text: str, **readers: Callable[[TrainerStatus], Value]
) -> Fact[TrainerStatus]:
    """A gauge with a series for each of ``readers``."""
    return Fact(
        name,
        text,
        lambda status: {which: read(status) for which, read in readers.items()},  # type: ignore[misc]
        {"which": tuple(readers)},
    )


FACTS: tuple[Fact[TrainerStatus], ...] = (
    Fact(
        "training_failed",
        "1 while training cannot go on: its thread failed, or waits for space on a disk or a GPU.",
        lambda s: bool(s.training_error),
    ),
    Fact(
        "streams",
        "Open streams of samples, by the transport that they were opened with.",
        lambda s: s.streams,
        {"transport": TRANSPORTS},
    ),
    _is("sessions", "Open sessions of the current run."),
    _is("samples_pending", "Samples accepted, not trained on yet."),
    _is("samples_held_out", "Samples held out of training, for the gate."),
    _is(
        "samples_unsaved",
        "Samples after their last epoch, kept until a training state includes it.",
    ),
    _is("replay_bytes", "Bytes in the replay buffer."),
    _is("replay_capacity_bytes", "Bound of the replay buffer."),
    Fact(
        "replay_directory",
        "1; the label is the path where the samples are kept.",
        lambda s: {s.replay_directory: 1},
        {"directory": ()},
    ),
    _is("loss", f"Training loss of the last step. {_NO_STEP}"),
    Fact(
        "expected_acceptance",
        "Expected acceptance in [0, 1] at each TTT step, 0-based, of the last training step. "
        + _NO_STEP,
        lambda s: {str(step): value for step, value in enumerate(s.step_acceptance)},
        {"step": ()},
    ),
    _is(
        "gain_per_version",
        "Share of its time by which training for one policy version shortened generation. Training "
        "pays while `gain_per_version` x `generation_seconds_per_version` x `horizon_versions` "
        f"exceeds `training_seconds_per_version` x `training_share`. {_NO_FIGURE}",
    ),
    _is(
        "generation_seconds_per_version",
        "Seconds that the slowest server's engine spent on steps in one policy version. "
        + _NO_FIGURE,
    ),
    _is("horizon_versions", f"`economy.horizon_versions`. {_NO_POLICY}"),
    _is(
        "training_seconds_per_version",
        "Seconds of optimizer steps in one policy version in which there were any. " + _NO_FIGURE,
    ),
    _is("training_share", f"Part of a second of training that the loop loses. {_NO_FIGURE}"),
    _is(
        "idle",
        "1 while no step is made: there is nothing to train on, or training is paused "
        "(`training_paused`).",
    ),
    _is(
        "training_paused",
        "1 while nothing is trained: it does not pay, or `economy.mode` is never.",
    ),
    _which(
        "draft_version",
        "Draft version: the newest release, the promoted one, and the last that the whole fleet "
        "served.",
        newest=_field("newest_release"),
        promoted=_field("promoted_release"),
        served=_field("served_release"),
    ),
    _which(
        "trained_against_policy_version",
        "Newest policy version of this run that these releases were trained on. No series for a "
        "release that was trained on none, or whose manifest cannot be read.",
        newest=_field("trained_against_policy_version"),
        promoted=_field("promoted_trained_against"),
        served=_field("served_trained_against"),
    ),
    _is("policy_version", f"Newest policy version known. {_NO_POLICY}"),
    _is(
        "policy_timestamp_seconds",
        "Unix time at which the newest policy version was registered with this process. No series "
        "until one is, also after a restart.",
        "policy_registered_at",
    ),
    _is(
        "draft_served_timestamp_seconds",
        "Unix time at which the fleet was put on the release that it serves. No series until this "
        "process has done so.",
        "served_at",
    ),
    _is(
        "draft_staleness_versions",
        "Policy versions that the served release is behind the newest one; a release that was "
        f"trained on none of this run counts as trained on the first one. {_NO_POLICY}",
        "served_staleness",
    ),
    _is(
        "draft_staleness_seconds",
        "Time since the policy moved past what the served release was trained on; 0 while it has "
        f"not. Counted from this process's start at the earliest. {_NO_POLICY}",
        "served_staleness_seconds",
    ),
    _which(
        "gate_acceptance_length",
        "Expected acceptance length on held-out states at the last gate result; an estimate, not "
        f"what is served. {_NO_GATE}",
        candidate=_gate("candidate_acceptance_length"),
        incumbent=_gate("incumbent_acceptance_length"),
    ),
    Fact(
        "gate_span_acceptance_length",
        "`gate_acceptance_length` of the drafts that begin at this position of their sequence, "
        f"prompt included, or after it, up to the next span. {_NO_GATE}",
        _by_position,
        {"which": ("candidate", "incumbent"), "from": tuple(map(str, SPANS))},
    ),
    Fact(
        "gate_half_width",
        f"Half width of the paired difference's interval. {_NO_GATE}",
        _gate("difference_half_width"),
    ),
    Fact("gate_anchors", f"Held-out anchors of the last gate result. {_NO_GATE}", _gate("anchors")),
    Fact(
        "problem",
        "1 while a part of the path from the policy to released drafts needs action; "
        "`draft-trainer doctor` says what to do.",
        lambda s: {one.part: one.severity == PROBLEM for one in s.diagnosis},
        {"part": PARTS},
    ),
    Fact(
        "servers",
        "Rollout servers at the last check: `known`; `reachable` ones of these; `ready` ones of "
        "the reachable; `current`, reachable and on the release that they should serve. No series "
        "before the first check.",
        lambda s: s.servers_by_state,
        {"state": ("known", "reachable", "ready", "current")},
    ),
    Fact("trial_running", "1 while a release is on trial.", lambda s: s.HasField("trial")),
    Fact(
        "trial_undecided",
        "1 while the fleet serves a release that has had no verdict for `trial.max_seconds`.",
        lambda s: bool(s.trial.undecided),
    ),
)


def facts(refusals: Refusals) -> tuple[Fact[TrainerStatus], ...]:
    """Return the metrics that are read from the status, and those of refused calls."""
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
            "Calls without the required role.",
            lambda _: refusals.by_reason,
            {"reason": REASONS},
            "counter",
        ),
        *FACTS,
    )


def trainer_registry(
    counters: Counters, status: Callable[[], TrainerStatus], refusals: Refusals
) -> CollectorRegistry:
    """Return the registry of everything that a trainer measures."""
    disable_created_metrics()
    registry = counters.registry
    registry.register(FactCollector(PREFIX, facts(refusals), status))
    return registry
