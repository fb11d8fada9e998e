"""Checks that the draft in a worker's memory is the committed one."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping

import torch
from torch import nn

from rollout_server.served.derived import derived
from rollout_server.vllm_patches import storages

SAME, DIFFERS, ASLEEP = "same", "differs", "asleep"

_BY_ELEMENT = 1 << 16
"""Bytes up to which a tensor is hashed by the element."""

_HASHED = 31
"""Elements of a larger tensor that are hashed without their order. Odd: a constant shows."""

GetModel = Callable[[], nn.Module]


def element_hash(parameter: torch.Tensor) -> int:
    """Hash of a tensor's elements and of their order, but for that within 31 neighbours.

    XOR of each 31 elements, weighted by their place: one pass at the memory's speed, where an XOR
    of all would be blind to swapped rows or shards. A small tensor is hashed by the element.
    """
    values = parameter.detach().reshape(-1)
    if values.dtype.itemsize == 1:
        # torch.hash_tensor has no kernel for the 8-bit floats.
        values = values.view(torch.int8)
    block = _HASHED if values.nbytes > _BY_ELEMENT else 1
    whole = values.numel() // block * block
    hashes = torch.hash_tensor(values[:whole].view(-1, block), 1).view(torch.int64)
    if whole < values.numel():
        rest = torch.hash_tensor(values[whole:]).view(torch.int64)
        hashes = torch.cat([hashes, rest.view(1)])
    # Odd weights, modulo 2^64: a change of one block always changes the sum.
    return int((hashes * (2 * torch.arange(hashes.numel(), device=hashes.device) + 1)).sum())


def hashes_of(draft: nn.Module, without: Container[int] = ()) -> dict[str, int]:
    """``element_hash`` by name of the parameters that packing leaves, and of what is derived.

    Args:
        draft: the draft, or a copy of it.
        without: addresses of memory that is left out.
    """
    tensors = [*draft.named_parameters(), *derived(draft)]
    return {
        name: element_hash(tensor)
        for name, tensor in tensors
        if tensor.numel() and tensor.untyped_storage().data_ptr() not in without
    }


class ReadBack:
    """Whether the draft in a worker's memory is the one that was committed.

    It is not after sleep level 2 (the memory comes back empty), after another writer, or after a
    memory fault. ``element_hash`` finds damage, not malice. Left out are parameters in the
    verifier's memory, which a policy push changes, and those that a CPU build packs away at load
    (they are empty).
    """

    def __init__(self, policy: GetModel, draft: GetModel) -> None:
        self._policy, self._draft = policy, draft
        self.lost = False
        self.committed = self._now()

    def record(self, hashes: Mapping[str, int] | None = None) -> None:
        """The draft was just replaced.

        Args:
            hashes: of the parameters that were swapped in, taken before, so that no pass over the
                draft delays the engine now; None: read the memory.
        """
        self.committed = self._now() if hashes is None else {**self.committed, **hashes}
        self.lost = False

    def check(self) -> str:
        """``SAME`` or ``DIFFERS``; not while the engine sleeps, whose memory is gone."""
        return DIFFERS if self.lost or self._now() != self.committed else SAME

    @torch.no_grad()
    def _now(self) -> dict[str, int]:
        return hashes_of(self._draft(), storages(self._policy()))
