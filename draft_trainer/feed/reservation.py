"""Room for a sample that is being received, and a batch that was drawn."""

from __future__ import annotations

from dataclasses import dataclass

from draft_trainer.feed.arena import Extent
from draft_trainer.feed.sample import Sample
from slipstream.checksums import Bytes


@dataclass(frozen=True)
class Drawn:
    """A batch: what ``draw`` chose.

    Attributes:
        number: of the draw, which a training state that contains it carries; 0 where ``samples``
            is empty.
        samples: views of the arena.
    """

    number: int
    samples: list[Sample]


class Reservation:
    """Room for one sample that is being received. It is given back when nothing views it."""

    __slots__ = ("_block", "extent")

    def __init__(self, extent: Extent, block: Bytes) -> None:
        self.extent = extent
        self._block: Bytes | None = block

    @property
    def block(self) -> Bytes:
        """uint8 [nbytes], its start aligned to 64 bytes; its content is not defined at first."""
        assert self._block is not None, "this reservation was released"
        return self._block

    def release(self) -> None:
        """View it no more. What else views it keeps it until then. Idempotent."""
        self._block = None
