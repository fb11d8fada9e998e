"""The training states of a serving trainer: when they are written, and which one is resumed.

A state carries the number of the last draw that its weights have seen, so that a restart can take
back the later ones; see ``draft_trainer/feed/store.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from draft_trainer.training.learner import Learner
from draft_trainer.training.state_writer import StateWriter
from draft_trainer.training.training_state import Facts, StateStore

logger = logging.getLogger(__name__)

FOLDER = "training-state"
_WAIT_S = 30.0


@dataclass(frozen=True)
class Resumed:
    """Where a resumed training stands.

    Attributes:
        run_id: the run that it was trained on; empty when nothing was resumed.
        draws: number of the last draw that it contains; None when nothing was resumed.
    """

    run_id: str = ""
    draws: int | None = None


class LearnerStates:
    """Saves a learner every few steps, off the training thread. For that thread only.

    Args:
        registry: folder of the releases, in which the states get a folder of their own.
        belongs_to: see ``StateStore``.
        every_steps: optimizer steps between two states; 0 writes and reads none. While one is
            being written the next is put off.
        on_saved: told the last draw of every state that is on disk, on another thread.
    """

    def __init__(
        self,
        registry: Path,
        belongs_to: Facts,
        every_steps: int,
        on_saved: Callable[[int], None] = lambda draws: None,
    ) -> None:
        self._every_steps = every_steps
        self._on_saved = on_saved
        self._saved_at = -1
        self._store = StateStore(registry / FOLDER, belongs_to) if every_steps else None
        self._writer: StateWriter | None = None

    def resume(self, learner: Learner, newest_release: int) -> Resumed:
        """Put the newest state into ``learner`` unless a release is newer than it.

        Raises:
            RefusedError: the state is of another head, draft or format, or all are damaged.
        """
        if self._store is None:
            return Resumed()
        state = self._store.load()
        if state is None:
            return Resumed()
        if state.position["newest_release"] != newest_release:
            # Its weights are older than the release's, by more than is ever lost to a kill.
            logger.warning(
                "training state of step %d is from before release %d and is not resumed",
                *(state.step, newest_release),
            )
            self._store.clear()
            return Resumed()
        learner.load_state_dict(state.tensors)
        self._saved_at = learner.steps
        logger.info("resumed the training state of step %d", state.step)
        # States of a trainer that kept no samples have no draws: none of theirs can be undone.
        return Resumed(str(state.position["run_id"]), int(state.position.get("draws", 0)))

    def after_step(self, learner: Learner, run_id: str, newest_release: int, draws: int) -> None:
        """Save when it is time and the last one is written."""
        due = self._every_steps and learner.steps >= self._saved_at + self._every_steps
        if due and (self._writer is None or self._writer.free):
            self.save(learner, run_id, newest_release, draws)

    def save(self, learner: Learner, run_id: str, newest_release: int, draws: int) -> None:
        """Save now, as after a release."""
        if self._store is None:
            return
        self._writer = self._writer or StateWriter(self._store, self._written)
        position = {"run_id": run_id, "newest_release": newest_release, "draws": draws}
        if self._writer.write(learner.state_dict(), learner.steps, position, _WAIT_S):
            self._saved_at = learner.steps
        else:
            logger.error("the training state of step %d was not written in time", learner.steps)

    def save_last(self, learner: Learner, run_id: str, newest_release: int, draws: int) -> None:
        """Save what was learned since the last state, and wait until it is written."""
        if learner.steps > max(self._saved_at, 0):
            self.save(learner, run_id, newest_release, draws)
        if self._writer is not None and not self._writer.close(_WAIT_S):
            logger.error("the last training state was not written in time")

    def _written(self, position: Facts) -> None:
        draws = position["draws"]
        assert isinstance(draws, int)
        self._on_saved(draws)
