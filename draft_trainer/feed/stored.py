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
from draft_trainer.feed.sample import Sample
from slipstream.checksums import Bytes
from slipstream.packed import Layout, layout_of

_FACTS = ("sample_id", "policy_version", "temperature")
_TENSORS = tuple(field.name for field in fields(Sample) if field.name not in _FACTS)


# Not frozen: setting fields past that takes three times as long, for every small sample.
@dataclass(eq=False, slots=True)
class Description:
    """Everything about a sample but where its bytes are.

    Attributes:
        facts: its id, policy version and temperature.
        tensors: element type, shape and offset in the extent of each of its tensors; or the
            layout of a block that is all of it.
        num_tokens: T.
        group: what the samples of its prompt share.
    """

    facts: tuple[str, int, float]
    tensors: dict[str, tuple[str, list[int], int]] | Layout
    num_tokens: int
    group: str

    @classmethod
    def of(cls, sample: Sample, block: Bytes) -> Description:
        """Of a sample whose tensors are views of ``block`` (uint8 [N])."""
        facts = (sample.sample_id, sample.policy_version, sample.temperature)
        tensors = {}
        for name in _TENSORS:
            tensor: Tensor = getattr(sample, name)
            offset = tensor.data_ptr() - block.ctypes.data if tensor.numel() else 0
            inside = offset >= 0 and offset + tensor.nbytes <= block.nbytes
            # A restart would read other bytes than were validated.
            assert inside and tensor.is_contiguous(), f"{name} does not lie in the reservation"
            tensors[name] = (_name(tensor.dtype), list(tensor.shape), offset)
        return cls(facts, tensors, sample.num_tokens, sample.group)

    @classmethod
    def from_json(cls, text: str) -> Description:
        """From ``to_json``."""
        facts, tensors, num_tokens, group = json.loads(text)
        if isinstance(tensors, list):
            *sizes, kind = tensors
            tensors = layout_of(*sizes, getattr(torch, kind))
        return cls(tuple(facts[name] for name in _FACTS), tensors, num_tokens, group)

    def to_json(self) -> str:
        """For the ledger."""
        sample_id, version, temperature = self.facts
        layout = self.tensors
        if isinstance(layout, Layout):
            sizes = f"{layout.tokens},{layout.aux_layers},{layout.hidden_size}"
            tensors = f'[{sizes},"{_name(layout.dtype)}"]'
        else:
            tensors = json.dumps(layout)
        # By hand: a third of what the encoder takes, for every small sample.
        return (
            f'[{{"sample_id":{_quoted(sample_id)},"policy_version":{version},'
            f'"temperature":{temperature!r}}},{tensors},{self.num_tokens},{_quoted(self.group)}]'
        )

    def sample(self, block: Bytes) -> Sample:
        """The sample, its tensors views of its bytes: uint8 [N], no copy.

        They are made only when somebody reads them: eleven views of a small sample take longer
        than everything else about it.
        """
        whole = torch.from_numpy(block)
        if isinstance(self.tensors, Layout):
            return packed_sample(self.facts, whole, self.tensors)
        values: dict[str, Any] = dict(zip(_FACTS, self.facts, strict=True))
        for name, (kind, shape, offset) in self.tensors.items():
            dtype: torch.dtype = getattr(torch, kind)
            nbytes = math.prod(shape) * dtype.itemsize
            values[name] = whole[offset : offset + nbytes].view(dtype).view(shape)
        return Sample(**values)


@lru_cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(eq=False, slots=True)
class StoredSample:
    """Everything about a sample but its bytes, which are read when they are needed.

    Attributes:
        number: of its row in the ledger.
        extent: where its bytes are.
        description: the rest.
    """

    number: int
    extent: Extent
    description: Description

    @property
    def sample_id(self) -> str:
        """See ``Sample``."""
        return self.description.facts[0]

    @property
    def policy_version(self) -> int:
        """See ``Sample``."""
        return self.description.facts[1]

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.description.num_tokens

    @property
    def group(self) -> str:
        """What the samples of its prompt share."""
        return self.description.group

    def read(self, arena: Arena) -> Sample:
        """The sample, its tensors views of the arena: they keep the extent from being reused."""
        return self.description.sample(arena.view(self.extent, self.extent.size))
