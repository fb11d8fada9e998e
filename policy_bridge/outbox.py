"""A queue of samples bounded in bytes, which gives up the oldest policy's samples first.

Invariant: every sample that was taken leaves in exactly one way: settled by an
acknowledgement, or shed and counted under a reason. Samples stay here until
they are acknowledged, so what is in flight counts against the bound too and is
still here to be sent again when a stream is lost.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque

from policy_bridge.sample import Sample
from policy_bridge.stats import Counters


class Outbox:
    """Filled by the policy's thread, drained by the shipper. Thread-safe.

    Args:
        capacity_bytes: bound on the tensors of all samples held.
        counters: where shed samples are counted.
    """

    def __init__(self, capacity_bytes: int, counters: Counters) -> None:
        self._capacity = capacity_bytes
        self._counters = counters
        self._changed = threading.Condition()
        self._held: dict[int, OrderedDict[str, Sample]] = {}
        self._version_bytes: dict[int, int] = {}
        self._order: deque[tuple[int, str]] = deque()
        self._sent: OrderedDict[str, int] = OrderedDict()
        self._bytes = 0
        self._closed = False

    def offer(self, sample: Sample, deadline_seconds: float) -> bool:
        """Take a sample, or count it as shed. O(1), apart from what it displaces.

        Samples of older policy versions make room; samples of the same version do
        not: swapping equals would only churn.

        Args:
            sample: its ``nbytes`` counts against the bound.
            deadline_seconds: the longest this call may wait for another thread.

        Returns:
            Whether it was taken.
        """
        if not self._changed.acquire(timeout=deadline_seconds):
            self._counters.shed("deadline", 1, sample.nbytes)
            return False
        try:
            if self._closed:
                return self._refuse(sample, "closed")
            if sample.nbytes > self._capacity:
                return self._refuse(sample, "too_large")
            older = [v for v in self._held if v < sample.policy_version]
            room = self._capacity - self._bytes
            if room + sum(self._version_bytes[v] for v in older) < sample.nbytes:
                return self._refuse(sample, "outbox_full")
            for version in sorted(older):
                while version in self._held and self._capacity - self._bytes < sample.nbytes:
                    oldest = next(iter(self._held[version].values()))
                    self._drop(oldest)
                    self._counters.shed("superseded", 1, oldest.nbytes)
            version = sample.policy_version
            self._held.setdefault(version, OrderedDict())[sample.sample_id] = sample
            self._version_bytes[version] = self._version_bytes.get(version, 0) + sample.nbytes
            self._bytes += sample.nbytes
            self._order.append((version, sample.sample_id))
            self._changed.notify_all()
            return True
        finally:
            self._changed.release()

    def peek(self, timeout: float) -> Sample | None:
        """The next sample to send, which stays held; None if none came in time or closed."""
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                while self._order:
                    version, sample_id = self._order[0]
                    held = self._held.get(version)
                    sample = held.get(sample_id) if held is not None else None
                    if sample is not None:
                        return sample
                    self._order.popleft()
                left = deadline - time.monotonic()
                if self._closed or left <= 0:
                    return None
                self._changed.wait(left)

    def mark_sent(self, sample: Sample) -> bool:
        """Move a peeked sample to "sent". False if it was shed since the peek."""
        with self._changed:
            key = (sample.policy_version, sample.sample_id)
            if not self._order or self._order[0] != key or not self._holds(key):
                return False
            self._order.popleft()
            self._sent[sample.sample_id] = sample.policy_version
            return True

    def settle(self, sample_id: str) -> bool:
        """Forget an acknowledged sample. False if it is not held as sent."""
        with self._changed:
            version = self._sent.get(sample_id)
            if version is None:
                return False
            self._drop(self._held[version][sample_id])
            self._changed.notify_all()
            return True

    def requeue_sent(self) -> set[str]:
        """Put every unacknowledged sample back to the front, in order; their ids."""
        with self._changed:
            again = [(version, sample_id) for sample_id, version in self._sent.items()]
            self._order.extendleft(reversed(again))
            self._sent.clear()
            self._changed.notify_all()
            return {sample_id for _, sample_id in again}

    def shed(self, reason: str, version: int | None = None) -> None:
        """Give up every sample, or every one of a policy version."""
        with self._changed:
            for held_version in [v for v in self._held if version in (None, v)]:
                for sample in list(self._held[held_version].values()):
                    self._drop(sample)
                    self._counters.shed(reason, 1, sample.nbytes)
            self._changed.notify_all()

    def give_up(self, sample: Sample, reason: str) -> None:
        """Shed one sample, if it is still held."""
        with self._changed:
            if self._holds((sample.policy_version, sample.sample_id)):
                self._drop(sample)
                self._counters.shed(reason, 1, sample.nbytes)
                self._changed.notify_all()

    def wait_empty(self, timeout: float) -> bool:
        """Wait until everything was acknowledged or shed."""
        with self._changed:
            return self._changed.wait_for(lambda: self._bytes == 0, timeout)

    def close(self) -> None:
        """Take no more, shed what is left, wake every waiter."""
        with self._changed:
            self._closed = True
        self.shed("closed")

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        with self._changed:
            return self._bytes

    def __len__(self) -> int:
        with self._changed:
            return sum(len(samples) for samples in self._held.values())

    def _holds(self, key: tuple[int, str]) -> bool:
        return key[0] in self._held and key[1] in self._held[key[0]]

    def _refuse(self, sample: Sample, reason: str) -> bool:
        self._counters.shed(reason, 1, sample.nbytes)
        return False

    def _drop(self, sample: Sample) -> None:
        version = sample.policy_version
        del self._held[version][sample.sample_id]
        self._sent.pop(sample.sample_id, None)
        self._bytes -= sample.nbytes
        self._version_bytes[version] -= sample.nbytes
        if not self._held[version]:
            del self._held[version], self._version_bytes[version]
