"""One step of the head over a whole sequence, with a dense mask: the plainest way to run it."""

from __future__ import annotations

import torch
from torch import Tensor

from draft_trainer.drafters.eagle3.head import Eagle3Head


def dense_step(head: Eagle3Head, hidden: Tensor, embeds: Tensor, positions: Tensor) -> Tensor:
    """The layer's pre-norm output [1, T, H].

    Args:
        head: the head; its modules are used as they are.
        hidden: [1, T, H].
        embeds: [1, T, H], of the tokens that go in beside ``hidden``.
        positions: int64 [1, T].
    """
    x, residual = head.midlayer.enter(embeds, hidden)
    cos, sin = head.rotary(positions, torch.float32)
    q, k, v = head.midlayer.self_attn.project(x, cos, sin)
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    if head.config.sliding_window is not None:
        seen = seen.triu(1 - head.config.sliding_window)
    scores = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5
    attended = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v
    return head.midlayer.leave(attended, residual)
