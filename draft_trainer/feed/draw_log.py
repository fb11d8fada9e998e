"""Which draws the weights on disk have seen."""

from __future__ import annotations

from collections.abc import Iterable

from draft_trainer.feed.ledger import Ledger

_LAST = "draws"
_RELEASE = "release"
_STATE = "state_draws"


class DrawLog:
    """Numbers the draws, over the whole life of the ledger. Its owner has the lock.

    Attributes:
        last: number of the last draw.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.last: int = ledger.fact(_LAST, 0)

    def record(self, numbers: Iterable[int]) -> None:
        """These samples were drawn, together; on disk before they are trained on."""
        with self._ledger.transaction():
            self._ledger.record_draw(self.last + 1, numbers)
            self._ledger.set_fact(_LAST, self.last + 1)
        self.last += 1

    def undo_last(self) -> None:
        """The last draw was not trained on."""
        with self._ledger.transaction():
            self._ledger.undo_draws(self.last)

    def saved(self, draws: int) -> None:
        """A training state that contains the draws up to this one is on disk."""
        with self._ledger.transaction():
            before = self._ledger.fact(_STATE, 0)
            if before < draws:
                # Not its own: where this state is damaged, the one before it is resumed.
                self._ledger.forget_draws(before)
            self._ledger.set_fact(_STATE, draws)

    def released(self, version: int) -> None:
        """A release whose weights contain every draw was written; no older state is resumed."""
        with self._ledger.transaction():
            self._ledger.set_fact(_RELEASE, [version, self.last])
            self._ledger.set_fact(_STATE, self.last)
            self._ledger.forget_draws(self.last)

    def rewind(self, draws: int | None, release: int) -> tuple[int, int, int]:
        """Take back what the weights that are resumed have not seen; see ``SampleStore.rewind``.

        Returns:
            The last draw that they have seen, how often a sample was drawn after it, and how many
            of those samples are gone.
        """
        with self._ledger.transaction():
            if draws is None:
                noted, last = self._ledger.fact(_RELEASE, [release, 0])
                # Another than noted: killed between writing it and noting it, and nothing is
                # drawn in between.
                draws = int(last) if noted == release else self.last
                self._ledger.set_fact(_RELEASE, [release, draws])
            undone, gone = self._ledger.undo_draws(draws + 1)
            # Numbers go on upwards, also where the state knows of more than this ledger.
            self.last = max(self.last, draws)
            self._ledger.set_fact(_LAST, self.last)
        return draws, undone, gone
