"""One sequence's states in host memory, and as the message that carries them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.layers import encode_layers
from slipstream.tensors import encode
from slipstream.v1 import draft_trainer_pb2 as pb


@dataclass(frozen=True)
class Sample:
    """T tokens of one sequence, A auxiliary layers, hidden size H; CPU tensors of its own.

    Attributes:
        sample_id: unique within the run.
        policy_version: whose forward pass made the states.
        temperature: of the rollout.
        aux_layers: "after L layers" numbers of ``aux_hidden_states``.
        token_ids: int32 [T].
        positions: int32 [T].
        loss_mask: bool [T].
        aux_hidden_states: [T, A * H].
        final_hidden_state: [T, H], same dtype.
        sampled_logprobs: float32 [T].
        sampled_logits: float32 [T].
    """

    sample_id: str
    policy_version: int
    temperature: float
    aux_layers: tuple[int, ...]
    token_ids: torch.Tensor
    positions: torch.Tensor
    loss_mask: torch.Tensor
    aux_hidden_states: torch.Tensor
    final_hidden_state: torch.Tensor
    sampled_logprobs: torch.Tensor
    sampled_logits: torch.Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        tensors = (
            self.token_ids,
            self.positions,
            self.loss_mask,
            self.aux_hidden_states,
            self.final_hidden_state,
            self.sampled_logprobs,
            self.sampled_logits,
        )
        return sum(tensor.nbytes for tensor in tensors)

    def to_proto(self) -> pb.VerifierStates:
        """The message, checksums included. Copies the states once."""
        return pb.VerifierStates(
            sample_id=self.sample_id,
            policy_version=self.policy_version,
            temperature=self.temperature,
            token_ids=encode(self.token_ids),
            positions=encode(self.positions),
            segment_ids=encode(torch.zeros_like(self.positions)),
            loss_mask=encode(self.loss_mask),
            aux_layers=encode_layers(self.aux_layers),
            aux_hidden_states=encode(self.aux_hidden_states),
            final_hidden_state=encode(self.final_hidden_state),
            sampled_logprobs=encode(self.sampled_logprobs),
            sampled_logits=encode(self.sampled_logits),
        )
