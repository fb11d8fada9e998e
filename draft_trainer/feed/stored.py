"""A sample as it lies in the arena: what the replay buffer orders, and a restart finds again."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from functools import lru_cache
from json.encoder import encode_basestring_ascii as _quoted
from typing import Any

import torch
from torch import Tensor

from draft_trainer.feed.arena import Arena, Extent
from draft_trainer.feed.packed_sample import packed_sample
from draft_trainer.feed.reservation import Reservation
from draft_trainer.feed.sample import Sample
from slipstream.checksums import Bytes
from slipstream.packed import Layout, layout_of

_FACTS = ("sample_id", "policy_version", "temperature")
_TENSORS = tuple(field.name for field in fields(Sample) if field.name not in _FACTS)


# Not frozen: setting fields past that takes three times as long, for every small sample. And one
# object: each that is made for a sample is half a microsecond.
@dataclass(eq=False, slots=True)
class StoredSample:
    """Everything about a sample but its bytes, which are read when they are needed.

    Attributes:
        sample_id, policy_version, temperature: see ``Sample``.
        tensors: element type, shape and offset in the extent of each of its tensors; or the
            layout of a block that is all of it.
        num_tokens: T.
        group: what the samples of its prompt share.
        extent: where its bytes are.
        number: of its row in the ledger; 0 until it has one.
    """

    sample_id: str
    policy_version: int
    temperature: float
    tensors: dict[str, tuple[str, list[int], int]] | Layout
    num_tokens: int
    group: str
    extent: Extent
    number: int = 0

    @classmethod
    def of(cls, sample: Sample, room: Reservation) -> StoredSample:
        """Of a sample whose tensors are views of its room."""
        facts = (sample.sample_id, sample.policy_version, sample.temperature)
        block = room.block
        tensors = {}
        for name in _TENSORS:
            tensor: Tensor = getattr(sample, name)
            offset = tensor.data_ptr() - block.ctypes.data if tensor.numel() else 0
            inside = offset >= 0 and offset + tensor.nbytes <= block.nbytes
            # A restart would read other bytes than were validated.
            assert inside and tensor.is_contiguous(), f"{name} does not lie in the reservation"
            tensors[name] = (_name(tensor.dtype), list(tensor.shape), offset)
        return cls(*facts, tensors, sample.num_tokens, sample.group, room.extent)

    @classmethod
    def from_json(cls, text: str, extent: Extent, number: int) -> StoredSample:
        """From ``to_json``."""
        facts, tensors, num_tokens, group = json.loads(text)
        if isinstance(tensors, list):
            *sizes, kind = tensors
            tensors = layout_of(*sizes, getattr(torch, kind))
        first: tuple[str, int, float] = tuple(facts[name] for name in _FACTS)  # type: ignore[assignment]
        return cls(*first, tensors, num_tokens, group, extent, number)

    def to_json(self) -> str:
        """For the ledger."""
        layout = self.tensors
        if isinstance(layout, Layout):
            sizes = f"{layout.tokens},{layout.aux_layers},{layout.hidden_size}"
            tensors = f'[{sizes},"{_name(layout.dtype)}"]'
        else:
            tensors = json.dumps(layout)
        # By hand: a third of what the encoder takes, for every small sample.
        return (
            f'[{{"sample_id":{_quoted(self.sample_id)},"policy_version":{self.policy_version},'
            f'"temperature":{self.temperature!r}}},'
            f"{tensors},{self.num_tokens},{_quoted(self.group)}]"
        )

    def sample(self, block: Bytes) -> Sample:
        """The sample, its tensors views of its bytes: uint8 [N], no copy.

        They are made only when somebody reads them: eleven views of a small sample take longer
        than everything else about it.
        """
        whole = torch.from_numpy(block)
        facts = (self.sample_id, self.policy_version, self.temperature)
        if isinstance(self.tensors, Layout):
            return packed_sample(facts, whole, self.tensors)
        values: dict[str, Any] = dict(zip(_FACTS, facts, strict=True))
        for name, (kind, shape, offset) in self.tensors.items():
            dtype: torch.dtype = getattr(torch, kind)
            nbytes = math.prod(shape) * dtype.itemsize
            values[name] = whole[offset : offset + nbytes].view(dtype).view(shape)
        return Sample(**values)

    def read(self, arena: Arena) -> Sample:
        """The sample, its tensors views of the arena: they keep the extent from being reused."""
        return self.sample(arena.view(self.extent, self.extent.size))


@lru_cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
