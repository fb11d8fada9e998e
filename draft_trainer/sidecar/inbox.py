"""Requests that one thread has read and another one takes, several together."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

from slipstream.framing import Framed
from slipstream.refusal import RefusedError
from slipstream.v1 import draft_trainer_pb2 as pb

# What one transaction of the store takes: more would only keep the first ones waiting.
_MOST_SAMPLES = 512
_MOST_BYTES = 16 << 20
# Of messages. Credit counts bytes, and 64 MiB are 32 million empty samples.
_MOST_WAITING = 1024
# A transaction, an answer and the switches between threads take as long as checking some MiB does.
# What arrives within the pause is taken with what came first. With half of both, inline samples of
# a MiB took a tenth longer; with half as much again they took as long.
_ENOUGH_SAMPLES = 256
_ENOUGH_BYTES = 8 << 20
_PAUSE = 0.004

Arrived = tuple[Framed, float]
"""A request, and when it came (monotonic seconds)."""


class Inbox:
    """Bounded, in the order of arrival. One thread puts, one takes.

    Args:
        flight_bytes: what a client may have in flight. It waits for an answer when that is spent,
            so a quarter of it is enough.
    """

    def __init__(self, flight_bytes: int) -> None:
        self._enough_bytes = min(_ENOUGH_BYTES, flight_bytes // 4)
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Arrived, int, int]] = deque()
        self._samples = self._nbytes = 0
        self._ended = False
        self._error: RefusedError | None = None

    def put(self, framed: Framed, at: float, timeout: float) -> bool:
        """Append a request; False when there was no room for ``timeout`` s, or it ended."""
        messages = samples_in(framed.request)
        nbytes = sum([message.packed.span.bytes for message in messages]) or framed.nbytes
        with self._changed:
            if not self._changed.wait_for(self._has_room, timeout) or self._ended:
                return False
            self._waiting.append(((framed, at), len(messages), nbytes))
            self._samples += len(messages)
            self._nbytes += nbytes
            if len(self._waiting) == 1 or self._is_enough():
                self._changed.notify_all()
            return True

    def end(self, error: RefusedError | None = None) -> None:
        """Nothing is put any more. What waits is still taken; then ``take`` raises ``error``."""
        with self._changed:
            self._ended = True
            self._error = self._error or error
            self._changed.notify_all()

    @property
    def ended(self) -> bool:
        """Whether nothing more is put."""
        with self._changed:
            return self._ended

    @property
    def done(self) -> bool:
        """Whether nothing waits either, and ``take`` has nothing to raise."""
        with self._changed:
            return self._ended and not self._waiting and self._error is None

    def take(self, timeout: float) -> list[Arrived]:
        """What waits, at least one request; none when ``timeout`` s passed or the inbox ended.

        Raises:
            RefusedError: what ``end`` was given.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ended, timeout)
            if self._waiting and not self._is_enough():
                self._changed.wait_for(self._is_enough, _PAUSE)
            together: list[Arrived] = []
            samples = nbytes = 0
            while self._waiting and samples < _MOST_SAMPLES and nbytes < _MOST_BYTES:
                arrived, some, size = self._waiting.popleft()
                together.append(arrived)
                samples += some
                nbytes += size
            self._samples -= samples
            self._nbytes -= nbytes
            self._changed.notify_all()
            if not together and self._error is not None:
                raise self._error
            return together

    def _has_room(self) -> bool:
        return len(self._waiting) < _MOST_WAITING or self._ended

    def _is_enough(self) -> bool:
        many = self._samples >= _ENOUGH_SAMPLES or len(self._waiting) >= _MOST_WAITING
        return many or self._nbytes >= self._enough_bytes or self._ended


def samples_in(request: pb.StreamStatesRequest) -> Sequence[pb.VerifierStates]:
    """The samples that a request describes."""
    return [request.sample] if request.WhichOneof("kind") == "sample" else request.batch.samples
