"""Moves one chosen sequence's states from where the policy computed them to host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch


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
        at = 0
        for part in parts:
            width = part.shape[-1]
            host.narrow(1, at, width).copy_(part)
            at += width
    else:
        host.copy_(torch.cat([part.to(host.dtype) for part in parts], -1), non_blocking=True)
