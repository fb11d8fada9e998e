"""Brings samples into their rooms, checked: together where that is possible, or one by one."""

from __future__ import annotations

from collections.abc import Sequence

from draft_trainer.feed.contents import check_contents
from draft_trainer.feed.packed_sample import prompt_in
from draft_trainer.feed.receive import receive
from draft_trainer.feed.reservation import Reservation
from draft_trainer.feed.together import Arrived, fill_together
from draft_trainer.feed.validate import Expected
from slipstream.packed import Layout
from slipstream.refusal import RefusedError
from slipstream.ring import RingTruncatedError

Outcome = str | RefusedError
"""Of a sample: its prompt (``prompt_in``), or what is wrong with it."""


def fill_rooms(
    samples: Arrived,
    wanted: Sequence[tuple[int, Layout]],
    kept: Sequence[Layout],
    rooms: Sequence[Reservation | RefusedError],
    expected: Expected,
) -> dict[int, Outcome]:
    """Bring samples into their rooms and check them there.

    Args:
        samples: descriptions, and where their spans point.
        wanted: indices of those whose declarations are right, and the layouts in which they come.
        kept: the layouts in which they stay.
        rooms: for them, or why there is none.
        expected: of every sample.

    Returns:
        What became of each, by its index.

    Raises:
        RingTruncatedError: the ring was cut short while it was read; no room is to be relied on.
    """
    outcomes: dict[int, Outcome] = dict(fill_together(samples, wanted, rooms, expected))
    for (at, arriving), layout, room in zip(wanted, kept, rooms, strict=True):
        if at in outcomes:
            continue
        if isinstance(room, RefusedError):
            outcomes[at] = room
            continue
        message, memories = samples[at]
        try:
            block = room.block
            receive(message, memories, arriving, block, layout)
            check_contents(block, layout, expected)
            outcomes[at] = prompt_in(block, layout)
        except RingTruncatedError:
            # Nothing of this stream can be read: it is not for the sample to answer for.
            raise
        except RefusedError as error:
            # Without the frames it came through: they hold the room, and what holds the error.
            outcomes[at] = error.with_traceback(None)
    return outcomes
