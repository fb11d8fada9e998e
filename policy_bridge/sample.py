"""One sequence's states in host memory, and as the block that travels."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from slipstream.fp8 import quantize
from slipstream.packed import FLOAT8, Layout, PackedTensors, layout_of

_NONE = torch.empty(0)


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
        scales: float32 [A + 1, T] where the states are float8_e4m3fn (``slipstream.fp8``), of
            each auxiliary layer and of the final state; else None.
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
    scales: torch.Tensor | None = None

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
        scales = 0 if self.scales is None else self.scales.nbytes
        return scales + sum(tensor.nbytes for tensor in tensors)

    @property
    def layout(self) -> Layout:
        """Of the block that travels."""
        tokens, hidden_size = self.final_hidden_state.shape
        dtype = self.final_hidden_state.dtype
        return layout_of(tokens, len(self.aux_layers), hidden_size, dtype)

    def tensors(self) -> PackedTensors:
        """What the block holds: one sequence, so one segment."""
        return PackedTensors(
            token_ids=self.token_ids,
            positions=self.positions,
            segment_ids=_NONE,
            sampled_logprobs=self.sampled_logprobs,
            sampled_logits=self.sampled_logits,
            loss_mask=self.loss_mask,
            aux=self.aux_hidden_states,
            final=self.final_hidden_state,
            scales=_NONE if self.scales is None else self.scales,
        )

    def in_float8(self) -> Sample:
        """With its states in float8 and their scales; itself if they are already."""
        if self.final_hidden_state.dtype == FLOAT8:
            return self
        hidden_size = self.final_hidden_state.shape[1]
        aux, aux_scales = quantize(self.aux_hidden_states, hidden_size)
        final, final_scales = quantize(self.final_hidden_state, hidden_size)
        return replace(
            self,
            aux_hidden_states=aux,
            final_hidden_state=final,
            scales=torch.cat((aux_scales, final_scales)),
        )
