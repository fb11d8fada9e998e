"""Writes training states beside training: the training thread pays for a copy in memory only."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from torch import Tensor

from draft_trainer.training.training_state import Facts, StateStore

logger = logging.getLogger(__name__)


class StateWriter:
    """A thread that writes one state at a time; while it does, no other is taken.

    Args:
        store: where to.
        on_written: told the position of every state that is on disk, on the writer's thread.
    """

    def __init__(
        self, store: StateStore, on_written: Callable[[Facts], None] = lambda position: None
    ) -> None:
        self._store = store
        self._on_written = on_written
        self._changed = threading.Condition()
        self._job: tuple[Mapping[str, Tensor], int, Facts] | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="state-writer", daemon=True)
        self._thread.start()

    @property
    def free(self) -> bool:
        """Whether ``write`` would take a state at once."""
        with self._changed:
            return self._job is None and not self._closing

    def write(
        self, tensors: Mapping[str, Tensor], step: int, position: Facts, timeout: float
    ) -> bool:
        """Hand over a state, which is not changed any more; ``StateStore.save`` says what it is.

        A state that cannot be written is logged as an error and given up: training goes on.

        Args:
            timeout: seconds to wait while another one is being written.

        Returns:
            False when it was not taken.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._job is None, timeout) or self._closing:
                return False
            self._job = (tensors, step, position)
            self._changed.notify_all()
            return True

    def wait(self, timeout: float) -> bool:
        """Until what was handed over is written; False when that took ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._job is None, timeout)

    def close(self, timeout: float) -> bool:
        """Write what was handed over and end; True when that was done in ``timeout`` seconds."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._job is not None or self._closing)
                if self._job is None:
                    return
                tensors, step, position = self._job
            try:
                self._store.save(tensors, step, position)
                self._on_written(position)
            except OSError as error:
                # A full disk must not end training; the next state may fit.
                logger.error("the training state of step %d was not written: %s", step, error)
            finally:
                with self._changed:
                    self._job = None
                    self._changed.notify_all()
