"""``causal.c`` on tensors: causal attention with its log-sum-exp and the joint backward pass."""

from __future__ import annotations

from ctypes import CDLL, c_int, c_int64

import torch
from torch import Tensor

from draft_trainer.kernels.library import pointer

_LOG2E = 1.4426950408889634
# As in causal.c.
_BLOCK = 64
_WIDE = 32


def causal_forward(functions: CDLL, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The last R of T positions attend to every position up to their own.

    Args:
        functions: the library.
        q: [B, R, heads, D], R <= T.
        k: [B, T, kv_heads, D].
        v: the same shape.

    Returns:
        [B, R, heads, D] in the type of ``q``, and the log-sum-exp of the scaled scores, float32
        [B, R, heads].
    """
    queries = _queries(q, k).mul_(q.shape[-1] ** -0.5 * _LOG2E)
    keys_t, values = _keys(k).mT.contiguous(), _keys(v)
    out, lse = torch.empty_like(queries), queries.new_empty(queries.shape[:2])
    functions.causal_forward(
        *map(pointer, (queries, keys_t, values, out, lse)), *_sizes(q, k, queries, values, 1)
    )
    return _by_head(out, q, k).to(q.dtype), _by_head(lse[..., None] / _LOG2E, q, k)[..., 0]


def causal_backward(
    functions: CDLL, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, delta: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, where the soft-max may have had further keys.

    Args:
        functions: the library.
        grad: of the output, [B, R, heads, D].
        q, k, v: as given to ``causal_forward``.
        delta: grad . output over D with the output of the WHOLE soft-max, float32 [B, R, heads].
        lse: log-sum-exp of the whole soft-max, like ``delta``.
    """
    scale = q.shape[-1] ** -0.5
    queries, flowing = _queries(q, k).mul_(scale * _LOG2E), _queries(grad, k)
    keys, values = _keys(k), _keys(v)
    keys_t, values_t = keys.mT.contiguous(), values.mT.contiguous()
    # One number a row needs no filling up.
    offset, total = _flat(delta[..., None], k), _flat(lse[..., None], k) * _LOG2E
    grad_q, grad_k = torch.empty_like(queries), torch.zeros_like(keys)
    grad_v = torch.zeros_like(keys)
    functions.causal_backward(
        *map(
            pointer,
            (flowing, queries, keys_t, keys, values_t, offset, total, grad_q, grad_k, grad_v),
        ),
        *_sizes(q, k, queries, keys, 2),
    )
    return (
        _by_head(grad_q.mul_(scale), q, k).to(q.dtype),
        _of_keys(grad_k.div_(_LOG2E), k),
        _of_keys(grad_v, v),
    )


def _sizes(q: Tensor, k: Tensor, queries: Tensor, keys: Tensor, buffers: int) -> tuple[object, ...]:
    """The arguments that both kernels end with."""
    heads, rows, size = queries.shape
    threads = torch.get_num_threads()
    scratch = torch.empty(threads, buffers, _BLOCK, keys.shape[1])
    group, first = q.shape[2] // k.shape[2], k.shape[1] - q.shape[1]
    counts = map(c_int64, (heads, rows, group, size, keys.shape[1], first))
    return *counts, _Kept(scratch), c_int(threads)


class _Kept:
    """A pointer argument that keeps its tensor alive."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._as_parameter_ = pointer(tensor)


def _flat(x: Tensor, k: Tensor) -> Tensor:
    """[B, R, heads, D] to [B * kv_heads, R * group, D]: a position's queries beside each other."""
    grouped = x.unflatten(2, (k.shape[2], -1)).transpose(1, 2)
    return grouped.reshape(x.shape[0] * k.shape[2], -1, x.shape[-1])


def _queries(x: Tensor, k: Tensor) -> Tensor:
    """``_flat`` in float32, D filled up with zeros; a copy."""
    flat = _flat(x, k)
    out = flat.new_zeros(*flat.shape[:2], _filled(x.shape[-1]), dtype=torch.float32)
    out[..., : x.shape[-1]] = flat
    return out


def _keys(x: Tensor) -> Tensor:
    """[B, T, kv_heads, D] to float32 [B * kv_heads, T, D], T and D filled up with zeros."""
    batch, length, heads, size = x.shape
    out = torch.zeros(batch, heads, _filled(length), _filled(size))
    out[:, :, :length, :size] = x.transpose(1, 2)
    return out.flatten(0, 1)


def _filled(size: int) -> int:
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
