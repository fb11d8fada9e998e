"""A queue of samples bounded in bytes, which gives up the oldest policy's samples first.

Invariant: every sample that was taken leaves in exactly one way: settled by an
acknowledgement, or shed and counted under a reason. Samples stay here until
they are acknowledged, so what is in flight counts against the bound too and is
still here to be sent again when a stream is lost.

What is shed to make room is the least of (policy version, priority), the oldest
of equals first, and only what is less than the sample that needs the room:
swapping equals would only churn. Finding it takes no search: samples lie in one
bin per version and priority, and versions only rise.

Host memory for captured states: taken once, lent out, used again.

Correctness: a loan is a tensor over a numpy view of the slab, and every tensor
or memoryview made from it keeps that numpy view alive. The loan therefore ends
exactly when nobody can read it any more: not when a sample is shed, which may be
while another thread is still sending it.

One sequence's states in host memory, as the block that travels.
"""

from __future__ import annotations

import threading
import time
import weakref
from bisect import bisect_left, insort
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from policy_bridge.stats import Counters
from slipstream.sample import FLOAT8, Layout, PackedTensors, layout_of, tensors_in, write_block
from slipstream.tensors import quantize

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


@dataclass(frozen=True)
class Sample:
    """T tokens of one sequence, A auxiliary layers, hidden size H.

    Attributes:
        sample_id: unique within the run.
        policy_version: whose forward pass made the states.
        temperature: of the rollout.
        aux_layers: "after L layers" numbers of the auxiliary states.
        layout: of the block.
        block: uint8 [layout.nbytes], on the CPU, its own memory: it is sent as it is.
    """

    sample_id: str
    policy_version: int
    temperature: float
    aux_layers: tuple[int, ...]
    layout: Layout
    block: torch.Tensor

    @classmethod
    def of(
        cls,
        sample_id: str,
        policy_version: int,
        temperature: float,
        aux_layers: tuple[int, ...],
        tensors: PackedTensors,
    ) -> Sample:
        """A sample with copies of ``tensors``, which lie apart, on the CPU."""
        tokens, hidden_size = tensors.final.shape
        layout = layout_of(tokens, len(aux_layers), hidden_size, tensors.final.dtype)
        block = torch.empty(layout.nbytes, dtype=torch.uint8)
        write_block(tensors, layout, block.numpy())
        return cls(sample_id, policy_version, temperature, aux_layers, layout, block)

    @property
    def nbytes(self) -> int:
        """Of the block."""
        return self.layout.nbytes

    @cached_property
    def tensors(self) -> PackedTensors:
        """Views of the block. Made when they are asked for: sending needs none of them."""
        return tensors_in(self.block, self.layout)

    @property
    def float8_layout(self) -> Layout:
        """Of ``in_float8``."""
        layout = self.layout
        return layout_of(layout.tokens, layout.aux_layers, layout.hidden_size, FLOAT8)

    def in_float8(self) -> Sample:
        """With its states in float8 and their scales; itself if they are already."""
        if self.layout.dtype == FLOAT8:
            return self
        aux, aux_scales = quantize(self.tensors.aux, self.layout.hidden_size)
        final, final_scales = quantize(self.tensors.final, self.layout.hidden_size)
        scales = torch.cat((aux_scales, final_scales))
        tensors = replace(self.tensors, aux=aux, final=final, scales=scales)
        return Sample.of(
            self.sample_id, self.policy_version, self.temperature, self.aux_layers, tensors
        )


PRIORITIES = 16
"""Priorities are whole numbers from 0 to one less; the highest is shed last."""


@dataclass
class _VersionBins:
    bins: list[OrderedDict[str, Sample]] = field(
        default_factory=lambda: [OrderedDict() for _ in range(PRIORITIES)]
    )
    nbytes: list[int] = field(default_factory=lambda: [0] * PRIORITIES)


class Outbox:
    """Filled by the policy's thread, drained by the shipper. Thread-safe.

    Args:
        capacity_bytes: bound on the tensors of all samples held.
        counters: where shed samples are counted.
        pool: whose memory ``reserve`` lends; without it, memory of its own.
    """

    def __init__(
        self, capacity_bytes: int, counters: Counters, pool: HostPool | None = None
    ) -> None:
        self._capacity = capacity_bytes
        self._counters = counters
        self._pool = pool
        self._changed = threading.Condition()
        self._held: dict[str, tuple[Sample, int]] = {}
        self._versions: list[int] = []
        self._bins: dict[int, _VersionBins] = {}
        self._waiting: OrderedDict[str, None] = OrderedDict()
        self._sent: OrderedDict[str, None] = OrderedDict()
        self._bytes = 0
        self._closed = ""  # Why, once it is.

    def reserve(
        self, nbytes: int, version: int, priority: int, deadline_seconds: float
    ) -> torch.Tensor | None:
        """Memory for a sample that will be offered, made free before anything is copied.

        Args:
            nbytes: of the sample's tensors.
            version: its policy version.
            priority: see ``offer``.
            deadline_seconds: the longest this call may wait for another thread.

        Returns:
            uint8 [nbytes]; None if there is no room, which is counted as shed.
        """
        if not self._changed.acquire(timeout=deadline_seconds):
            self._counters.shed("deadline", 1, nbytes)
            return None
        try:
            if not self._make_room(nbytes, version, priority):
                return None
            if self._pool is None:
                return torch.empty(nbytes, dtype=torch.uint8)
            while True:
                loan = self._pool.take(nbytes)
                if loan is not None:
                    return loan
                # Room enough, but in pieces, or still being read by whoever sends it.
                if not self._displace(version, priority):
                    self._counters.shed("outbox_full", 1, nbytes)
                    return None
        finally:
            self._changed.release()

    def offer(self, sample: Sample, deadline_seconds: float, priority: int = 0) -> bool:
        """Take a sample, or count it as shed. O(1), apart from what it displaces.

        Args:
            sample: its ``nbytes`` counts against the bound.
            deadline_seconds: the longest this call may wait for another thread.
            priority: 0 to ``PRIORITIES`` - 1.

        Returns:
            Whether it was taken.
        """
        if not self._changed.acquire(timeout=deadline_seconds):
            self._counters.shed("deadline", 1, sample.nbytes)
            return False
        try:
            version, nbytes = sample.policy_version, sample.nbytes
            if not self._make_room(nbytes, version, priority):
                return False
            if version not in self._bins:
                self._bins[version] = _VersionBins()
                insort(self._versions, version)
            of_version = self._bins[version]
            of_version.bins[priority][sample.sample_id] = sample
            of_version.nbytes[priority] += nbytes
            self._held[sample.sample_id] = (sample, priority)
            self._waiting[sample.sample_id] = None
            self._bytes += nbytes
            self._changed.notify_all()
            return True
        finally:
            self._changed.release()

    def peek(self, timeout: float) -> Sample | None:
        """The next sample to send, which stays held; None if none came in time or closed."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while not self._waiting:
                left = deadline - time.monotonic()
                if self._closed or left <= 0:
                    return None
                self._changed.wait(left)
            return self._held[next(iter(self._waiting))][0]

    def mark_sent(self, sample: Sample) -> bool:
        """Move a peeked sample to "sent". False if it was shed since the peek."""
        with self._changed:
            if next(iter(self._waiting), None) != sample.sample_id:
                return False
            del self._waiting[sample.sample_id]
            self._sent[sample.sample_id] = None
            return True

    def take(self, wanted: Callable[[Sample], bool], most: int) -> list[Sample]:
        """Move samples from the front to "sent", at once: a lock for each is dear for small ones.

        Args:
            wanted: asked of one after the other, until it says no.
            most: samples.
        """
        taken: list[Sample] = []
        with self._changed:
            for sample_id in self._waiting:
                sample = self._held[sample_id][0]
                if len(taken) == most or not wanted(sample):
                    break
                taken.append(sample)
            for sample in taken:
                del self._waiting[sample.sample_id]
                self._sent[sample.sample_id] = None
        return taken

    def put_back(self, samples: Sequence[Sample]) -> None:
        """To the front again, in order: they were taken and not sent."""
        if samples:
            with self._changed:
                for sample in reversed(samples):
                    if self._sent.pop(sample.sample_id, self) is None:
                        self._waiting[sample.sample_id] = None
                        self._waiting.move_to_end(sample.sample_id, last=False)
                self._changed.notify_all()

    def holds(self, sample: Sample) -> bool:
        """Whether it was neither acknowledged nor shed."""
        with self._changed:
            return sample.sample_id in self._held

    def settle(self, *sample_ids: str) -> int:
        """Forget acknowledged samples; how many of them were held as sent."""
        with self._changed:
            settled = 0
            for sample_id in sample_ids:
                if sample_id in self._sent:
                    self._drop(sample_id)
                    settled += 1
            if settled:
                self._changed.notify_all()
            return settled

    def requeue_sent(self) -> set[str]:
        """Put every unacknowledged sample back to the front, in order; their ids."""
        with self._changed:
            again = list(self._sent)
            for sample_id in reversed(again):
                self._waiting[sample_id] = None
                self._waiting.move_to_end(sample_id, last=False)
            self._sent.clear()
            self._changed.notify_all()
            return set(again)

    def shed(self, reason: str, version: int | None = None) -> None:
        """Give up every sample, or every one of a policy version."""
        with self._changed:
            for sample, _ in list(self._held.values()):
                if version in (None, sample.policy_version):
                    self._give_up(sample, reason)
            self._changed.notify_all()

    def give_up(self, sample: Sample, reason: str) -> None:
        """Shed one sample, if it is still held."""
        with self._changed:
            if sample.sample_id in self._held:
                self._give_up(sample, reason)
                self._changed.notify_all()

    def wait_empty(self, timeout: float) -> bool:
        """Wait until everything was acknowledged or shed."""
        with self._changed:
            return self._changed.wait_for(lambda: self._bytes == 0, timeout)

    def close(self, reason: str = "closed") -> None:
        """Take no more, shed what is left, wake every waiter; the first reason stands."""
        with self._changed:
            self._closed = self._closed or reason
            self.shed(self._closed)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        with self._changed:
            return self._bytes

    def __len__(self) -> int:
        with self._changed:
            return len(self._held)

    def _make_room(self, nbytes: int, version: int, priority: int) -> bool:
        """Shed what is less until ``nbytes`` fit; shed nothing, and count, if they cannot."""
        if self._closed:
            reason = self._closed
        elif nbytes > self._capacity:
            reason = "too_large"
        elif self._capacity - self._bytes >= nbytes:
            return True
        elif self._capacity - self._bytes + self._displaceable(version, priority) < nbytes:
            reason = "outbox_full"
        else:
            while self._capacity - self._bytes < nbytes:
                self._displace(version, priority)
            return True
        self._counters.shed(reason, 1, nbytes)
        return False

    def _displaceable(self, version: int, priority: int) -> int:
        own = self._bins.get(version)
        lower = sum(own.nbytes[:priority]) if own else 0
        if not self._versions or version >= self._versions[-1]:
            return self._bytes - (sum(own.nbytes) if own else 0) + lower
        return sum(sum(self._bins[v].nbytes) for v in self._versions if v < version) + lower

    def _displace(self, version: int, priority: int) -> bool:
        """Shed the least sample, if it is less than (version, priority)."""
        if not self._versions or self._versions[0] > version:
            return False
        oldest = self._versions[0]
        bins = self._bins[oldest].bins
        for held in bins[:priority] if oldest == version else bins:
            for sample in held.values():
                self._give_up(sample, "superseded")
                return True
        return False

    def _give_up(self, sample: Sample, reason: str) -> None:
        self._drop(sample.sample_id)
        self._counters.shed(reason, 1, sample.nbytes)

    def _drop(self, sample_id: str) -> None:
        sample, priority = self._held.pop(sample_id)
        self._waiting.pop(sample_id, None)
        self._sent.pop(sample_id, None)
        of_version = self._bins[sample.policy_version]
        del of_version.bins[priority][sample_id]
        of_version.nbytes[priority] -= sample.nbytes
        self._bytes -= sample.nbytes
        if not any(of_version.nbytes):
            del self._bins[sample.policy_version]
            self._versions.remove(sample.policy_version)
