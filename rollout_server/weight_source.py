"""Where a worker reads weights from: a staged set of tensors, or a checkpoint directory.

Only paths, shapes and dtypes cross the engine's RPC, never tensors: vLLM pickles
what it passes to workers, and a policy is gigabytes. A staged tensor is a file of
raw bytes that the worker maps into memory; a checkpoint is safetensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from rollout_server.checkpoint import weight_files


@dataclass(frozen=True)
class StagedTensor:
    """One tensor in the content store.

    Attributes:
        name: parameter name in the checkpoint.
        dtype: for example "bfloat16".
        shape: sizes, outermost first.
        path: file of exactly product(shape) * itemsize raw bytes.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: str


@dataclass(frozen=True)
class WeightSource:
    """All weights of one model: a checkpoint directory, or staged tensors.

    Attributes:
        directory: a checkpoint on disk; empty when ``tensors`` holds the weights.
        tensors: staged tensors; empty when ``directory`` is set.
    """

    directory: str = ""
    tensors: tuple[StagedTensor, ...] = ()

    def to_message(self) -> dict[str, Any]:
        """As plain dicts, for vLLM's RPC."""
        return asdict(self)

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> WeightSource:
        """The inverse of ``to_message``."""
        tensors: Sequence[Mapping[str, Any]] = message["tensors"]
        return cls(
            directory=message["directory"],
            tensors=tuple(
                StagedTensor(t["name"], t["dtype"], tuple(t["shape"]), t["path"]) for t in tensors
            ),
        )

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every (name, tensor), CPU, memory-mapped.

        Raises:
            OSError: a file is missing or short.
        """
        if self.directory:
            yield from _checkpoint_weights(Path(self.directory))
        else:
            for tensor in self.tensors:
                yield tensor.name, map_tensor(tensor)


def map_tensor(tensor: StagedTensor) -> torch.Tensor:
    """A staged tensor over its file's pages, private to this process.

    Raises:
        OSError: missing, or not of the size that its shape needs.
    """
    dtype = getattr(torch, tensor.dtype)
    size = math.prod(tensor.shape) * dtype.itemsize
    found = Path(tensor.path).stat().st_size
    if found != size:
        raise OSError(f"{tensor.path}: {found} bytes, {size} needed for {tensor.name}")
    if size == 0:
        return torch.empty(tensor.shape, dtype=dtype)
    flat = torch.from_file(tensor.path, shared=False, size=size, dtype=torch.uint8)
    return flat.view(dtype).reshape(tensor.shape)


def _checkpoint_weights(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in weight_files(directory):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (not a dict: it has no __iter__)
                yield name, file.get_tensor(name)
