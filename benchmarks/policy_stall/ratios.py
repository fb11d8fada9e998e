"""Medians and p99s of one ratio a round, with intervals by resampling, and other figures."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

_RESAMPLES = 2_000


def median(ratios: Sequence[float]) -> dict[str, float]:
    """Of one ratio of each round, with an interval by resampling rounds, and the outermost two."""
    values = torch.tensor(ratios, dtype=torch.float64)
    # quantile, not median: that takes the lower of the two in the middle.
    medians = values[_resampled(len(values))].quantile(0.5, dim=1)
    return {
        "median": statistics.median(ratios),
        "low_95": float(medians.quantile(0.025)),
        "high_95": float(medians.quantile(0.975)),
        "min": min(ratios),
        "max": max(ratios),
    }


def ratio_of_p99(mine: Sequence[float], peers: Sequence[Sequence[float]]) -> dict[str, float]:
    """Of these ratios to the mean of the peers', with an interval by resampling rounds.

    Not to the p99 of all peers' ratios together, which are more: of a hundred it comes out lower
    than of a thousand from the same source.

    Args:
        mine: one of each round.
        peers: those of each round, equally many and in the same order.
    """
    own = torch.tensor(mine, dtype=torch.float64)[:, None]
    its = torch.tensor(peers, dtype=torch.float64)
    runs = _resampled(len(own))
    drawn = _p99(own[runs]) / _p99(its[runs])
    return {
        "ratio": float(_p99(own) / _p99(its)),
        "low_95": float(drawn.quantile(0.025)),
        "high_95": float(drawn.quantile(0.975)),
    }


def _p99(values: torch.Tensor) -> torch.Tensor:
    """Of the rounds, the mean over the contestants: [..., rounds, contestants] to [...]."""
    return values.quantile(0.99, dim=-2).mean(dim=-1)


def _resampled(rounds: int) -> torch.Tensor:
    """Rounds of each of many runs that might as well have been, [runs, rounds]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(rounds, (_RESAMPLES, rounds), generator=generator)


def growth(resident: list[int]) -> float:
    """Growth over the second half of the rounds, by a straight line, as a share of the mean."""
    half = torch.tensor(resident[len(resident) // 2 :], dtype=torch.float64)
    at = torch.arange(len(half), dtype=torch.float64)
    at = at - at.mean()
    slope = float((at * (half - half.mean())).sum() / (at * at).sum().clamp_min(1.0))
    return slope * len(half) / float(half.mean())
