"""A memory-mapped file of a fixed size that tensors are views of.

What is written survives kill -9, because it is in the page cache (or in tmpfs) and not in the
process. The file's blocks are allocated when it is made: a full file system is an error then, and
never a SIGBUS at some later write.
"""

from __future__ import annotations

import mmap
import os
import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from slipstream.checksum import Bytes
from slipstream.errors import RefusedError, StatusCode

ALIGNMENT = 64
"""Bytes. Every element type's alignment divides it, and so does a cache line."""

MOST_SHARED = 1 << 20
"""Bytes that one view of several extents covers. Whoever holds one of them holds them all."""


def aligned(nbytes: int) -> int:
    """``nbytes`` rounded up to a whole, positive number of ``ALIGNMENT``."""
    return max(-(-nbytes // ALIGNMENT), 1) * ALIGNMENT


class FreeList:
    """The free parts of [0, size): neighbours are merged, the smallest that fits is taken.

    Args:
        size: bytes.
        taken: (start, size) of what is not free at first; disjoint and within bounds.
    """

    def __init__(self, size: int, taken: Iterable[tuple[int, int]] = ()) -> None:
        self.free = 0
        self._ends: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []
        at = 0
        for start, length in sorted(taken):
            assert at <= start, "two extents overlap"
            if at < start:
                self.give(at, start - at)
            at = start + length
        assert at <= size, "an extent is beyond the end"
        if at < size:
            self.give(at, size - at)

    def take(self, size: int) -> int | None:
        """The start of ``size`` bytes that are free no more; None where no part is as large."""
        index = bisect_left(self._by_size, (size, 0))
        if index == len(self._by_size):
            return None
        found, start = self._by_size[index]
        self._remove(start, found)
        if found > size:
            self._insert(start + size, found - size)
        return start

    def give(self, start: int, size: int) -> None:
        """Make a part free again that ``take`` gave."""
        if start in self._ends:
            before = self._ends[start]
            length = self._sizes[before]
            self._remove(before, length)
            start, size = before, length + size
        following = self._sizes.get(start + size)
        if following is not None:
            self._remove(start + size, following)
            size += following
        self._insert(start, size)

    def parts(self) -> list[tuple[int, int]]:
        """(start, size) of every free part, by start."""
        return sorted(self._sizes.items())

    def _insert(self, start: int, size: int) -> None:
        self._sizes[start] = size
        self._ends[start + size] = start
        insort(self._by_size, (size, start))
        self.free += size

    def _remove(self, start: int, size: int) -> None:
        del self._sizes[start], self._ends[start + size]
        del self._by_size[bisect_left(self._by_size, (size, start))]
        self.free -= size


@dataclass(eq=False, slots=True)
class Extent:
    """A part of the arena. ``owned`` and ``leases`` are the arena's."""

    start: int
    size: int
    owned: bool = False
    leases: int = 0


class _Lease(weakref.ref):  # type: ignore[type-arg]
    """Tells of a view's end. A tenth of what ``weakref.finalize`` costs, for every small sample."""

    __slots__ = ("extents",)
    extents: Sequence[Extent]


class Arena:
    """The mapped file, and who uses which part of it. Not thread-safe: its owner has the lock.

    An extent is free again when nobody owns it and no tensor views it: a batch may still read a
    sample that was evicted. Views say so when they are collected, on whatever thread that is.

    Args:
        path: made if it is missing, and brought to ``size``.
        size: bytes, a multiple of ``ALIGNMENT``.
        taken: (start, size) of the extents that are owned from the beginning; those come back
            from ``extents`` in the same order.

    Raises:
        RefusedError: the file cannot be made, or there is no room for it (RESOURCE_EXHAUSTED).
    """

    def __init__(self, path: Path, size: int, taken: Iterable[tuple[int, int]] = ()) -> None:
        self.size = size
        self.extents = [Extent(start, length, owned=True) for start, length in taken]
        self._free = FreeList(size, [(extent.start, extent.size) for extent in self.extents])
        self._leases: dict[int, _Lease] = {}
        self._ended: deque[_Lease] = deque()
        self._leased = 0
        try:
            number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(number, size)
                os.posix_fallocate(number, 0, size)
                # Its pages at once: a fault costs more than copying a page, and every sample of the
                # first pass over the arena would pay for its own.
                self._map = mmap.mmap(number, size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
                self._address = np.frombuffer(self._map, np.uint8).ctypes.data
            finally:
                os.close(number)
        except OSError as error:
            raise RefusedError(
                "replay.directory",
                f"{path} ({error.strerror})",
                f"a folder with room for {size} bytes (replay.capacity_bytes)",
                "free some room there, set another replay.directory, or lower "
                "replay.capacity_bytes",
                StatusCode.RESOURCE_EXHAUSTED,
            ) from error

    @property
    def address(self) -> int:
        """Of its first byte."""
        return self._address

    @property
    def used(self) -> int:
        """Bytes that are owned or viewed."""
        self._collect()
        return self.size - self._free.free

    @property
    def leased(self) -> int:
        """Bytes that are viewed."""
        self._collect()
        return self._leased

    def allocate(self, size: int) -> Extent | None:
        """An extent of ``size`` bytes, a multiple of ``ALIGNMENT``; None where none is free.

        It is free again when the last view of it ends, unless it is owned by then.
        """
        return self.allocate_all([size])[0]

    def allocate_all(self, sizes: Sequence[int]) -> list[Extent | None]:
        """As ``allocate`` for each size; one after the other where a free part has room for all."""
        self._collect()
        start = self._free.take(sum(sizes)) if len(sizes) > 1 else None
        extents: list[Extent | None] = []
        for size in sizes:
            at = self._free.take(size) if start is None else start
            extents.append(None if at is None else Extent(at, size))
            if start is not None:
                start += size
        return extents

    def give_back(self, extent: Extent) -> None:
        """An extent that was allocated is not needed: nobody owns it or viewed it yet."""
        assert not extent.owned and extent.leases == 0
        self._free.give(extent.start, extent.size)

    def view(self, extent: Extent, nbytes: int) -> Bytes:
        """uint8 [nbytes]: the extent's bytes, to read or to write. No copy.

        Slices of it, and tensors made of it, hold it until the last of them is gone.
        """
        return self._view((extent,), nbytes)

    def view_all(self, extents: Sequence[Extent]) -> list[tuple[Bytes, int]]:
        """For each extent a view as by ``view``, and where the extent begins in it.

        Neighbours share one of up to ``MOST_SHARED`` bytes: a view of its own cost a small sample
        as much as the checks of its states.
        """
        views: list[tuple[Bytes, int]] = []
        while (at := len(views)) < len(extents):
            first, until = extents[at], at + 1
            end = first.start + first.size
            while (
                until < len(extents)
                and extents[until].start == end
                and end + extents[until].size - first.start <= MOST_SHARED
            ):
                end += extents[until].size
                until += 1
            shared = self._view(extents[at:until], end - first.start)
            views += [(shared, extent.start - first.start) for extent in extents[at:until]]
        return views

    def _view(self, extents: Sequence[Extent], nbytes: int) -> Bytes:
        """Of neighbours, from the first one's beginning on."""
        array = np.frombuffer(self._map, np.uint8, nbytes, extents[0].start)
        lease = _Lease(array, self._ended.append)
        lease.extents = extents
        self._leases[id(lease)] = lease
        for extent in extents:
            if extent.leases == 0:
                self._leased += extent.size
            extent.leases += 1
        return array

    def is_viewed(self, extent: Extent) -> bool:
        """Whether some tensor views it."""
        self._collect()
        return extent.leases > 0

    def disown(self, *extents: Extent) -> None:
        """Their owner needs them no more."""
        for extent in extents:
            assert extent.owned
            extent.owned = False
        self._give([extent for extent in extents if extent.leases == 0])

    def _collect(self) -> None:
        # Only here, under the owner's lock: a view may end in the midst of any other operation.
        ended = []
        while self._ended:
            lease = self._ended.popleft()
            del self._leases[id(lease)]
            for extent in lease.extents:
                extent.leases -= 1
                if extent.leases == 0:
                    self._leased -= extent.size
                    if not extent.owned:
                        ended.append(extent)
        self._give(ended)

    def _give(self, extents: Sequence[Extent]) -> None:
        """Make extents free, neighbours as one: samples mostly leave in the order they came in."""
        start = end = 0
        for extent in extents:
            if extent.start != end:
                if end > start:
                    self._free.give(start, end - start)
                start = extent.start
            end = extent.start + extent.size
        if end > start:
            self._free.give(start, end - start)
