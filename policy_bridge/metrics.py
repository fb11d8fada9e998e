"""``bridge.stats()`` for Prometheus, in a process that serves it already or wants to.

prometheus_client is not among the bridge's own packages: nothing else here imports this module.

    from prometheus_client import REGISTRY, start_http_server

    REGISTRY.register(BridgeCollector(bridge))
    start_http_server(9465, "127.0.0.1")
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Protocol

from policy_bridge.stats import BridgeStats
from slipstream.metrics import Fact, FactCollector, Value

PREFIX = "slipstream_bridge_"
SHED_REASONS = (
    *("closed", "copies_behind", "deadline", "draft_changed", "no_credit"),
    *("non_finite", "outbox_full", "policy_moved", "policy_not_announced"),
    *("device_memory", "policy_refused", "shared_memory_lost", "shipper_died"),
    *("superseded", "too_large"),
)
_NO_SYNC = "No series before the first sync."


class Counting(Protocol):
    """A ``PolicyBridge``, or one that is switched off."""

    def stats(self) -> BridgeStats:
        """Every counter at this moment."""
        ...


def _counter(
    name: str,
    help: str,
    read: Callable[[BridgeStats], Value],
    label: str = "",
    values: Sequence[str] = (),
) -> Fact[BridgeStats]:
    return Fact(name, help, read, {label: values} if label else {}, "counter")


def _refused(stats: BridgeStats) -> Value:
    """By the first word of the field, as the trainer counts: a bounded set."""
    fields: Counter[str] = Counter()
    for name, count in stats.refused_by_field.items():
        fields[name.partition(".")[0]] += count
    return dict(fields)


def _sync_seconds(stats: BridgeStats) -> Value:
    last = stats.last_sync
    if last is None:
        return {}
    return {
        "prepare": last.prepare_seconds,
        "stage": last.stage_seconds,
        "commit": last.commit_seconds,
    }


FACTS: tuple[Fact[BridgeStats], ...] = (
    Fact("connected", "1 while a run is open and its stream is up.", lambda s: s.connected),
    Fact(
        "transport",
        "1; the label says how the states travel. No series before the first stream.",
        lambda s: {s.transport: 1} if s.transport else {},
        {"transport": ("grpc", "shared_memory")},
    ),
    Fact(
        "capture_enabled",
        "1 while the next capture window would take states.",
        lambda s: not s.capture_off_reason,
    ),
    _counter("connects", "Runs opened, the first included.", lambda s: s.connects),
    _counter(
        "captures",
        "Capture windows: `taken`; `skipped` because capture was off; `refused` for a call that "
        "could not be served.",
        lambda s: {
            "taken": s.captures,
            "skipped": s.captures_skipped,
            "refused": s.captures_refused,
        },
        "outcome",
        ("taken", "skipped", "refused"),
    ),
    _counter(
        "captured_tokens",
        "Unpadded tokens of the forward passes given to `ship`.",
        lambda s: s.captured_tokens,
    ),
    _counter(
        "chosen_samples", "Samples that the selector took of them.", lambda s: s.chosen_samples
    ),
    _counter("chosen_tokens", "Tokens of these.", lambda s: s.chosen_tokens),
    _counter(
        "not_chosen_samples",
        "Samples that it left, to stay within the budget.",
        lambda s: s.not_chosen_samples,
    ),
    _counter("sent_samples", "Samples sent, repeats included.", lambda s: s.sent_samples),
    _counter(
        "sent_bytes",
        "Bytes of these, through shared memory or serialized.",
        lambda s: s.sent_bytes,
    ),
    _counter("resent_samples", "Repeats after a lost stream.", lambda s: s.resent_samples),
    _counter(
        "acknowledgements",
        "The trainer's answers.",
        lambda s: {"accepted": s.accepted, "duplicate": s.duplicate, "refused": s.refused},
        "outcome",
        ("accepted", "duplicate", "refused"),
    ),
    _counter(
        "samples_refused",
        "Refused samples, by field as in `slipstream_trainer_samples_refused_total`.",
        _refused,
        "field",
    ),
    _counter(
        "shed_samples", "Samples given up, by reason.", lambda s: s.shed, "reason", SHED_REASONS
    ),
    _counter("shed_bytes", "Bytes of samples given up.", lambda s: s.shed_bytes),
    Fact(
        "outbox_samples",
        "Samples that wait, unacknowledged ones included.",
        lambda s: s.outbox_samples,
    ),
    Fact("outbox_bytes", "Bytes of the samples that wait.", lambda s: s.outbox_bytes),
    Fact("outbox_capacity_bytes", "Bound of `outbox_bytes`.", lambda s: s.outbox_capacity_bytes),
    Fact(
        "policy_version",
        f"Last policy version whose sync ended well. {_NO_SYNC}",
        lambda s: s.policy_version,
    ),
    _counter(
        "announced_policies", "Policy versions that the trainer was told of.", lambda s: s.announced
    ),
    _counter("syncs", "Sync windows that ended well.", lambda s: s.syncs),
    Fact(
        "last_sync_seconds",
        f"Time of the last sync: staging the draft, staging the policy, committing. {_NO_SYNC}",
        _sync_seconds,
        {"phase": ("prepare", "stage", "commit")},
    ),
    Fact(
        "last_sync_draft_errors",
        f"Reasons for which the draft could not follow the policy in the last sync. {_NO_SYNC}",
        lambda s: None if s.last_sync is None else len(s.last_sync.draft_errors),
    ),
)


class BridgeCollector(FactCollector[BridgeStats]):
    """Everything that the bridge counts.

    Args:
        bridge: asked at every scrape; unregister this before the bridge is dropped.
    """

    def __init__(self, bridge: Counting) -> None:
        super().__init__(PREFIX, FACTS, bridge.stats)
