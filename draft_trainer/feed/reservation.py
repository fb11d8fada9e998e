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
    """Room for one sample that is being received. It is given back when nothing views it.

    Args:
        extent: in the arena.
        shared: uint8 [N], a view of the arena, of other reservations' room too.
        at: where this one's room begins in it.
        address: of its first byte.
        nbytes: of the sample.
    """

    __slots__ = ("_shared", "address", "at", "extent", "nbytes")

    def __init__(self, extent: Extent, shared: Bytes, at: int, address: int, nbytes: int) -> None:
        self.extent = extent
        self.at = at
        self.address = address
        self.nbytes = nbytes
        self._shared: Bytes | None = shared

    @property
    def shared(self) -> Bytes:
        """See the class."""
        assert self._shared is not None, "this reservation was released"
        return self._shared

    @property
    def block(self) -> Bytes:
        """uint8 [nbytes], its start aligned to 64 bytes; its content is not defined at first."""
        return self.shared[self.at : self.at + self.nbytes]

    def release(self) -> None:
        """View it no more. What else views it keeps it until then. Idempotent."""
        self._shared = None
