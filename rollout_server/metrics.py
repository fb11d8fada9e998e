"""Slipstream's metrics on vLLM's own ``/metrics`` (prometheus_client's default registry).

Counters of acceptance are read from the tracker when Prometheus asks, so there is
one truth, and the label sets are those of the versions that the tracker keeps.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rollout_server.acceptance_tracker import AcceptanceTracker
from rollout_server.content_store import ContentStore
from rollout_server.control import Committed, RolloutControl
from rollout_server.weights import DRAFT, POLICY
from slipstream.access import AccessRefusals

_PREFIX = "slipstream_rollout_"
_BUCKETS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class CommitMetrics:
    """``control.CommitObserver``: how many commits, and how long they took."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._commits = Counter(
            _PREFIX + "commits",
            "Commits by what they changed (draft, policy, both, rollback) and how they ended",
            ["kind", "outcome"],
            registry=registry,
        )
        self._seconds = Histogram(
            _PREFIX + "commit_seconds",
            "Seconds from a commit call's arrival to the worker's answer",
            ["kind"],
            buckets=_BUCKETS,
            registry=registry,
        )
        self._stall = Histogram(
            _PREFIX + "worker_stall_seconds",
            "Seconds that the engine stood still for a commit",
            ["kind"],
            buckets=_BUCKETS,
            registry=registry,
        )

    def committed(self, kind: str, outcome: str, took: Committed | None) -> None:
        self._commits.labels(kind, outcome).inc()
        if took is not None:
            self._seconds.labels(kind).observe(took.seconds)
            self._stall.labels(kind).observe(took.worker_seconds)


class StateCollector(Collector):
    """Acceptance per draft version, and what is live, read at scrape time."""

    def __init__(
        self,
        tracker: AcceptanceTracker,
        control: RolloutControl,
        store: ContentStore,
        refusals: AccessRefusals,
    ) -> None:
        self._refusals = refusals
        self._tracker = tracker
        self._control = control
        self._store = store

    def collect(self) -> Iterable[Metric]:
        """Called by prometheus_client."""
        yield from self._acceptance()
        draft, policy = self._control.live[DRAFT], self._control.live[POLICY]
        yield _gauge("draft_version", "Draft version that proposes", draft.version)
        yield _gauge(
            "trained_against_policy_version",
            "Policy version that the live draft was trained against",
            draft.trained_against,
        )
        yield _gauge("policy_version", "Policy version that verifies", policy.version)
        yield _gauge(
            "speculation_enabled",
            "1 while drafts are proposed",
            int(self._control.speculation_enabled),
        )
        yield _gauge(
            "ready", "1 while requests may be sent here", int(not self._control.readiness.reason)
        )
        refused = CounterMetricFamily(
            _PREFIX + "access_refused", "Calls refused for missing rights", labels=["reason"]
        )
        for reason, count in sorted(self._refusals.counts().items()):
            refused.add_metric([reason], count)
        yield refused
        yield _gauge("staged_bytes", "Bytes of weights held on the host", self._store.bytes)

    def _acceptance(self) -> Iterable[Metric]:
        labels = ["draft_version"]
        drafts = CounterMetricFamily(_PREFIX + "drafts", "Verification steps", labels=labels)
        proposed = CounterMetricFamily(_PREFIX + "draft_tokens", "Tokens proposed", labels=labels)
        accepted = CounterMetricFamily(
            _PREFIX + "accepted_tokens", "Proposed tokens accepted", labels=labels
        )
        position = CounterMetricFamily(
            _PREFIX + "accepted_per_position",
            "Proposed tokens accepted at each 0-based draft position",
            labels=[*labels, "position"],
        )
        for version, counters in self._tracker.counters().items():
            label = str(version)
            drafts.add_metric([label], counters.drafts)
            proposed.add_metric([label], counters.draft_tokens)
            accepted.add_metric([label], counters.accepted_tokens)
            for place, count in enumerate(counters.accepted_per_position):
                position.add_metric([label, str(place)], count)
        return (drafts, proposed, accepted, position)


def _gauge(name: str, text: str, value: float | None) -> GaugeMetricFamily:
    """A gauge without a sample while there is no value."""
    gauge = GaugeMetricFamily(_PREFIX + name, text)
    if value is not None:
        gauge.add_metric([], value)
    return gauge
