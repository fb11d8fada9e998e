"""A sample that has just arrived: its facts, and a block in the packed layout that was checked.

Tensors are made of the block only when somebody reads them: eleven views of a small sample take
longer than everything else about it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch

from draft_trainer.feed.sample import Sample
from slipstream.checksums import Bytes
from slipstream.packed import Layout, tensors_in


# Not frozen: setting fields past that takes three times as long, for every small sample.
@dataclass(eq=False, slots=True)
class Received:
    """What the store needs to know of a sample.

    Attributes:
        sample_id, policy_version, temperature: see ``Sample``.
        layout: of its block, which begins where its reservation does.
        group: see ``Sample.group``.
    """

    sample_id: str
    policy_version: int
    temperature: float
    layout: Layout
    group: str

    def sample(self, block: torch.Tensor) -> Sample:
        """The sample, its tensors views of its block (uint8 [layout.nbytes])."""
        facts = (self.sample_id, self.policy_version, self.temperature)
        return packed_sample(facts, block, self.layout)


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


def group_in(sample_id: str, block: Bytes, layout: Layout) -> str:
    """``sample.group_of`` of a block (uint8 [layout.nbytes])."""
    mask = block[layout.mask_at : layout.mask_at + layout.tokens].tobytes()
    prompt = mask.find(1)
    if prompt < 1:
        return sample_id
    tokens = block[: 4 * prompt].view(np.int32).astype(np.int64)
    return hashlib.blake2b(tokens.tobytes(), digest_size=16).hexdigest()
