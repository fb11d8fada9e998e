"""``bridge.stats()`` for Prometheus, in a process that serves it already or wants to.

prometheus_client is not among the bridge's own packages: nothing else here imports this module.

    from prometheus_client import REGISTRY, start_http_server

    REGISTRY.register(BridgeCollector(bridge))
    start_http_server(9465, "127.0.0.1")

Every metric of the bridge. ``prometheus`` fills them; docs/metrics.md is made from them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Protocol

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from policy_bridge.stats import BridgeStats
from slipstream.metrics import Catalogue, Group, Label, Scrape, build_info, counter, gauge

_SYNCED = "before the first sync"

PROCESS = Group(
    "Process",
    (
        build_info(),
        gauge("connected", "1 while a run is open and its stream is up."),
        gauge(
            "transport",
            "1; the label says how the states travel.",
            Label("transport", ("grpc", "shared_memory")),
            absent="before the first stream",
        ),
        gauge("capture_enabled", "1 while the next capture window would take states."),
        counter("connects", "Runs opened, the first included."),
    ),
)

CAPTURE = Group(
    "Capture",
    (
        counter(
            "captures",
            "Capture windows: `taken`; `skipped` because capture was off; `refused` for a call "
            "that could not be served.",
            Label("outcome", ("taken", "skipped", "refused")),
        ),
        counter("captured_tokens", "Unpadded tokens of the forward passes given to `ship`."),
        counter("chosen_samples", "Samples that the selector took of them."),
        counter("chosen_tokens", "Tokens of these."),
        counter("not_chosen_samples", "Samples that it left, for the budget's sake."),
    ),
)

SHIPPING = Group(
    "Shipping",
    (
        counter("sent_samples", "Samples sent, repeats included."),
        counter("sent_bytes", "Bytes of these, through shared memory or serialized."),
        counter("resent_samples", "Repeats after a lost stream."),
        counter(
            "acknowledgements",
            "The trainer's answers.",
            Label("outcome", ("accepted", "duplicate", "refused")),
        ),
        counter(
            "samples_refused",
            "Refused samples, by field.",
            Label("field", text="as in `slipstream_trainer_samples_refused_total`"),
        ),
        counter(
            "shed_samples",
            "Samples given up, by reason.",
            Label(
                "reason",
                (
                    *("closed", "copies_behind", "deadline", "draft_changed", "no_credit"),
                    *("non_finite", "outbox_full", "policy_moved", "policy_not_announced"),
                    *("policy_refused", "shipper_died", "superseded", "too_large"),
                ),
            ),
        ),
        counter("shed_bytes", "Bytes of them."),
        gauge("outbox_samples", "Samples that wait, unacknowledged ones included."),
        gauge("outbox_bytes", "Bytes of these."),
        gauge("outbox_capacity_bytes", "Bound of these."),
        gauge(
            "ring_used_bytes",
            "Bytes of the ring that hold unacknowledged samples.",
            absent="while the states do not go through shared memory",
        ),
        gauge(
            "ring_capacity_bytes",
            "Size of the ring.",
            absent="while the states do not go through shared memory",
        ),
    ),
)

SYNC = Group(
    "Weight syncs",
    (
        gauge("policy_version", "Last policy version whose sync ended well.", absent=_SYNCED),
        counter("announced_policies", "Policy versions that the trainer was told of."),
        counter("syncs", "Sync windows that ended well."),
        gauge(
            "last_sync_seconds",
            "What the last sync took: staging the draft, staging the policy, committing.",
            Label("phase", ("prepare", "stage", "commit")),
            absent=_SYNCED,
        ),
        gauge(
            "last_sync_draft_errors",
            "Reasons for which the draft could not follow the policy in the last sync.",
            absent=_SYNCED,
        ),
    ),
)

CATALOGUE = Catalogue(
    "Policy bridge",
    "slipstream_bridge_",
    "the training process, where it registers `policy_bridge.metrics.BridgeCollector`; "
    "`bridge.stats()` has the same figures",
    (PROCESS, CAPTURE, SHIPPING, SYNC),
)


class Counting(Protocol):
    """A ``PolicyBridge``, or one that is switched off."""

    def stats(self) -> BridgeStats:
        """Every counter at this moment."""
        ...


class BridgeCollector(Collector):
    """Everything that the bridge counts; see ``metrics_catalogue``.

    Args:
        bridge: asked at every scrape; unregister this before the bridge is dropped.
    """

    def __init__(self, bridge: Counting) -> None:
        self._bridge = bridge

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client."""
        stats, scrape = self._bridge.stats(), Scrape(CATALOGUE)
        scrape.build()
        scrape.put("connected", stats.connected)
        if stats.transport:
            scrape.put("transport", 1, stats.transport)
        scrape.put("capture_enabled", not stats.capture_off_reason)
        scrape.put("connects", stats.connects)
        _capture(scrape, stats)
        _shipping(scrape, stats)
        _sync(scrape, stats)
        yield from scrape.families()


def _capture(scrape: Scrape, stats: BridgeStats) -> None:
    outcomes = {
        "taken": stats.captures,
        "skipped": stats.captures_skipped,
        "refused": stats.captures_refused,
    }
    scrape.count("captures", outcomes)
    scrape.put("captured_tokens", stats.captured_tokens)
    scrape.put("chosen_samples", stats.chosen_samples)
    scrape.put("chosen_tokens", stats.chosen_tokens)
    scrape.put("not_chosen_samples", stats.not_chosen_samples)


def _shipping(scrape: Scrape, stats: BridgeStats) -> None:
    scrape.put("sent_samples", stats.sent_samples)
    scrape.put("sent_bytes", stats.sent_bytes)
    scrape.put("resent_samples", stats.resent_samples)
    outcomes = {
        "accepted": stats.accepted,
        "duplicate": stats.duplicate,
        "refused": stats.refused,
    }
    scrape.count("acknowledgements", outcomes)
    fields: Counter[str] = Counter()
    for field, count in stats.refused_by_field.items():
        # The first word, as the trainer counts: a bounded set.
        fields[field.partition(".")[0]] += count
    scrape.count("samples_refused", fields)
    scrape.count("shed_samples", stats.shed)
    scrape.put("shed_bytes", stats.shed_bytes)
    scrape.put("outbox_samples", stats.outbox_samples)
    scrape.put("outbox_bytes", stats.outbox_bytes)
    scrape.put("outbox_capacity_bytes", stats.outbox_capacity_bytes)
    if stats.ring_bytes is not None:
        used, whole = stats.ring_bytes
        scrape.put("ring_used_bytes", used)
        scrape.put("ring_capacity_bytes", whole)


def _sync(scrape: Scrape, stats: BridgeStats) -> None:
    scrape.put("policy_version", stats.policy_version)
    scrape.put("announced_policies", stats.announced)
    scrape.put("syncs", stats.syncs)
    last = stats.last_sync
    if last is not None:
        scrape.put("last_sync_seconds", last.prepare_seconds, "prepare")
        scrape.put("last_sync_seconds", last.stage_seconds, "stage")
        scrape.put("last_sync_seconds", last.commit_seconds, "commit")
        scrape.put("last_sync_draft_errors", len(last.draft_errors))
