"""Tells whether a policy's weights were written to or stepped since a sync."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from policy_bridge.logits import is_sharded


def stamp_of(weights: Sequence[torch.Tensor]) -> int:
    """A number that changes when something writes to the weights in place.

    Sum of the version counters. Writes through ``.data`` escape it, and those of fused optimizers:
    ``WeightWatch`` counts steps too. DTensors are left out: see ``ShardWatch``. Finding the weights
    takes a millisecond: not for use in a step.
    """
    return sum([p._version for p in weights if not is_sharded(p)])


class ShardWatch:
    """Tells whether DTensors were written to in place. Moving one to other memory is no write.

    A move gives it another local tensor, and version counters that begin anew: what was written
    between the last call and the move is not seen. Multi-tensor operations escape the counters.
    """

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        self._weights = [cast(Any, p) for p in weights if is_sharded(p)]
        self._seen = self._look()
        self._written = False

    def written(self) -> bool:
        """Return whether one was written to since this watch was made."""
        before, self._seen = self._seen, self._look()
        for (old, version), (new, now) in zip(before, self._seen, strict=True):
            if old() is new() and version != now:
                self._written = True
        return self._written

    def _look(self) -> list[tuple[weakref.ref[torch.Tensor], int]]:
        # Weak: a model that was moved must not keep the memory that it left.
        held = [(p, p._local_tensor) for p in self._weights]
        return [
            (weakref.ref(local), p._version + (0 if local.is_inference() else local._version))
            for p, local in held
        ]


def watched(
    weights: Sequence[torch.Tensor], steps: Callable[[], int] = lambda: 0
) -> Callable[[], bool]:
    """Return a function that tells whether the weights were written to since, or ``steps`` rose."""
    shards, stamp = ShardWatch(weights), stamp_of(weights) + steps()
    return lambda: shards.written() or stamp_of(weights) + steps() != stamp


class WeightWatch:
    """Tells whether a policy's weights are still those of a sync. ``close`` it.

    Fused optimizers write past the version counters, and on DTensors multi-tensor ones do too, so
    steps of every optimizer that holds one of the weights are counted as well.

    Attributes:
        moved: tells whether they were written to, or stepped, since the last sync; the function of
            an earlier sync goes on to tell of that one.
    """

    def __init__(self) -> None:
        self.moved: Callable[[], bool] = lambda: False
        self._ids: frozenset[int] = frozenset()
        self._steps = 0
        # Before a step: counted after it, another thread could have read new weights by then.
        # Not traced: a compiled step would be compiled again whenever the count has changed.
        self._hook = register_optimizer_step_pre_hook(torch.compiler.disable(self._count))

    def synced(self, weights: Sequence[torch.Tensor]) -> None:
        """Take these, from ``PolicyModules.weights``, as the weights of a version."""
        self._ids = frozenset(map(id, weights))
        self.moved = watched(weights, lambda: self._steps)

    def close(self) -> None:
        """Stop counting steps."""
        self._hook.remove()

    def _count(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        held = (id(p) for group in optimizer.param_groups for p in group["params"])
        # Threads that step other optimizers must not write here, or a count may get lost.
        if any(one in self._ids for one in held):
            self._steps += 1
