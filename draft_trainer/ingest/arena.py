"""A memory-mapped file of fixed size, allocated in extents that are pinned while viewed."""

from __future__ import annotations

import mmap
import os
import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from slipstream.errors import RefusedError, StatusCode
from slipstream.shm import FreeList
from slipstream.tensors import Bytes
from slipstream.v1 import release_pb2

ALIGNMENT = 64
"""Bytes: a cache line, and a multiple of every element type's alignment."""


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to a positive multiple of ``ALIGNMENT``."""
    return max(-(-nbytes // ALIGNMENT), 1) * ALIGNMENT


class Arena:
    """Extents of one mapped file, the best fit first. Not thread-safe: the store holds the lock.

    The page cache keeps the content over kill -9. All blocks of the file are allocated at once, so
    that a full file system is an error here and no SIGBUS later, unless it copies on write.

    A view pins its extent: a released extent is reused only when the last array or tensor that
    shares its memory is garbage-collected, on whatever thread that happens.

    Args:
        path: created if missing, and resized to ``size`` and ``ALIGNMENT`` bytes for
            ``sample_count``.
        size: bytes, a multiple of ``ALIGNMENT``.

    Raises:
        RefusedError: the file cannot be made, or there is no space for it (RESOURCE_EXHAUSTED).
    """

    def __init__(self, path: Path, size: int) -> None:
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(path, flags, 0o600)
            try:
                end = os.fstat(descriptor).st_size
                count = os.pread(descriptor, 8, end - ALIGNMENT) if end >= ALIGNMENT else b""
                os.ftruncate(descriptor, size + ALIGNMENT)
                os.posix_fallocate(descriptor, 0, size + ALIGNMENT)
                # Populated, because a page fault costs more than copying a page.
                flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
                self._map = mmap.mmap(descriptor, size + ALIGNMENT, flags)
            finally:
                os.close(descriptor)
        except OSError as error:
            expected = f"a folder with space for {size} bytes (replay.capacity_bytes)"
            advice, code = "free space there, or lower it", StatusCode.RESOURCE_EXHAUSTED
            field, reason = "replay.directory", release_pb2.REFUSAL_REASON_DISK
            raise RefusedError(field, error, expected, advice, code, reason) from error
        self._address = np.frombuffer(self._map, np.uint8).ctypes.data
        self.size = size
        self.sample_count = min(int.from_bytes(count, "little"), size // ALIGNMENT)
        # For every viewed extent, the array that all of its views keep alive.
        self._viewed: weakref.WeakValueDictionary[int, Bytes] = weakref.WeakValueDictionary()
        self._collected: deque[int] = deque()  # starts of extents whose last view was collected
        self._orphans: dict[int, int] = {}  # start -> size of viewed extents that no sample owns
        self.restart([])

    @property
    def sample_count(self) -> int:
        """The number of samples in the store, kept with the content."""
        return int.from_bytes(self._map[self.size : self.size + 8], "little")

    @sample_count.setter
    def sample_count(self, number: int) -> None:
        self._map[self.size : self.size + 8] = number.to_bytes(8, "little")

    @property
    def used(self) -> int:
        """Bytes that are allocated or viewed."""
        self._collect()
        return self.size - self._free.nbytes

    @property
    def pinned(self) -> int:
        """Bytes that are viewed."""
        return sum(map(len, self._viewed.values()))

    def reserve(self, nbytes: int) -> Bytes | None:
        """Return a writable view, uint8 [nbytes], of a new extent; None if no gap is large enough.

        The extent is free again when the view ends, unless it was retained by then.
        """
        self._collect()
        size = aligned(nbytes)
        start = self._free.take(size)
        if start is None:
            return None
        self._orphans[start] = size
        return self.view(start, nbytes)

    def retain(self, start: int) -> None:
        """Give this reservation to a sample: it outlives its views."""
        del self._orphans[start]

    def release(self, start: int, size: int) -> None:
        """Take an extent from its sample: it is free now, or when its last view ends."""
        if self.is_viewed(start):
            self._orphans[start] = size
        else:
            self._free.give(start, size)

    def view(self, start: int, nbytes: int) -> Bytes:
        """uint8 [nbytes] from ``start`` on, no copy. Slices, and tensors made of it, pin it too."""
        whole = self._viewed.get(start)
        if whole is None:
            whole = np.frombuffer(self._map, np.uint8, aligned(nbytes), start)
            self._viewed[start] = whole
            weakref.finalize(whole, self._collected.append, start).atexit = False
        return whole[:nbytes]

    def is_viewed(self, start: int) -> bool:
        """Return whether an array or tensor shares this extent's memory."""
        return start in self._viewed

    def start_of(self, address: int) -> int:
        """The start of the extent whose memory begins at this address."""
        return address - self._address

    def restart(self, extents: Sequence[tuple[int, int]]) -> list[int]:
        """Begin with these (start, size) in use, besides what is viewed.

        Returns:
            Indices of impossible extents: out of bounds, not aligned or overlapping.
        """
        self._collected.clear()
        viewed = {start: len(whole) for start, whole in self._viewed.items()}
        self._orphans = dict(viewed)
        used = sorted((start, start + size) for start, size in viewed.items())
        impossible = []
        for (start, size), index in sorted((extent, i) for i, extent in enumerate(extents)):
            end, at = start + size, bisect_left(used, (start,))
            inside = 0 <= start < end <= self.size and (start | size) % ALIGNMENT == 0
            before, after = at and used[at - 1][1], used[at][0] if at < len(used) else self.size
            if inside and self._orphans.get(start) == size:
                del self._orphans[start]
            elif inside and before <= start and end <= after and start not in viewed:
                insort(used, (start, end))
            else:
                impossible.append(index)
        self._free = FreeList()
        at = 0
        for start, end in (*used, (self.size, self.size)):
            if at < start:
                self._free.give(at, start - at)
            at = end
        return impossible

    def _collect(self) -> None:
        # Here, under the owner's lock: a view may end in the middle of any other operation.
        while self._collected:
            start = self._collected.popleft()
            if start in self._orphans and not self.is_viewed(start):
                self._free.give(start, self._orphans.pop(start))
