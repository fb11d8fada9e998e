"""Samples of one layout, brought into their rooms and checked by two calls for all of them.

A sample of 2 KiB took 15 us in calls of numpy, and one of a megabyte 40: where megabytes have just
gone by, no code is left in the processor's caches. What is found wrong, or is not the usual case of
one sequence in order, is left to ``receive`` and ``contents``, which also say what it is; so is
everything where the kernels do not run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from ctypes import CDLL
from dataclasses import dataclass, field

from draft_trainer.feed.contents import LOGPROB_TOLERANCE
from draft_trainer.feed.receive import Memories, bounds_of, ring_there
from draft_trainer.feed.reservation import Reservation
from draft_trainer.feed.sample import prompt_of
from draft_trainer.feed.validate import Expected
from draft_trainer.kernels.checked_copy import copies_checked, fits_copies
from draft_trainer.kernels.contents import sequences_right
from draft_trainer.kernels.library import all_kernels
from slipstream.packed import FLOAT8, Layout
from slipstream.refusal import RefusedError
from slipstream.v1 import draft_trainer_pb2 as pb

Arrived = Sequence[tuple[pb.VerifierStates, Memories]]


@dataclass(eq=False, slots=True)
class _Together:
    """Samples of one layout: indices, descriptions, rooms, and addresses that they come from."""

    at: list[int] = field(default_factory=list)
    packed: list[pb.PackedStates] = field(default_factory=list)
    rooms: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)


def fill_together(
    samples: Arrived,
    wanted: Sequence[tuple[int, Layout]],
    rooms: Sequence[Reservation | RefusedError],
    expected: Expected,
) -> Iterator[tuple[int, str]]:
    """Fill the rooms of those that are right.

    Args:
        samples: of one stream: descriptions, and where their spans point.
        wanted: indices of those whose declarations are right, and the layouts in which they come.
        rooms: for them, or why there is none.
        expected: of every sample.

    Yields:
        The index of each that is right and in its room, and its prompt (``prompt_in``). What is in
        the rooms of the others is not defined.

    Raises:
        RingTruncatedError: the ring was cut short while it was read.
    """
    kernels = all_kernels()
    if kernels is None:
        return
    ring = next((memories.ring for _, memories in samples if memories.ring is not None), None)
    for layout, group in _groups(samples, wanted, rooms):
        with ring_there(ring):
            yield from _filled(kernels, layout, group, expected)


def _groups(
    samples: Arrived,
    wanted: Sequence[tuple[int, Layout]],
    rooms: Sequence[Reservation | RefusedError],
) -> list[tuple[Layout, _Together]]:
    # Equal layouts are the same object; a hash of all of its fields is dear for each sample.
    groups: dict[int, tuple[Layout, _Together]] = {}
    memory: dict[tuple[int, int], tuple[int, int, int, int] | None] = {}
    for (at, layout), room in zip(wanted, rooms, strict=True):
        message, memories = samples[at]
        if layout.dtype == FLOAT8 or not message.HasField("packed"):
            continue
        packed = message.packed
        span = packed.span
        if not isinstance(room, Reservation) or not fits_copies(
            layout.nbytes, packed.checksum_kind, layout.aux_at
        ):
            continue
        # A stream has one ring, and each message its own payload.
        key = span.memory, id(memories)
        if key not in memory:
            memory[key] = _memory(span.memory, memories)
        known = memory[key]
        if known is None:
            continue
        address, first, end, step = known
        start = span.offset
        if start < first or start > end - layout.nbytes or start % step:
            continue
        _, group = groups.setdefault(id(layout), (layout, _Together()))
        group.at.append(at)
        group.packed.append(packed)
        group.rooms.append(room.address)
        group.sources.append(address + start)
    return list(groups.values())


def _memory(memory: int, memories: Memories) -> tuple[int, int, int, int] | None:
    """The address of a memory that is in one piece, and its bounds (``bounds_of``)."""
    try:
        bounds = bounds_of(memory, memories)
    except RefusedError:
        return None
    if memory == pb.MEMORY_RING:
        assert memories.ring is not None, "it has bounds"
        return memories.ring.span(0, memories.ring.nbytes).ctypes.data, *bounds
    if len(memories.payload) != 1:
        return None
    return memories.payload[0].ctypes.data, *bounds


def _filled(
    kernels: CDLL, layout: Layout, group: _Together, expected: Expected
) -> Iterator[tuple[int, str]]:
    # What is looked at is what is kept: the ring is shared memory, which its owner may change.
    checksums, finite = copies_checked(
        kernels, group.sources, group.rooms, layout.nbytes, layout.dtype, layout.aux_at
    )
    right, lengths, ids = sequences_right(
        kernels, group.rooms, layout.tokens, expected.vocab_size, LOGPROB_TOLERANCE
    )
    found = zip(group.at, group.packed, checksums, finite.tolist(), right, strict=True)
    for number, (at, packed, checksum, states, contents) in enumerate(found):
        if states and contents and checksum == packed.checksum:
            length = lengths[number]
            yield at, prompt_of(ids[number, :length]) if length else ""
