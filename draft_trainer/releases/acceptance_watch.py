"""Follows every rollout server's acceptance counters and keeps the recent past of each.

One thread and one stream per server, opened again when it ends, so that a server may
come, go and restart. Counters only grow while a process lives; one that fell belongs
to a new process and counts from nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from draft_trainer.releases.fleet import Fleet
from draft_trainer.releases.sequential import Batch, batch_of
from slipstream.v1 import rollout_server_pb2 as pb

logger = logging.getLogger(__name__)

INTERVAL_MS = 100
STREAM_SECONDS = 600.0
RETRY_SECONDS = 1.0
KEPT = 2048


@dataclass(frozen=True)
class Seen:
    """One batch of one draft version on one server, and when it was reported (monotonic s)."""

    at: float
    version: int
    batch: Batch


class AcceptanceWatch:
    """Owner of the threads. Thread-safe.

    Args:
        fleet: asked for each server's stream.
        on_growth: told what each report added: address, the state that came with it, draft
            version, drafts, accepted per position.
    """

    def __init__(
        self,
        fleet: Fleet,
        on_growth: Callable[
            [str, pb.ServerState, int, int, Sequence[int]], None
        ] = lambda *growth: None,
    ) -> None:
        self._fleet = fleet
        self._on_growth = on_growth
        self._changed = threading.Condition()
        self._revision = 0
        self._seen: dict[str, deque[Seen]] = {}
        self._threads: dict[str, tuple[threading.Thread, threading.Event]] = {}
        self._stopped = False

    def follow(self, addresses: Iterable[str]) -> None:
        """Watch these servers and no others."""
        wanted = set(addresses)
        with self._changed:
            if self._stopped:
                return
            for address in set(self._threads) - wanted:
                self._threads.pop(address)[1].set()
                self._seen.pop(address, None)
            for address in wanted - set(self._threads):
                over = threading.Event()
                thread = threading.Thread(
                    target=self._watch, args=(address, over), name=f"watch-{address}", daemon=True
                )
                self._threads[address] = (thread, over)
                self._seen[address] = deque(maxlen=KEPT)
                thread.start()

    def look(self) -> None:
        """Ask every server what it serves, for the fleet's own ``on_states``; changes nothing."""
        self._fleet.states()

    def since(self, version: int, addresses: Iterable[str], begin: float) -> list[Batch]:
        """What a draft version did on these servers after ``begin``, oldest first."""
        return [seen.batch for seen in self._of(version, addresses) if seen.at > begin]

    def before(
        self, version: int, addresses: Iterable[str], end: float, seconds: float
    ) -> list[Batch]:
        """What it did on them in the ``seconds`` before ``end``, oldest first."""
        return [s.batch for s in self._of(version, addresses) if end - seconds < s.at <= end]

    def wait_beyond(self, revision: int, timeout: float) -> int:
        """Block until a report came, or ``timeout`` seconds; returns the revision then."""
        with self._changed:
            self._changed.wait_for(lambda: self._revision > revision, timeout)
            return self._revision

    def wake(self) -> None:
        """As if a report had come."""
        with self._changed:
            self._revision += 1
            self._changed.notify_all()

    def stop(self, timeout: float) -> bool:
        """End the threads; their streams end when the fleet's channels close."""
        with self._changed:
            self._stopped = True
            threads, self._threads = self._threads, {}
        for _, over in threads.values():
            over.set()
        deadline = time.monotonic() + timeout
        for thread, _ in threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread, _ in threads.values())

    def _of(self, version: int, addresses: Iterable[str]) -> list[Seen]:
        with self._changed:
            found = [s for a in addresses for s in self._seen.get(a, ()) if s.version == version]
        return sorted(found, key=lambda seen: seen.at)

    def _watch(self, address: str, over: threading.Event) -> None:
        before: dict[int, list[int]] | None = None
        while not over.is_set():
            for report in self._fleet.client(address).watch(INTERVAL_MS, STREAM_SECONDS):
                before = self._note(address, report, before)
                if over.is_set():
                    return
            over.wait(RETRY_SECONDS)

    def _note(
        self, address: str, report: pb.AcceptanceReport, before: dict[int, list[int]] | None
    ) -> dict[int, list[int]]:
        now = {c.draft_version: [c.drafts, *c.accepted_per_position] for c in report.counters}
        if before is None:
            # How old these counts are nobody knows; they only say where to begin.
            return now
        with self._changed:
            for version, counts in now.items():
                last = before.get(version, [])
                grown = [
                    count - (last[place] if place < len(last) else 0)
                    for place, count in enumerate(counts)
                ]
                if grown[0] < 0:
                    grown = counts
                if grown[0] > 0 and address in self._seen:
                    self._on_growth(address, report.state, version, grown[0], grown[1:])
                    seen = Seen(time.monotonic(), version, batch_of(grown[0], grown[1:]))
                    self._seen[address].append(seen)
            self._revision += 1
            self._changed.notify_all()
        return now
