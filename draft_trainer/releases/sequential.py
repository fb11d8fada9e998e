"""Compares two drafts' live acceptance again and again without spending the error rate.

Per arm a confidence sequence of the mean accepted tokens per draft: with probability
1 - alpha it covers the true mean at *every* time at once, so looking after each report
is allowed (asymptotic confidence sequence with a Gaussian mixture: Waudby-Smith, Arbour,
Sinha, Kennedy and Ramdas 2021, arXiv 2103.06476, theorem 2.2 and its choice of rho).

Drafts of one sequence, and of one prompt's samples, are alike. The number of drafts is
therefore divided by a design effect: the larger of a configured floor and of what the
variance between blocks says (method of batch means; blocks are merged in pairs as they
grow in number, so that they outgrow the correlation's length).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

TUNED_FOR = 100.0
"""Effective drafts at which the interval is tightest."""

MAX_BLOCKS = 32
MIN_BLOCKS = 8


@dataclass(frozen=True)
class Batch:
    """Verification steps of one draft version, between two reports.

    Args:
        drafts: how many.
        accepted: tokens accepted in all of them.
        squares: sum over drafts of the square of what was accepted.
    """

    drafts: int
    accepted: int
    squares: int


def batch_of(drafts: int, accepted_per_position: Iterable[int]) -> Batch:
    """From counters per position: a draft of which a tokens were accepted counts at
    positions 0 .. a-1, and a^2 is the sum of the first a odd numbers."""
    per_position = list(accepted_per_position)
    return Batch(
        drafts,
        sum(per_position),
        sum((2 * place + 1) * count for place, count in enumerate(per_position)),
    )


@dataclass(frozen=True)
class Interval:
    """Accepted tokens per draft: the mean, and where it may truly be."""

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

    Args:
        most: tokens of a draft (k): accepted lies in [0, k].
        design_effect: floor, at least 1.
    """

    def __init__(self, most: int, design_effect: float) -> None:
        self._most = most
        self._floor = design_effect
        self.drafts = self._accepted = self._squares = 0
        self._blocks: list[tuple[int, int]] = []
        self._block_drafts = 1

    def add(self, batch: Batch) -> None:
        """Take in what came since the last."""
        if not batch.drafts:
            return
        self.drafts += batch.drafts
        self._accepted += batch.accepted
        self._squares += batch.squares
        if self._blocks and self._blocks[-1][0] < self._block_drafts:
            drafts, accepted = self._blocks.pop()
            self._blocks.append((drafts + batch.drafts, accepted + batch.accepted))
        else:
            self._blocks.append((batch.drafts, batch.accepted))
        if len(self._blocks) > MAX_BLOCKS:
            pairs = zip(self._blocks[::2], self._blocks[1::2], strict=False)
            merged = [(a[0] + b[0], a[1] + b[1]) for a, b in pairs]
            self._blocks = merged + self._blocks[2 * len(merged) :]
            self._block_drafts = min(drafts for drafts, _ in merged)

    def interval(self, alpha: float) -> Interval:
        """Where the mean lies, but for one time in 1 / ``alpha``. Needs at least one draft."""
        mean = self._accepted / self.drafts
        # Two more drafts, of which none and all were accepted: nothing is certain yet.
        variance = (self._squares + self._most**2) / (self.drafts + 2)
        variance -= ((self._accepted + self._most) / (self.drafts + 2)) ** 2
        n = self.drafts / max(self._floor, self._measured_effect(mean, variance))
        if not n:
            return Interval(self.drafts, mean, 0.0, float(self._most))
        log_alpha = -2.0 * math.log(alpha)
        rho2 = (log_alpha + math.log(log_alpha + 1.0)) / TUNED_FOR
        t = n * rho2 + 1.0
        radius = math.sqrt(variance * 2.0 * t / (n * n * rho2) * math.log(math.sqrt(t) / alpha))
        return Interval(
            self.drafts, mean, max(0.0, mean - radius), min(float(self._most), mean + radius)
        )

    def _measured_effect(self, mean: float, variance: float) -> float:
        """Variance between blocks over what independent drafts would give; 1 while unknown."""
        if len(self._blocks) < MIN_BLOCKS:
            return 1.0
        spread = sum(drafts * (accepted / drafts - mean) ** 2 for drafts, accepted in self._blocks)
        return spread / (len(self._blocks) - 1) / variance


def verdict(candidate: Interval, incumbent: Interval, max_loss: float) -> bool | None:
    """Whether the candidate loses no more than a share ``max_loss`` of the acceptance length.

    Returns:
        True: it does not. False: it loses more. None: not known yet.
    """
    kept = 1.0 - max_loss
    if 1.0 + candidate.high < kept * (1.0 + incumbent.low):
        return False
    if 1.0 + candidate.low > kept * (1.0 + incumbent.high):
        return True
    return None
