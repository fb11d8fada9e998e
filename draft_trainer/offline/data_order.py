"""Which samples each step of an offline fit takes: a function of the seed and the position.

Nothing here has a state of its own, so that a position, two integers, is all that a resumed run
needs to draw what the uninterrupted one would have drawn.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from slipstream.refusal import RefusedError


@dataclass(frozen=True)
class Position:
    """Where in the data a run stands.

    Attributes:
        epoch: passes over the data that are done.
        index: samples of the present pass that are done.
    """

    epoch: int = 0
    index: int = 0


class DataOrder:
    """Every sample once per epoch, in an order of that epoch's own.

    Args:
        lengths: tokens of every sample.
        batch_tokens: bound on the tokens of one step; a sample that is longer has a step to itself.
        seed: of the orders.
    """

    def __init__(self, lengths: Sequence[int], batch_tokens: int, seed: int) -> None:
        if not lengths:
            raise RefusedError("samples", "none", "at least one", "record some states first")
        if batch_tokens < 1:
            raise RefusedError("batch_tokens", batch_tokens, "at least 1", "raise it")
        self._lengths = tuple(lengths)
        self._batch_tokens = batch_tokens
        self._seed = seed
        self._epoch, self._order = -1, [0]

    def next_step(self, position: Position) -> tuple[list[int], Position]:
        """The samples of the step that begins at ``position``, and where the next one begins.

        A step never spans two epochs; the last one of an epoch may be short.
        """
        order = self.order(position.epoch)
        chosen: list[int] = []
        tokens = 0
        for sample in order[position.index :]:
            tokens += self._lengths[sample]
            if chosen and tokens > self._batch_tokens:
                break
            chosen.append(sample)
        index = position.index + len(chosen)
        if index == len(order):
            return chosen, Position(position.epoch + 1, 0)
        return chosen, Position(position.epoch, index)

    def steps(self, epochs: int, start: Position = Position()) -> Iterator[list[int]]:
        """The samples of every step from ``start`` to the end of the last epoch."""
        position = start
        while position.epoch < epochs:
            chosen, position = self.next_step(position)
            yield chosen

    def order(self, epoch: int) -> list[int]:
        """Sample indices of one epoch.

        Sorted by the numbers of ``random.Random``, whose sequence Python promises to keep for a
        seed; that of its shuffle, or of torch.randperm, may change between versions and would
        give a run that was resumed after an upgrade some samples twice and others never.
        """
        if epoch != self._epoch:
            draw = random.Random(f"{self._seed}:{epoch}").random
            keys = [draw() for _ in self._lengths]
            self._order = sorted(range(len(keys)), key=keys.__getitem__)
            self._epoch = epoch
        return self._order
