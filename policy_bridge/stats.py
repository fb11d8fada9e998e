"""The bridge's counters: every dropped sample is counted here, by reason."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from slipstream.errors import RefusedError
    from slipstream.v1 import draft_trainer_pb2 as pb

T = TypeVar("T")
_MAX_FIELDS = 64
"""The most fields whose refusals are counted by name: the names come from the trainer."""


@dataclass(frozen=True)
class SyncResult:
    """The outcome of one weight-sync window.

    Attributes:
        policy_version: the version that was synced.
        policy_pushed: whether Slipstream carried the policy's weights.
        draft_versions: draft version that each rollout server answered it serves.
        prepare_seconds: opening the window: the draft is staged.
        stage_seconds: staging the policy on every rollout server.
        commit_seconds: from the commit call to the last server's answer.
        draft_errors: why the draft could not follow; empty when it did.
        policy_waits: whether the push was left to the next window, because the trainer, which knows
            the rollout servers, was not reached yet.
        left_out: why the policy was not pushed to these servers: with ``skip_unreachable_servers``
            those that cannot be reached, those that join and are not ready for it yet, and those
            that the trainer no longer lists and that do not answer.
    """

    policy_version: int
    policy_pushed: bool = False
    draft_versions: Mapping[str, int] = field(default_factory=dict)
    prepare_seconds: float = 0.0
    stage_seconds: float = 0.0
    commit_seconds: float = 0.0
    draft_errors: tuple[str, ...] = ()
    policy_waits: bool = False
    left_out: Mapping[str, str] = field(default_factory=dict)


def _counter(help: str) -> int:
    return field(default=0, metadata={"kind": "counter", "help": help})  # type: ignore[no-any-return]


def _gauge(default: T, help: str) -> T:
    return field(default=default, metadata={"kind": "gauge", "help": help})  # type: ignore[no-any-return]


@dataclass(frozen=True)
class BridgeStats:
    """A snapshot. Counters count since the bridge was built.

    A field that says its kind is a metric of that name and text for Prometheus too
    (``policy_bridge.metrics``).
    """

    connected: bool = _gauge(False, "1 while a run is open and its stream is up.")
    transport: str = ""
    """The way the states travel, "shared_memory" or "grpc"; empty before the first stream."""
    transport_reason: str = ""
    """The reason why the states do not go through shared memory; empty when they do."""
    policy_version: int | None = _gauge(
        None, "Last policy version whose sync succeeded. No series before the first sync."
    )
    captures: int = 0
    """Capture windows that were entered while capture was on."""
    captures_skipped: int = 0
    """Capture windows that took no states: capture was off, the windows before had chosen the
    version's budget, or what the trainer wants of a version."""
    captures_refused: int = 0
    """Capture windows that ended early for a call that could not be served."""
    capture_off_reason: str = ""
    """The reason why the next window would take nothing, or why the last one was refused; empty
    while capture is on."""
    captured_tokens: int = _counter("Unpadded tokens of the forward passes given to `ship`.")
    chosen_samples: int = _counter("Captured samples that were chosen to be sent.")
    chosen_tokens: int = _counter("Tokens of the chosen samples.")
    not_chosen_samples: int = _counter(
        "Captured samples that were not chosen, to stay within the budget."
    )
    sent_samples: int = _counter("Samples sent, repeats included.")
    sent_bytes: int = _counter("Bytes of sent samples, through shared memory or serialized.")
    resent_samples: int = _counter("Repeats after a lost stream.")
    accepted: int = 0
    """Samples that the trainer took."""
    duplicate: int = 0
    """Samples that it had taken before."""
    refused: int = 0
    """Samples that it refused."""
    refused_by_field: Mapping[str, int] = field(default_factory=dict)
    """Refused samples by the field that the refusal names."""
    shed: Mapping[str, int] = field(default_factory=dict)
    """Dropped samples, by reason."""
    shed_bytes: int = _counter("Bytes of dropped samples.")
    outbox_samples: int = _gauge(0, "Samples that wait, unacknowledged ones included.")
    outbox_bytes: int = _gauge(0, "Bytes of the samples that wait.")
    outbox_capacity_bytes: int = _gauge(0, "Bound of `outbox_bytes`.")
    announced: int = 0
    """Policy versions announced to the trainer."""
    connects: int = _counter("Runs opened, including the first.")
    syncs: int = _counter("Sync windows that succeeded.")
    waiting_pushes: int = _counter("Pushes left to the next window: the servers were not known.")
    servers_left_out: int = _counter("Rollout servers that a window left out.")
    last_sync: SyncResult | None = None
    """The newest sync that succeeded; None before it."""
    last_error: str = ""
    """The newest error of the trainer's side; empty if none."""


def flat(prefix: str, value: object) -> dict[str, float]:
    """The numbers in ``value``, by path: of dataclasses, mappings and sequences, however deep.

    Texts and what is None are left out.
    """
    if isinstance(value, bool | int | float):
        return {prefix: float(value)}
    if is_dataclass(value):
        named = [(field.name, getattr(value, field.name)) for field in fields(value)]
    elif isinstance(value, Mapping):
        named = [(str(name), part) for name, part in value.items()]
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        named = [(str(index), part) for index, part in enumerate(value)]
    else:
        return {}
    found: dict[str, float] = {}
    for name, part in named:
        found |= flat(f"{prefix}/{name}", part)
    return found


def flat_status(status: pb.TrainerStatus) -> dict[str, float]:
    """Every number of a trainer's status that is there, by path from ``trainer``.

    No messages, and no reasons: their numbers mean nothing on a plot.
    """
    found: dict[str, float] = {}
    for field_ in status.DESCRIPTOR.fields:
        there = not field_.has_presence or status.HasField(field_.name)
        if there and field_.enum_type is None:
            found |= flat(f"trainer/{field_.name}", getattr(status, field_.name))
    return found


class Counters:
    """Counts from every thread of the bridge."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._shed: Counter[str] = Counter()
        self._refused: Counter[str] = Counter()
        self._last_error = ""
        self._run_refusal: RefusedError | None = None
        self._refused_in_a_row = 0
        self._refused_field = ""
        self._transport = ("", "")

    def transport(self, name: str, reason: str) -> None:
        """Record how the states travel now, and why not through shared memory."""
        with self._lock:
            self._transport = (name, reason)

    def add(self, **deltas: int) -> None:
        """Add to counters of ``BridgeStats`` by name."""
        with self._lock:
            # Not Counter.update, which takes longer than the rest: the policy's thread counts too.
            for name, delta in deltas.items():
                self._counts[name] += delta
            if deltas.get("accepted") or deltas.get("duplicate"):
                self._refused_in_a_row = 0
            if deltas.get("connects"):
                self._run_refusal = None

    def shed(self, reason: str, samples: int, nbytes: int) -> None:
        """Count samples that are given up."""
        with self._lock:
            self._shed[reason] += samples
            self._counts["shed_bytes"] += nbytes

    def refused(self, field_name: str) -> bool:
        """Count a refusal; True the first time for this field. Beyond 64 fields: as "other"."""
        with self._lock:
            if len(self._refused) >= _MAX_FIELDS and field_name not in self._refused:
                field_name = "other"
            self._counts["refused"] += 1
            self._refused[field_name] += 1
            self._refused_in_a_row += 1
            self._refused_field = field_name
            return self._refused[field_name] == 1

    def error(self, text: str, refusal: RefusedError | None = None) -> bool:
        """Keep the newest error; True when it is another one than before.

        Args:
            text: for people.
            refusal: the error itself, where the run was refused, here or by the trainer.
        """
        with self._lock:
            changed = text != self._last_error
            self._last_error = text
            self._run_refusal = refusal
            return changed

    @property
    def run_refusal(self) -> RefusedError | None:
        """The refusal that keeps the run from opening; None once it is open."""
        with self._lock:
            return self._run_refusal

    @property
    def refused_in_a_row(self) -> tuple[int, str]:
        """Samples refused since one was taken, and the field that the last was refused for."""
        with self._lock:
            return self._refused_in_a_row, self._refused_field

    def forgive_refusals(self) -> None:
        """Count refusals in a row from 0 again."""
        with self._lock:
            self._refused_in_a_row = 0

    def snapshot(self, **gauges: Any) -> BridgeStats:
        """Every counter, at one moment.

        Args:
            gauges: the fields of ``BridgeStats`` that are not counted here.
        """
        with self._lock:
            transport, reason = self._transport
            counted: dict[str, Any] = dict(self._counts)
            return BridgeStats(
                **counted,
                refused_by_field=dict(self._refused),
                shed=dict(self._shed),
                transport=transport,
                transport_reason=reason,
                last_error=self._last_error,
                **gauges,
            )
