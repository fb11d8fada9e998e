"""Attention of the training-time test without a [T, K * T] mask.

At TTT step s the anchor i attends to the step-0 keys of positions <= i and to its own keys of
steps 1 .. s. The first part is ordinary causal attention, the second one key per step and anchor
(a diagonal). Both go through one soft-max: causal attention also gives the log-sum-exp L0 of its
scores, and with own scores o_1 .. o_s

    L = log(exp L0 + sum_r exp o_r),   out = exp(L0 - L) out_0 + sum_r exp(o_r - L) v_r.

Backward, the kernel of causal attention is handed ``out`` and L of BOTH parts: it recomputes
P = exp(scores - L) and dS = P (dP - grad . out), which is exact for its part of the joint
soft-max. Nothing of size T * T is ever kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from draft_trainer.eagle3.causal import causal_attention, causal_attention_backward
from draft_trainer.kernels.library import kernels_for
from draft_trainer.kernels.own import MOST_STEPS, own_backward, own_forward


def ttt_attention(
    q: Tensor, k0: Tensor, v0: Tensor, own: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """Exact softmax attention over a causal prefix and each anchor's own later keys.

    Rows of the batch are single sequences that start at index 0, so padding at their end is
    never attended to by a token before it.

    Args:
        q: [B, R, heads, D], this step's queries of the last R of T positions, the anchors.
        k0: [B, T, kv_heads, D], keys of step 0; anchor i sees those of positions <= i.
        v0: the same shape.
        own: keys and values of steps 1 .. s, each [B, R, kv_heads, D]; an anchor sees its own.

    Returns:
        [B, R, heads, D], in the type of ``q``. Differentiable once in every argument.
    """
    return _TTTAttention.apply(q, k0, v0, *(tensor for pair in own for tensor in pair))


class _TTTAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k0: Tensor, v0: Tensor, *own: Tensor) -> Tensor:
        out, lse = causal_attention(q, k0, v0)
        kernels = _kernels_for(q, own)
        if kernels is not None:
            out, lse = out.contiguous(), lse.contiguous()
            scores = own_forward(kernels, q, own, out, lse)
            ctx.save_for_backward(q, k0, v0, out, lse, *scores, *own)
            return out
        own_scores = [_dot(q, key) * q.shape[-1] ** -0.5 for key in own[::2]]
        if own_scores:
            prefix = lse
            lse = torch.stack([prefix, *own_scores]).logsumexp(0)
            out = out * (prefix - lse).exp()[..., None].to(out.dtype)
            for score, value in zip(own_scores, own[1::2], strict=True):
                out += _times((score - lse).exp(), value, q)
        ctx.save_for_backward(q, k0, v0, out, lse, *own_scores, *own)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        q, k0, v0, out, lse, *rest = ctx.saved_tensors
        steps = len(rest) // 3
        own_scores, own = rest[:steps], rest[steps:]
        delta = _dot(grad, out)
        grad_q, grad_k0, grad_v0 = causal_attention_backward(grad, q, k0, v0, delta, lse)
        kernels = _kernels_for(q, own)
        if kernels is not None:
            grad_q = grad_q.contiguous()
            scores = torch.stack(own_scores)
            of_own = own_backward(kernels, q, own, grad, lse, scores, delta.contiguous(), grad_q)
            return grad_q, grad_k0, grad_v0, *of_own
        grads = [grad_k0, grad_v0]
        for score, key, value in zip(own_scores, own[::2], own[1::2], strict=True):
            p = (score - lse).exp()
            d_score = p * (_dot(grad, value) - delta) * q.shape[-1] ** -0.5
            grad_q = grad_q + _times(d_score, key, q)
            grads += [_folded(d_score, q, key), _folded(p, grad, value)]
        return grad_q, *grads


def _kernels_for(q: Tensor, own: Sequence[Tensor]) -> CDLL | None:
    return kernels_for(q) if 0 < len(own) <= 2 * MOST_STEPS else None


def _grouped(x: Tensor, like: Tensor) -> Tensor:
    """[B, T, heads, D] to [B, T, kv_heads, heads / kv_heads, D]."""
    return x.unflatten(2, (like.shape[2], -1))


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """x . y over D, in at least float32: [B, T, heads, D] and [B, T, kv_heads, D] to
    [B, T, heads]."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return (_grouped(x, y) * y[:, :, :, None]).sum(-1, dtype=wide).flatten(2)


def _times(weight: Tensor, y: Tensor, like: Tensor) -> Tensor:
    """weight [B, T, heads] times y [B, T, kv_heads, D], as [B, T, heads, D]."""
    return (_grouped(weight[..., None].to(like.dtype), y) * y[:, :, :, None]).flatten(2, 3)


def _folded(weight: Tensor, x: Tensor, like: Tensor) -> Tensor:
    """weight [B, T, heads] times x [B, T, heads, D], summed over a key head's queries."""
    # One addition after the other: a sum over so short a dimension is six times slower.
    return reduce(torch.add, _grouped(weight[..., None].to(x.dtype) * x, like).unbind(3))
