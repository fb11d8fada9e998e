"""A sample of a block in the packed layout, and what the samples of its prompt share."""

from __future__ import annotations

import numpy as np
import torch

from draft_trainer.feed.sample import Sample, prompt_of
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


def prompt_in(block: Bytes, layout: Layout) -> str:
    """A hash of the tokens before the first completion in a block; empty where there are none.

    The group of a sample without any is its id. See ``sample.group_of``.
    """
    length = block[layout.mask_at : layout.mask_at + layout.tokens].tobytes().find(1)
    return prompt_of(block[: 4 * length].view(np.int32).astype(np.int64)) if length > 0 else ""
