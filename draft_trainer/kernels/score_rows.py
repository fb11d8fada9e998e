"""``score_rows.c`` on tensors: loss, metrics and gradient of logits against the policy."""

from __future__ import annotations

from ctypes import CDLL, c_int, c_int64

import torch
from torch import Tensor

from draft_trainer.kernels.library import pointer

_TARGETS = {"kl": 0, "tv": 1, "lk": 2}


def score_rows(
    functions: CDLL,
    logits: Tensor,
    policy: Tensor,
    log_z: Tensor,
    inverse_t: Tensor,
    target: str,
    learns: bool,
) -> Tensor:
    """As ``loss._score_blocks``: logits [K, R, V] become their gradient if ``learns``.

    Args:
        logits: float32 or bfloat16, each [R, V] contiguous.
        policy: [R, V], in the same type.
        log_z: float32 [R].
        inverse_t: float32 [R].

    Returns:
        float64 [K, R, 4].
    """
    steps, rows, vocab = logits.shape
    policy, log_z, inverse_t = policy.contiguous(), log_z.contiguous(), inverse_t.contiguous()
    threads = torch.get_num_threads()
    scratch = torch.empty(threads, 2, vocab)
    scores = torch.empty(steps, rows, 4, dtype=torch.float64)
    functions.score_rows(
        pointer(logits),
        c_int64(logits.stride(0)),
        *map(pointer, (policy, log_z, inverse_t)),
        *map(c_int64, (steps, rows, vocab)),
        *map(c_int, (_TARGETS[target], learns, logits.dtype == torch.float32)),
        pointer(scratch),
        pointer(scores),
        c_int(threads),
    )
    return scores
