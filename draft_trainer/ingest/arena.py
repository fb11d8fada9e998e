"""A memory-mapped file of fixed size, handed out in extents that stay put while they are viewed."""

from __future__ import annotations

import mmap
import os
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from slipstream.checksum import Bytes
from slipstream.errors import RefusedError, StatusCode
from slipstream.shm import FreeList

ALIGNMENT = 64
"""Bytes: a cache line, and a multiple of every element type's alignment."""


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to a positive multiple of ``ALIGNMENT``."""
    return max(-(-nbytes // ALIGNMENT), 1) * ALIGNMENT


class Arena:
    """Extents of one mapped file, the best fit first. Not thread-safe: the store holds the lock.

    The page cache keeps the content over kill -9. All blocks of the file are allocated at once, so
    that a full file system is an error here and never a SIGBUS later.

    A view pins its extent: a released extent is reused only when the last array or tensor that
    shares its memory is garbage-collected, on whatever thread that happens.

    Args:
        path: created if missing, and brought to ``size``.
        size: bytes, a multiple of ``ALIGNMENT``.

    Raises:
        RefusedError: the file cannot be made, or there is no space for it (RESOURCE_EXHAUSTED).
    """

    def __init__(self, path: Path, size: int) -> None:
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(path, flags, 0o600)
            try:
                os.ftruncate(descriptor, size)
                os.posix_fallocate(descriptor, 0, size)
                # Populated: a page fault costs more than copying a page.
                self._map = mmap.mmap(descriptor, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
            finally:
                os.close(descriptor)
        except OSError as error:
            expected = f"a folder with space for {size} bytes (replay.capacity_bytes)"
            advice, code = "free space there, or lower it", StatusCode.RESOURCE_EXHAUSTED
            raise RefusedError("replay.directory", error, expected, advice, code) from error
        self._address = np.frombuffer(self._map, np.uint8).ctypes.data
        self.size = size
        self._views: dict[int, int] = {}  # start -> number of views
        self._sizes: dict[int, int] = {}  # start -> bytes, of viewed extents
        self._ended: deque[int] = deque()  # starts of views that were collected
        self._orphans: set[int] = set()  # viewed extents that belong to no sample
        self.restart([])

    @property
    def used(self) -> int:
        """Bytes that are allocated or viewed."""
        self._collect()
        return self.size - self._free.nbytes

    @property
    def pinned(self) -> int:
        """Bytes that are viewed."""
        self._collect()
        return sum(self._sizes.values())

    def reserve(self, nbytes: int) -> Bytes | None:
        """A writable view, uint8 [nbytes], of a new extent; None if no gap is large enough.

        The extent is free again when the view ends, unless it was retained by then.
        """
        self._collect()
        start = self._free.take(aligned(nbytes))
        if start is None:
            return None
        self._orphans.add(start)
        return self.view(start, nbytes)

    def retain(self, start: int) -> None:
        """A sample owns this reservation now: it outlives its views."""
        self._orphans.remove(start)

    def release(self, start: int, size: int) -> None:
        """An extent belongs to no sample any more: free now, or when its last view ends."""
        self._collect()
        if start in self._views:
            self._orphans.add(start)
        else:
            self._free.give(start, size)

    def view(self, start: int, nbytes: int) -> Bytes:
        """uint8 [nbytes] from ``start`` on, no copy. Slices, and tensors made of it, pin it too."""
        array = np.frombuffer(self._map, np.uint8, nbytes, start)
        self._views[start] = self._views.get(start, 0) + 1
        self._sizes.setdefault(start, aligned(nbytes))
        weakref.finalize(array, self._ended.append, start).atexit = False
        return array

    def is_viewed(self, start: int) -> bool:
        """Whether an array or tensor shares this extent's memory."""
        self._collect()
        return start in self._views

    def start_of(self, address: int) -> int:
        """The start of the extent whose memory begins at this address."""
        return address - self._address

    def restart(self, extents: Sequence[tuple[int, int]]) -> list[int]:
        """Begin with these (start, size) in use, beside what is viewed.

        Returns:
            Indices of extents that cannot be: out of bounds, not aligned or overlapping.
        """
        self._collect()
        self._free = FreeList()
        pins, impossible, used = sorted(self._sizes.items()), [], dict(self._sizes)
        end = 0
        self._orphans = set(self._sizes)
        for (start, size), index in sorted((extent, i) for i, extent in enumerate(extents)):
            after = bisect_left(pins, (start, 0))
            limit = pins[after][0] if after < len(pins) else self.size
            floor = sum(pins[after - 1]) if after else 0
            free = max(end, floor) <= start and start + size <= limit
            viewed = self._sizes.get(start) == size and start in self._orphans
            if not (free or viewed) or size <= 0 or start % ALIGNMENT or size % ALIGNMENT:
                impossible.append(index)
                continue
            self._orphans.discard(start)
            used[start], end = size, start + size
        at = 0
        for start, size in sorted(used.items()):
            if at < start:
                self._free.give(at, start - at)
            at = start + size
        if at < self.size:
            self._free.give(at, self.size - at)
        return impossible

    def _collect(self) -> None:
        # Here, under the owner's lock: a view may end in the middle of any other operation.
        while self._ended:
            start = self._ended.popleft()
            self._views[start] -= 1
            if not self._views[start]:
                del self._views[start]
                size = self._sizes.pop(start)
                if start in self._orphans:
                    self._orphans.remove(start)
                    self._free.give(start, size)
