"""Reads what a caller says of a padded batch of B rows and S columns."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from slipstream.refusal import RefusedError


def check_temperature(temperature: float) -> None:
    """Raise RefusedError unless ``temperature`` is a finite number above 0."""
    if not math.isfinite(temperature) or temperature <= 0:
        raise RefusedError(
            "temperature", temperature, "a finite number > 0", "pass the rollouts' temperature"
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
    attention_mask: torch.Tensor | None, shape: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    """First column and column after the last of every row's real tokens."""
    if attention_mask is None:
        return ((0, shape[1]),) * shape[0]
    if tuple(attention_mask.shape) != shape:
        raise RefusedError(
            "attention_mask", list(attention_mask.shape), list(shape), "pass what was run"
        )
    spans = []
    for row in attention_mask.detach().bool().tolist():
        count = sum(row)
        start = row.index(True) if count else 0
        if not all(row[start : start + count]):
            raise RefusedError(
                "attention_mask", "a row with gaps", "left or right padding", "pad at one end"
            )
        spans.append((start, start + count))
    return tuple(spans)
