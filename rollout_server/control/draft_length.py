"""Chooses the draft length for each number of requests, from measured costs and live acceptance.

With k drafted tokens a step of b requests takes t(k, b) seconds and gives AL(k) tokens a request
(``slipstream.economics.arithmetic``). The lengths that are best now go to vLLM's scheduler, which
looks one up each step. Where drafting pays at no number of requests it is off altogether: vLLM's
own k = 0 still runs the draft once a step, to keep its KV cache filled for drafts to come.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from rollout_server.control.acceptance_counts import AcceptanceTracker
from rollout_server.control.step_costs import PLAIN, SPECULATIVE, StepSum, StepSums
from slipstream.economics.arithmetic import acceptance_length
from slipstream.economics.costs import OFF, StepTable

if TYPE_CHECKING:
    from rollout_server.vllm.engine import VllmEngine

KEPT_STEPS = 200.0
"""The steps over which an older cost fades to 1/e."""

MARGIN = 0.02
"""The gain in speed below which lengths stay as they are."""

RETRY_SECONDS, MAX_RETRY_SECONDS = 30.0, 240.0
"""The seconds of engine steps without drafts after which they are tried again, because only drafts
show whether they pay. The time doubles with each try of one draft, up to the second figure, because
a try may cost the prefix cache (``SchedulerSwitch.too_much_undrafted``)."""

REFRESH_SECONDS = 60.0
"""The age of a cost beyond which it is measured again: contexts grow, and others use the machine.
Counted in seconds of engine steps, because in a pause nothing can be measured."""

RECENT_SECONDS = 10.0
"""The age of a cost, in seconds of engine steps, beyond which lengths do not change for it until it
is measured again. Lengths in use are timed under the present load. A cost from the calibration,
with no context and no requests to answer, or from another minute, would look low beside them."""

REFRESH_STEPS = 6
"""The steps taken to measure a cost again, if they last ``MIN_REFRESH_SECONDS``; else more."""

MIN_REFRESH_SECONDS = 0.2

CALIBRATION_STEPS = 6
"""The fewest steps of each draft length and number of requests before the server is ready."""

logger = logging.getLogger(__name__)


def lengths_to_choose(longest: int) -> tuple[int, ...]:
    """All lengths up to 3, then odd ones and the longest: CUDA graphs are captured for each."""
    return tuple(k for k in range(1, longest + 1) if k <= 3 or k % 2 or k == longest)


def launch_schedule(lengths: Sequence[int]) -> list[list[int]]:
    """Return a ``num_speculative_tokens_per_batch_size`` that names 0 and every length, so that
    vLLM captures CUDA graphs for each. The lengths to draft are chosen later.

    vLLM cuts the schedule at ``--max-num-seqs``, and captures a length up to the largest batch that
    it is named for: the longest comes first, which is never cut, and again for all larger batches.
    """
    longest = lengths[-1]
    named = [[n, n, k] for n, k in enumerate((longest, 0, *lengths[:-1]), 1)]
    return [*named, [len(named) + 1, 1 << 20, longest]]


def sizes_to_measure(largest: int) -> list[int]:
    """Return 1, 4, 16, 64 and so on, and the largest batch."""
    return sorted({min(4**power, largest) for power in range(8)})


class LengthChooser:
    """Keeps costs and makes the table of lengths. No clock and no engine.

    Args:
        longest: the most tokens that the draft can propose.
        largest: the most requests in a step.

    Attributes:
        table: tokens to draft by the number of requests; None while no drafts pay.
        speed_up: of generation by ``table`` over no drafts; None while unknown.
    """

    def __init__(self, longest: int, largest: int) -> None:
        self.largest = largest
        self.lengths = lengths_to_choose(longest)
        self.table: list[int] | None = [longest] * (largest + 1)
        self.speed_up: float | None = None
        self._costs: dict[tuple[int, int], tuple[float, float]] = {}  # steps, mean seconds
        self._work: dict[int, float] = {}  # recent tokens of a request, by requests in the step
        self._seen: StepSums = {}

    def add(
        self, sums: StepSums, rates: Sequence[float] | None, served: bool = True
    ) -> Mapping[int, float]:
        """Count the steps since the last call.

        Args:
            sums: since the engine's start.
            rates: acceptance by position in these steps.
            served: whether their batch sizes are those of users.

        Returns:
            The seconds of the slowest of these steps, by draft length.
        """
        fresh: list[tuple[int, int, int, float]] = []
        for (kind, requests, length), total in sums.items():
            before = self._seen.get((kind, requests, length), StepSum())
            steps, seconds = total.steps - before.steps, total.seconds - before.seconds
            if steps and kind in (PLAIN, SPECULATIVE):
                fresh.append((OFF if kind == PLAIN else length, requests, steps, seconds))
        self._seen = dict(sums)
        if fresh:
            self._work = {n: work / 2 for n, work in self._work.items() if work > 0.5}
        for k, requests, steps, seconds in fresh:
            old, mean = self._costs.get((k, requests), (0.0, 0.0))
            old *= math.exp(-steps / KEPT_STEPS)
            self._costs[k, requests] = old + steps, (old * mean + seconds) / (old + steps)
            tokens = steps * (acceptance_length(rates, k) if rates else 1.0)
            if served:
                self._work[requests] = self._work.get(requests, 0.0) + tokens
        return {
            k: max(seconds / steps for other, _, steps, seconds in fresh if other == k)
            for k, *_ in fresh
        }

    def choose(self, rates: Sequence[float] | None) -> None:
        """Make ``table`` the best one; it stays while acceptance or a cost is unknown."""
        costs = self._table()
        if rates is None or not self._work or not {OFF, *self.lengths} <= set(costs.points):
            return
        known = rates

        choices = [k for k in (0, *self.lengths) if k in costs.points]
        # Beyond the largest batch that every length was measured at, all are compared at that one.
        largest = min(costs.points[k][-1][0] for k in (OFF, *choices))

        def speed(k: int, requests: int) -> float:
            seconds = costs.seconds(k, min(max(requests, 1), largest))
            return acceptance_length(known, k) / seconds

        def seconds(table: Sequence[int] | None) -> float:
            return sum(
                tokens / speed(OFF if table is None else table[min(n, self.largest)], n)
                for n, tokens in self._work.items()
            )

        best = []
        for requests in range(self.largest + 1):
            speeds = {k: speed(k, requests) for k in choices}
            fastest = max(speeds, key=lambda k: speeds[k])
            now = fastest if self.table is None else self.table[requests]
            best.append(now if speeds[now] >= speeds[fastest] * (1 - MARGIN) else fastest)
        # A change must gain the margin over what is in use now.
        on, off = seconds(best), seconds(None)
        on *= 1 - MARGIN if self.table else 1
        off *= 1 if self.table else 1 - MARGIN
        # Lengths of 0 at all sizes in use cost at least a step without drafts, whatever was timed.
        drafts = any(best[min(n, self.largest)] for n in self._work)
        self.table = best if drafts and on <= off else None
        self.speed_up = seconds(None) / seconds(self.table)

    def in_use(self) -> set[int]:
        """The lengths that ``table`` has for the recent numbers of requests."""
        if self.table is None:
            return {OFF}
        return {self.table[min(n, self.largest)] for n in self._work}

    def doubt(self, length: int) -> None:
        """Let the next few steps of a length count as much as all before them."""
        for (k, requests), (steps, mean) in self._costs.items():
            if k == length:
                self._costs[k, requests] = min(steps, REFRESH_STEPS), mean

    def try_again(self) -> None:
        """Draft the shortest length for now, where no drafts paid: another draft may."""
        if self.table is None:
            self.table = [self.lengths[0]] * (self.largest + 1)

    def _table(self) -> StepTable:
        return StepTable.measured(
            (requests, k, seconds, steps) for (k, requests), (steps, seconds) in self._costs.items()
        )


class LengthControl:
    """Keeps the engine on the chooser's table.

    Args:
        set_lengths: ``RolloutControl.set_draft_lengths``.
    """

    def __init__(
        self,
        chooser: LengthChooser,
        tracker: AcceptanceTracker,
        set_lengths: Callable[[Sequence[int] | None], Awaitable[None]],
    ) -> None:
        self.chooser = chooser
        self._tracker = tracker
        self._set_lengths = set_lengths
        self._live: list[int] | None = chooser.table
        self._version = tracker.live
        self._off_since, self._retry_after = 0.0, RETRY_SECONDS
        # The calibration says nothing about the present load.
        self._timed = dict.fromkeys((OFF, 0, *chooser.lengths), -math.inf)
        self._tried = dict(self._timed)

    async def update(self, sums: StepSums) -> float | None:
        """Choose by the newest measurements, and put the table into effect.

        Returns:
            The chooser's speed-up: by the lengths in use at each batch size.

        Raises:
            RefusedError: the engine did not answer.
        """
        chooser, now = self.chooser, sum(total.seconds for total in sums.values())
        rates = self._tracker.recent.rates()
        steps = chooser.add(sums, rates)
        self._timed |= dict.fromkeys(steps, now)
        if self._version != self._tracker.live:
            self._version, self._retry_after = self._tracker.live, RETRY_SECONDS
            chooser.try_again()
        elif chooser.table is None and now - self._off_since > self._retry_after:
            self._retry_after = min(2 * self._retry_after, MAX_RETRY_SECONDS)
            chooser.try_again()
        else:
            before = chooser.table, chooser.speed_up
            chooser.choose(rates)
            # Not while drafting is off: every try of a draft may cost the prefix cache.
            if steps and self._live is not None and chooser.table != self._live:
                oldest = self._longest_untimed(chooser.in_use())
                if now - self._timed[oldest] > RECENT_SECONDS:
                    chooser.table, chooser.speed_up = before
                    if now - self._tried[oldest] > RECENT_SECONDS:
                        await self._refresh(oldest, now, max(steps.values()))
                    return chooser.speed_up
        if chooser.table != self._live:
            await self._set_lengths(chooser.table)
            self._live, self._off_since = chooser.table, now
            logger.info("draft lengths: %s", _describe(chooser.table))
        oldest = self._longest_untimed(self._timed)
        since = max(self._timed[oldest], self._tried[oldest])
        if steps and chooser.table and now - since >= REFRESH_SECONDS:
            await self._refresh(oldest, now, max(steps.values()))
        return chooser.speed_up

    def _longest_untimed(self, lengths: Iterable[int]) -> int:
        """The length of which no step was timed for the longest time."""
        return min(lengths, key=lambda k: self._timed[k])

    async def _refresh(self, length: int, now: float, step_seconds: float) -> None:
        """Take a few steps of a length; the next update reads them."""
        # It may fail: steps that also read prompts are not timed, and there may be no others.
        self._tried[length] = now
        self.chooser.doubt(length)
        try:
            await self._set_lengths(
                None if length == OFF else [length] * (self.chooser.largest + 1)
            )
            await asyncio.sleep(max(MIN_REFRESH_SECONDS, REFRESH_STEPS * step_seconds))
        finally:
            await self._set_lengths(self._live)


def _describe(table: Sequence[int] | None) -> str:
    if table is None:
        return "none, because drafting pays at no number of requests"
    starts = [n for n in range(1, len(table)) if n == 1 or table[n] != table[n - 1]]
    return ", ".join(f"{table[n]} from {n} requests" for n in starts)


async def calibrate(
    engine: VllmEngine,
    generate: Callable[[int, int], Awaitable[None]],
    chooser: LengthChooser,
) -> None:
    """Measure every draft length, and none, at a few batch sizes before the server is ready.

    Args:
        engine: serves nobody yet; it drafts the longest length afterwards.
        generate: runs that many requests at once, of that many tokens each.
        chooser: gets the measurements.

    Raises:
        RefusedError: the engine did not answer.
    """
    began = time.monotonic()
    for requests in sizes_to_measure(chooser.largest):
        for k in (OFF, 0, *chooser.lengths):
            await engine.set_speculation(k != OFF)
            if k != OFF:
                await engine.set_draft_lengths([k] * (chooser.largest + 1))
            # Enough tokens even if each step accepts all of its drafts.
            await generate(requests, CALIBRATION_STEPS * (max(k, 0) + 1))
    await engine.set_draft_lengths([chooser.lengths[-1]] * (chooser.largest + 1))
    chooser.add(await engine.step_sums(), None, served=False)
    logger.info("timed engine steps for %.1f s", time.monotonic() - began)
