"""Matrix products, by the fastest kernel that torch ships for the machine.

torch multiplies float32 matrices on a CPU with MKL, which on AMD's Zen 5 reaches 95 GFLOP/s a
core where oneDNN, which is in the same torch and multiplies its bfloat16 matrices, reaches 210.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def product(a: Tensor, b: Tensor) -> Tensor:
    """[M, K] times [K, N], any strides, in their common type."""
    if not _through_onednn(a):
        return a @ b
    if a.stride(0) == 1 and a.stride(1) != 1:
        # oneDNN is a third slower with a transposed first operand than with a transposed second.
        return _onednn(b.T, a.T).T
    return _onednn(a, b)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear``: [..., in] with weight [out, in] to [..., out]."""
    if not _through_onednn(x):
        return F.linear(x, weight, bias)
    out = _Linear.apply(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])
    return out if bias is None else out + bias


class Linear(nn.Linear):
    """``torch.nn.Linear`` through ``linear``."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] to [..., out]."""
        return linear(x, self.weight, self.bias)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight.T)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        grad_x = product(grad, weight) if ctx.needs_input_grad[0] else None
        grad_weight = product(grad.T, x) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight


def _through_onednn(x: Tensor) -> bool:
    return _ONEDNN and x.dtype == torch.float32 and x.device.type == "cpu" and x.numel() > 0


def _onednn(a: Tensor, b: Tensor) -> Tensor:
    weight = b.T
    if not (weight.is_contiguous() or b.is_contiguous()):
        # Columns of a larger matrix get oneDNN's reference kernel, a thousand times slower.
        weight = weight.contiguous()
    return torch.ops.mkldnn._linear_pointwise(a, weight, None, "none", [], "")
