"""The rings of shared memory that sessions were offered, and those that streams use."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from pathlib import Path

from slipstream.errors import RefusedError, StatusCode
from slipstream.shm import HEADER_BYTES, RingFile, remove_stale
from slipstream.v1 import draft_trainer_pb2 as pb

logger = logging.getLogger(__name__)


class Rings:
    """Makes, lends and removes them, at most ``limit`` at a time. Thread-safe.

    Args:
        directory: in memory, mounted by trainer and bridge alike; None: no rings.
        nbytes: of each.
        limit: offered ones that no stream claimed give way, oldest first.
        offer_seconds: after which an offered one that no stream claimed is removed: its client
            went away, and the memory is taken.
    """

    def __init__(
        self, directory: Path | None, nbytes: int, limit: int, offer_seconds: float = 30.0
    ) -> None:
        self._directory = directory
        self._nbytes = max(nbytes // HEADER_BYTES, 1) * HEADER_BYTES + HEADER_BYTES
        self._limit = limit
        self._lock = threading.Lock()
        self._offer_seconds = offer_seconds
        self._timers: dict[str, threading.Timer] = {}
        self._offered: OrderedDict[str, RingFile] = OrderedDict()
        self._claimed: dict[str, RingFile] = {}
        if directory is not None:
            for name in remove_stale(directory):
                logger.warning("removed %s, which a trainer left that was killed", name)

    def offer(self, session_id: str) -> pb.SharedMemory:
        """A ring for a session; or why there is none."""
        if self._directory is None:
            return pb.SharedMemory(absent_because="the trainer's server.shared_memory is off")
        with self._lock:
            while self._offered and len(self._offered) + len(self._claimed) >= self._limit:
                self._withdraw(next(iter(self._offered)))
            if len(self._claimed) >= self._limit:
                return pb.SharedMemory(
                    absent_because=f"{self._limit} rings are in use (server.max_streams)"
                )
            try:
                ring = RingFile.create(self._directory, self._nbytes)
            except RefusedError as error:
                logger.warning("no shared memory for a session: %s", error)
                return pb.SharedMemory(absent_because=str(error))
            self._offered[session_id] = ring
            timer = threading.Timer(self._offer_seconds, self._expire, (session_id,))
            timer.daemon = True
            self._timers[session_id] = timer
            timer.start()
        return pb.SharedMemory(name=ring.name, bytes=ring.nbytes, nonce=ring.nonce)

    @property
    def counts(self) -> dict[str, int]:
        """Rings by state: offered to a session, or claimed by its stream."""
        with self._lock:
            return {"offered": len(self._offered), "claimed": len(self._claimed)}

    @property
    def nbytes(self) -> int:
        """Memory of all of them."""
        return self._nbytes * sum(self.counts.values())

    def claim(self, session_id: str, transport: int) -> RingFile | None:
        """The session's ring for a stream that has it open, its name removed; else None.

        Raises:
            RefusedError: the stream says that it uses shared memory, and there is none for it
                (FAILED_PRECONDITION).
        """
        with self._lock:
            ring = self._take_offered(session_id)
            if transport != pb.TRANSPORT_SHARED_MEMORY:
                if ring is not None:
                    _discard(ring)
                return None
            if ring is None:
                raise RefusedError(
                    "header.transport",
                    "TRANSPORT_SHARED_MEMORY",
                    "another transport: this session's ring was used up or not offered",
                    "open the run again for another ring",
                    StatusCode.FAILED_PRECONDITION,
                )
            ring.remove_name()
            self._claimed[session_id] = ring
            return ring

    def release(self, session_id: str) -> None:
        """The session's stream ended."""
        with self._lock:
            ring = self._claimed.pop(session_id, None)
            if ring is not None:
                _discard(ring)

    def close(self) -> None:
        """Remove all of them."""
        with self._lock:
            for session_id in list(self._offered):
                self._withdraw(session_id)
            for ring in self._claimed.values():
                _discard(ring)
            self._claimed.clear()

    def _expire(self, session_id: str) -> None:
        with self._lock:
            self._withdraw(session_id)

    def _withdraw(self, session_id: str) -> None:
        ring = self._take_offered(session_id)
        if ring is not None:
            _discard(ring)

    def _take_offered(self, session_id: str) -> RingFile | None:
        timer = self._timers.pop(session_id, None)
        if timer is not None:
            timer.cancel()
        return self._offered.pop(session_id, None)


def _discard(ring: RingFile) -> None:
    ring.remove_name()
    ring.close()
