"""The training-time test: the head run K steps ahead from every position at once.

Source: EAGLE-3 (arXiv 2503.01840), section 3.2; the alignment is that of vLLM's proposer. For the
anchor i and step s: token in x_{i+1+s}, position i + s, hidden in fc(aux_i) at s = 0 and the
head's own pre-norm output of step s - 1 afterwards; the output predicts x_{i+2+s}.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from draft_trainer.attention import ttt_attention
from draft_trainer.batch import Batch
from draft_trainer.head import Eagle3Head


def ttt_unroll(head: Eagle3Head, batch: Batch, steps: int) -> Iterator[Tensor]:
    """Yield the layer's pre-norm output of every step, for ``head.logits``.

    Args:
        head: the draft head.
        batch: rows of tokens, auxiliary states and embeddings; none of them gets a gradient.
        steps: K, at least 1.

    Yields:
        ``steps`` tensors [B, T, H]. Entries whose token in lies past the row's end mean nothing,
        and no meaningful entry depends on them.
    """
    layer, dtype = head.midlayer, head.norm.weight.dtype
    hidden = head.fc(batch.aux.to(dtype))
    embeds = batch.embeds.to(dtype)
    own_keys: list[Tensor] = []
    own_values: list[Tensor] = []
    for step in range(steps):
        cos, sin = head.rotary(batch.positions + step, dtype if dtype.itemsize > 4 else _ANGLE)
        x, residual = layer.enter(ahead(embeds, step + 1), hidden)
        q, k, v = layer.self_attn.project(x, cos, sin)
        if step == 0:
            first_keys, first_values = k, v
            no_keys = k.new_empty(0, *k.shape)
        else:
            own_keys.append(k)
            own_values.append(v)
        attended = ttt_attention(
            q,
            first_keys,
            first_values,
            torch.stack(own_keys) if own_keys else no_keys,
            torch.stack(own_values) if own_values else no_keys,
        )
        output = layer.leave(attended, residual)
        yield output
        hidden = head.feedback(output)


def ahead(x: Tensor, count: int) -> Tensor:
    """x[:, i + count] at index i, zeros past the end; [B, T, ...] to the same shape."""
    shifted = torch.zeros_like(x)
    if count < x.shape[1]:
        shifted[:, : x.shape[1] - count] = x[:, count:]
    return shifted


_ANGLE = torch.float32
