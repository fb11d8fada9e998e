"""A queue of samples bounded in bytes, which gives up the oldest policy's samples first.

Invariant: every sample that was taken leaves in exactly one way: settled by an
acknowledgement, or shed and counted under a reason. Samples stay here until
they are acknowledged, so what is in flight counts against the bound too and is
still here to be sent again when a stream is lost.

What is shed to make room is the least of (policy version, priority), the oldest
of equals first, and only what is less than the sample that needs the room:
swapping equals would only churn. Finding it takes no search: samples lie in one
bin per version and priority, and versions only rise.
"""

from __future__ import annotations

import threading
import time
from bisect import insort
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from policy_bridge.pool import HostPool
from policy_bridge.sample import Sample
from policy_bridge.stats import Counters

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
