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
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from rollout_server.weight_source import WeightSource

if TYPE_CHECKING:
    from vllm.config import ModelConfig


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
