"""Attention of the training-time test without a [T, K * T] mask.

At TTT step s the anchor i attends to the step-0 keys of positions <= i and to its own keys of
steps 1 .. s. The first part is ordinary causal attention, the second one key per step and anchor
(a diagonal). Both go through one soft-max: causal attention also gives the log-sum-exp L0 of its
scores, and with own scores o_1 .. o_s

    L = log(exp L0 + sum_r exp o_r),   out = exp(L0 - L) out_0 + sum_r exp(o_r - L) v_r.

Backward, the kernel of causal attention is handed ``out`` and L of BOTH parts: it recomputes
P = exp(scores - L) and dS = P (dP - grad . out), which is exact for its part of the joint
soft-max. Nothing of size T * T is ever kept.

Causal attention that also gives the log-sum-exp of its scores, and its backward pass.

``torch.nn.functional.scaled_dot_product_attention`` keeps the log-sum-exp to itself and cannot
take another one for its backward pass; flex attention has none on a CPU. So this is plain torch,
a block of queries and key heads at a time: nothing of size T * T is kept, future keys cost
nothing beyond their block, and a block is small enough for a core's cache. On a CPU it is the
reference of ``kernels/causal.c``, which runs where a C compiler is found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import CDLL
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from draft_trainer.kernels.causal import causal_backward, causal_forward
from draft_trainer.kernels.library import kernels_for
from draft_trainer.kernels.own import MOST_STEPS, own_backward, own_forward

_LOG2E = 1.4426950408889634
_QUERY_BLOCK = {"cpu": 64, "cuda": 1024}
# Scores of one block: a CPU wants them in its cache, a GPU wants them to fill it.
_BLOCK_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 27}


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The last R of T positions attend to every position up to their own.

    Args:
        q: [B, R, heads, D], R <= T.
        k: [B, T, kv_heads, D].
        v: the same shape.

    Returns:
        [B, R, heads, D] in the type of ``q``, and the log-sum-exp of the scaled scores,
        [B, R, heads] in at least float32.
    """
    kernels = kernels_for(q)
    if kernels is not None:
        return causal_forward(kernels, q, k, v)
    queries, keys, values = _queries(q, k), _keys(k), _keys(v)
    scaled = _scaled(queries, queries.shape[-1] ** -0.5 * _LOG2E)
    wide_keys = keys.to(scaled.dtype).transpose(1, 2)
    out = torch.empty_like(queries)
    lse = scaled.new_empty(queries.shape[:3])
    for block in _blocks(queries, keys.shape[1]):
        scores = block.scores(scaled, wide_keys)
        highest = scores.amax(-1, keepdim=True)
        p = scores.sub_(highest).exp2_()
        total = p.sum(-1, keepdim=True)
        lse[block.queries] = block.by_row((highest + total.log2())[..., 0] / _LOG2E)
        # Divided last, where a row has D entries and not T.
        mixed = torch.bmm(p.to(v.dtype), values[block.keys]) / total
        out[block.queries] = block.by_row(mixed)
    return _by_head(out, q), _by_head(lse[..., None], q)[..., 0]


def causal_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, delta: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, where the soft-max may have had further keys.

    Args:
        grad: of the output, [B, R, heads, D].
        q: as given to ``causal_attention``.
        k: as given.
        v: as given.
        delta: grad . output over D, [B, R, heads] in at least float32; the output of the WHOLE
            soft-max.
        lse: log-sum-exp of the whole soft-max, like ``delta``.
    """
    kernels = kernels_for(q)
    if kernels is not None:
        return causal_backward(kernels, grad, q, k, v, delta, lse)
    queries, keys, values, flowing = _queries(q, k), _keys(k), _keys(v), _queries(grad, k)
    scale = queries.shape[-1] ** -0.5
    scaled = _scaled(queries, scale * _LOG2E)
    wide_keys = keys.to(scaled.dtype).transpose(1, 2)
    lse2 = _queries((lse * _LOG2E)[..., None], k)
    offset = _queries(delta[..., None], k)
    grad_q = torch.empty_like(queries)
    grad_k, grad_v = torch.zeros_like(wide_keys.mT), torch.zeros_like(wide_keys.mT)
    for block in _blocks(queries, keys.shape[1]):
        p = block.scores(scaled, wide_keys).sub_(block.flat(lse2)).exp2_()
        g = block.flat(flowing)
        d_p = torch.bmm(g, values[block.keys].transpose(1, 2)).to(p.dtype)
        d_s = d_p.sub_(block.flat(offset)).mul_(p).to(q.dtype)
        grad_q[block.queries] = block.by_row(torch.bmm(d_s, keys[block.keys]))
        grad_k[block.keys] += torch.bmm(d_s.transpose(1, 2), block.flat(queries))
        grad_v[block.keys] += torch.bmm(p.to(g.dtype).transpose(1, 2), g)
    return (
        _by_head(grad_q.mul_(scale), q),
        _by_head(grad_k.mul_(scale).to(k.dtype)[:, :, None], k),
        _by_head(grad_v.to(v.dtype)[:, :, None], v),
    )


@dataclass(frozen=True)
class _Block:
    """Some key heads of the batch, some query positions of theirs, and how many keys those see."""

    heads: slice
    rows: slice
    seen: int
    future: Tensor

    @property
    def queries(self) -> tuple[slice, slice]:
        return self.heads, self.rows

    @property
    def keys(self) -> tuple[slice, slice]:
        return self.heads, slice(0, self.seen)

    def flat(self, x: Tensor) -> Tensor:
        """[B * kv_heads, T, group, D] to [n, R * group, D]."""
        return x[self.queries].flatten(1, 2)

    def by_row(self, x: Tensor) -> Tensor:
        """The inverse of ``flat``, for what is written back."""
        return x.unflatten(1, (self.rows.stop - self.rows.start, -1))

    def scores(self, scaled: Tensor, keys: Tensor) -> Tensor:
        """[n, rows * group, seen], minus infinity where the key is in the future."""
        scores = torch.bmm(self.flat(scaled), keys[self.heads, :, : self.seen])
        scores[..., self.seen - self.future.shape[1] :] += self.future
        return scores


def _blocks(queries: Tensor, keys: int) -> Iterator[_Block]:
    count, length, group, _ = queries.shape
    size = _QUERY_BLOCK[queries.device.type]
    wide = torch.promote_types(queries.dtype, torch.float32)
    for start in range(0, length, size):
        rows = slice(start, min(start + size, length))
        span = rows.stop - start
        seen = keys - length + rows.stop
        future = torch.full((span, span), float("-inf"), dtype=wide, device=queries.device).triu(1)
        future = future.repeat_interleave(group, dim=0)
        at_once = max(1, _BLOCK_ELEMENTS[queries.device.type] // (span * group * seen))
        for head in range(0, count, at_once):
            yield _Block(slice(head, min(head + at_once, count)), rows, seen, future)


def _scaled(queries: Tensor, factor: float) -> Tensor:
    """In at least float32: scores in bfloat16 would be off by a tenth where they are large."""
    return queries.to(torch.promote_types(queries.dtype, torch.float32)) * factor


def _queries(x: Tensor, k: Tensor) -> Tensor:
    """[B, T, heads, D] to [B * kv_heads, T, heads / kv_heads, D], contiguous."""
    return x.unflatten(2, (k.shape[2], -1)).transpose(1, 2).flatten(0, 1).contiguous()


def _keys(x: Tensor) -> Tensor:
    """[B, T, kv_heads, D] to [B * kv_heads, T, D], contiguous."""
    return x.transpose(1, 2).flatten(0, 1).contiguous()


def _by_head(x: Tensor, like: Tensor) -> Tensor:
    """[B * kv_heads, T, group, D] to [B, T, kv_heads * group, D]."""
    return x.unflatten(0, (like.shape[0], -1)).transpose(1, 2).flatten(2, 3)


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
