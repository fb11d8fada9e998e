"""``own.c`` on tensors."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import CDLL, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from draft_trainer.kernels.library import pointer

MOST_STEPS = 16
"""As in own.c: what ``training.ttt_steps`` allows."""


def own_forward(
    functions: CDLL, q: Tensor, own: Sequence[Tensor], out: Tensor, lse: Tensor
) -> Tensor:
    """Join the prefix' ``out`` [B, R, heads, D] and ``lse`` [B, R, heads], both contiguous and
    changed in place, with each anchor's own keys and values.

    Args:
        q: [B, R, heads, D].
        own: key, value, key, value, ... of the later steps, each [B, R, kv_heads, D].

    Returns:
        The own scores, float32 [steps, B, R, heads].
    """
    rows = [_with_whole_rows(x) for x in (q, *own)]
    scores = torch.empty(len(own) // 2, *lse.shape)
    functions.own_forward(*_located(rows), *map(pointer, (out, lse, scores)), *_sizes(q, own, out))
    return scores


def own_backward(
    functions: CDLL,
    q: Tensor,
    own: Sequence[Tensor],
    grad: Tensor,
    lse: Tensor,
    scores: Tensor,
    delta: Tensor,
    grad_q: Tensor,
) -> list[Tensor]:
    """Add the own keys' share to ``grad_q`` [B, R, heads, D], contiguous; returns theirs.

    Args:
        grad: of the output, [B, R, heads, D].
        lse: joint, float32 [B, R, heads]; ``scores`` and ``delta`` are float32 too.

    Returns:
        The gradients of ``own``, in its order.
    """
    rows = [_with_whole_rows(x) for x in (q, *own, grad)]
    grads = [torch.empty(x.shape, dtype=x.dtype) for x in own]
    outputs = (c_void_p * len(grads))(*(x.data_ptr() for x in grads))
    functions.own_backward(
        *_located(rows),
        *map(pointer, (lse, scores, delta, grad_q)),
        outputs,
        *_sizes(q, own, grad_q),
    )
    return grads


def _with_whole_rows(x: Tensor) -> Tensor:
    """Heads and their elements beside each other, as a split of one product has them."""
    whole = x.stride(3) == 1 and x.stride(2) == x.shape[3]
    return x if whole else x.contiguous()


def _located(rows: Sequence[Tensor]) -> tuple[ctypes.Array[c_void_p], ctypes.Array[c_int64]]:
    pointers = (c_void_p * len(rows))(*(x.data_ptr() for x in rows))
    strides = (c_int64 * (2 * len(rows)))(*(n for x in rows for n in x.stride()[:2]))
    return pointers, strides


def _sizes(q: Tensor, own: Sequence[Tensor], like: Tensor) -> tuple[object, ...]:
    batch, length, heads, size = q.shape
    counts = (len(own) // 2, batch, length, heads, heads // own[0].shape[2], size)
    return (
        *map(c_int64, counts),
        c_int(like.dtype == torch.float32),
        c_int(torch.get_num_threads()),
    )
