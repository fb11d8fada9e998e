"""``rows.c`` and ``score_rows.c`` on tensors: SwiGLU, RMSNorm, rotary embedding and the loss."""

from __future__ import annotations

import torch
from torch import Tensor

from draft_trainer.kernels.library import run

# As in rows.c.
_BLOCK = 64
_TARGETS = {"kl": 0, "tv": 1, "lk": 2}


def swiglu_forward(gate_up: Tensor) -> Tensor:
    """Compute ``ops.swiglu``: [..., 2 * I] to [..., I]."""
    gate_up = gate_up.contiguous()
    out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
    run("swiglu_forward", gate_up, out, *_sizes(out))
    return out


def swiglu_backward(gate_up: Tensor, grad: Tensor) -> Tensor:
    """[..., 2 * I] and the gradient [..., I] to [..., 2 * I]."""
    gate_up, grad = gate_up.contiguous(), grad.contiguous()
    out = torch.empty_like(gate_up)
    run("swiglu_backward", gate_up, grad, out, *_sizes(grad))
    return out


def norm_forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute ``ops.rms_norm``, and 1 / rms, float32 [..., 1]."""
    x = x.contiguous()
    out, scale = torch.empty_like(x), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
    rows, size, wide = _sizes(x)
    run("norm_forward", x, weight, out, scale, rows, size, float(eps), wide)
    return out, scale


def norm_backward(
    x: Tensor, weight: Tensor, scale: Tensor, grad: Tensor, wants: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of ``x`` and of ``weight``, each if it is wanted; ``scale`` is [..., 1]."""
    x, grad = x.contiguous(), grad.contiguous()
    size = x.shape[-1]
    grad_x = torch.empty_like(x) if wants[0] else None
    blocks = -(-x.numel() // size // _BLOCK)
    shares = torch.zeros(blocks, size, dtype=torch.float32) if wants[1] else None
    run("norm_backward", x, weight, grad, scale, grad_x, shares, *_sizes(x))
    return grad_x, None if shares is None else shares.sum(0).to(weight.dtype)


def rotate(x: Tensor, count: int, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """Compute ``ops.rotate_heads``, backwards with sign -1; ``cos`` and ``sin`` are float32."""
    x, cos, sin = x.contiguous(), cos.contiguous(), sin.contiguous()
    out = torch.empty_like(x)
    heads, size = x.shape[-2:]
    counts = (x.numel() // (heads * size), heads, count, size, cos.shape[-1])
    run("rotate", x, out, cos, sin, *counts, float(sign), x.dtype == torch.float32)
    return out


def score_rows(
    logits: Tensor, policy: Tensor, log_z: Tensor, inverse_t: Tensor, target: str, learns: bool
) -> Tensor:
    """Compute ``loss._score_blocks``: logits [K, R, V] become their gradient if ``learns``.

    Args:
        logits: float32 or bfloat16, each [R, V] contiguous.
        policy: [R, V], float32 or bfloat16.
        log_z: float32 [R].
        inverse_t: float32 [R].

    Returns:
        float64 [K, R, 4].
    """
    steps, rows, vocab = logits.shape
    policy, log_z, inverse_t = policy.contiguous(), log_z.contiguous(), inverse_t.contiguous()
    scratch = torch.empty(torch.get_num_threads(), 2, vocab, dtype=torch.float32)
    scores = torch.empty(steps, rows, 4, dtype=torch.float64)
    wide = (logits.dtype == torch.float32, policy.dtype == torch.float32)
    how = (_TARGETS[target], learns, *wide)
    counts = (steps, rows, vocab)
    run(
        *("score_rows", logits, logits.stride(0), policy, log_z, inverse_t),
        *(*counts, *how, scratch, scores),
    )
    return scores


def _sizes(x: Tensor) -> tuple[int, int, bool]:
    """Rows, their size, and whether they are float32."""
    size = x.shape[-1]
    return x.numel() // size, size, x.dtype == torch.float32
