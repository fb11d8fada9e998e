"""The watch: follows every rollout server's acceptance counters and keeps the recent past."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import takewhile

from draft_trainer.releases.confidence import Batch
from draft_trainer.releases.fleet import Fleet
from slipstream.v1 import rollout_server_pb2 as pb

INTERVAL_MS = 500
STREAM_SECONDS = 600.0
RETRY_SECONDS = 1.0
KEPT = 2048
"""Batches of one server, one each ``INTERVAL_MS``."""

OFTEN = 64
"""Servers that report every ``INTERVAL_MS``; of a larger fleet, as many reports a second arrive and
as many batches are kept as of this one."""


@dataclass(frozen=True)
class Seen:
    """One batch of one draft version on one server, and when it was reported (monotonic s)."""

    at: float
    version: int
    batch: Batch


class AcceptanceWatch:
    """Follows every rollout server's acceptance counters and keeps the recent past. Thread-safe.

    One thread and one stream per server, opened again when it ends: a server may come, go and
    restart. Counters only grow while a process lives; one that fell belongs to a new process, and
    counts from 0.
    """

    def __init__(
        self,
        fleet: Fleet,
        on_report: Callable[[str, pb.ServerState], None] = lambda *report: None,
    ) -> None:
        self._fleet = fleet
        self._on_report = on_report
        self._changed = threading.Condition()
        self._revision = 0
        self._seen: dict[str, deque[Seen]] = {}
        self._threads: dict[str, tuple[threading.Thread, threading.Event]] = {}
        self._stopped = False
        self._size = 0

    @property
    def _scale(self) -> float:
        return max(1.0, self._size / OFTEN)

    def follow(self, addresses: Iterable[str]) -> None:
        """Watch these servers and no others."""
        wanted = set(addresses)
        with self._changed:
            if self._stopped or wanted == self._threads.keys():
                return
            for address in set(self._threads) - wanted:
                self._threads.pop(address)[1].set()
            self._size = len(wanted)
            kept = math.ceil(KEPT / self._scale)
            self._seen = {a: deque(self._seen.get(a, ()), maxlen=kept) for a in wanted}
            for address in wanted - set(self._threads):
                over = threading.Event()
                thread = threading.Thread(
                    target=self._watch, args=(address, over), name=f"watch-{address}", daemon=True
                )
                # If no thread can be started, the next look at the fleet tries again.
                thread.start()
                self._threads[address] = (thread, over)

    def seen(self, version: int, addresses: Iterable[str], begin: float) -> list[Seen]:
        """Return a draft version's batches on these servers after ``begin``, oldest first."""
        with self._changed:
            found = [
                seen
                for address in addresses
                for seen in self._seen.get(address, ())
                if seen.version == version and seen.at > begin
            ]
        return sorted(found, key=lambda seen: seen.at)

    def since(self, version: int, addresses: Iterable[str], begin: float) -> list[Batch]:
        """Return the same batches without the times."""
        return [seen.batch for seen in self.seen(version, addresses, begin)]

    def recent(self, seconds: float) -> list[tuple[str, Seen]]:
        """Return the batches of the last ``seconds``, each with its server's address."""
        begin = time.monotonic() - seconds
        with self._changed:
            return [
                (address, seen)
                for address, batches in self._seen.items()
                for seen in takewhile(lambda seen: seen.at > begin, reversed(batches))
            ]

    def wait_beyond(self, revision: int, timeout: float) -> int:
        """Block until a report came, or ``timeout`` seconds; returns the revision then."""
        with self._changed:
            self._changed.wait_for(lambda: self._revision > revision, timeout)
            return self._revision

    def wake(self) -> None:
        """Wake ``wait_beyond``, as a report does."""
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

    def _watch(self, address: str, over: threading.Event) -> None:
        before: dict[int, Batch] | None = None
        while not over.is_set():
            interval = round(INTERVAL_MS * self._scale)
            for report in self._fleet.client(address).watch(interval, STREAM_SECONDS):
                before = self._note(address, report, before)
                if over.is_set():
                    return
            over.wait(RETRY_SECONDS)

    def _note(
        self, address: str, report: pb.AcceptanceReport, before: dict[int, Batch] | None
    ) -> dict[int, Batch]:
        # Also where nothing was drafted: a server may run without drafts.
        self._on_report(address, report.state)
        now = {
            c.draft_version: Batch(tuple(c.tried_per_position), tuple(c.accepted_per_position))
            for c in report.counters
        }
        if before is None:
            # The age of these counts is unknown: they are only the base of the next ones.
            return now
        with self._changed:
            for version, counts in now.items():
                grown = counts.since(before.get(version, Batch((), ())))
                if grown.drafts > 0 and address in self._seen:
                    self._seen[address].append(Seen(time.monotonic(), version, grown))
            self._revision += 1
            self._changed.notify_all()
        return now
