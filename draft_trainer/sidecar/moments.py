"""The trainer's counters, read every few seconds: the recent past whole, the rest thinned."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from slipstream.v1 import console_pb2 as pb

T = TypeVar("T")

SECONDS = 5.0
RECENT = 120
WHOLE = 400


class Thinned(Generic[T]):
    """Evenly spread over everything that was ever added, at most ``most`` of it, and the newest.

    For cumulative counters: what is left out changes no difference between what is kept.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._kept: list[T] = []
        self._newest: list[T] = []
        self._stride = 1
        self._added = 0

    def add(self, value: T) -> None:
        """One more."""
        self._newest = [value]
        if self._added % self._stride == 0:
            self._kept.append(value)
            self._newest = []
        self._added += 1
        if len(self._kept) >= self._most:
            self._kept = self._kept[::2]
            self._stride *= 2

    def __iter__(self) -> Iterator[T]:
        return iter([*self._kept, *self._newest])


class Moments:
    """Owns the thread that reads. Thread-safe.

    Args:
        read: the counters now.
        seconds: between two readings.
    """

    def __init__(self, read: Callable[[], pb.Moment], seconds: float = SECONDS) -> None:
        self._read = read
        self.seconds = seconds
        self._lock = threading.Lock()
        self._recent: deque[pb.Moment] = deque(maxlen=RECENT)
        self._whole: Thinned[pb.Moment] = Thinned(WHOLE)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="moments", daemon=True)

    def start(self) -> None:
        """Begin. Once only."""
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """End; True when the thread ended within ``timeout`` seconds."""
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def take(self) -> None:
        """One reading."""
        moment = self._read()
        with self._lock:
            self._recent.append(moment)
            self._whole.add(moment)

    def both(self) -> tuple[list[pb.Moment], list[pb.Moment]]:
        """The newest ``RECENT`` readings, and the whole life in at most ``WHOLE`` and one."""
        with self._lock:
            return list(self._recent), list(self._whole)

    def _run(self) -> None:
        self.take()
        while not self._over.wait(self.seconds):
            self.take()
