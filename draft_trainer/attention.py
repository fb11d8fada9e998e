"""Attention of the training-time test without a [T, K * T] mask.

At TTT step s the anchor i attends to the step-0 keys of positions <= i and to its own keys of
steps 1 .. s. The first part is ordinary causal attention, the second one key per step and anchor
(a diagonal). Both go through one softmax: their scores are joined before it, block of queries by
block of queries, and only the joint log-sum-exp is kept for the backward pass. Memory is
O(block * T) and not O(T * K * T).
"""

from __future__ import annotations

import torch
from torch import Tensor

_QUERY_BLOCK = 512


def ttt_attention(q: Tensor, k0: Tensor, v0: Tensor, k_own: Tensor, v_own: Tensor) -> Tensor:
    """Exact softmax attention over a causal prefix and each anchor's own later keys.

    Rows of the batch are single sequences that start at index 0, so padding at their end is
    never attended to by a token before it.

    Args:
        q: [B, heads, T, D], queries of this step.
        k0: [B, kv_heads, T, D], keys of step 0; anchor i sees those of positions <= i.
        v0: [B, kv_heads, T, D].
        k_own: [S, B, kv_heads, T, D], keys of steps 1 .. S (S may be 0); anchor i sees index i.
        v_own: [S, B, kv_heads, T, D].

    Returns:
        [B, heads, T, D], in the type of ``q``. Differentiable once in every argument.
    """
    with torch.autocast(q.device.type, enabled=False):
        return _TTTAttention.apply(q, k0, v0, k_own, v_own)  # type: ignore[no-any-return]


class _TTTAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        q: Tensor,
        k0: Tensor,
        v0: Tensor,
        k_own: Tensor,
        v_own: Tensor,
    ) -> Tensor:
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:-1], dtype=_wide(q))
        for rows in _blocks(q.shape[2]):
            scores, own = _scores(q, k0, k_own, rows)
            joint = torch.cat([scores, own], dim=-1)
            block_lse = joint.logsumexp(-1)
            p = (scores - block_lse[..., None]).exp().to(q.dtype)
            p_own = (own - block_lse[..., None]).exp().to(q.dtype)
            attended = _ungroup(_group(p, k0) @ v0[:, :, : rows.stop], q)
            for step, value in enumerate(v_own):
                attended = attended + p_own[..., step, None] * _repeat(value[:, :, rows], q)
            out[:, :, rows] = attended
            lse[:, :, rows] = block_lse
        ctx.save_for_backward(q, k0, v0, k_own, v_own, out, lse)
        return out

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx, grad_out: Tensor
    ) -> tuple[Tensor, ...]:
        q, k0, v0, k_own, v_own, out, lse = ctx.saved_tensors  # type: ignore[attr-defined]
        scale = q.shape[-1] ** -0.5
        grads = tuple(torch.zeros_like(t) for t in (q, k0, v0, k_own, v_own))
        grad_q, grad_k0, grad_v0, grad_k_own, grad_v_own = grads
        for rows in _blocks(q.shape[2]):
            stop = rows.stop
            g = grad_out[:, :, rows]
            # dS = P * (dP - sum(P * dP)), and sum(P * dP) over BOTH parts is grad . out.
            delta = (g * out[:, :, rows]).sum(-1, keepdim=True).to(lse.dtype)
            scores, own = _scores(q, k0, k_own, rows)
            p = (scores - lse[:, :, rows, None]).exp()
            p_own = (own - lse[:, :, rows, None]).exp()
            d_p = _ungroup(_group(g, k0) @ v0[:, :, :stop].transpose(-1, -2), q)
            d_s = (p * (d_p - delta) * scale).to(q.dtype)
            grad_q[:, :, rows] = _ungroup(_group(d_s, k0) @ k0[:, :, :stop], q)
            q_rows = _group(q[:, :, rows].contiguous(), k0)
            grad_k0[:, :, :stop] += _group(d_s, k0).transpose(-1, -2) @ q_rows
            grad_v0[:, :, :stop] += _group(p.to(q.dtype), k0).transpose(-1, -2) @ _group(g, k0)
            for step in range(k_own.shape[0]):
                key = _repeat(k_own[step][:, :, rows], q)
                value = _repeat(v_own[step][:, :, rows], q)
                weight = p_own[..., step, None]
                d_own = (g * value).sum(-1, keepdim=True).to(lse.dtype)
                d_s_own = (weight * (d_own - delta) * scale).to(q.dtype)
                grad_q[:, :, rows] += d_s_own * key
                grad_k_own[step][:, :, rows] = _fold(d_s_own * q[:, :, rows], k0)
                grad_v_own[step][:, :, rows] = _fold(weight.to(q.dtype) * g, k0)
        return grads


def _scores(q: Tensor, k0: Tensor, k_own: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
    """Scaled scores of a block: [B, heads, R, rows.stop] masked causally, and [B, heads, R, S]."""
    block = q[:, :, rows] * q.shape[-1] ** -0.5
    scores = _ungroup(_group(block, k0) @ k0[:, :, : rows.stop].transpose(-1, -2), q)
    index = torch.arange(rows.stop, device=q.device)
    future = index > index[rows, None]
    scores = scores.to(_wide(q)).masked_fill(future, float("-inf"))
    own = [(block * _repeat(key[:, :, rows], q)).sum(-1).to(_wide(q)) for key in k_own]
    return scores, torch.stack(own, dim=-1) if own else scores[..., :0]


def _blocks(length: int) -> list[slice]:
    return [slice(a, min(a + _QUERY_BLOCK, length)) for a in range(0, length, _QUERY_BLOCK)]


def _wide(q: Tensor) -> torch.dtype:
    """Softmax in at least float32."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _group(x: Tensor, k0: Tensor) -> Tensor:
    """[B, heads, R, N] to [B, kv_heads, group * R, N]: one matmul for the queries of a key head."""
    batch, heads, rows, size = x.shape
    kv_heads = k0.shape[1]
    return x.reshape(batch, kv_heads, heads // kv_heads * rows, size)


def _ungroup(x: Tensor, q: Tensor) -> Tensor:
    """The inverse of ``_group``."""
    return x.reshape(x.shape[0], q.shape[1], -1, x.shape[-1])


def _repeat(x: Tensor, q: Tensor) -> Tensor:
    """[B, kv_heads, R, D] to [B, heads, R, D]."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


def _fold(x: Tensor, k0: Tensor) -> Tensor:
    """[B, heads, R, D] to [B, kv_heads, R, D], summed over the queries of a key head."""
    return x.unflatten(1, (k0.shape[1], -1)).sum(2)
