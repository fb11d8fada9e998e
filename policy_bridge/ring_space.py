"""Which part of the ring is free: first in, first out, whatever the order of acknowledgements."""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from slipstream.packed import ALIGNMENT


@dataclass
class _Part:
    start: int
    end: int
    free: bool = False


class RingSpace:
    """Hands out contiguous parts of [first, last) in order. Thread-safe.

    A part that is given back before an older one is used again only after that one.

    Args:
        first: first byte, a multiple of 64.
        last: one beyond the last byte.
    """

    def __init__(self, first: int, last: int) -> None:
        self._first = first
        self._last = last
        self._next = first
        self._parts: deque[_Part] = deque()
        self._by_start: dict[int, _Part] = {}
        self._changed = threading.Condition()

    @property
    def capacity(self) -> int:
        """Largest part there can be, in bytes."""
        return (self._last - self._first) // ALIGNMENT * ALIGNMENT

    @property
    def used(self) -> int:
        """Bytes that are handed out, gaps at the end of a round included."""
        with self._changed:
            if not self._parts:
                return 0
            span = self._next - self._parts[0].start
            return span if span > 0 else self._last - self._first + span

    def take(self, nbytes: int, timeout: float) -> int | None:
        """Start of a free part, a multiple of 64; None if there was none in time."""
        size = max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)
        with self._changed:
            start = self._find(size)
            if start is None and timeout > 0:

                def found() -> bool:
                    nonlocal start
                    start = self._find(size)
                    return start is not None

                self._changed.wait_for(found, timeout)
            if start is None:
                return None
            part = _Part(start, start + size)
            self._parts.append(part)
            self._by_start[start] = part
            self._next = part.end
            return start

    def give_back(self, *starts: int) -> None:
        """The parts that begin here are free."""
        with self._changed:
            for start in starts:
                self._by_start.pop(start).free = True
            while self._parts and self._parts[0].free:
                self._parts.popleft()
            self._changed.notify_all()

    def _find(self, size: int) -> int | None:
        if not self._parts:
            return self._first if size <= self.capacity else None
        oldest = self._parts[0].start
        if self._next > oldest:
            if self._last - self._next >= size:
                return self._next
            # The rest at the end stays unused this time round.
            return self._first if oldest - self._first >= size else None
        return self._next if oldest - self._next >= size else None
