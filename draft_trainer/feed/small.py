"""Many small samples of one layout at once: the same checks, each for all of them together.

A call of numpy's costs as much for one sample of some kilobytes as for five hundred of them, and
there are twenty calls. What is found wrong, or is not the usual case of one sequence in order, is
left to ``receive`` and ``contents``, which also say what it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draft_trainer.feed.contents import LOGPROB_TOLERANCE
from draft_trainer.feed.receive import Memories, ring_there, source_of, start_of
from draft_trainer.feed.validate import Expected
from draft_trainer.kernels.guarded import guarded_rows
from slipstream.checksums import Bytes, checksum_of, finite_rows
from slipstream.packed import FLOAT8, Layout
from slipstream.refusal import RefusedError
from slipstream.v1 import draft_trainer_pb2 as pb

SMALL_BYTES = 16 << 10
"""Of a block that is worth it."""


# Not frozen: setting fields past that takes three times as long, for every small sample.
@dataclass(eq=False, slots=True)
class Arriving:
    """A sample whose declarations were checked.

    Attributes:
        message: its description.
        memories: where its span points.
        layout: in which it comes, and stays.
        block: uint8 [layout.nbytes], the trainer's own.
    """

    message: pb.VerifierStates
    memories: Memories
    layout: Layout
    block: Bytes


def is_small(message: pb.VerifierStates, layout: Layout) -> bool:
    """Whether a sample is of those that ``receive_together`` takes."""
    return layout.nbytes <= SMALL_BYTES and layout.dtype != FLOAT8 and message.HasField("packed")


def receive_together(samples: Sequence[Arriving], expected: Expected) -> list[bool]:
    """Bring samples into their blocks, checked as by ``receive`` and ``check_contents``.

    Args:
        samples: at least one, all small, of one layout and in one memory: the ring of a stream, or
            the payload of a message.
        expected: of every sample.

    Returns:
        Whether each is in its block and right; the block of any other one is as it was.

    Raises:
        RingTruncatedError: the ring was cut short while it was read.
    """
    answers = [False] * len(samples)
    there: list[int] = []
    starts: list[int] = []
    for at, sample in enumerate(samples):
        try:
            starts.append(start_of(sample.message.packed.span, sample.memories))
            there.append(at)
        except RefusedError:
            continue
    if not there:
        return answers
    layout = samples[0].layout
    rows = _copies([samples[at] for at in there], starts, layout)
    right = _contents_right(rows, layout, expected)
    right &= finite_rows(rows[:, layout.aux_at :], layout.dtype)
    for at, row, good in zip(there, rows, right.tolist(), strict=True):
        if good and _is_of(row, samples[at].message.packed):
            samples[at].block[:] = row
            answers[at] = True
    return answers


def _copies(samples: Sequence[Arriving], starts: Sequence[int], layout: Layout) -> Bytes:
    """The blocks as they arrived, uint8 [n, layout.nbytes]. They are what is checked: the ring is
    shared memory, which its other owner may change."""
    rows = np.empty((len(samples), layout.nbytes), dtype=np.uint8)
    memories = samples[0].memories
    if samples[0].message.packed.span.memory == pb.MEMORY_RING:
        assert memories.ring is not None, "a span in it was found to be right"
        with ring_there(memories.ring):
            guarded_rows(memories.ring.span(0, memories.ring.nbytes), starts, rows)
    elif len(memories.payload) == 1:
        guarded_rows(memories.payload[0], starts, rows)
    else:
        pieces = [source_of(sample.message.packed.span, memories) for sample in samples]
        np.concatenate([part for parts in pieces for part in parts], out=rows.reshape(-1))
    return rows


def _is_of(row: Bytes, packed: pb.PackedStates) -> bool:
    try:
        return checksum_of([row], packed.checksum_kind) == packed.checksum
    except RefusedError:
        return False


def _contents_right(rows: Bytes, layout: Layout, expected: Expected) -> NDArray[np.bool_]:
    """``check_contents`` of every row of uint8 [n, layout.nbytes], for one sequence in order."""
    tokens = layout.tokens
    numbers = rows[:, : 12 * tokens].view(np.int32)
    token_ids, positions, segments = np.split(numbers, 3, axis=1)
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
