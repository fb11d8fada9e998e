"""Reads what a caller says of a batch of B rows and S columns: padded, packed, or both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from slipstream.refusal import RefusedError


@dataclass(frozen=True)
class Span:
    """One sequence: a row's columns from ``start`` up to, not including, ``end``."""

    row: int
    start: int
    end: int


def check_temperature(temperature: float) -> None:
    """Raise RefusedError unless ``temperature`` is a finite number above 0."""
    if not math.isfinite(temperature) or temperature <= 0:
        raise RefusedError(
            "temperature", temperature, "a finite number > 0", "pass the rollouts' temperature"
        )


def check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise RefusedError unless ``tensor`` has the forward pass's shape [B, S]."""
    if tuple(tensor.shape) != shape:
        raise RefusedError(
            name, list(tensor.shape), f"the pass's {list(shape)}", "pass what was run"
        )


def aligned(name: str, values: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor | None:
    """``values`` as [B, S], detached, a missing first column padded with 0."""
    if values is None:
        return None
    values = values.detach()
    if tuple(values.shape) == (shape[0], shape[1] - 1):
        return F.pad(values, (1, 0))
    if tuple(values.shape) != shape:
        raise RefusedError(
            name,
            list(values.shape),
            f"{list(shape)} (or without the first column)",
            "align it with input_ids",
        )
    return values


def spans_of(
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    shape: tuple[int, ...],
) -> list[Span]:
    """Every sequence of a batch, row by row.

    Args:
        attention_mask: [B, S], true (or > 0) on real tokens; None: all are.
        position_ids: [B, S] of a packed batch: where they begin again at 0, so does a
            sequence. None: one sequence a row.
        shape: (B, S).

    Raises:
        RefusedError: a row with gaps, or positions that neither go on nor begin again.
    """
    if attention_mask is None and position_ids is None:
        return [Span(row, 0, shape[1]) for row in range(shape[0]) if shape[1]]
    # With numpy: these are many operations on few numbers.
    if attention_mask is None:
        real = np.ones(shape, dtype=np.bool_)
    else:
        real = attention_mask.detach().bool().cpu().numpy()
    begins = real.copy()
    begins[:, 1:] &= ~real[:, :-1]
    if position_ids is None:
        if (begins.sum(1) > 1).any():
            raise RefusedError(
                "attention_mask", "a row with gaps", "left or right padding", "pad at one end"
            )
    else:
        positions = position_ids.detach().long().cpu().numpy()
        goes_on = np.zeros(shape, dtype=np.bool_)
        goes_on[:, 1:] = positions[:, 1:] == positions[:, :-1] + 1
        begins |= real & ~goes_on
        if positions[begins].any():
            raise RefusedError(
                "position_ids",
                f"a sequence that begins at {int(positions[begins].max())}",
                "0 where a sequence begins, else one more than the token before",
                "pass the positions that the forward pass was given",
            )
    # A sequence ends where the next token is padding or begins another one.
    ends = real.copy()
    ends[:, :-1] &= (begins | ~real)[:, 1:]
    starts = np.argwhere(begins).tolist()
    stops = np.nonzero(ends)[1].tolist()
    return [Span(row, start, stop + 1) for (row, start), stop in zip(starts, stops, strict=True)]


def scores_of(
    name: str, values: torch.Tensor | Sequence[float] | None, sequences: int
) -> list[float | None]:
    """One number a sequence, in the order of ``spans_of``; None where none were given."""
    if values is None:
        return [None] * sequences
    numbers = values.tolist() if isinstance(values, torch.Tensor) else list(values)
    if len(numbers) != sequences or not all(math.isfinite(number) for number in numbers):
        raise RefusedError(
            name,
            f"{len(numbers)} numbers",
            f"a finite number for each of the {sequences} sequences",
            "give one per row, or per sequence of a packed row",
        )
    return [float(number) for number in numbers]
