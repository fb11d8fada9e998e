"""Applies weights to live vLLM modules: all of them, or none.

Runs inside one worker call, between two engine steps. A draft that lies ready beside the
live one (``spares``) is exchanged with it. Everything else, policies above all, goes through
vLLM's layer-wise reload, because plain in-place loading fails on CPUs, where linear layers
are pre-packed at load and their parameters left empty; it also copies into the old
storages, which CUDA graphs point at, and its weight loaders shard for tensor
parallelism.

A reload puts parameters on the meta device until it ends. If it fails in the
middle, ``_abandon`` puts the old parameters of the unfinished layers back, and
the finished ones get the old weights through a reload of their own.

Where a worker reads weights from: a staged set of tensors, or a checkpoint directory.

Only paths, shapes and dtypes cross the engine's RPC, never tensors: vLLM pickles
what it passes to workers, and a policy is gigabytes. A staged tensor is a file of
raw bytes that the worker maps into memory; a checkpoint is safetensors.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from safetensors import safe_open
from torch import nn

from rollout_server.checkpoint import weight_files

if TYPE_CHECKING:
    from vllm.config import ModelConfig


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


class Ready(Protocol):
    """Weights that lie ready beside a live model (``spares.Spares``)."""

    def put(self, new: WeightSource, old: WeightSource) -> bool:
        """Exchange them with the live ones; False if these do not lie ready."""
        ...

    def drop(self) -> None:
        """The live weights are about to be written in another way."""
        ...

    def loaded(self) -> None:
        """They were."""
        ...


@dataclass(frozen=True)
class Change:
    """One model and what it is to become.

    Attributes:
        kind: "draft" or "policy", for messages.
        model: the live module.
        config: vLLM's configuration of it.
        new: weights to apply.
        old: weights that it has now, for when something fails.
        ready: what may lie ready beside the model.
    """

    kind: str
    model: nn.Module
    config: ModelConfig
    new: WeightSource
    old: WeightSource
    ready: Ready | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of ``apply_all``.

    Attributes:
        seconds: wall time.
        error: empty when everything was applied; else why nothing was.
        restored: False when even the old weights could not be put back, so that
            the models are not to be trusted.
    """

    seconds: float
    error: str = ""
    restored: bool = True

    def to_message(self) -> dict[str, Any]:
        """As a plain dict, for vLLM's RPC."""
        return {"seconds": self.seconds, "error": self.error, "restored": self.restored}


# What a reload can raise on weights that passed every check before it: a file
# that vanished, a shape that only the sharded layer knows, memory.
FAILURES = (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError, AssertionError)


def apply_all(changes: Sequence[Change]) -> Outcome:
    """Apply every change; after a failure every model has its old weights again."""
    start = time.perf_counter()
    touched: list[Change] = []
    try:
        for change in changes:
            touched.append(change)
            _put(change, change.new, change.old)
    except FAILURES as error:
        failed = f"{touched[-1].kind}: {type(error).__name__}: {error}"
        try:
            if touched[-1].ready is not None:
                touched[-1].ready.drop()
            for change in touched:
                _abandon(change.model)
                _put(change, change.old, change.new)
        except FAILURES as second:
            return Outcome(
                time.perf_counter() - start,
                f"{failed}; and then the old weights: {type(second).__name__}: {second}",
                restored=False,
            )
        return Outcome(time.perf_counter() - start, failed)
    return Outcome(time.perf_counter() - start)


def _put(change: Change, new: WeightSource, old: WeightSource) -> None:
    if change.ready is not None:
        if change.ready.put(new, old):
            return
        change.ready.drop()
    load(change.model, change.config, new.weights())
    if change.ready is not None:
        change.ready.loaded()


@torch.no_grad()
def load(
    model: nn.Module, config: ModelConfig, weights: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Reload one model from checkpoint-named tensors (any shapes, CPU).

    The caller has set vLLM's current configuration.
    """
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
    )

    with _without_expected_warnings():
        initialize_layerwise_reload(model)
        model.load_weights(weights)  # type: ignore[operator]
        finalize_layerwise_reload(model, config)


@contextlib.contextmanager
def _without_expected_warnings() -> Iterator[None]:
    """vLLM warns "Failed to load weights" of every layer that has none in the
    checkpoint (rotary tables, the embedding that is shared on purpose). Which names
    must come was checked when they were staged."""
    logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@torch.no_grad()
def _abandon(model: nn.Module) -> None:
    """Take the unfinished layers of a failed reload off the meta device."""
    from vllm.model_executor.model_loader.reload import layerwise

    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load() and info.kernel_tensors is not None:
            layerwise._place_kernel_tensors(layer, info)
        info.reset()
    layerwise.LOADING_LAYERS.clear()
