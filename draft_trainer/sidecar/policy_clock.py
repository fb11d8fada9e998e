"""When policy versions were announced, and since when a draft is behind them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

KEPT = 4096


class PolicyClock:
    """Remembers the newest ``KEPT`` announcements. Thread-safe.

    Args:
        known: newest version that a restarted trainer knows already; it counts from now on.
        now: Unix seconds.
    """

    def __init__(self, known: int | None = None, now: Callable[[], float] = time.time) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._seen: deque[tuple[int, float]] = deque(maxlen=KEPT)
        self._newest_at: float | None = None
        if known is not None:
            self._seen.append((known, now()))

    @property
    def newest_at(self) -> float | None:
        """Unix time of the newest announcement; None before the first to this process."""
        with self._lock:
            return self._newest_at

    def announced(self, version: int) -> bool:
        """A version was announced; whether it is a new one."""
        with self._lock:
            if self._seen and self._seen[-1][0] == version:
                return False
            if self._seen and version < self._seen[-1][0]:
                # Another run: its versions say nothing about those of the one before.
                self._seen.clear()
            self._newest_at = self._now()
            self._seen.append((version, self._newest_at))
            return True

    def behind_seconds(self, version: int) -> float:
        """Seconds since the first version after ``version`` was announced; 0 if none was."""
        with self._lock:
            later = (at for seen, at in self._seen if seen > version)
            return max(0.0, self._now() - next(later, self._now()))
