"""``rows.c`` on tensors: SwiGLU, RMSNorm and rotary embedding, with backward passes."""

from __future__ import annotations

from ctypes import CDLL, c_float, c_int, c_int64

import torch
from torch import Tensor

from draft_trainer.kernels.library import pointer

# As in rows.c.
_BLOCK = 64


def swiglu_forward(functions: CDLL, gate_up: Tensor) -> Tensor:
    """As ``ops.swiglu``: [..., 2 * I] to [..., I]."""
    gate_up = gate_up.contiguous()
    out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    functions.swiglu_forward(pointer(gate_up), pointer(out), *_sizes(out))
    return out


def swiglu_backward(functions: CDLL, gate_up: Tensor, grad: Tensor) -> Tensor:
    """[..., 2 * I] and the gradient [..., I] to [..., 2 * I]."""
    gate_up, grad = gate_up.contiguous(), grad.contiguous()
    out = torch.empty_like(gate_up)
    functions.swiglu_backward(pointer(gate_up), pointer(grad), pointer(out), *_sizes(grad))
    return out


def norm_forward(functions: CDLL, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As ``ops.rms_norm``; also 1 / rms, float32 [..., 1]."""
    x = x.contiguous()
    out, scale = torch.empty_like(x), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
    rows, size, *rest = _sizes(x)
    functions.norm_forward(*map(pointer, (x, weight, out, scale)), rows, size, c_float(eps), *rest)
    return out, scale


def norm_backward(
    functions: CDLL,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    grad: Tensor,
    wants: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of ``x`` and of ``weight``, each if it is wanted; ``scale`` is [..., 1]."""
    x, grad = x.contiguous(), grad.contiguous()
    size = x.shape[-1]
    grad_x = torch.empty_like(x) if wants[0] else None
    blocks = -(-x.numel() // size // _BLOCK)
    shares = torch.zeros(blocks, size) if wants[1] else None
    outputs = [None if one is None else pointer(one) for one in (grad_x, shares)]
    functions.norm_backward(*map(pointer, (x, weight, grad, scale)), *outputs, *_sizes(x))
    return grad_x, None if shares is None else shares.sum(0).to(weight.dtype)


def rotate(functions: CDLL, x: Tensor, count: int, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """As ``ops.rotate_heads``, backwards with sign -1; ``cos`` and ``sin`` are float32."""
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    out = torch.empty_like(x)
    heads, size = x.shape[-2:]
    counts = (x.numel() // (heads * size), heads, count, size, cos.shape[-1])
    functions.rotate(
        *map(pointer, (x, out, cos, sin)),
        *map(c_int64, counts),
        c_float(sign),
        *_sizes(x)[2:],
    )
    return out


def _sizes(x: Tensor) -> tuple[c_int64, c_int64, c_int, c_int]:
    """The arguments that all of them end with: rows, size, wide, threads."""
    size = x.shape[-1]
    return (
        c_int64(x.numel() // size),
        c_int64(size),
        c_int(x.dtype == torch.float32),
        c_int(torch.get_num_threads()),
    )
