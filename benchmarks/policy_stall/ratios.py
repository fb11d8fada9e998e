"""One row's times over others', with intervals by resampling, and other figures of many numbers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

_RESAMPLES = 2_000


def paired(mine: Sequence[float], peers: Sequence[Sequence[float]]) -> dict[str, float]:
    """Ratio to the mean of the peers in each round: its median, with a bootstrap interval."""
    ratios = [own / statistics.fmean(its) for own, *its in zip(mine, *peers, strict=True)]
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


def ratio_of_p99(mine: Sequence[float], rounds: Sequence[Sequence[float]]) -> dict[str, float]:
    """Of this row to that of the peers' steps taken together, with an interval by resampling.

    Every time is first put over the median of its round's peers: a machine that others use has
    minutes in which all steps are slow, and which row's slowest fell there was chance (rows without
    a bridge stood between 0.93 and 1.10). ``plain`` is the ratio with the times as they are.

    Args:
        mine: one time a round.
        rounds: the peers' of each, equally many.
    """
    own = torch.tensor(mine, dtype=torch.float64)[:, None]
    its = torch.tensor(rounds, dtype=torch.float64)
    normal = its.quantile(0.5, dim=1, keepdim=True)
    over, its_over = own / normal, its / normal
    runs = _resampled(len(own))
    drawn = _p99(over[runs].flatten(1)) / _p99(its_over[runs].flatten(1))
    return {
        "ratio": float(_p99(over.flatten()) / _p99(its_over.flatten())),
        "low_95": float(drawn.quantile(0.025)),
        "high_95": float(drawn.quantile(0.975)),
        "plain": float(_p99(own.flatten()) / _p99(its.flatten())),
    }


def _p99(values: torch.Tensor) -> torch.Tensor:
    return values.quantile(0.99, dim=-1)


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


def spread(values: list[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}
