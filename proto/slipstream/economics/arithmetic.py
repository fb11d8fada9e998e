"""Costs and gains of speculation: one model for the page, CLI, server, trainer and tests.

Pure functions of costs that were measured or stated; nothing here imports torch or gRPC.

Symbols: k draft length, OFF without speculation; b requests in an engine step; t(k, b) seconds of
that step; AL(k) acceptance length, tokens of a request in a step with the bonus token. A request
gains AL(k) / t(k, b) tokens a second, so speculation pays while AL(k) is above its break-even,
c(k, b) = t(k, b) / t(OFF, b). Acceptance does not depend on b and cost does not depend on the
draft's quality, so the two are measured apart and combined here.

Sources: arXiv 2211.17192 (accepted tokens), arXiv 2604.26779 (step time and its speed-up).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from slipstream.economics.costs import OFF, Costs
from slipstream.errors import RefusedError


def check_rates(rates: Sequence[float]) -> tuple[float, ...]:
    """Acceptance by position: of drafts that had a token at position i, the share whose token there
    was accepted, i = 1, 2, ...

    Returns:
        The same, none above the one before it. Where draft lengths vary, fewer drafts had a token
        at a later position, and the share of those may be higher; of all drafts it is not.

    Raises:
        RefusedError: it is empty, or leaves 0..1.
    """
    if not rates or not all(0 <= rate <= 1 for rate in rates):
        raise RefusedError(
            "acceptance by position",
            f"{list(rates)}",
            "shares of drafts in 0..1",
            "give accepted tokens at each position divided by the drafts that had a token there",
        )
    return tuple(accumulate(rates, min))


def extended(rates: Sequence[float], k: int) -> tuple[float, ...]:
    """Return ``rates`` for k positions. A position that was never drafted is accepted, once it is
    reached, as often as the last one that was."""
    known = list(rates[:k])
    last = rates[-1] / (rates[-2] if len(rates) > 1 else 1.0) if rates[-1] else 0.0
    while len(known) < k:
        known.append(known[-1] * last)
    return tuple(known)


def acceptance_length(rates: Sequence[float], k: int) -> float:
    """AL(k): 1 for k = 0 and without speculation."""
    return 1 + sum(extended(rates, max(k, 0)))


def scaled(rates: Sequence[float], factor: float) -> tuple[float, ...]:
    """The rates of a better or staler draft: every conditional acceptance is ``factor`` times as
    high, at most 1."""
    reached, before, result = 1.0, 1.0, []
    for rate in rates:
        conditional = rate / before if before else 0.0
        before = rate
        reached *= min(1.0, conditional * factor)
        result.append(reached)
    return tuple(result)


def break_even(costs: Costs, k: int, batch: float, context: float = 0.0) -> float:
    """c(k, b): the acceptance length above which k drafted tokens pay."""
    return costs.seconds(k, batch, context) / costs.seconds(OFF, batch, context)


def speed_up(
    costs: Costs, rates: Sequence[float], k: int, batch: float, context: float = 0.0
) -> float:
    """Tokens a second with k drafted tokens, relative to no speculation."""
    return acceptance_length(rates, k) / break_even(costs, k, batch, context)


def best_length(costs: Costs, rates: Sequence[float], batch: float, context: float = 0.0) -> int:
    """The k with the most tokens a second where the server speculates, whether or not it gains.

    A table cannot turn speculation off for some batch sizes: its 0, where the cost of that is
    known, still runs the draft.
    """
    lengths = (k for k in costs.draft_lengths if k != OFF)
    return max(lengths, key=lambda k: speed_up(costs, rates, k, batch, context), default=OFF)


def schedule(choose: Callable[[int], int], largest: int) -> list[list[int]]:
    """vLLM's ``num_speculative_tokens_per_batch_size``: [first batch, last batch, k] rows from 1 to
    ``largest`` requests."""
    rows: list[list[int]] = []
    for batch in range(1, largest + 1):
        k = choose(batch)
        if rows and rows[-1][2] == k:
            rows[-1][1] = batch
        else:
            rows.append([batch, batch, k])
    return rows


@dataclass(frozen=True)
class Generation:
    """One engine's rollouts.

    Attributes:
        seconds: until the last one ends.
        mean_batch: requests in a step, averaged over seconds.
    """

    seconds: float
    mean_batch: float


def generate(
    costs: Costs,
    rates: Sequence[float],
    lengths: Sequence[float],
    choose: Callable[[float], int],
    slots: int,
    prompt_tokens: float = 0.0,
) -> Generation:
    """Decode rollouts of these lengths: ``slots`` at once, the next one when one ends.

    All running requests advance by AL(k) tokens a step, so time passes in closed form between two
    ends. Prefill is not counted.

    Args:
        lengths: tokens of each rollout, in the order in which they start.
        choose: the draft length at a number of running requests.
        slots: requests that run at once at most.
        prompt_tokens: of each request, for the context.
    """
    if not lengths or min(lengths) <= 0 or slots < 1:
        raise RefusedError(
            "rollouts",
            f"{len(lengths)} lengths, {slots} slots",
            "at least one rollout of positive length and one slot",
            "give the lengths of a step's completions in tokens",
        )
    waiting = iter(lengths)
    ends: list[tuple[float, float]] = []  # on the clock of tokens a request; with its start
    clock = seconds = batch_seconds = begun = 0.0
    for length in waiting:
        heapq.heappush(ends, (length, 0.0))
        if len(ends) == slots:
            break
    while ends:
        end, start = heapq.heappop(ends)
        running = len(ends) + 1
        step = end - clock
        if step > 0:
            context = prompt_tokens + clock + step / 2 - begun / running
            k = choose(running)
            passed = (
                step * costs.seconds(k, running, max(context, 0.0)) / acceptance_length(rates, k)
            )
            seconds += passed
            batch_seconds += passed * running
            clock = end
        begun -= start
        following = next(waiting, None)
        if following is not None:
            heapq.heappush(ends, (clock + following, clock))
            begun += clock
    return Generation(seconds, batch_seconds / seconds)


@dataclass(frozen=True)
class Loop:
    """The phases of an RL step around generation.

    Attributes:
        other_seconds: of a step without its generation: log-probs, update, weight sync.
        lag: policy versions that rollouts may be behind. 0 alternates generation and training;
            from 1 on they overlap, on devices of their own.
    """

    other_seconds: float
    lag: int = 0

    def run(self, generation_seconds: Sequence[float]) -> tuple[float, float]:
        """Mean seconds of a step, and of exposed generation in it, of a loop that repeats these
        steps: a first round fills the pipeline and does not count.

        Batch i is generated by a policy that has seen at least the first i - lag batches, and is
        trained on after batch i - 1.
        """
        trained: list[float] = []
        exposed: list[float] = []
        generated = 0.0
        for number, seconds in enumerate([*generation_seconds] * 2):
            needed = number - 1 - self.lag
            generated = max(generated, trained[needed] if needed >= 0 else 0.0) + seconds
            free = trained[-1] if trained else 0.0
            exposed.append(max(0.0, generated - free))
            trained.append(free + exposed[-1] + self.other_seconds)
        steps = len(generation_seconds)
        mean = sum(exposed[steps:]) / steps
        return self.other_seconds + mean, mean


def drift_that_pays(
    step_seconds: Callable[[Sequence[float]], float],
    rates: Sequence[float],
    upkeep: float,
) -> float | None:
    """The share of conditional acceptance that a frozen draft must lose before adapting pays.

    Args:
        step_seconds: of a draft with these rates.
        rates: of the adapted draft.
        upkeep: seconds of a step that adapting costs.

    Returns:
        In 0..1; None where even a draft that is never accepted costs less than the upkeep.
    """
    kept = step_seconds(rates) + upkeep
    if step_seconds(scaled(rates, 0.0)) <= kept:
        return None
    low, high = 0.0, 1.0  # lost shares: no gain at low, gain at high
    for _ in range(40):
        middle = (low + high) / 2
        if step_seconds(scaled(rates, 1 - middle)) > kept:
            high = middle
        else:
            low = middle
    return high
