"""States in eight bits: float8 e4m3, with a scale for each row.

A row is one token's state after one layer. The layers' magnitudes differ by far, so the auxiliary
states, which are several layers side by side, have a scale for each of them.
"""

from __future__ import annotations

import torch

LARGEST = 448.0
"""The largest float8_e4m3fn."""

_BLOCK_ROWS = 1024


def quantize(states: torch.Tensor, hidden_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """States as float8 and the scales that restore them, on the states' device.

    The error of a value is at most 2^-4 of it, or 2^-10 of its row's largest / 448 where it is
    below 2^-6 of that; a row that holds NaN or infinity gets a scale that is not finite.

    Args:
        states: floating point [T, L * H].
        hidden_size: H.

    Returns:
        float8_e4m3fn [T, L * H], and float32 [L, T]: largest magnitude of the row / 448, and 1
        for a row of zeros.
    """
    tokens, width = states.shape
    layers = width // hidden_size
    values = torch.empty((tokens, width), dtype=torch.float8_e4m3fn, device=states.device)
    scales = torch.empty((layers, tokens), dtype=torch.float32, device=states.device)
    # In blocks: all rows at once in float32 are four times the result.
    for first in range(0, tokens, _BLOCK_ROWS):
        rows = states[first : first + _BLOCK_ROWS].float().view(-1, layers, hidden_size)
        scale = rows.abs().amax(dim=2) / LARGEST
        scale = torch.where(scale == 0, 1.0, scale)
        scaled = (rows / scale[:, :, None]).view(-1, width)
        values[first : first + _BLOCK_ROWS] = scaled.to(torch.float8_e4m3fn)
        scales[:, first : first + _BLOCK_ROWS] = scale.T
    return values, scales


def dequantize_into(
    destination: torch.Tensor, values: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    """Restore states into ``destination`` and return it.

    Args:
        destination: [T, L * H], bfloat16 or wider.
        values: float8_e4m3fn [T, L * H].
        scales: float32 [L, T].
    """
    layers, tokens = scales.shape
    for first in range(0, tokens, _BLOCK_ROWS):
        rows = (
            values[first : first + _BLOCK_ROWS].float().view(-1, layers, values.shape[1] // layers)
        )
        rows *= scales[:, first : first + _BLOCK_ROWS].T[:, :, None]
        destination[first : first + _BLOCK_ROWS] = rows.view(-1, values.shape[1])
    return destination


def through_float8(states: torch.Tensor, hidden_size: int) -> torch.Tensor:
    """What the trainer gets of states that are shipped in float8; same shape and dtype.

    Shows the effect on training of recorded samples: apply it to both of their states.

    Args:
        states: bfloat16, float16 or float32 [T, L * H].
        hidden_size: H.
    """
    values, scales = quantize(states, hidden_size)
    decoded = torch.empty(states.shape, dtype=torch.bfloat16, device=states.device)
    return dequantize_into(decoded, values, scales).to(states.dtype)
