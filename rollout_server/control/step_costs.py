"""The gain of speculation, from costs of steps with and without drafts, and live acceptance.

Costs are compared at the same number of requests in flight: a step of one request and a step of a
hundred differ more than a speculative one from a plain one. Plain steps are rare on a server that
speculates, so those of about the last hour count, and speculative steps of the last minute.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import astuple, dataclass

from rollout_server.control.acceptance_counts import FIRST_DRAFTS, AcceptanceTracker
from slipstream.errors import RefusedError
from slipstream.v1 import rollout_server_pb2 as pb

SPECULATIVE, PLAIN, MIXED = "speculative", "plain", "mixed"

WINDOW_SECONDS = 60.0
MIN_STEPS = 16
"""The fewest steps of a kind and size for their cost to be known."""

PLAIN_SECONDS = 3600.0
"""The age of a plain cost at which it is measured again: contexts grow, others use the machine."""

MIN_DRAFTS = 100
"""The fewest verification steps for an acceptance length to be known."""

READ_SECONDS = 2.0

FIRST_READ_SECONDS = 0.25
"""The same while a draft is new (``FIRST_DRAFTS``): a bad one costs each request speed."""

PROBE_SECONDS = 1.0
"""The longest time that drafting is off for a measurement."""

PROBE_EVERY_SECONDS = 60.0
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepSum:
    """A number of steps, the seconds that they took together, and what they gave.

    Attributes:
        requests: that got tokens, counted in each step.
        tokens: that they got.
        prompts: that were begun.
    """

    steps: int = 0
    seconds: float = 0.0
    requests: int = 0
    tokens: int = 0
    prompts: int = 0

    def __add__(self, other: StepSum) -> StepSum:
        return StepSum(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, before: StepSum) -> StepSum:
        return StepSum(*(a - b for a, b in zip(astuple(self), astuple(before), strict=True)))


StepSums = Mapping[tuple[str, int, int], StepSum]
"""The sums by kind, most requests in the step, and draft length; 0 while nothing is drafted."""


@dataclass(frozen=True)
class _Reading:
    at: float
    sums: StepSums
    live: pb.AcceptanceCounters | None


class StepCosts:
    """Keeps the last minute of readings. Owned by the API server's event loop.

    Attributes:
        break_even: acceptance length above which speculation pays; None while unknown, as where no
            plain step of as many requests was timed. The last value stays while nothing is drafted.
    """

    def __init__(self) -> None:
        self.break_even: float | None = None
        self._readings: deque[_Reading] = deque()
        # By number of requests, the starts of the last two measurements of its plain cost.
        self._plain_since: dict[int, deque[tuple[float, StepSum]]] = {}

    @property
    def sums(self) -> StepSums:
        """The sums since the start."""
        return self._readings[-1].sums if self._readings else {}

    def add(self, at: float, sums: StepSums, live: pb.AcceptanceCounters) -> None:
        if not self._readings:
            self._readings.append(_Reading(at, {}, None))
        self._readings.append(_Reading(at, sums, live))
        while at - self._readings[1].at >= WINDOW_SECONDS:
            self._readings.popleft()
        for (kind, requests, _), total in sums.items():
            if kind == PLAIN:
                begun = self._plain_since.setdefault(requests, deque([(at, StepSum())], maxlen=2))
                since, before = begun[-1]
                if at - since >= PLAIN_SECONDS and (total - before).steps >= MIN_STEPS:
                    begun.append((at, total))
        if any(total.steps for total in self._recent_speculative().values()):
            self.break_even = self._break_even()

    @property
    def unknown_size(self) -> int | None:
        """The number of requests in most recent speculative steps, if its plain cost is unknown."""
        recent: dict[int, int] = {}
        for (_, requests, _), total in self._recent_speculative().items():
            recent[requests] = recent.get(requests, 0) + total.steps
        size = max(recent, key=lambda size: recent[size], default=None)
        if size is None or recent[size] < MIN_STEPS:
            return None
        return None if self._plain_steps(size)[0].steps >= MIN_STEPS else size

    def speed_up(self, now: float) -> float | None:
        """Speed-up of generation by speculation in the last minute; None if it is not known."""
        length = self.length(now)
        if length is None or self.break_even is None:
            return None
        return length / self.break_even

    def length(self, now: float) -> float | None:
        """Acceptance length of the live draft in the last minute; None while drafts are few."""
        last = self._readings[-1] if self._readings else None
        if last is None or last.live is None or now - last.at > WINDOW_SECONDS:
            return None
        drafts = tokens = 0
        for reading in reversed(self._readings):
            if reading.live is None or reading.live.draft_version != last.live.draft_version:
                break
            drafts = last.live.drafts - reading.live.drafts
            tokens = last.live.accepted_tokens - reading.live.accepted_tokens
        return 1 + tokens / drafts if drafts >= MIN_DRAFTS else None

    def _plain_steps(self, requests: int) -> list[StepSum]:
        """Plain steps since the last measurement began, and since the one before it began."""
        total = self.sums.get((PLAIN, requests, 0), StepSum())
        begun = self._plain_since.get(requests, [(0.0, StepSum())])
        return [total - before for _, before in reversed(begun)]

    def _recent_speculative(self) -> dict[tuple[str, int, int], StepSum]:
        """Speculative steps of the last minute."""
        before = self._readings[0].sums if self._readings else {}
        return {
            key: total - before.get(key, StepSum())
            for key, total in self.sums.items()
            if key[0] == SPECULATIVE
        }

    def _break_even(self) -> float | None:
        """The cost of a speculative step in plain ones, weighted by the last minute's steps."""
        speculative = plain = 0.0
        for (kind, requests, length), recent in self._recent_speculative().items():
            known = [other for other in self._plain_steps(requests) if other.steps >= MIN_STEPS]
            if known and self.sums[kind, requests, length].steps >= MIN_STEPS:
                speculative += recent.seconds
                plain += recent.steps * known[0].seconds / known[0].steps
        return speculative / plain if plain else None


class CostWatch:
    """Owns one task, which asks the engine every few seconds while it generates.

    Args:
        without_speculation: turns drafting off while it is entered, to measure what a plain step of
            as many requests costs where that is not known, or was an hour ago; None: never.
        measured: is given the sums after each reading, and returns the speed-up in place of that of
            ``costs``.
        engines: whose steps are in the sums.
    """

    def __init__(
        self,
        step_sums: Callable[[], Awaitable[StepSums]],
        tracker: AcceptanceTracker,
        costs: StepCosts,
        without_speculation: Callable[[], AbstractAsyncContextManager[None]] | None = None,
        measured: Callable[[StepSums], Awaitable[float | None]] | None = None,
        engines: int = 1,
    ) -> None:
        self._measured = measured
        self._engines = engines
        self._step_sums = step_sums
        self._tracker = tracker
        self._costs = costs
        self._without_speculation = without_speculation
        self._next_probe_at = 0.0
        self._seen = 0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def read(self) -> bool:
        """Read the sums, if anything was generated since the last time. Returns whether it was."""
        tracker = self._tracker
        if tracker.live is None or tracker.all.generated_tokens == self._seen:
            return False
        self._seen = tracker.all.generated_tokens
        sums = await self._step_sums()
        tracker.engine_seconds = sum(total.seconds for total in sums.values()) / self._engines
        live = pb.AcceptanceCounters()
        live.CopyFrom(tracker.exposed()[tracker.live])
        self._costs.add(time.monotonic(), sums, live)
        # Without drafts nothing else tells watchers that the engine runs.
        tracker.wake()
        return True

    async def probe(self) -> None:
        """Take plain steps for a moment, if the cost of one is needed and not known."""
        size = self._costs.unknown_size
        now = time.monotonic()
        if self._without_speculation is None or size is None or now < self._next_probe_at:
            return
        self._next_probe_at = now + PROBE_EVERY_SECONDS
        logger.info("no drafts for at most %.0f s: timing steps without drafts", PROBE_SECONDS)
        async with self._without_speculation():
            while self._costs.unknown_size == size and time.monotonic() < now + PROBE_SECONDS:
                await asyncio.sleep(PROBE_SECONDS / 20)
                await self.read()

    async def _run(self) -> None:
        while True:
            new = self._measured and self._tracker.recent.drafts < FIRST_DRAFTS
            await asyncio.sleep(FIRST_READ_SECONDS if new else READ_SECONDS)
            try:
                # Without requests there are no plain steps to time.
                if await self.read():
                    await self.probe()
                now = time.monotonic()
                speed_up = self._costs.speed_up(now)
                if self._measured is not None:
                    by_lengths = await self._measured(self._costs.sums)
                    # This needs drafts, but no plain steps of the last minute's sizes.
                    speed_up = None if self._costs.length(now) is None else by_lengths
                self._tracker.speed_up = speed_up
            except RefusedError as error:
                # An engine that died ends the server; one that is slow is asked again.
                logger.warning("step costs: %s", error)
