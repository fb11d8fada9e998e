"""``bridge.stats()`` as Prometheus metrics, for a process that serves them.

prometheus_client is not among the bridge's own packages: nothing else here imports this module.

    from prometheus_client import REGISTRY, start_http_server

    REGISTRY.register(BridgeCollector(bridge))
    start_http_server(9465, "127.0.0.1")
"""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from operator import attrgetter
from typing import Protocol

from policy_bridge.stats import BridgeStats
from slipstream.metrics import Fact, FactCollector, Value

PREFIX = "slipstream_bridge_"
SHED_REASONS = (
    *("capture_refused", "closed", "copies_behind", "draft_changed", "no_credit"),
    *("non_finite", "outbox_full", "policy_moved", "policy_not_announced"),
    *("device_full", "device_memory", "policy_refused", "shared_memory_lost", "shipper_died"),
    *("superseded", "too_large"),
)
_NO_SYNC = "No series before the first sync."


class Counting(Protocol):
    """A ``PolicyBridge``, or one that is switched off."""

    def stats(self) -> BridgeStats:
        """Every counter at this moment."""
        ...


def _refused(stats: BridgeStats) -> Value:
    """Count refusals by the first word of the field, as the trainer does: a bounded set."""
    fields: Counter[str] = Counter()
    for name, count in stats.refused_by_field.items():
        fields[name.partition(".")[0]] += count
    return dict(fields)


_PHASES = ("prepare", "stage", "commit")
_OUTCOMES = ("accepted", "duplicate", "refused")
_CAPTURES = {"taken": "captures", "skipped": "captures_skipped", "refused": "captures_refused"}
FACTS: tuple[Fact[BridgeStats], ...] = (
    *(
        Fact(f.name, f.metadata["help"], attrgetter(f.name), {}, f.metadata["kind"])
        for f in fields(BridgeStats)
        if f.metadata
    ),
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
    Fact(
        "captures",
        "Capture windows: `taken`; `skipped` because capture was off, the windows before it had "
        "used up the version's `bytes_per_step`, or a trainer whose training is paused needs no "
        "more; `refused` for a call that could not be served.",
        lambda s: {outcome: getattr(s, field) for outcome, field in _CAPTURES.items()},
        {"outcome": tuple(_CAPTURES)},
        "counter",
    ),
    Fact(
        "acknowledgements",
        "Answers of the trainer to samples.",
        lambda s: {outcome: getattr(s, outcome) for outcome in _OUTCOMES},
        {"outcome": _OUTCOMES},
        "counter",
    ),
    Fact(
        "samples_refused",
        "Refused samples, by field as in `slipstream_trainer_samples_refused_total`.",
        _refused,
        {"field": ()},
        "counter",
    ),
    Fact(
        "shed_samples",
        "Dropped samples, by reason.",
        attrgetter("shed"),
        {"reason": SHED_REASONS},
        "counter",
    ),
    Fact(
        "announced_policies",
        "Policy versions announced to the trainer.",
        attrgetter("announced"),
        {},
        "counter",
    ),
    Fact(
        "last_sync_seconds",
        f"Time of the last sync: staging the draft, staging the policy, committing. {_NO_SYNC}",
        lambda s: {p: getattr(s.last_sync, f"{p}_seconds") for p in _PHASES if s.last_sync},
        {"phase": _PHASES},
    ),
    Fact(
        "last_sync_draft_errors",
        f"Reasons for which the draft could not follow the policy in the last sync. {_NO_SYNC}",
        lambda s: None if s.last_sync is None else len(s.last_sync.draft_errors),
    ),
)


class BridgeCollector(FactCollector[BridgeStats]):
    """Everything that a bridge counts; unregister it before the bridge is dropped."""

    def __init__(self, bridge: Counting) -> None:
        super().__init__(PREFIX, FACTS, bridge.stats)
