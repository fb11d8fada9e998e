"""Whether speculation pays: what speculative and plain steps cost, and what is accepted.

Costs are compared at as many requests in flight: a step of one request and a step of a hundred
differ more than a speculative one from a plain one. Plain steps are rare on a server that
speculates, so all of them since the start count; of speculative ones the last minute's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

SPECULATIVE, PLAIN, MIXED = "speculative", "plain", "mixed"

WINDOW_SECONDS = 60.0
LEAST_STEPS = 16
"""Steps of a kind and size without which their cost is not known."""

LEAST_DRAFTS = 100
"""Drafts without which an acceptance length says nothing."""


@dataclass(frozen=True)
class StepSum:
    """Steps, and the seconds that they took together."""

    steps: int = 0
    seconds: float = 0.0


StepSums = Mapping[tuple[str, int], StepSum]
"""By kind and most requests in the step."""


@dataclass(frozen=True)
class Accepted:
    """Of the live draft, so far."""

    version: int
    drafts: int = 0
    tokens: int = 0


@dataclass(frozen=True)
class _Look:
    at: float
    sums: StepSums
    live: Accepted | None


class StepCosts:
    """Keeps the last minute of looks. Owned by the API server's event loop.

    Attributes:
        break_even: acceptance length above which speculation pays; None while unknown. The last
            one known stays while nothing is generated.
    """

    def __init__(self) -> None:
        self.break_even: float | None = None
        self._looks: deque[_Look] = deque()

    @property
    def sums(self) -> StepSums:
        """Since the start."""
        return self._looks[-1].sums if self._looks else {}

    def look(self, at: float, sums: StepSums, live: Accepted) -> None:
        """What the engine and the tracker say at a moment.

        Args:
            at: monotonic seconds.
            sums: since the start.
            live: the live draft's counts.
        """
        if not self._looks:
            self._looks.append(_Look(at, {}, None))
        self._looks.append(_Look(at, sums, live))
        while at - self._looks[1].at >= WINDOW_SECONDS:
            self._looks.popleft()
        self.break_even = self._cost() or self.break_even

    @property
    def unknown_size(self) -> int | None:
        """Requests in most of the last minute's speculative steps, if no plain cost is known."""
        if not self._looks:
            return None
        before, now = self._looks[0].sums, self._looks[-1].sums
        recent = {
            key: total.steps - before.get(key, StepSum()).steps
            for key, total in now.items()
            if key[0] == SPECULATIVE
        }
        key = max(recent, key=lambda key: recent[key], default=None)
        if key is None or recent[key] < LEAST_STEPS:
            return None
        return None if self._plain(key[1]).steps >= LEAST_STEPS else key[1]

    def _plain(self, requests: int) -> StepSum:
        return self.sums.get((PLAIN, requests), StepSum())

    def pays(self, now: float) -> bool | None:
        """Whether it does over the last minute; None where that is not known."""
        length = self._length(now)
        if length is None or self.break_even is None:
            return None
        return length > self.break_even

    def _length(self, now: float) -> float | None:
        last = self._looks[-1] if self._looks else None
        if last is None or last.live is None or now - last.at > WINDOW_SECONDS:
            return None
        drafts = tokens = 0
        for look in reversed(self._looks):
            if look.live is None or look.live.version != last.live.version:
                break
            drafts = last.live.drafts - look.live.drafts
            tokens = last.live.tokens - look.live.tokens
        return 1 + tokens / drafts if drafts >= LEAST_DRAFTS else None

    def _cost(self) -> float | None:
        """A speculative step in plain ones, weighted by what the last minute's steps were."""
        before, now = self._looks[0].sums, self._looks[-1].sums
        speculative = plain = 0.0
        for (kind, requests), total in now.items():
            other = self._plain(requests)
            if kind != SPECULATIVE or min(total.steps, other.steps) < LEAST_STEPS:
                continue
            earlier = before.get((kind, requests), StepSum())
            speculative += total.seconds - earlier.seconds
            plain += (total.steps - earlier.steps) * other.seconds / other.steps
        return speculative / plain if plain else None
