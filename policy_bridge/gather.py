"""Moves one chosen sequence's states from where the policy computed them to host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

_BLOCK = (1 << 15) - 1
"""Values: from ``at::internal::GRAIN_SIZE`` (ATen/Parallel.h) on, torch shares a copy out over a
pool of threads. Beside the policy's own pool that would be twice as many threads as cores."""


def gather_into(host: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Fill ``host`` with ``parts`` side by side, cast to its dtype.

    On the host that is one copy of each part, in blocks that take no second core. From a
    device the parts are laid together and cast there, then copied once; ``host`` is complete
    when the current stream is (at once, where its memory is not pinned).

    Args:
        host: [T, sum of widths], CPU.
        parts: [T, width] each, on one device.
    """
    if parts[0].device.type != "cpu":
        host.copy_(torch.cat([part.to(host.dtype) for part in parts], -1), non_blocking=True)
        return
    at = 0
    for part in parts:
        tokens, width = part.shape
        columns = host.narrow(1, at, width)
        rows = max(1, _BLOCK // width)
        if tokens <= rows:
            columns.copy_(part)
        else:
            for to, block in zip(columns.split(rows), part.split(rows), strict=True):
                to.copy_(block)
        at += width
