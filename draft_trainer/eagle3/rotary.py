"""Rotary embedding of several heads at once, in the NeoX layout: a head's halves are the pairs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draft_trainer.kernels.library import kernels_for
from draft_trainer.kernels.rows import rotate


def rotate_heads(x: Tensor, count: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first ``count`` heads and pass the others on.

    Args:
        x: [B, T, heads, D].
        count: heads to rotate, for example the queries' and the keys' but not the values'.
        cos: [B, T, 1, R / 2], at least float32; elements of a head from R on are passed on too.
        sin: the same.

    Returns:
        [B, T, heads, D], in the type of ``x``.
    """
    return _RotateHeads.apply(x, count, cos, sin)


class _RotateHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.count = count
        ctx.save_for_backward(cos, sin)
        return _rotated(x, count, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return _rotated(grad, ctx.count, cos, sin, -1.0), None, None, None


def _rotated(x: Tensor, count: int, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    kernels = kernels_for(x)
    # The C kernel wants an angle for every row; the product may share one over the batch.
    if kernels is not None and cos.dtype == torch.float32 and cos.shape[:2] == x.shape[:2]:
        return rotate(kernels, x, count, cos, sin, sign)
    sin = sin if sign > 0 else -sin
    out = torch.empty_like(x)
    width = 2 * cos.shape[-1]
    out[:, :, count:] = x[:, :, count:]
    out[:, :, :count, width:] = x[:, :, :count, width:]
    first, second = x[:, :, :count, :width].to(cos.dtype).chunk(2, dim=-1)
    to_first, to_second = out[:, :, :count, :width].chunk(2, dim=-1)
    to_first.copy_((first * cos).addcmul_(second, sin, value=-1.0))
    to_second.copy_((second * cos).addcmul_(first, sin))
    return out
