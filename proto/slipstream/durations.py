"""A histogram of seconds, as plain numbers."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass


@dataclass(frozen=True)
class Durations:
    """Counts per bucket, and the sum of what was observed.

    Attributes:
        bounds: upper bounds in seconds, ascending.
        counts: one for each, and one for what is beyond the last.
        total: seconds.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...] = ()
    total: float = 0.0

    def observe(self, seconds: float, times: int = 1) -> Durations:
        """This histogram with one more value, or with several equal ones."""
        counts = list(self.counts or (0,) * (len(self.bounds) + 1))
        counts[bisect_left(self.bounds, seconds)] += times
        return Durations(self.bounds, tuple(counts), self.total + seconds * times)

    def cumulative(self) -> list[tuple[str, float]]:
        """Bound and count of what is not beyond it, as Prometheus's buckets are."""
        total, found = 0, []
        counts = self.counts or (0,) * (len(self.bounds) + 1)
        for bound, count in zip([*map(str, self.bounds), "+Inf"], counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found
