"""A sample of a block in the packed layout, and what the samples of its prompt share."""

from __future__ import annotations

import hashlib

import numpy as np
import torch

from draft_trainer.feed.sample import Sample
from slipstream.checksums import Bytes
from slipstream.packed import Layout, tensors_in


def packed_sample(facts: tuple[str, int, float], block: torch.Tensor, layout: Layout) -> Sample:
    """A sample (id, policy version, temperature) whose tensors are views of a block."""
    tensors = tensors_in(block, layout)
    return Sample(
        *facts,
        token_ids=tensors.token_ids,
        positions=tensors.positions,
        segment_ids=tensors.segment_ids,
        loss_mask=tensors.loss_mask,
        aux=tensors.aux,
        final_hidden=tensors.final,
        sampled_logprobs=tensors.sampled_logprobs,
        sampled_logits=tensors.sampled_logits,
    )


def prompts_in(rows: Bytes, layout: Layout) -> list[str]:
    """A hash of the tokens before the first completion, of each block in uint8 [n, layout.nbytes].

    Empty where there are none; the group of such a sample is its id. See ``sample.group_of``.
    """
    tokens = layout.tokens
    lengths = rows[:, layout.mask_at : layout.mask_at + tokens].argmax(axis=1).tolist()
    if not any(lengths):
        return [""] * len(rows)
    ids = rows[:, : 4 * tokens].view(np.int32).astype(np.int64).tobytes()
    return [
        hashlib.blake2b(ids[start : start + 8 * length], digest_size=16).hexdigest()
        if length
        else ""
        for start, length in zip(range(0, len(ids), 8 * tokens), lengths, strict=True)
    ]
