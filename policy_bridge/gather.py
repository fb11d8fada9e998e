"""Moves one chosen sequence's states from where the policy computed them to host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

Pieces = tuple[tuple[torch.dtype, tuple[int, ...]], ...]


def sample_pieces(tokens: int, layers: int, hidden: int, dtype: torch.dtype) -> Pieces:
    """Dtype and shape of a sample's tensors, widest items first: auxiliary states, final
    state, token ids, positions, log-probs, logits, loss mask."""
    per_token = (tokens,)
    return (
        (dtype, (tokens, layers * hidden)),
        (dtype, (tokens, hidden)),
        (torch.int32, per_token),
        (torch.int32, per_token),
        (torch.float32, per_token),
        (torch.float32, per_token),
        (torch.bool, per_token),
    )


def gather_into(host: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Fill ``host`` with ``parts`` side by side, cast to its dtype.

    On the host that is one copy of each part. From a device the parts are laid
    together and cast there, then copied once; ``host`` is complete when the current
    stream is (at once, where its memory is not pinned).

    Args:
        host: [T, sum of widths], CPU.
        parts: [T, width] each, on one device.
    """
    if parts[0].device.type == "cpu":
        column = 0
        for part in parts:
            host[:, column : column + part.shape[-1]].copy_(part)
            column += part.shape[-1]
    else:
        host.copy_(torch.cat([part.to(host.dtype) for part in parts], -1), non_blocking=True)
