"""Host memory for captured states: taken once, lent out, used again.

Correctness: a loan is a tensor over a numpy view of the slab, and every tensor
or memoryview made from it keeps that numpy view alive. The loan therefore ends
exactly when nobody can read it any more: not when a sample is shed, which may be
while another thread is still sending it.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left
from collections import deque

import torch

ALIGNMENT = 64
"""Bytes; a cache line, and more than any dtype needs."""


class _Loan(weakref.ref):  # type: ignore[type-arg]
    """Tells of a loan's end. A tenth of what ``weakref.finalize`` costs the policy's thread."""

    __slots__ = ("end", "start")
    start: int
    end: int


class HostPool:
    """One slab of host memory, lent out piece by piece. Thread-safe.

    First fit from the low end: samples leave about in the order in which they came,
    so there are few gaps, and pages of an unpinned slab that were never needed are
    never touched.

    Args:
        capacity_bytes: size of the slab.
        pinned: lock it in memory, for asynchronous copies from a CUDA device.
    """

    def __init__(self, capacity_bytes: int, *, pinned: bool = False) -> None:
        self._capacity = capacity_bytes // ALIGNMENT * ALIGNMENT
        self._slab = torch.empty(self._capacity, dtype=torch.uint8, pin_memory=pinned).numpy()
        self._lock = threading.Lock()
        # Gaps as [start, end), ascending.
        self._gaps: list[tuple[int, int]] = [(0, self._capacity)] if self._capacity else []
        self._held = 0
        # Appended to by finalizers, which may run in any thread and inside any call: no lock.
        self._returned: deque[_Loan] = deque()
        self._loans: dict[int, _Loan] = {}

    def take(self, nbytes: int) -> torch.Tensor | None:
        """A piece of the slab, uint8 [nbytes], undefined content; None if no gap is large enough.

        It is given back when the last tensor over it is gone.
        """
        size = max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)
        with self._lock:
            self._collect()
            fits = (i for i, (start, end) in enumerate(self._gaps) if end - start >= size)
            index = next(fits, None)
            if index is None:
                return None
            start, end = self._gaps.pop(index)
            if end - start > size:
                self._gaps.insert(index, (start + size, end))
            self._held += size
            view = self._slab[start : start + nbytes]
            loan = _Loan(view, self._returned.append)
            loan.start, loan.end = start, start + size
            self._loans[id(loan)] = loan
        return torch.from_numpy(view)

    @property
    def capacity(self) -> int:
        """Bytes of the slab."""
        return self._capacity

    @property
    def held(self) -> int:
        """Bytes on loan."""
        with self._lock:
            self._collect()
            return self._held

    def _collect(self) -> None:
        while self._returned:
            loan = self._returned.popleft()
            del self._loans[id(loan)]
            start, end = loan.start, loan.end
            self._held -= end - start
            at = bisect_left(self._gaps, (start, end))
            if at < len(self._gaps) and self._gaps[at][0] == end:
                end = self._gaps.pop(at)[1]
            if at and self._gaps[at - 1][1] == start:
                start = self._gaps[at - 1][0]
                self._gaps[at - 1] = (start, end)
            else:
                self._gaps.insert(at, (start, end))
