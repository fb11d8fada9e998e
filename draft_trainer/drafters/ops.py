"""RMSNorm, rotary embedding, SwiGLU, matrix products, a predicted rate: each with its gradient.

The first three have a C kernel for CPUs beside the plain torch that runs everywhere; products in
float32 on CPUs go through oneDNN, which torch ships but uses for other types only.
"""

from __future__ import annotations

import platform
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from draft_trainer.kernels import library, rows


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
        if library.runs_on(x) and x.dtype == weight.dtype:
            out, scale = rows.norm_forward(x, weight, eps)
            ctx.save_for_backward(x, weight, scale)
            return out
        if not x.is_cpu and x.dtype == weight.dtype:
            out, scale = torch.ops.aten._fused_rms_norm(x, weight.shape, weight, eps)
            ctx.save_for_backward(x, weight, scale)
            return out
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.linalg.vecdot(wide, wide).div_(x.shape[-1]).add_(eps).rsqrt_()[..., None]
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).mul_(weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        if library.runs_on(x) and x.dtype == weight.dtype:
            return *rows.norm_backward(x, weight, scale, grad, ctx.needs_input_grad[:2]), None
        if not x.is_cpu and x.dtype == weight.dtype:
            grads = torch.ops.aten._fused_rms_norm_backward(
                grad, x, weight.shape, scale, weight, ctx.needs_input_grad[:2]
            )
            return *grads, None
        normed = x.to(scale.dtype) * scale
        wide = grad.to(scale.dtype)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (wide * normed).flatten(0, -2).sum(0).to(weight.dtype)
        if not ctx.needs_input_grad[0]:
            return None, grad_weight, None
        # d/dx of x * scale: the component along x changes the length alone, which scale undoes.
        wide = wide * weight
        along = torch.linalg.vecdot(wide, normed).div_(x.shape[-1])[..., None]
        return wide.addcmul_(normed, along, value=-1.0).mul_(scale).to(x.dtype), grad_weight, None


def rate_prediction(
    states: Tensor, rates: Tensor, row_weights: Tensor, weight: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The binary cross-entropy to ``rates`` of a linear prediction's sigmoid, and its gradients.

    Args:
        states: [N, size]; the prediction sees the first columns.
        rates: [N], from 0 to 1; constants.
        row_weights: [N], factors of the rows in the gradients.
        weight: [1, width].
        bias: [1].

    Returns:
        The losses, [N], and the gradients of the columns, [N, width], of weight and of bias.
    """
    seen, rates = states[:, : weight.shape[1]].to(weight.dtype), rates.to(weight.dtype)
    logits = seen @ weight[0] + bias
    slopes = (logits.sigmoid() - rates) * row_weights
    losses = F.softplus(logits) - rates * logits
    return losses, slopes[:, None] * weight, (slopes @ seen)[None], slopes.sum()[None]


def rotate_heads(x: Tensor, count: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first ``count`` heads and copy the others.

    Args:
        x: [B, T, heads, D].
        count: heads to rotate, for example the queries' and the keys' but not the values'.
        cos: [B, T, 1, R / 2], at least float32; elements of a head from R on are copied too.
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
    # The C kernel needs angles for every row; plain torch can share them over the batch.
    if library.runs_on(x) and cos.dtype == torch.float32 and cos.shape[:2] == x.shape[:2]:
        return rows.rotate(x, count, cos, sin, sign)
    sin = sin if sign > 0 else -sin
    out = torch.empty_like(x)
    width = 2 * cos.shape[-1]
    out[:, :, count:] = x[:, :, count:]
    out[:, :, :count, width:] = x[:, :, :count, width:]
    first, second = x[:, :, :count, :width].chunk(2, dim=-1)
    to_first, to_second = out[:, :, :count, :width].chunk(2, dim=-1)
    # The products are in the angles' type; their sum is rounded when it is written.
    torch.addcmul(first * cos, second, sin, value=-1.0, out=to_first)
    torch.addcmul(second * cos, first, sin, out=to_second)
    return out


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: [..., 2 * I] to [..., I].

    Its backward pass writes both halves of the gradient into one tensor; autograd's computes each
    and concatenates them, three more passes over the widest tensor of the layer.
    """
    return _SwiGLU.apply(gate_up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        if library.runs_on(gate_up):
            return rows.swiglu_forward(gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        if library.runs_on(gate_up):
            return rows.swiglu_backward(gate_up, grad)
        return _swiglu_backward(gate_up, grad)


def _swiglu_backward(gate_up: Tensor, grad: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    out = torch.empty_like(gate_up)
    to_gate, to_up = out.chunk(2, dim=-1)
    torch.mul(F.silu(gate), grad, out=to_up)
    torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=to_gate)
    return out


def swiglu_linear(gate_up: Tensor, weight: Tensor) -> Tensor:
    """``linear(swiglu(gate_up), weight)``, which on a GPU does not keep the SwiGLU's output.

    Computing it again costs a pass over it; keeping it, an eighth of a training step's memory.
    """
    if gate_up.is_cpu:
        return linear(swiglu(gate_up), weight)
    return _SwiGLULinear.apply(gate_up, weight)


class _SwiGLULinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up, weight)
        return F.linear(swiglu(gate_up), weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate_up, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        grad_weight = rows.T @ swiglu(gate_up).flatten(0, -2)
        return _swiglu_backward(gate_up, grad @ weight), grad_weight


_ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def cpu_precision() -> Literal["float32", "bfloat16"]:
    """The type in which matrix products are faster on this CPU.

    On x86-64 without AVX-512, oneDNN has a reference kernel only for bfloat16, which takes fifty
    times as long as float32.
    """
    narrow = torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2")
    return "float32" if narrow and platform.machine() == "x86_64" else "bfloat16"


def product(a: Tensor, b: Tensor) -> Tensor:
    """[M, K] times [K, N], any strides, in their common type."""
    if not _through_onednn(a):
        return a @ b
    if a.stride(0) == 1 and a.stride(1) != 1:
        # oneDNN is faster with a transposed second operand than with a transposed first.
        return _onednn(b.T, a.T).T
    return _onednn(a, b)


def add_product(into: Tensor, a: Tensor, b: Tensor) -> None:
    """Add [M, K] times [K, N] to a tensor [M, N] of their type, or in float32.

    CUDA adds to float32 what it has not rounded, in one pass, from torch 2.10 on:
    https://github.com/pytorch/pytorch/pull/167931.
    """
    by_cuda = (into.is_cuda and torch.version.hip is None) or into.is_meta
    if by_cuda and torch.__version__ >= "2.10" and into.dtype != a.dtype:
        torch.addmm(into, a, b, out_dtype=into.dtype, out=into)
    else:
        into += product(a, b)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``torch.nn.functional.linear``: [..., in] with weight [out, in] to [..., out]."""
    if not _through_onednn(x):
        return F.linear(x, weight, bias)
    out = _Linear.apply(x.flatten(0, -2), weight).unflatten(0, x.shape[:-1])
    return out if bias is None else out + bias


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
        # For columns of a larger matrix, oneDNN has only a far slower reference kernel.
        weight = weight.contiguous()
    return torch.ops.mkldnn._linear_pointwise(a, weight, None, "none", [], "")
