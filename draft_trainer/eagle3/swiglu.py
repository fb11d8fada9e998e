"""SwiGLU of a gate and an up projection that were made by one product."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from draft_trainer.kernels.library import kernels_for
from draft_trainer.kernels.rows import swiglu_backward, swiglu_forward


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up: [..., 2 * I] to [..., I].

    Its backward pass writes both halves of the gradient where the product wants them; autograd's
    makes each by itself and joins them, three passes more over the widest tensor of the layer.
    """
    return _SwiGLU.apply(gate_up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        kernels = kernels_for(gate_up)
        if kernels is not None:
            return swiglu_forward(kernels, gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        kernels = kernels_for(gate_up)
        if kernels is not None:
            return swiglu_backward(kernels, gate_up, grad)
        gate, up = gate_up.chunk(2, dim=-1)
        out = torch.empty_like(gate_up)
        to_gate, to_up = out.chunk(2, dim=-1)
        torch.mul(F.silu(gate), grad, out=to_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=to_gate)
        return out
