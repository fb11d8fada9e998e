"""What the bridge did, in numbers: nothing is given up without being counted here."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from slipstream.errors import RefusedError


@dataclass(frozen=True)
class SyncResult:
    """What one weight-sync window did.

    Attributes:
        policy_version: the version that was synced.
        policy_pushed: whether Slipstream carried the policy's weights.
        draft_versions: draft version that each rollout server answered it serves.
        prepare_seconds: opening the window: the draft is staged.
        stage_seconds: staging the policy on every rollout server.
        commit_seconds: from the commit call to the last server's answer.
        draft_errors: why the draft could not follow; empty when it did.
    """

    policy_version: int
    policy_pushed: bool = False
    draft_versions: Mapping[str, int] = field(default_factory=dict)
    prepare_seconds: float = 0.0
    stage_seconds: float = 0.0
    commit_seconds: float = 0.0
    draft_errors: tuple[str, ...] = ()


@dataclass(frozen=True)
class BridgeStats:
    """A snapshot. Counters count since the bridge was built.

    Attributes:
        connected: a run is open and its stream is up.
        transport: of the states, "shared_memory" or "grpc"; empty before the first stream.
        transport_reason: why the states do not go through shared memory; empty when they do.
        policy_version: the last version whose sync ended well; None before it.
        captures: capture windows that took states.
        captures_skipped: capture windows that took none, because capture was off.
        captures_refused: capture windows that ended early for a call that could not be served.
        capture_off_reason: why the next window would take nothing, or why the last one was
            refused; empty while capture is on.
        captured_tokens: unpadded tokens of the forward passes given to ``ship``.
        chosen_samples, chosen_tokens: what the selector took of them.
        not_chosen_samples: what it left, for the budget's sake.
        sent_samples, sent_bytes: what went out, repeats included; serialized bytes and those
            that went through shared memory.
        resent_samples: repeats after a lost stream.
        accepted, duplicate, refused: acknowledgements by kind.
        refused_by_field: refusals by the field that they name.
        shed: samples given up, by reason.
        shed_bytes: bytes of them.
        outbox_samples, outbox_bytes: waiting now, unacknowledged ones included.
        outbox_capacity_bytes: bound of these.
        ring_bytes: used and whole bytes of the shared-memory ring; None where there is none.
        announced: policy versions the trainer was told of.
        connects: runs opened, the first included.
        syncs: windows that ended well.
        last_sync: the newest of them; None before it.
        last_error: the newest error of the trainer's side; empty if none.
    """

    connected: bool
    transport: str
    transport_reason: str
    policy_version: int | None
    captures: int
    captures_skipped: int
    captures_refused: int
    capture_off_reason: str
    captured_tokens: int
    chosen_samples: int
    chosen_tokens: int
    not_chosen_samples: int
    sent_samples: int
    sent_bytes: int
    resent_samples: int
    accepted: int
    duplicate: int
    refused: int
    refused_by_field: Mapping[str, int]
    shed: Mapping[str, int]
    shed_bytes: int
    outbox_samples: int
    outbox_bytes: int
    outbox_capacity_bytes: int
    ring_bytes: tuple[int, int] | None
    announced: int
    connects: int
    syncs: int
    last_sync: SyncResult | None
    last_error: str


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
        """The states travel this way now."""
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
        """Count a refusal; True the first time for this field."""
        with self._lock:
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
        """Why the run is not open, if it was refused; None once it is open."""
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

    def snapshot(
        self,
        *,
        connected: bool,
        policy_version: int | None,
        outbox_samples: int,
        outbox_bytes: int,
        last_sync: SyncResult | None,
        capture_off_reason: str = "",
        outbox_capacity_bytes: int = 0,
        ring_bytes: tuple[int, int] | None = None,
    ) -> BridgeStats:
        """Every counter and the given gauges, at one moment."""
        with self._lock:
            counts = self._counts
            return BridgeStats(
                connected=connected,
                transport=self._transport[0],
                transport_reason=self._transport[1],
                policy_version=policy_version,
                captures=counts["captures"],
                captures_skipped=counts["captures_skipped"],
                captures_refused=counts["captures_refused"],
                capture_off_reason=capture_off_reason,
                captured_tokens=counts["captured_tokens"],
                chosen_samples=counts["chosen_samples"],
                chosen_tokens=counts["chosen_tokens"],
                not_chosen_samples=counts["not_chosen_samples"],
                sent_samples=counts["sent_samples"],
                sent_bytes=counts["sent_bytes"],
                resent_samples=counts["resent_samples"],
                accepted=counts["accepted"],
                duplicate=counts["duplicate"],
                refused=counts["refused"],
                refused_by_field=MappingProxyType(dict(self._refused)),
                shed=MappingProxyType(dict(self._shed)),
                shed_bytes=counts["shed_bytes"],
                outbox_samples=outbox_samples,
                outbox_bytes=outbox_bytes,
                outbox_capacity_bytes=outbox_capacity_bytes,
                ring_bytes=ring_bytes,
                announced=counts["announced"],
                connects=counts["connects"],
                syncs=counts["syncs"],
                last_sync=last_sync,
                last_error=self._last_error,
            )
