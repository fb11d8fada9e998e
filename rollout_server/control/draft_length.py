"""Chooses the draft length for each number of requests, from measured costs and live acceptance.

With k drafted tokens a step of b requests takes t(k, b) seconds and gives AL(k) tokens a request
(``slipstream.economics.arithmetic``). With short completions two more things decide, and are
counted. Requests get only a share of AL(k) - 1: nothing beyond the end of a completion, and one
token in the step that reads the prompt. And that step takes longer, by more seconds with drafts
than without.

The lengths that are best now go to vLLM's scheduler, which looks one up each step. vLLM's own k = 0
still runs the draft once a step, to keep its KV cache filled for drafts to come. Where that takes
more than ``FILL`` of a step, the draft does not run in it (``OFF``), nor where drafting pays at no
number of requests.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING

from rollout_server.control.acceptance_counts import FIRST_DRAFTS, MIN_DRAFTS, AcceptanceTracker
from rollout_server.control.step_costs import MIXED, PLAIN, SPECULATIVE, StepSum, StepSums
from slipstream.economics.arithmetic import acceptance_length
from slipstream.economics.costs import OFF, StepTable

if TYPE_CHECKING:
    from rollout_server.vllm.engine import VllmEngine

KEPT_STEPS = 200.0
"""The steps over which an older cost fades to 1/e."""

KEPT_REQUESTS, LEAST_REQUESTS = 4000.0, 500.0
"""The requests, counted in each step, over which what they get and what prompts take fades to 1/e,
and the fewest for the share of accepted tokens that they get to be known."""

LEAST_PROMPTS = 16.0
"""The fewest prompts for the time that one takes to be known."""

MARGIN = 0.02
"""The gain in speed below which lengths stay as they are."""

FILL = 0.05
"""The share of a step without drafts that filling the draft's KV cache may take. Drafts that begin
within a request are accepted less without its keys and values, which no step's time shows."""

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

CALIBRATION_SECONDS = 5.0
"""The longest time for which steps are timed before the server is ready, small batches first: there
drafts pay before they do elsewhere. What it does not reach is timed under load
(``LengthChooser.untimed``)."""

CALIBRATION_STEPS = 6
"""The steps of each draft length and number of requests in it."""

ERROR_RATE = 0.01
"""The share of drafts that pay to be taken for ones that do not (``LengthChooser.loses``) at most,
however often that is asked."""

_STAKES = (0.2, 0.4, 0.6, 0.8)
"""Shares of the wealth that a bet against a draft may lose at most."""

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
        table: tokens to draft by the number of requests, or ``OFF``; None while no drafts pay.
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
        # Requests with drafts; tokens accepted for them, and those they got.
        self._given: tuple[float, ...] = (0.0, 0.0, 0.0)
        # With drafts and without: prompts, and seconds that their steps took longer than others.
        self._prompts: dict[bool, tuple[float, ...]] = dict.fromkeys((True, False), (0.0, 0.0))
        self._load: tuple[float, ...] = (0.0, 0.0)  # prompts, tokens

    @property
    def kept(self) -> float:
        """The share of accepted tokens that requests get."""
        drafted, accepted, got = self._given
        known = drafted >= LEAST_REQUESTS and accepted > 0.0
        return min(max(got / accepted, 0.0), 1.0) if known else 1.0

    def prompt_seconds(self, drafting: bool) -> float:
        """The seconds of prompts for each token that is generated; as the other way, if unknown."""
        for way in (drafting, not drafting):
            prompts, seconds = self._prompts[way]
            if prompts >= LEAST_PROMPTS:
                begun, tokens = self._load
                return max(seconds / prompts, 0.0) * begun / max(tokens, 1.0)
        return 0.0

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
        mixed: list[tuple[int, int, StepSum]] = []
        for (kind, requests, length), total in sums.items():
            new = total - self._seen.get((kind, requests, length), StepSum())
            if new.steps and kind in (PLAIN, SPECULATIVE):
                fresh.append((OFF if kind == PLAIN else length, requests, new.steps, new.seconds))
            if new.requests and served:
                self._load = _faded(self._load, new.requests, (new.prompts, new.tokens))
                if length and rates:
                    accepted = new.requests * (acceptance_length(rates, length) - 1.0)
                    given = new.requests, accepted, new.tokens - new.requests
                    self._given = _faded(self._given, new.requests, given)
            if kind == MIXED and new.steps and served:
                mixed.append((length or OFF, requests, new))
        # Merged: no sums are known before the first request, and they do not take these back.
        self._seen = {**self._seen, **sums}
        if fresh:
            self._work = {n: work / 2 for n, work in self._work.items() if work > 0.5}
        for k, requests, steps, seconds in fresh:
            old, mean = self._costs.get((k, requests), (0.0, 0.0))
            old *= math.exp(-steps / KEPT_STEPS)
            self._costs[k, requests] = old + steps, (old * mean + seconds) / (old + steps)
            tokens = steps * (acceptance_length(rates, k) if rates else 1.0)
            if served:
                self._work[requests] = self._work.get(requests, 0.0) + tokens
        costs = self._table()
        for k, requests, new in mixed:
            if k in costs.points and requests <= costs.points[k][-1][0]:
                longer = new.seconds - new.steps * costs.seconds(k, requests)
                before, more = self._prompts[k != OFF], (new.prompts, longer)
                self._prompts[k != OFF] = _faded(before, new.requests, more)
        return {
            k: max(seconds / steps for other, _, steps, seconds in fresh if other == k)
            for k, *_ in fresh
        }

    def choose(self, rates: Sequence[float] | None, may_stop: bool = True) -> None:
        """Make ``table`` the best one; it stays while acceptance or a cost is unknown.

        Before the first request drafts run if they pay at any number of requests.

        Args:
            rates: acceptance by position.
            may_stop: whether no drafts are a choice.
        """
        costs = self._table()
        if rates is None or not {OFF, *self.lengths} <= set(costs.points):
            return
        known, kept = rates, self.kept
        prompts = {way: self.prompt_seconds(way) for way in (True, False)}

        choices = [k for k in (OFF, 0, *self.lengths) if k in costs.points]
        # Where not all lengths were timed yet, those that were are compared, and beyond the largest
        # batch of two of them at that one. Costs of fewer requests would favour drafts.
        timed = {k: costs.points[k][-1][0] for k in choices}
        largest = min(timed[OFF], max(timed[k] for k in choices if k != OFF))

        def speed(k: int, requests: int) -> float:
            batch = min(max(requests, 1), largest, timed[k])
            tokens = 1.0 + kept * (acceptance_length(known, k) - 1.0)
            return 1.0 / (costs.seconds(k, batch) / tokens + batch * prompts[k != OFF])

        best, gains = [], []
        for requests in range(self.largest + 1):
            reached = min(requests, largest)
            speeds = {k: speed(k, requests) for k in choices if timed[k] >= reached}
            if speeds.get(0, 0.0) >= speeds[OFF] * (1 - FILL):
                del speeds[OFF]
            fastest = max(speeds, key=lambda k: speeds[k])
            now = fastest if self.table is None else self.table[requests]
            stays = speeds.get(now, 0.0) >= speeds[fastest] * (1 - MARGIN)
            best.append(now if stays else fastest)
            gains.append(speeds[fastest] / speed(OFF, requests))
        work = self._work or {gains.index(max(gains)): 1.0}

        def seconds(table: Sequence[int] | None) -> float:
            return sum(
                tokens / speed(OFF if table is None else table[min(n, self.largest)], n)
                for n, tokens in work.items()
            )

        # A change must gain the margin over what is in use now.
        on, off = seconds(best), seconds(None)
        on *= 1 - MARGIN if self.table else 1
        off *= 1 if self.table else 1 - MARGIN
        # Without drafts at any size in use, a step costs at least a plain one, whatever was timed.
        used = {best[min(n, self.largest)] for n in work}
        if max(used) > 0 and on <= off:
            self.table = best
        elif may_stop:
            # Where the draft does not run, it costs nothing to be ready for fewer requests.
            self.table = best if used == {OFF} and max(best) > 0 else None
        self.speed_up = seconds(None) / seconds(self.table)

    def loses(self, outcomes: Mapping[tuple[int, int], Sequence[int]]) -> bool:
        """Return whether drafts surely took more time than they saved.

        For a draft of length k whose steps break even at m accepted tokens, bet against them: a
        wealth of 1 is multiplied by 1 - s (x - m) for each draft with x tokens accepted. Where m or
        more are accepted on average, it is expected not to grow, so that it ever reaches
        1 / ``ERROR_RATE`` with a probability of at most ``ERROR_RATE``. Costs are taken as known.

        Source: Ville's inequality; betting on a bounded mean, arXiv 2010.09686.

        Args:
            outcomes: ``RecentAcceptance.outcomes``.
        """
        costs = self._table()
        logs = [0.0] * len(_STAKES)
        for (requests, k), counts in outcomes.items():
            if not {OFF, k} <= set(costs.points):
                continue
            n = min(requests, costs.points[OFF][-1][0], costs.points[k][-1][0])
            even = costs.seconds(k, n) / costs.seconds(OFF, n) - 1
            for place, stake in enumerate(_STAKES):
                bet = stake / max(k - even, 1.0)
                logs[place] += sum(c * math.log1p(-bet * (x - even)) for x, c in enumerate(counts))
        return sum(math.exp(min(log, 700.0)) for log in logs) / len(logs) >= 1 / ERROR_RATE

    def untimed(self) -> list[int]:
        """Return the lengths of which no step of as many requests as in use was timed."""
        largest, points = max(self._work, default=0), self._table().points
        return [
            k
            for k in (OFF, *self.lengths, 0)
            if k not in points or points[k][-1][0] < min(largest, self.largest)
        ]

    def in_use(self) -> set[int]:
        """The lengths that ``table`` has for the recent numbers of requests."""
        if self.table is None:
            return {OFF}
        return {self.table[min(n, self.largest)] for n in self._work}

    @property
    def idle(self) -> bool:
        """True while no drafts are made for the recent numbers of requests."""
        return max(self.in_use(), default=self.lengths[0]) <= 0

    def doubt(self, length: int) -> None:
        """Let the next few steps of a length count as much as all before them."""
        for (k, requests), (steps, mean) in self._costs.items():
            if k == length:
                self._costs[k, requests] = min(steps, REFRESH_STEPS), mean

    def try_again(self) -> None:
        """Draft the shortest length for now, where no drafts paid: another draft may."""
        if self.idle:
            self.table = [self.lengths[0]] * (self.largest + 1)

    def _table(self) -> StepTable:
        return StepTable.measured(
            (requests, k, seconds, steps) for (k, requests), (steps, seconds) in self._costs.items()
        )


def _faded(sums: tuple[float, ...], requests: float, more: tuple[float, ...]) -> tuple[float, ...]:
    """Add to sums, what came before faded by so many requests."""
    fade = math.exp(-requests / KEPT_REQUESTS)
    return tuple(fade * a + b for a, b in zip(sums, more, strict=True))


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
        self._updated_at = -math.inf
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
        replaced, self._version = self._version != self._tracker.live, self._tracker.live
        if now == self._updated_at and not replaced:
            return chooser.speed_up
        self._updated_at = now
        recent = self._tracker.recent
        steps = chooser.add(sums, recent.rates() or recent.expected)
        sure = chooser.loses(recent.outcomes)
        rates = recent.rates(1 if sure else MIN_DRAFTS) or recent.expected or None
        self._timed |= dict.fromkeys(steps, now)
        if not chooser.idle:
            self._off_since = now
        if replaced:
            self._off_since, self._retry_after = now, RETRY_SECONDS
        if replaced and rates is None:
            chooser.try_again()
        elif chooser.idle and now - self._off_since > self._retry_after:
            self._retry_after = min(2 * self._retry_after, MAX_RETRY_SECONDS)
            chooser.try_again()
        else:
            before = chooser.table, chooser.speed_up
            # Before its first draft, too, unless this is a try.
            untried = not recent.drafts and self._retry_after == RETRY_SECONDS
            chooser.choose(rates, sure or untried or recent.drafts >= FIRST_DRAFTS)
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
        await self._go_on_timing(steps, now)
        return chooser.speed_up

    async def _go_on_timing(self, steps: Mapping[int, float], now: float) -> None:
        """Take a few steps of a length that was not timed at as many requests, or not for long."""
        if not steps or not self.chooser.table:
            return
        untimed = [k for k in self.chooser.untimed() if now - self._tried[k] > RECENT_SECONDS]
        oldest = untimed[0] if untimed else self._longest_untimed(self._timed)
        since = max(self._timed[oldest], self._tried[oldest])
        if untimed or now - since >= REFRESH_SECONDS:
            await self._refresh(oldest, now, max(steps.values()))

    def _longest_untimed(self, lengths: Iterable[int]) -> int:
        """The length of which no step was timed for the longest time."""
        return min(lengths, key=lambda k: self._timed[k])

    async def _refresh(self, length: int, now: float, step_seconds: float) -> None:
        """Take a few steps of a length; the next update reads them."""
        # It may fail: steps that also read prompts are not timed, and there may be no others.
        self._tried[length] = now
        self.chooser.doubt(length)
        try:
            await self._set_lengths([length] * (self.chooser.largest + 1))
            await asyncio.sleep(max(MIN_REFRESH_SECONDS, REFRESH_STEPS * step_seconds))
        finally:
            await self._set_lengths(self._live)


def _describe(table: Sequence[int] | None) -> str:
    if table is None:
        return "none, because drafting pays at no number of requests"
    starts = [n for n in range(1, len(table)) if n == 1 or table[n] != table[n - 1]]
    named = (f"{'none' if table[n] == OFF else table[n]} from {n} requests" for n in starts)
    return ", ".join(named)


async def calibrate(
    engine: VllmEngine,
    generate: Callable[[int, int, int], Awaitable[None]],
    chooser: LengthChooser,
) -> None:
    """Time draft lengths, and none, at a few batch sizes for ``CALIBRATION_SECONDS`` at most.

    Args:
        engine: serves nobody yet; it drafts the longest length afterwards.
        generate: runs that many requests at once, for so many steps that give each at most so many
            tokens; what it runs ends with its task.
        chooser: gets the measurements.

    Raises:
        RefusedError: the engine did not answer.
    """
    began = time.monotonic()
    timed = [*product(sizes_to_measure(chooser.largest), (OFF, *chooser.lengths, 0))]
    for number, (requests, k) in enumerate(timed):
        await engine.set_speculation(k != OFF)
        if k != OFF:
            await engine.set_draft_lengths([k] * (chooser.largest + 1))
        try:
            async with asyncio.timeout(CALIBRATION_SECONDS - (time.monotonic() - began)):
                await generate(requests, CALIBRATION_STEPS, max(k, 0) + 1)
        except TimeoutError:
            at = f"{number} of {len(timed)} numbers of requests and draft lengths"
            logger.info("timed %s: the others are timed under load", at)
            break
    await engine.set_speculation(True)
    await engine.set_draft_lengths([chooser.lengths[-1]] * (chooser.largest + 1))
    chooser.add(await engine.step_sums(), None, served=False)
    logger.info("timed engine steps for %.1f s", time.monotonic() - began)
