"""Attention of the training-time test without a [T, K * T] mask.

At TTT step s the anchor i attends to the step-0 keys of positions <= i and to its own keys of
steps 1 .. s. The step-0 keys before the first anchor are plain attention, those from it on causal
attention, and each later step is one key per anchor. All parts share one soft-max. With output
o_j and log-sum-exp L_j of each part,

    L = log(sum_j exp L_j),   out = sum_j exp(L_j - L) o_j.

In the backward pass each part is given ``out`` and L of the whole: it recomputes
P = exp(scores - L) and dS = P (dP - grad . out), which is exact for its share of the joint
soft-max. Nothing of size T * T is kept.

torch's flash attention operators return the log-sum-exp and take another one in their backward
pass; ``scaled_dot_product_attention`` does neither. On CPUs with a C compiler, the kernels of
``draft_trainer.kernels`` compute the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from draft_trainer.kernels import library
from draft_trainer.kernels.attention import (
    MOST_STEPS,
    causal_backward,
    causal_forward,
    step_keys_backward,
    step_keys_forward,
)


def ttt_attention(
    q: Tensor, k0: Tensor, v0: Tensor, later: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """Exact soft-max attention over a causal prefix and each anchor's own later keys.

    Rows of the batch are single sequences that start at index 0, so padding at their end is
    never attended to by a token before it.

    Args:
        q: [B, R, heads, D], this step's queries of the last R of T positions, the anchors. On a
            GPU float16 or bfloat16, with D a multiple of 8.
        k0: [B, T, kv_heads, D], keys of step 0; anchor i sees those of positions <= i.
        v0: the same shape.
        later: keys and values of steps 1 .. s, each [B, R, kv_heads, D]; an anchor sees its own.

    Returns:
        [B, R, heads, D], in the type of ``q``. Differentiable once in every argument.
    """
    flat = [tensor for pair in later for tensor in pair]
    if library.runs_on(q) and len(later) <= MOST_STEPS:
        return _CompiledAttention.apply(q, k0, v0, *flat)
    return _FlashAttention.apply(q, k0, v0, *flat)


class _CompiledAttention(torch.autograd.Function):
    """Attends with the C kernels; the anchors' context is part of their causal prefix."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k0: Tensor, v0: Tensor, *later: Tensor) -> Tensor:
        out, lse = causal_forward(q, k0, v0)
        scores = step_keys_forward(q, later, out, lse) if later else None
        ctx.save_for_backward(q, k0, v0, out, lse, scores, *later)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k0, v0, out, lse, scores, *later = ctx.saved_tensors
        delta = _dot(grad, out).contiguous()
        grad_q, *prefix = causal_backward(grad, q, k0, v0, delta, lse)
        if scores is None:
            return grad_q, *prefix
        grad_q = grad_q.contiguous()
        grads = step_keys_backward(q, later, grad, lse, scores, delta, grad_q)
        return grad_q, *prefix, *grads


class _FlashAttention(torch.autograd.Function):
    """Attends with torch's flash attention operators."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k0: Tensor, v0: Tensor, *later: Tensor) -> Tensor:
        context = k0.shape[1] - q.shape[1]
        parts = [_flash(q, k0[:, context:], v0[:, context:], causal=True)]
        if context:
            # With no keys at all, the operator crashes the process with SIGFPE.
            parts.append(_flash(q, k0[:, :context], v0[:, :context], causal=False))
        score = lse = torch.stack([part[1] for part in parts])
        if later:
            keys, values = _stacked(later)
            score = _dot(q[None], keys).mul_(q.shape[-1] ** -0.5)
            lse = torch.cat([lse, score])
        lse = lse.logsumexp(0)
        weighted = [(o, (part_lse - lse).exp()) for o, part_lse in parts]
        out = reduce(torch.add, (o * weight[..., None].to(o.dtype) for o, weight in weighted))
        if later:
            out += _times((score - lse).exp_(), values, q).sum(0)
        ctx.save_for_backward(q, k0, v0, out, lse, score, *later)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        q, k0, v0, out, lse, score, *later = ctx.saved_tensors
        context = k0.shape[1] - q.shape[1]
        grad_q, grad_k, grad_v = _flash_backward(
            grad, q, k0[:, context:], v0[:, context:], out, lse, causal=True
        )
        if context:
            more_q, *more = _flash_backward(
                grad, q, k0[:, :context], v0[:, :context], out, lse, causal=False
            )
            grad_q = grad_q + more_q
            grad_k, grad_v = torch.cat([more[0], grad_k], 1), torch.cat([more[1], grad_v], 1)
        if not later:
            return grad_q, grad_k, grad_v
        keys, values = _stacked(later)
        p = (score - lse).exp_()
        d_score = _dot(grad[None], values).sub_(_dot(grad, out)).mul_(p).mul_(q.shape[-1] ** -0.5)
        grad_q = grad_q + _times(d_score, keys, q).sum(0)
        grads = zip(_folded(d_score, q, keys), _folded(p, grad, values), strict=True)
        return grad_q, grad_k, grad_v, *(tensor for pair in grads for tensor in pair)


def _stacked(later: list[Tensor] | tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Stack the later steps' keys and values, each [s, B, R, kv_heads, D]: few launches for all."""
    return torch.stack(later[::2]), torch.stack(later[1::2])


def _flash(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
    """Output [B, R, heads, D] and log-sum-exp [B, R, heads] of one part's scores.

    Args:
        q: [B, R, heads, D].
        k: [B, S, kv_heads, D], S at least 1; R where ``causal``.
        v: the same shape.
        causal: query i sees the keys up to i, not all of them.
    """
    if not q.is_cpu:
        out, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False
        )
        return out, lse.transpose(1, 2)
    by_head = (x.transpose(1, 2) for x in (q, k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*by_head, 0.0, causal)
    return out.transpose(1, 2), lse.transpose(1, 2)


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of one part's q, k and v; ``out`` and ``lse`` are those of the whole soft-max."""
    lse = lse.transpose(1, 2).contiguous()
    if not q.is_cpu:
        unused = torch.empty(2, dtype=torch.int64, device=q.device)  # dropout's random state
        grads = torch.ops.aten._flash_attention_backward(
            *(grad, q, k, v, out, lse, None, None, q.shape[1], k.shape[1]),
            *(0.0, causal, unused, unused),
        )
        return grads[0], grads[1], grads[2]
    by_head = (x.transpose(1, 2) for x in (grad, q, k, v, out))
    grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        *by_head, lse, 0.0, causal
    )
    return grads[0].transpose(1, 2), grads[1].transpose(1, 2), grads[2].transpose(1, 2)


def _grouped(x: Tensor, like: Tensor) -> Tensor:
    """[..., heads, D] to [..., kv_heads, heads / kv_heads, D]."""
    return x.unflatten(-2, (like.shape[-2], -1))


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """x . y over D, in at least float32: [..., heads, D] and [..., kv_heads, D] to [..., heads]."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return (_grouped(x, y) * y[..., None, :]).sum(-1, dtype=wide).flatten(-2)


def _times(weight: Tensor, y: Tensor, like: Tensor) -> Tensor:
    """weight [..., heads] times y [..., kv_heads, D], as [..., heads, D]."""
    return (_grouped(weight[..., None].to(like.dtype), y) * y[..., None, :]).flatten(-3, -2)


def _folded(weight: Tensor, x: Tensor, like: Tensor) -> Tensor:
    """weight [..., heads] times x [..., heads, D], summed over a key head's queries."""
    return _grouped(weight[..., None].to(x.dtype) * x, like).sum(-2)
