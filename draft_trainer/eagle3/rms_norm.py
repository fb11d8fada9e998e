"""RMSNorm with a backward pass of its own: autograd's keeps six tensors where one number does."""

from __future__ import annotations

from ctypes import CDLL
from typing import Any

import torch
from torch import Tensor

from draft_trainer.kernels.library import kernels_for
from draft_trainer.kernels.rows import norm_backward, norm_forward


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight; the mean of squares in at least float32, as vLLM has it.

    Args:
        x: [..., size].
        weight: [size].
        eps: added to the mean of squares.

    Returns:
        [..., size], in the type of ``x``.
    """
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        kernels = _kernels_for(x, weight)
        if kernels is not None:
            out, scale = norm_forward(kernels, x, weight, eps)
            ctx.save_for_backward(x, weight, scale)
            return out
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.linalg.vecdot(wide, wide).div_(x.shape[-1]).add_(eps).rsqrt_()[..., None]
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        kernels = _kernels_for(x, weight)
        if kernels is not None:
            wants = ctx.needs_input_grad[:2]
            return *norm_backward(kernels, x, weight, scale, grad, wants), None
        normed = x.to(scale.dtype) * scale
        wide = grad.to(scale.dtype)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (wide * normed).flatten(0, -2).sum(0).to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None
        # d/dx of x * scale: what points along x itself changes the length and nothing else.
        wide = wide * weight
        along = torch.linalg.vecdot(wide, normed).div_(x.shape[-1])[..., None]
        return wide.addcmul_(normed, along, value=-1.0).mul_(scale).to(x.dtype), grad_weight, None


def _kernels_for(x: Tensor, weight: Tensor) -> CDLL | None:
    return kernels_for(x) if x.dtype == weight.dtype else None
