"""The training states of a serving trainer: when they are written, and which one is resumed.

Samples that were acknowledged but not trained on are not in them: the replay buffer is in memory.
"""

from __future__ import annotations

import logging
from pathlib import Path

from draft_trainer.training.learner import Learner
from draft_trainer.training.state_writer import StateWriter
from draft_trainer.training.training_state import Facts, StateStore

logger = logging.getLogger(__name__)

FOLDER = "training-state"
_WAIT_S = 30.0


class LearnerStates:
    """Saves a learner every few steps, off the training thread. For that thread only.

    Args:
        registry: folder of the releases, in which the states get a folder of their own.
        belongs_to: see ``StateStore``.
        every_steps: optimizer steps between two states; 0 writes and reads none. While one is
            being written the next is put off.
    """

    def __init__(self, registry: Path, belongs_to: Facts, every_steps: int) -> None:
        self._every_steps = every_steps
        self._saved_at = -1
        self._store = StateStore(registry / FOLDER, belongs_to) if every_steps else None
        self._writer: StateWriter | None = None

    def resume(self, learner: Learner, newest_release: int) -> str:
        """Put the newest state into ``learner`` unless a release is newer than it.

        Returns:
            The run that it was trained on; empty when nothing was resumed.

        Raises:
            RefusedError: the state is of another head, draft or format, or all are damaged.
        """
        if self._store is None:
            return ""
        state = self._store.load()
        if state is None:
            return ""
        if state.position["newest_release"] != newest_release:
            # Its weights are older than the release's, by more than is ever lost to a kill.
            logger.warning(
                "training state of step %d is from before release %d and is not resumed",
                *(state.step, newest_release),
            )
            self._store.clear()
            return ""
        learner.load_state_dict(state.tensors)
        self._saved_at = learner.steps
        logger.info("resumed the training state of step %d", state.step)
        return str(state.position["run_id"])

    def after_step(self, learner: Learner, run_id: str, newest_release: int) -> None:
        """Save when it is time and the last one is written."""
        due = self._every_steps and learner.steps >= self._saved_at + self._every_steps
        if due and (self._writer is None or self._writer.free):
            self.save(learner, run_id, newest_release)

    def save(self, learner: Learner, run_id: str, newest_release: int) -> None:
        """Save now, as after a release."""
        if self._store is None:
            return
        self._writer = self._writer or StateWriter(self._store)
        position = {"run_id": run_id, "newest_release": newest_release}
        if self._writer.write(learner.state_dict(), learner.steps, position, _WAIT_S):
            self._saved_at = learner.steps
        else:
            logger.error("the training state of step %d was not written in time", learner.steps)

    def save_last(self, learner: Learner, run_id: str, newest_release: int) -> None:
        """Save what was learned since the last state, and wait until it is written."""
        if learner.steps > max(self._saved_at, 0):
            self.save(learner, run_id, newest_release)
        if self._writer is not None and not self._writer.close(_WAIT_S):
            logger.error("the last training state was not written in time")
