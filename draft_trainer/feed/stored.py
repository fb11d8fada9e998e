"""A sample as it lies in the arena: what the replay buffer orders, and a restart finds again."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from draft_trainer.feed.arena import Arena, Extent
from draft_trainer.feed.received import Received, packed_sample
from draft_trainer.feed.sample import Sample
from slipstream.packed import layout_of as packed_layout

_FACTS = ("sample_id", "policy_version", "temperature")
_TENSORS = tuple(field.name for field in fields(Sample) if field.name not in _FACTS)


@dataclass(frozen=True, eq=False)
class StoredSample:
    """Everything about a sample but its bytes, which are read when they are needed.

    Attributes:
        number: of its row in the ledger.
        extent: where its bytes are.
        facts: its fields that are no tensors.
        tensors: element type, shape and offset in the extent of each of the others; or tokens,
            layers, hidden size and element type of a block in the packed layout.
        num_tokens: T.
        group: what the samples of its prompt share.
    """

    number: int
    extent: Extent
    facts: dict[str, Any]
    tensors: dict[str, tuple[str, list[int], int]] | list[Any]
    num_tokens: int
    group: str

    @property
    def sample_id(self) -> str:
        """See ``Sample``."""
        return str(self.facts["sample_id"])

    @property
    def policy_version(self) -> int:
        """See ``Sample``."""
        return int(self.facts["policy_version"])

    def read(self, arena: Arena) -> Sample:
        """The sample, its tensors views of the arena: they keep the extent from being reused."""
        whole = arena.view(self.extent, self.extent.size)
        if isinstance(self.tensors, list):
            facts = (self.sample_id, self.policy_version, float(self.facts["temperature"]))
            *sizes, kind = self.tensors
            return packed_sample(facts, whole, packed_layout(*sizes, getattr(torch, kind)))
        values: dict[str, Any] = dict(self.facts)
        for name, (kind, shape, offset) in self.tensors.items():
            dtype: torch.dtype = getattr(torch, kind)
            nbytes = math.prod(shape) * dtype.itemsize
            values[name] = whole[offset : offset + nbytes].view(dtype).view(shape)
        return Sample(**values)


def layout_of(sample: Sample | Received, buffer: Tensor) -> str:
    """JSON of how a sample lies in ``buffer`` (uint8 [N]), of which its tensors are views."""
    facts = {name: getattr(sample, name) for name in _FACTS}
    if isinstance(sample, Received):
        block = sample.layout
        kind = str(block.dtype).removeprefix("torch.")
        sizes = [block.tokens, block.aux_layers, block.hidden_size, kind]
        return json.dumps([facts, sizes, block.tokens, sample.group])
    tensors = {}
    for name in _TENSORS:
        tensor: Tensor = getattr(sample, name)
        offset = tensor.data_ptr() - buffer.data_ptr() if tensor.numel() else 0
        inside = offset >= 0 and offset + tensor.nbytes <= buffer.nbytes
        # A restart would read other bytes than were validated.
        assert inside and tensor.is_contiguous(), f"{name} does not lie in the reservation"
        kind = str(tensor.dtype).removeprefix("torch.")
        tensors[name] = (kind, list(tensor.shape), offset)
    return json.dumps([facts, tensors, sample.num_tokens, sample.group])


def stored(number: int, extent: Extent, layout: str) -> StoredSample:
    """From ``layout_of``."""
    return StoredSample(number, extent, *json.loads(layout))
