"""Puts samples where the trainer reads them: into the ring, or into the message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from policy_bridge.config import BridgeConfig
from policy_bridge.ring_space import RingSpace
from policy_bridge.sample import Sample
from policy_bridge.session import Session
from slipstream.checksums import KINDS, Bytes, checksum_of, copy_hashed
from slipstream.framing import PIECE_BYTES
from slipstream.layers import encode_layers
from slipstream.packed import Layout
from slipstream.refusal import RefusedError
from slipstream.ring import HEADER_BYTES, RingFile
from slipstream.tensors import dtype_to_wire
from slipstream.v1 import draft_trainer_pb2 as pb

DESCRIPTION_BYTES = 512
"""More than a sample's message takes without its block."""

# More than a piece of a payload takes beside its bytes.
_FIELD_BYTES = 16
# Samples that wait are described together: what the trainer does once for a batch, and its answer,
# cost it as much as a MiB of states. Inline four messages' worth of them was no faster than one.
_BATCH_BYTES = 16 << 20


@dataclass(frozen=True)
class Placed:
    """Where a sample's block is.

    Attributes:
        payload: pieces to append to the message's payload; none when it is in the ring.
        ring_bytes: of it in the ring.
    """

    payload: list[Bytes]
    ring_bytes: int


class Placement:
    """One stream's way of handing states over. Used by one thread, but for ``settled``.

    Args:
        session: of the stream; says what the trainer offers.
        config: which transport is wanted.
        distrusted: why shared memory is out of the question; empty when it is not.
    """

    def __init__(self, session: Session, config: BridgeConfig, distrusted: str = "") -> None:
        self._aux_layers = encode_layers(session.aux_layers)
        self._kind = next(kind for kind in KINDS if kind in session.checksums)
        self._ring: RingFile | None = None
        self.reason = distrusted
        if config.transport == "grpc":
            self.reason = 'transport = "grpc"'
        elif not distrusted:
            self._attach(session.shared_memory, Path(config.shared_memory))
        ring = self._ring
        self._space = None if ring is None else RingSpace(HEADER_BYTES, ring.nbytes)
        self._placed: dict[str, int] = {}
        self._facts: tuple[Layout, int, float, int] | None = None
        self._template = pb.VerifierStates()

    @property
    def transport(self) -> pb.Transport:
        """Where most of the states are."""
        return pb.TRANSPORT_GRPC if self._ring is None else pb.TRANSPORT_SHARED_MEMORY

    @property
    def name(self) -> str:
        """The same, as it is configured."""
        return "grpc" if self._ring is None else "shared_memory"

    @property
    def batch_bytes(self) -> int:
        """Bytes of states after which a message is full."""
        return _BATCH_BYTES if self._ring is not None else PIECE_BYTES

    @property
    def ring_bytes(self) -> tuple[int, int] | None:
        """Used and whole bytes of the ring; None where there is none."""
        return None if self._space is None else (self._space.used, self._space.capacity)

    def message_bytes(self, layout: Layout) -> int:
        """Most serialized bytes that describing a sample takes, its block included if inline."""
        nbytes = layout.nbytes
        if self._fits_ring(nbytes):
            return DESCRIPTION_BYTES
        return DESCRIPTION_BYTES + nbytes + (nbytes // PIECE_BYTES + 1) * _FIELD_BYTES

    def place(
        self,
        sample: Sample,
        payload_at: int,
        timeout: float,
        add: Callable[[], pb.VerifierStates],
    ) -> Placed | None:
        """Copy a sample into the ring, or prepare it for a payload, and describe it.

        Args:
            sample: on the CPU.
            payload_at: bytes that are in the message's payload already.
            timeout: seconds to wait for room in the ring.
            add: makes the description, empty; called once there is room.

        Returns:
            None if there was no room in time.

        Raises:
            RefusedError: the ring was truncated.
        """
        layout, payload = sample.layout, []
        if self._ring is not None and self._space is not None and self._fits_ring(layout.nbytes):
            offset = self._space.take(layout.nbytes, timeout)
            if offset is None:
                return None
            self._placed[sample.sample_id] = offset
            self._ring.check()
            block = self._ring.span(offset, layout.nbytes)
            checksum = copy_hashed(sample.block.numpy(), block, self._kind)
            memory = pb.MEMORY_RING
        else:
            memory, offset = pb.MEMORY_PAYLOAD, payload_at
            payload = [sample.block.numpy()]
            checksum = checksum_of(payload, self._kind)
        message = add()
        message.CopyFrom(self._common(sample, memory))
        message.sample_id = sample.sample_id
        packed = message.packed
        packed.checksum = checksum
        packed.span.offset = offset
        return Placed(payload, 0 if payload else layout.nbytes)

    def settled(self, *sample_ids: str) -> None:
        """The trainer has answered: their parts of the ring are free."""
        if self._space is not None:
            offsets = [self._placed.pop(sample_id, None) for sample_id in sample_ids]
            self._space.give_back(*[offset for offset in offsets if offset is not None])

    def close(self) -> None:
        """Let go of the ring."""
        if self._ring is not None:
            self._ring.close()

    def _common(self, sample: Sample, memory: pb.Memory) -> pb.VerifierStates:
        """The description without what differs from sample to sample.

        Made once for many that are alike: built up from its parts it is copied with each of them,
        which took a small sample 6 us, and takes 1.
        """
        layout = sample.layout
        facts = (layout, sample.policy_version, sample.temperature, int(memory))
        if facts != self._facts:
            self._facts = facts
            self._template = pb.VerifierStates(
                policy_version=sample.policy_version,
                temperature=sample.temperature,
                aux_layers=self._aux_layers,
                packed=pb.PackedStates(
                    tokens=layout.tokens,
                    states_dtype=dtype_to_wire(layout.dtype),
                    span=pb.Span(memory=memory, bytes=layout.nbytes),
                    checksum_kind=self._kind,
                ),
            )
        return self._template

    def _attach(self, offered: pb.SharedMemory, directory: Path) -> None:
        if not offered.name:
            self.reason = offered.absent_because or "the trainer offers none"
            return
        try:
            self._ring = RingFile.attach(directory, offered.name, offered.bytes, offered.nonce)
        except (RefusedError, OSError) as error:
            self.reason = str(error)

    def _fits_ring(self, nbytes: int) -> bool:
        return self._space is not None and nbytes <= self._space.capacity
