"""``step_keys.c`` on tensors: each anchor's keys of the later TTT steps."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import CDLL, c_int, c_int64, c_void_p

import torch
from torch import Tensor

from draft_trainer.kernels.library import pointer

MOST_STEPS = 16
"""``STEPS`` of step_keys.c."""


def step_keys_forward(
    functions: CDLL, q: Tensor, later: Sequence[Tensor], out: Tensor, lse: Tensor
) -> Tensor:
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
    scores = torch.empty(len(later) // 2, *lse.shape)
    functions.step_keys_forward(
        *_located(rows), *map(pointer, (out, lse, scores)), *_sizes(q, later, out)
    )
    return scores


def step_keys_backward(
    functions: CDLL,
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
        q: as given to ``step_keys_forward``.
        later: as given.
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
    outputs = (c_void_p * len(grads))(*(x.data_ptr() for x in grads))
    functions.step_keys_backward(
        *_located(rows),
        *map(pointer, (lse, scores, delta, grad_q)),
        outputs,
        *_sizes(q, later, grad_q),
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


def _sizes(q: Tensor, later: Sequence[Tensor], like: Tensor) -> tuple[object, ...]:
    batch, length, heads, size = q.shape
    counts = (len(later) // 2, batch, length, heads, heads // later[0].shape[2], size)
    return (
        *map(c_int64, counts),
        c_int(like.dtype == torch.float32),
        c_int(torch.get_num_threads()),
    )
