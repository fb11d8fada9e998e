"""Slipstream's metrics on vLLM's own ``/metrics`` (prometheus_client's default registry).

Commits are counted here when they end; everything else is read at a scrape from where it is
counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import Metric

from rollout_server.control.acceptance_counts import AcceptanceTracker
from rollout_server.control.changes import Result
from rollout_server.control.control import DRAFT, POLICY, RolloutControl
from rollout_server.control.draft_length import LengthChooser, sizes_to_measure
from rollout_server.control.stages import StageStore
from rollout_server.control.step_costs import StepCosts
from slipstream.errors import Refusals
from slipstream.metrics import Fact, FactCollector, Value, unit_of
from slipstream.serving.identity import REASONS

PREFIX = "slipstream_rollout_"
COMMIT_KINDS = ("draft", "policy", "both", "rollback")
COMMIT_BUCKETS = (
    *(0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0),
)
_STEP = {"kind": ("speculative", "plain", "mixed"), "requests": (), "draft_length": ()}
_ALL = "of all draft versions since the start, including versions without a series."
_SIZES = (
    "`requests` is their number, rounded up to 1, 2, 3, 4, 6, 8, 12, 16, 24 and so on. No series "
    "for kinds and sizes that have not occurred."
)
_NO_POLICY = "No series until a policy is pushed through Slipstream."


class CommitCounts:
    """Counts commits; ``committed`` is a ``control.Committed``."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.commits = Counter(
            PREFIX + "commits",
            "Commits by what they changed and how they ended.",
            ("kind", "outcome"),
            registry=self.registry,
        )
        self.seconds = self._histogram(
            "commit_seconds", "Seconds from a commit call's arrival to the worker's answer."
        )
        self.stall = self._histogram(
            "worker_stall_seconds", "Seconds that the engine took no step for a commit."
        )
        for kind in COMMIT_KINDS:
            for outcome in ("ok", "failed", "untrusted"):
                self.commits.labels(kind, outcome)
            self.seconds.labels(kind)
            self.stall.labels(kind)

    def committed(self, kind: str, outcome: str, result: Result | None) -> None:
        self.commits.labels(kind, outcome).inc()
        if result is not None:
            self.seconds.labels(kind).observe(result.seconds)
            self.stall.labels(kind).observe(result.worker_seconds)

    def _histogram(self, name: str, text: str) -> Histogram:
        return Histogram(
            PREFIX + name,
            text,
            ("kind",),
            unit=unit_of(name),
            registry=self.registry,
            buckets=COMMIT_BUCKETS,
        )


@dataclass(frozen=True)
class Observed:
    """The objects that a scrape reads."""

    tracker: AcceptanceTracker
    control: RolloutControl
    store: StageStore
    commits: CommitCounts
    costs: StepCosts
    refusals: Refusals
    draft_length: int
    lengths: LengthChooser | None = None


def _by_version(field: str) -> Callable[[Observed], Value]:
    return lambda o: {str(v): getattr(c, field) for v, c in o.tracker.exposed().items()}


def _in_all(field: str) -> Callable[[Observed], Value]:
    return lambda o: getattr(o.tracker.all, field)


def _positions(observed: Observed, counts: Iterable[int]) -> list[int]:
    found = list(counts)
    return found + [0] * (observed.draft_length - len(found))


def _by_position(observed: Observed, counts: Iterable[int]) -> dict[str, int]:
    return {str(place): count for place, count in enumerate(_positions(observed, counts))}


def _planned(lengths: LengthChooser | None) -> dict[str, int]:
    if lengths is None:
        return {}
    table = lengths.table or [0] * (lengths.largest + 1)
    return {str(n): max(table[n], 0) for n in sizes_to_measure(lengths.largest)}


def _versions_behind(observed: Observed) -> int | None:
    draft, policy = observed.control.live[DRAFT], observed.control.live[POLICY]
    # A draft kind without weights has no tensors, and nothing to train.
    if policy.version is None or not draft.source.tensors:
        return None
    return max(0, policy.version - (draft.trained_against or 0))


def _counter(
    name: str, help: str, read: Callable[[Observed], Value], labels: Any = None
) -> Fact[Observed]:
    return Fact(name, help, read, labels or {}, "counter")


FACTS: tuple[Fact[Observed], ...] = (
    _counter(
        "calls_refused",
        "Calls of the control plane that ended with an error, by gRPC status.",
        lambda o: o.refusals.by_method,
        {"method": (), "code": ()},
    ),
    _counter(
        "access_refused",
        "Calls of the control plane without the required role.",
        lambda o: o.refusals.by_reason,
        {"reason": REASONS},
    ),
    *(
        fact
        for name, help in (
            ("drafts", "Verification steps of one request each, by the version that drafted."),
            ("draft_tokens", "Tokens proposed."),
            ("accepted_tokens", "Proposed tokens accepted."),
            (
                "generated_tokens",
                "Tokens generated while this draft was live, whether it proposed or not.",
            ),
        )
        for fact in (
            _counter(name, help, _by_version(name), {"draft_version": ()}),
            _counter(f"all_{name}", f"`{name}` {_ALL}", _in_all(name)),
        )
    ),
    _counter(
        "accepted_per_position",
        "Proposed tokens accepted at each draft position, 0-based.",
        lambda o: {
            (str(version), str(place)): count
            for version, counters in o.tracker.exposed().items()
            for place, count in enumerate(_positions(o, counters.accepted_per_position))
        },
        {"draft_version": (), "position": ()},
    ),
    _counter(
        "all_accepted_per_position",
        f"`accepted_per_position` {_ALL}",
        lambda o: _by_position(o, o.tracker.all.accepted_per_position),
        {"position": ()},
    ),
    _counter(
        "all_tried_per_position",
        "Drafts that had a token at each draft position, 0-based, of all versions.",
        lambda o: _by_position(o, o.tracker.all.tried_per_position),
        {"position": ()},
    ),
    Fact(
        "acceptance_per_position",
        "Share of the live draft's recent drafts whose token was accepted, at each position that "
        "was drafted, 0-based. No series while there were few.",
        lambda o: {str(n): rate for n, rate in enumerate(o.tracker.recent.rates() or ())},
        {"position": ()},
    ),
    _counter(
        "engine_steps",
        "Engine steps: `speculative` ones verify drafts, `plain` ones decode a token per request, "
        f"`mixed` ones take prompts too, or verify drafts of some requests only. {_SIZES}",
        lambda o: {(*map(str, key),): total.steps for key, total in o.costs.sums.items()},
        _STEP,
    ),
    _counter(
        "engine_step_seconds",
        "Time of engine steps, from one step's output to the next while the engine is busy. "
        + _SIZES,
        lambda o: {(*map(str, key),): total.seconds for key, total in o.costs.sums.items()},
        _STEP,
    ),
    Fact(
        "break_even_acceptance_length",
        "Cost of a recent speculative step in plain steps of as many requests: speculation pays "
        "while the acceptance length is greater. No series while the cost of either kind of step "
        "is unknown for every number of requests.",
        lambda o: o.costs.break_even,
    ),
    Fact(
        "speculation_speed_up",
        "Speed of generation over that without drafts, from measured step costs and live "
        "acceptance; with `--speculation auto` by the draft lengths in use at each batch size. No "
        "series while a cost is not known, or while there were few drafts in the last minute.",
        lambda o: o.tracker.speed_up,
    ),
    Fact(
        "planned_draft_length",
        "Tokens that are drafted at that number of requests in a step; 0 everywhere while drafting "
        "does not pay. No series without `--speculation auto`.",
        lambda o: _planned(o.lengths),
        {"requests": ()},
    ),
    Fact(
        "speculation_enabled",
        "1 while drafts are proposed.",
        lambda o: o.control.speculation_enabled,
    ),
    Fact(
        "speculation_wanted",
        "0 while drafts are kept off by `SetSpeculation` or `--speculation off`, or because the "
        "engine did not answer when they were to run again. While it is 1 and "
        "`speculation_enabled` is 0, no draft length pays, or steps without drafts are timed.",
        lambda o: o.control.speculation_wanted,
    ),
    Fact("draft_length", "Tokens that a draft proposes at most (k).", lambda o: o.draft_length),
    Fact("draft_version", "Live draft version.", lambda o: o.control.live[DRAFT].version),
    Fact(
        "policy_version",
        f"Live policy version. {_NO_POLICY}",
        lambda o: o.control.live[POLICY].version,
    ),
    Fact(
        "draft_staleness_versions",
        "Policy versions that the live draft is behind the policy; a draft that was trained on "
        "none counts as trained on version 0. A server knows of no run: after another one began it "
        f"compares versions of two runs until that one's first release is live. {_NO_POLICY} Never "
        "one with `--draft-kind ngram` or `none`.",
        _versions_behind,
    ),
    Fact(
        "draft_live_timestamp_seconds",
        "Unix time at which the live draft went live.",
        lambda o: o.control.draft_live_since,
    ),
    Fact("staged_bytes", "Bytes of weights held on the host.", lambda o: o.store.bytes),
    Fact(
        "staged_capacity_bytes",
        "Bound of `staged_bytes` (`--stage-bytes`).",
        lambda o: o.store.capacity,
    ),
    Fact("stages", "Stages that are held and not live.", lambda o: len(o.control.staged)),
    Fact("ready", "1 while requests may be sent there.", lambda o: not o.control.not_ready),
)


class RolloutCollector(FactCollector[Observed]):
    """A collector of everything above."""

    def __init__(self, observed: Observed, vllm: str) -> None:
        super().__init__(PREFIX, FACTS, lambda: observed, vllm=vllm)
        self._commits = observed.commits.registry

    def collect(self) -> Iterator[Metric]:
        yield from super().collect()
        yield from self._commits.collect()
