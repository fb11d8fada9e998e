"""Causal attention that also gives the log-sum-exp of its scores, and its backward pass.

``torch.nn.functional.scaled_dot_product_attention`` keeps the log-sum-exp to itself and cannot
take another one for its backward pass; flex attention has none on a CPU. So this is plain torch,
a block of queries and key heads at a time: nothing of size T * T is kept, future keys cost
nothing beyond their block, and a block is small enough for a core's cache. On a CPU it is the
reference of ``kernels/causal.c``, which runs where a C compiler is found.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from draft_trainer.kernels.causal import causal_backward, causal_forward
from draft_trainer.kernels.library import kernels_for

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
