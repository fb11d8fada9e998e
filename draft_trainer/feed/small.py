"""Many small samples of one layout at once: the same checks, each for all of them together.

A call of numpy's costs as much for one sample of some kilobytes as for five hundred of them, and
there are twenty calls. What is found wrong, or is not the usual case of one sequence in order, is
left to ``receive`` and ``contents``, which also say what it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from draft_trainer.feed.contents import LOGPROB_TOLERANCE
from draft_trainer.feed.packed_sample import prompts_in
from draft_trainer.feed.receive import Memories, bounds_of, cut, ring_there
from draft_trainer.feed.reservation import Reservation
from draft_trainer.feed.validate import Expected
from draft_trainer.kernels.checked_copy import fused_rows_checked
from slipstream.checksums import Bytes
from slipstream.packed import FLOAT8, Layout
from slipstream.refusal import RefusedError
from slipstream.ring import RingTruncatedError
from slipstream.v1 import draft_trainer_pb2 as pb

SMALL_BYTES = 16 << 10
"""Of a block that is worth it."""


@dataclass(eq=False, slots=True)
class Together:
    """Samples of one layout and in one memory, whose declarations were checked.

    Attributes:
        layout: in which they come, and stay.
        memory: which one it is.
        kind: of all of their checksums.
        memories: it is among them.
        shared: the view that all of their rooms are parts of.
        at: their indices, for whoever made this.
        packed: their descriptions.
        rooms: for them.
    """

    layout: Layout
    memory: int
    kind: int
    memories: Memories
    shared: Bytes
    at: list[int] = field(default_factory=list)
    packed: list[pb.PackedStates] = field(default_factory=list)
    rooms: list[Reservation] = field(default_factory=list)


def is_small(message: pb.VerifierStates, layout: Layout) -> bool:
    """Whether a sample is of those that ``receive_together`` takes."""
    return layout.nbytes <= SMALL_BYTES and layout.dtype != FLOAT8 and message.HasField("packed")


def receive_together(samples: Together, expected: Expected) -> list[str | None]:
    """Bring samples into their rooms, checked as by ``receive`` and ``check_contents``.

    Args:
        samples: at least one, all small.
        expected: of every sample.

    Returns:
        For each that is in its room and right, its prompt (``prompts_in``). None for any other
        one, whose room's content is not defined.

    Raises:
        RingTruncatedError: the ring was cut short while it was read.
    """
    layout = samples.layout
    prompts: list[str | None] = [None] * len(samples.rooms)
    starts = [packed.span.offset for packed in samples.packed]
    there = _inside(starts, samples)
    if not there:
        return prompts
    rooms = [samples.rooms[at] for at in there]
    neighbours = _neighbours(rooms, samples)
    # What is checked is what is kept: the ring is shared memory, which its owner may change.
    rows = np.empty((len(there), layout.nbytes), np.uint8) if neighbours is None else neighbours
    try:
        checksums, right = _copied([starts[at] for at in there], samples, rows)
    except RingTruncatedError:
        raise
    except RefusedError:
        # A kind of checksum that nobody here can compute.
        return prompts
    right &= _contents_right(rows, layout, expected)
    found = zip(there, checksums, right.tolist(), prompts_in(rows, layout), strict=True)
    for row, (at, checksum, good, prompt) in enumerate(found):
        if good and checksum == samples.packed[at].checksum:
            if neighbours is None:
                samples.rooms[at].block[:] = rows[row]
            prompts[at] = prompt
    return prompts


def _inside(starts: Sequence[int], samples: Together) -> list[int]:
    """Indices of the spans that lie within the memory."""
    try:
        first, end, step = bounds_of(samples.memory, samples.memories)
    except RefusedError:
        return []
    last = end - samples.layout.nbytes
    return [at for at, start in enumerate(starts) if first <= start <= last and not start % step]


def _neighbours(rooms: Sequence[Reservation], samples: Together) -> Bytes | None:
    """The rooms as uint8 [n, layout.nbytes], if they lie one after the other."""
    first, nbytes = rooms[0].at, samples.layout.nbytes
    if rooms[-1].at - first != (len(rooms) - 1) * nbytes:
        return None
    return samples.shared[first : first + len(rooms) * nbytes].reshape(len(rooms), nbytes)


def _copied(
    starts: Sequence[int], samples: Together, rows: Bytes
) -> tuple[list[int], NDArray[np.bool_]]:
    """Copy the blocks as they arrived, to uint8 [n, layout.nbytes]; checksums, and what is finite.

    Raises:
        RefusedError: a kind of checksum that this process cannot compute.
        RingTruncatedError: the ring was cut short while it was read.
    """
    layout, memories = samples.layout, samples.memories
    if samples.memory == pb.MEMORY_RING:
        assert memories.ring is not None, "a span in it was found to be right"
        source = memories.ring.span(0, memories.ring.nbytes)
    elif len(memories.payload) == 1:
        source = memories.payload[0]
    else:
        pieces = [cut(memories.payload, at, at + layout.nbytes) for at in starts]
        source = np.concatenate([part for parts in pieces for part in parts])
        starts = range(0, len(source), layout.nbytes)
    with ring_there(memories.ring):
        return fused_rows_checked(source, starts, rows, samples.kind, layout.dtype, layout.aux_at)


def _contents_right(rows: Bytes, layout: Layout, expected: Expected) -> NDArray[np.bool_]:
    """``check_contents`` of every row of uint8 [n, layout.nbytes], for one sequence in order."""
    tokens = layout.tokens
    numbers = rows[:, : 12 * tokens].view(np.int32)
    token_ids, positions = numbers[:, :tokens], numbers[:, tokens : 2 * tokens]
    segments = numbers[:, 2 * tokens :]
    mask = rows[:, layout.mask_at : layout.mask_at + tokens]
    floats = rows[:, 12 * tokens : 20 * tokens].view(np.float32)
    # Read as unsigned a negative number is beyond every bound.
    right: NDArray[np.bool_] = token_ids.view(np.uint32).max(axis=1) < expected.vocab_size
    right &= mask.max(axis=1) <= 1
    right &= mask[:, 2:].any(axis=1)
    # In 64 bits, where no step wraps around.
    first = positions[:, :1].astype(np.int64)
    right &= (positions == first + np.arange(tokens)).all(axis=1) & (first[:, 0] >= 0)
    right &= ~segments.any(axis=1)
    right &= np.isfinite(floats).all(axis=1)
    right &= floats[:, :tokens].max(axis=1) <= LOGPROB_TOLERANCE
    return right
