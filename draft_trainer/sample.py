"""One verified sequence, as the trainer keeps it.

A sample of a block in the packed layout, and what the samples of its prompt share.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from slipstream.checksum import Bytes
from slipstream.sample import Layout, tensors_in

STATE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Of hidden states on the wire; float8 is decoded to bfloat16 at ingest."""


@dataclass(frozen=True, eq=False)
class Sample:
    """The states of one sequence (or window, or pack) that the policy's own forward pass saw.

    Field semantics are those of ``slipstream.v1.VerifierStates``. T tokens, A auxiliary layers,
    H hidden size. The tensors are shared, never written to.

    Attributes:
        sample_id: unique within the run.
        policy_version: the policy version whose forward pass made the states.
        temperature: sampling temperature of the rollout, > 0; the teacher's temperature.
        token_ids: int32 or int64 [T], x_0 .. x_{T-1}.
        positions: int32 or int64 [T], position of each token in its own sequence.
        segment_ids: int32 or int64 [T], one number per packed sequence, in one run each.
        loss_mask: bool [T], true where the token is a completion token.
        aux: [T, A * H], auxiliary hidden states, concatenated in the run's layer order.
        final_hidden: [T, H], after the final norm (the input of lm_head).
        sampled_logprobs: float32 [T], log p(x_t | x_<t) at ``temperature``.
        sampled_logits: float32 [T], logit of x_t given x_<t, before temperature.
    """

    sample_id: str
    policy_version: int
    temperature: float
    token_ids: Tensor
    positions: Tensor
    segment_ids: Tensor
    loss_mask: Tensor
    aux: Tensor
    final_hidden: Tensor
    sampled_logprobs: Tensor
    sampled_logits: Tensor

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.token_ids.shape[0])

    @property
    def group(self) -> str:
        """What the samples of one prompt share; see ``group_of``."""
        return group_of(self.sample_id, self.token_ids, self.loss_mask)

    @property
    def nbytes(self) -> int:
        """Bytes that the tensors occupy."""
        tensors = (getattr(self, field.name) for field in fields(self))
        return sum(t.nbytes for t in tensors if isinstance(t, torch.Tensor))


def group_of(sample_id: str, token_ids: Tensor, loss_mask: Tensor) -> str:
    """What the samples of one prompt share: a hash of the tokens before the first completion.

    GRPO draws many completions of one prompt. A head that has trained on some of them knows
    the others, so they are held out together and are not independent evidence. A window that
    begins inside a completion has no prompt, and is a group of its own.

    Args:
        sample_id: of the sample.
        token_ids: int32 or int64 [T].
        loss_mask: bool [T].
    """
    prompt = int(loss_mask.int().argmax())
    if prompt == 0:
        return sample_id
    return prompt_of(token_ids[:prompt].long().numpy())


def prompt_of(token_ids: NDArray[np.int64]) -> str:
    """A hash of tokens."""
    return hashlib.blake2b(token_ids.tobytes(), digest_size=16).hexdigest()


def is_held_out(group: str, fraction: float) -> bool:
    """Whether samples of this group are held out of training: a hash of it below ``fraction``.

    It follows from the prompt alone, so a restart, a second trainer or a replayed stream never
    moves a sample from the held-out share into training.
    """
    word = hashlib.blake2b(group.encode(), digest_size=8).digest()
    return int.from_bytes(word, "little") < fraction * 2.0**64


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
