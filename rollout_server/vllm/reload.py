"""Applies weights to live vLLM modules in one worker call between two steps, all or none.

A draft whose standby copy is ready is swapped (``swap``). A draft from whose parameters vLLM
derives other tensors (``served.derived``) is never reloaded: if need be, its copy is made in the
commit. Everything else, policies above all, goes through vLLM's layer-wise reload: plain in-place
loading fails on CPUs, where linear layers are packed at load and their parameters left empty. The
reload also copies into the old storages, which CUDA graphs point at, and its weight loaders shard
for tensor parallelism.

A reload puts parameters on the meta device until it ends. If it fails in the middle, the old
parameters of the unfinished layers are put back, and the finished ones get the old weights through
a reload of their own.

Whatever a model's ``load_weights`` copies into a parameter without its weight loader is lost: a
copy onto the meta device does nothing, and vLLM then puts the old parameter back without an error.
https://github.com/vllm-project/vllm/pull/57795 and
https://github.com/vllm-project/vllm/pull/57805 are about GPT-OSS, which 0.29 to 0.33 load that way.
Such a reload is refused (``refuse_lost``), whatever the version is.

A reload asks for the names of weight loaders, which partial functions have none of: it failed in
the middle, and so did the one that puts the old weights back. MiniMax-M2 has such loaders, in 0.32
too; https://github.com/vllm-project/vllm/pull/32133 brought the question (``name_loaders``).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from rollout_server.control.changes import (
    Change,
    Result,
)
from rollout_server.control.stages import WeightSource
from rollout_server.vllm.served.derived import is_derived
from rollout_server.vllm.standby import Standby
from rollout_server.vllm.swap import LOAD_FAILURES, NotSwappableError
from slipstream.errors import RefusedError

if TYPE_CHECKING:
    from vllm.config import ModelConfig


@dataclass(frozen=True)
class LiveModel:
    """A model in a worker's memory.

    Attributes:
        model: the module.
        config: vLLM's configuration of it.
        standby: a draft's standby copies.
        receive: makes the weight-transfer engine receive what ``WeightSource.transfer`` describes.
    """

    model: nn.Module
    config: ModelConfig
    standby: Standby | None = None
    receive: Callable[[str], None] | None = None

    def reloads(self, new: WeightSource) -> bool:
        """Return whether ``apply`` would load these weights layer by layer over the live ones."""
        return self.standby is None or not (self.standby.is_ready(new) or is_derived(self.model))

    def apply(self, new: WeightSource, old: WeightSource, restoring: bool = False) -> None:
        """Swap or reload.

        Args:
            new: becomes live.
            old: is live.
            restoring: as of ``load``.

        Raises:
            RefusedError: as ``refuse_lost``; the model is torn.
            NotSwappableError: a draft that no reload may touch cannot be swapped; nothing changed.
            OSError, RuntimeError, ...: one of ``LOAD_FAILURES``; the model may be torn.
        """
        if self.standby is not None:
            if self.standby.swap(new, old):
                return
            self.standby.drop()
            if is_derived(self.model):
                self.standby.load(new)
                if not self.standby.swap(new, old):
                    raise NotSwappableError("the copy that was just loaded does not fit")
                return
        name_loaders(self.model)
        if new.transfer and self.receive is not None:
            self.receive(new.transfer)
            return
        load(self.model, self.config, new.weights(), restoring)
        if self.standby is not None:
            self.standby.read_back.record()

    @torch.no_grad()
    def abandon(self) -> None:
        """Take the unfinished layers of a failed reload off the meta device."""
        from vllm.model_executor.model_loader.reload import layerwise

        for layer in self.model.modules():
            info = layerwise.get_layerwise_info(layer)
            if info.can_load() and info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)
            info.reset()
        layerwise.LOADING_LAYERS.clear()


def name_loaders(model: nn.Module) -> None:
    """Name the weight loaders of a model that are partial functions after what they call."""
    for tensor in (*model.parameters(), *model.buffers()):
        loader = getattr(tensor, "weight_loader", None)
        if isinstance(loader, functools.partial):
            loader.__name__ = loader.func.__name__  # type: ignore[attr-defined]


def apply_all(changes: Sequence[tuple[Change, LiveModel]]) -> Result:
    """Apply every change; after a failure every model has its old weights again.

    ``Result.restored`` is False if that failed, as it does for old weights of a transfer.
    """
    start = time.perf_counter()
    touched: list[tuple[Change, LiveModel]] = []
    error, restored, received = "", True, False
    try:
        for change, live in changes:
            touched.append((change, live))
            live.apply(change.new, change.old)
    except (RefusedError, NotSwappableError, *LOAD_FAILURES) as failure:
        change, live = touched[-1]
        if isinstance(failure, NotSwappableError):
            touched.pop()
        error = f"{change.kind}: {type(failure).__name__}: {failure}"
        received = any(change.new.transfer for change, _ in touched)
        if live.standby is not None:
            live.standby.drop()
    # Outside the handler: the error keeps alive what the failed load held.
    if error:
        try:
            for change, live in touched:
                live.abandon()
                # Nobody sends the old weights again: those of a transfer are held nowhere.
                replace(live, receive=None).apply(change.old, change.new, restoring=True)
        except (NotSwappableError, *LOAD_FAILURES) as second:
            error += f"; and then the old weights: {type(second).__name__}: {second}"
            restored = False
    return Result(time.perf_counter() - start, error, restored, received=received)


@torch.no_grad()
def load(
    model: nn.Module,
    config: ModelConfig,
    weights: Iterable[tuple[str, torch.Tensor]],
    restoring: bool = False,
) -> None:
    """Reload one model from checkpoint-named tensors (any shapes, CPU).

    The caller has set vLLM's current configuration.

    Args:
        model: in memory.
        config: vLLM's of it.
        weights: all of its tensors.
        restoring: ``weights`` are those from before a load that failed. A layer that a reload
            cannot reach still has them, and keeps them.

    Raises:
        RefusedError: as ``refuse_lost``; the model is torn.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    with _without_expected_warnings():
        layerwise.initialize_layerwise_reload(model)
        loaded = model.load_weights(weights) or ()  # type: ignore[operator]
        if restoring:
            for layer in {*lost(model, loaded).values()}:
                info = layerwise.get_layerwise_info(layer)
                layerwise._place_kernel_tensors(layer, info)
                info.reset()
        else:
            refuse_lost(model, loaded)
        layerwise.finalize_layerwise_reload(model, config)


def lost(model: nn.Module, loaded: Iterable[str]) -> dict[str, nn.Module]:
    """Find the tensors that a reload, if finished now, would leave as they were.

    Args:
        model: between vLLM's ``initialize_layerwise_reload`` and ``finalize_layerwise_reload``.
        loaded: the names that its ``load_weights`` reported.

    Returns:
        The names among these for which no weight loader holds anything, and the layer of each.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    layers = dict(model.named_modules(remove_duplicate=False))
    found = {}
    for name in sorted(loaded):
        owner, _, leaf = name.rpartition(".")
        layer = layers.get(owner)
        tensor = None if layer is None else (layer._parameters | layer._buffers).get(leaf)
        # A tensor that is not on the meta device was written, or its layer is finished.
        if layer is None or tensor is None or not tensor.is_meta:
            continue
        info = layerwise.get_layerwise_info(layer)
        if info.can_load() and leaf not in {each for each, _ in info.loaded_weights}:
            found[name] = layer
    return found


def refuse_lost(model: nn.Module, loaded: Iterable[str]) -> None:
    """Refuse a reload that would leave tensors as they were (``lost``).

    Raises RefusedError: naming the first of them.
    """
    if names := [*lost(model, loaded)]:
        raise RefusedError(
            names[0] + (f" and {len(names) - 1} others" if names[1:] else ""),
            f"copied by {type(model).__name__}.load_weights without a weight loader, which changes "
            "nothing in a model that is live",
            "tensors that vLLM loads through weight loaders",
            "start the server anew with these weights as its model: this vLLM cannot push them",
        )


@contextlib.contextmanager
def _without_expected_warnings() -> Iterator[None]:
    """Silence "Failed to load weights", which vLLM logs for every layer without any in the
    checkpoint (rotary tables, a shared embedding). The names were checked at the stage."""
    logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
