"""One sequence's states in host memory, as the block that travels."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from slipstream.fp8 import quantize
from slipstream.packed import FLOAT8, Layout, PackedTensors, layout_of, tensors_in, write_block


@dataclass(frozen=True)
class Sample:
    """T tokens of one sequence, A auxiliary layers, hidden size H.

    Attributes:
        sample_id: unique within the run.
        policy_version: whose forward pass made the states.
        temperature: of the rollout.
        aux_layers: "after L layers" numbers of the auxiliary states.
        layout: of the block.
        block: uint8 [layout.nbytes], on the CPU, its own memory: it is sent as it is.
    """

    sample_id: str
    policy_version: int
    temperature: float
    aux_layers: tuple[int, ...]
    layout: Layout
    block: torch.Tensor

    @classmethod
    def of(
        cls,
        sample_id: str,
        policy_version: int,
        temperature: float,
        aux_layers: tuple[int, ...],
        tensors: PackedTensors,
    ) -> Sample:
        """A sample with copies of ``tensors``, which lie apart, on the CPU."""
        tokens, hidden_size = tensors.final.shape
        layout = layout_of(tokens, len(aux_layers), hidden_size, tensors.final.dtype)
        block = torch.empty(layout.nbytes, dtype=torch.uint8)
        write_block(tensors, layout, block.numpy())
        return cls(sample_id, policy_version, temperature, aux_layers, layout, block)

    @property
    def nbytes(self) -> int:
        """Of the block."""
        return self.layout.nbytes

    @cached_property
    def tensors(self) -> PackedTensors:
        """Views of the block. Made when they are asked for: sending needs none of them."""
        return tensors_in(self.block, self.layout)

    @property
    def float8_layout(self) -> Layout:
        """Of ``in_float8``."""
        layout = self.layout
        return layout_of(layout.tokens, layout.aux_layers, layout.hidden_size, FLOAT8)

    def in_float8(self) -> Sample:
        """With its states in float8 and their scales; itself if they are already."""
        if self.layout.dtype == FLOAT8:
            return self
        aux, aux_scales = quantize(self.tensors.aux, self.layout.hidden_size)
        final, final_scales = quantize(self.tensors.final, self.layout.hidden_size)
        scales = torch.cat((aux_scales, final_scales))
        tensors = replace(self.tensors, aux=aux, final=final, scales=scales)
        return Sample.of(
            self.sample_id, self.policy_version, self.temperature, self.aux_layers, tensors
        )
