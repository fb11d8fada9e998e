"""``causal.c`` and ``step_keys.c`` on tensors: the two parts of ``drafters.attention``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draft_trainer.kernels.library import run

_LOG2E = 1.4426950408889634
# As in causal.c.
_BLOCK = 64
_WIDE = 32
MOST_STEPS = 16
"""``STEPS`` of step_keys.c."""


def causal_forward(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The last R of T positions attend to every position up to their own.

    Args:
        q: [B, R, heads, D], R <= T.
        k: [B, T, kv_heads, D].
        v: the same shape.

    Returns:
        [B, R, heads, D] in the type of ``q``, and the log-sum-exp of the scaled scores, float32
        [B, R, heads]; both contiguous.
    """
    queries = _queries(q, k).mul_(q.shape[-1] ** -0.5 * _LOG2E)
    keys_t, values = _keys(k).mT.contiguous(), _keys(v)
    out, lse = torch.empty_like(queries), queries.new_empty(queries.shape[:2])
    run("causal_forward", queries, keys_t, values, out, lse, *_causal(q, k, queries, values, 1))
    lse = _by_head(lse[..., None] / _LOG2E, q, k)[..., 0]
    return _by_head(out, q, k).to(q.dtype).contiguous(), lse.contiguous()


def causal_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, delta: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, where the soft-max may have had further keys.

    Args:
        grad: of the output, [B, R, heads, D].
        q, k, v: as given to ``causal_forward``.
        delta: grad . output over D with the output of the WHOLE soft-max, float32 [B, R, heads].
        lse: log-sum-exp of the whole soft-max, like ``delta``.
    """
    scale = q.shape[-1] ** -0.5
    queries, flowing = _queries(q, k).mul_(scale * _LOG2E), _queries(grad, k)
    keys, values = _keys(k), _keys(v)
    # One number per row needs no padding.
    offset, total = _flat(delta[..., None], k), _flat(lse[..., None], k) * _LOG2E
    grads = [torch.empty_like(queries), torch.zeros_like(keys), torch.zeros_like(keys)]
    given = (flowing, queries, keys.mT.contiguous(), keys, values.mT.contiguous(), offset, total)
    run("causal_backward", *given, *grads, *_causal(q, k, queries, keys, 2))
    grad_q, grad_k, grad_v = grads
    return (
        _by_head(grad_q.mul_(scale), q, k).to(q.dtype),
        _of_keys(grad_k.div_(_LOG2E), k),
        _of_keys(grad_v, v),
    )


def step_keys_forward(q: Tensor, later: Sequence[Tensor], out: Tensor, lse: Tensor) -> Tensor:
    """Join the prefix with each anchor's later keys and values.

    Args:
        q: [B, R, heads, D].
        later: key, value, key, value, ... of the later steps, each [B, R, kv_heads, D]; at most
            ``MOST_STEPS`` steps.
        out: [B, R, heads, D], contiguous; the prefix' output, replaced by the joint one.
        lse: float32 [B, R, heads], contiguous; the prefix' log-sum-exp, replaced likewise.

    Returns:
        The scores of the later keys, float32 [steps, B, R, heads].
    """
    rows = [_with_whole_rows(x) for x in (q, *later)]
    scores = torch.empty(len(later) // 2, *lse.shape, dtype=torch.float32)
    run("step_keys_forward", *_located(rows), out, lse, scores, *_step_keys(q, later, out))
    return scores


def step_keys_backward(
    q: Tensor,
    later: Sequence[Tensor],
    grad: Tensor,
    lse: Tensor,
    scores: Tensor,
    delta: Tensor,
    grad_q: Tensor,
) -> list[Tensor]:
    """Gradients of the later keys and values; their share of q's is added to ``grad_q``.

    Args:
        q, later: as given to ``step_keys_forward``.
        grad: of the joint output, [B, R, heads, D].
        lse: joint, float32 [B, R, heads].
        scores: what ``step_keys_forward`` returned.
        delta: grad . output over D, float32 [B, R, heads], contiguous.
        grad_q: [B, R, heads, D], contiguous.

    Returns:
        The gradients of ``later``, in its order.
    """
    rows = [_with_whole_rows(x) for x in (q, *later, grad)]
    grads = [torch.empty(x.shape, dtype=x.dtype) for x in later]
    outputs = [x.data_ptr() for x in grads]
    given = (*_located(rows), lse, scores, delta, grad_q, outputs)
    run("step_keys_backward", *given, *_step_keys(q, later, grad_q))
    return grads


def _causal(
    q: Tensor, k: Tensor, queries: Tensor, keys: Tensor, buffers: int
) -> tuple[int | Tensor, ...]:
    """The arguments that both causal kernels end with."""
    scratch = torch.empty(
        torch.get_num_threads(), buffers, _BLOCK, keys.shape[1], dtype=torch.float32
    )
    group, first = q.shape[2] // k.shape[2], k.shape[1] - q.shape[1]
    heads, rows, size = queries.shape
    return heads, rows, group, size, keys.shape[1], first, scratch


def _step_keys(q: Tensor, later: Sequence[Tensor], like: Tensor) -> tuple[int, ...]:
    """The arguments that both kernels of later keys end with."""
    batch, length, heads, size = q.shape
    group = heads // later[0].shape[2]
    return len(later) // 2, batch, length, heads, group, size, like.dtype == torch.float32


def _flat(x: Tensor, k: Tensor) -> Tensor:
    """[B, R, heads, D] to [B * kv_heads, R * group, D]: a position's queries beside each other."""
    grouped = x.unflatten(2, (k.shape[2], -1)).transpose(1, 2)
    return grouped.reshape(x.shape[0] * k.shape[2], -1, x.shape[-1])


def _queries(x: Tensor, k: Tensor) -> Tensor:
    """``_flat`` in float32, D padded with zeros; a copy."""
    flat = _flat(x, k)
    out = flat.new_zeros(*flat.shape[:2], _padded(x.shape[-1]), dtype=torch.float32)
    out[..., : x.shape[-1]] = flat
    return out


def _keys(x: Tensor) -> Tensor:
    """[B, T, kv_heads, D] to float32 [B * kv_heads, T, D], T and D padded with zeros."""
    batch, length, heads, size = x.shape
    out = torch.zeros(batch, heads, _padded(length), _padded(size), dtype=torch.float32)
    out[:, :, :length, :size] = x.transpose(1, 2)
    return out.flatten(0, 1)


def _padded(size: int) -> int:
    return -(-size // _WIDE) * _WIDE


def _by_head(x: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The inverse of ``_flat``."""
    batch, length, heads, size = q.shape
    x = x[..., :size].unflatten(0, (batch, -1)).unflatten(2, (length, heads // k.shape[2]))
    return x.transpose(1, 2).flatten(2, 3)


def _of_keys(x: Tensor, like: Tensor) -> Tensor:
    """The inverse of ``_keys``."""
    batch, length, heads, size = like.shape
    return x[:, :length, :size].unflatten(0, (batch, heads)).transpose(1, 2).to(like.dtype)


def _with_whole_rows(x: Tensor) -> Tensor:
    """Heads and their elements beside each other, as a split of one product has them."""
    whole = x.stride(3) == 1 and x.stride(2) == x.shape[3]
    return x if whole else x.contiguous()


def _located(rows: Sequence[Tensor]) -> tuple[list[int], list[int]]:
    """Addresses, and the strides of batch and row."""
    return [x.data_ptr() for x in rows], [n for x in rows for n in x.stride()[:2]]
