"""Confidence sequences of the acceptance length, and the comparison of two of them.

Checking after every report must not inflate the false-positive rate (optional stopping). Each side
therefore has a confidence sequence of the mean accepted tokens per verification step: with
probability 1 - alpha it covers the true mean at *every* time at once (asymptotic confidence
sequence with a Gaussian mixture: Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas 2021, arXiv
2103.06476, theorem 2.2 and its choice of rho).

Steps of one sequence, and of one prompt's samples, are correlated. Their number is therefore
divided by a design effect: the larger of a configured floor and of what the variance between blocks
implies (method of batch means; as their number grows, blocks are merged in pairs, so that they
outgrow the correlation's length).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import accumulate, pairwise, takewhile, zip_longest
from operator import add

TUNED_FOR = 100.0
"""Effective verification steps at which the interval is tightest."""

MAX_BLOCKS = 32
MIN_BLOCKS = 8

FIGURES_KEPT = 64
"""Batches that are kept of a release, neighbours added up."""


@dataclass(frozen=True)
class Batch:
    """Verification steps of one draft version between two reports.

    Args:
        tried: steps whose draft had a token at each position; all of them had a first one.
        accepted: how many of these tokens were accepted.
    """

    tried: tuple[int, ...]
    accepted: tuple[int, ...]

    def __add__(self, other: Batch) -> Batch:
        return Batch(_sums(self.tried, other.tried), _sums(self.accepted, other.accepted))

    @property
    def drafts(self) -> int:
        """Verification steps."""
        return self.tried[0] if self.tried else 0

    def since(self, before: Batch) -> Batch:
        """Return what a server counted since ``before``; all of it if the server has restarted."""
        grown = self + Batch(
            *(tuple(-n for n in counts) for counts in (before.tried, before.accepted))
        )
        return grown if min((*grown.tried, *grown.accepted), default=0) >= 0 else self


def _sums(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip_longest(one, other, fillvalue=0))


Figures = tuple[Batch, ...]
"""Live acceptance, oldest first."""


@dataclass(frozen=True)
class Interval:
    """Accepted tokens per verification step of a draft of ``positions`` tokens: the mean and its
    bounds."""

    positions: int
    drafts: int
    mean: float
    low: float
    high: float

    @property
    def length(self) -> float:
        """Acceptance length, the bonus token included."""
        return 1.0 + self.mean


class Arm:
    """One draft version's side of a comparison.

    A server that adapts the draft length proposes fewer tokens in some steps than in others. The
    mean is therefore of drafts as long as the comparison asks for: each position's share is of the
    steps that tried it, and is weighted with the inverse of how often that was.
    """

    def __init__(self, design_effect: float) -> None:
        self._floor = design_effect
        self._sum = Batch((), ())
        self._blocks: list[Batch] = []
        self._block_drafts = 1

    @property
    def drafts(self) -> int:
        """Verification steps."""
        return self._sum.drafts

    def add(self, batch: Batch) -> None:
        """Add the counts since the last report."""
        if not batch.drafts:
            return
        self._sum += batch
        if self._blocks and self._blocks[-1].drafts < self._block_drafts:
            self._blocks[-1] += batch
        else:
            self._blocks.append(batch)
        if len(self._blocks) > MAX_BLOCKS:
            merged = [a + b for a, b in zip(self._blocks[::2], self._blocks[1::2], strict=False)]
            self._blocks = merged + self._blocks[2 * len(merged) :]
            self._block_drafts = min(block.drafts for block in merged)

    def positions(self, least: int) -> int:
        """Return how many positions, from the first one, were tried at least ``least`` times."""
        return sum(1 for _ in takewhile(lambda tried: tried >= least, self._sum.tried))

    def interval(self, alpha: float, positions: int) -> Interval:
        """Return bounds of the mean that fail once in 1 / ``alpha`` trials.

        Args:
            alpha: error rate.
            positions: number of draft positions, at least one; each was tried.
        """
        tried, accepted = self._sum.tried[:positions], self._sum.accepted[:positions]
        shares = [one / steps for one, steps in zip(accepted, tried, strict=True)]
        weights = [self.drafts / steps for steps in tried]
        mean = sum(shares)
        # A step with a accepted tokens counts at positions 0 .. a-1.
        values = list(accumulate(weights))
        ended = [one - after for one, after in pairwise((*accepted, 0))]
        total = sum(count * value for count, value in zip(ended, values, strict=True))
        squares = sum(count * value**2 for count, value in zip(ended, values, strict=True))
        # Adds a step with no and one with all tokens accepted: few steps give no certainty.
        variance = (squares + values[-1] ** 2) / (self.drafts + 2)
        variance -= ((total + values[-1]) / (self.drafts + 2)) ** 2
        effect = self._measured_effect(shares, weights) / variance
        n = self.drafts / max(self._floor, effect)
        log_alpha = -2.0 * math.log(alpha)
        rho2 = (log_alpha + math.log(log_alpha + 1.0)) / TUNED_FOR
        t = n * rho2 + 1.0
        radius = math.sqrt(variance * 2.0 * t / (n * n * rho2) * math.log(math.sqrt(t) / alpha))
        return Interval(
            positions,
            self.drafts,
            mean,
            max(0.0, mean - radius),
            min(float(positions), mean + radius),
        )

    def _measured_effect(self, shares: Sequence[float], weights: Sequence[float]) -> float:
        """Return the variance of a step that would explain that of blocks; 0 while unknown."""
        if len(self._blocks) < MIN_BLOCKS:
            return 0.0
        spread = 0.0
        for block in self._blocks:
            beyond = sum(
                weight * (accepted - share * tried)
                for weight, share, accepted, tried in zip(
                    weights, shares, block.accepted, block.tried, strict=False
                )
            )
            spread += beyond**2 / block.drafts
        return spread / (len(self._blocks) - 1)


def decide(candidate: Interval, incumbent: Interval, max_loss: float) -> bool | None:
    """Return whether the candidate keeps the acceptance length but for a share ``max_loss``; None
    while that is not known."""
    kept = 1.0 - max_loss
    if 1.0 + candidate.high < kept * (1.0 + incumbent.low):
        return False
    if 1.0 + candidate.low > kept * (1.0 + incumbent.high):
        return True
    return None


def drafts_of(batches: Sequence[Batch]) -> int:
    """Return the verification steps of all batches."""
    return sum(batch.drafts for batch in batches)


def condensed(batches: Sequence[Batch]) -> Figures:
    """Return at most ``FIGURES_KEPT`` batches with the same sums: neighbours are added up."""
    stride = -(-len(batches) // FIGURES_KEPT) or 1
    groups = [batches[start : start + stride] for start in range(0, len(batches), stride)]
    return tuple(reduce(add, group) for group in groups)
