"""The folder that a fit writes: a draft that vLLM loads, from its first instant to its last.

``config.json`` and ``model.safetensors`` are the best draft so far, ``training.jsonl`` is the log,
``state/`` what ``--resume`` needs; at the end it is removed and ``training.svg`` is drawn.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from draft_trainer.checkpoints.checkpoint import WEIGHTS_FILE, save_draft
from draft_trainer.durable import folder_written_whole, fsync
from draft_trainer.eagle3.head import Eagle3Head
from draft_trainer.offline.training_log import LOG_FILE, TrainingLog, read_log
from draft_trainer.offline.training_plot import draw
from draft_trainer.training.learner import Learner
from draft_trainer.training.state_writer import StateWriter
from draft_trainer.training.training_state import Facts, StateStore
from slipstream.refusal import RefusedError

STATE_FOLDER = "state"
PLOT_FILE = "training.svg"
_WRITE_SECONDS = 600.0


@dataclass(frozen=True)
class Standing:
    """Where a fit stands: with the learner's tensors all that the rest of it depends on.

    Attributes:
        step: optimizer steps done, skipped ones included.
        epoch: passes over the data that are done.
        index: samples of the present pass that are done.
        tokens: trained on.
        seconds: spent on it, evaluations not counted.
        best: highest estimated acceptance length.
        best_step: the step after which it was reached.
    """

    step: int = 0
    epoch: int = 0
    index: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best: float = 0.0
    best_step: int = 0


class FitOutput:
    """One output folder. One process writes.

    Args:
        folder: where.
        d2t: the draft vocabulary's map (see ``checkpoint``).
        every_steps: optimizer steps between two training states; 0 writes one only at a stop.
    """

    def __init__(self, folder: Path, d2t: Tensor | None, every_steps: int) -> None:
        self.folder = folder
        self._d2t = d2t
        self._every_steps = every_steps
        self._saved = 0

    @property
    def is_finished(self) -> bool:
        """Whether a fit ended here."""
        log = self.folder / LOG_FILE
        if not log.is_file() or self._states.exists():
            return False
        events = read_log(log)
        return bool(events) and events[-1]["event"] == "end"

    def begin(self, learner: Learner, belongs_to: Facts, resume: bool) -> Standing:
        """Make the folder, or put what is in it into ``learner``.

        Raises:
            RefusedError: something is there that is not to be resumed, or cannot be with these
                inputs and this configuration.
            OSError: the folder cannot be written.
        """
        if not self.folder.exists():
            self._create(learner.snapshot())
        elif not (resume and self._states.is_dir()):
            unfinished = self._states.is_dir()
            advice = "give --resume to go on" if unfinished else "remove it, or choose another"
            raise RefusedError(f"--out {self.folder}", "something there", "a free name", advice)
        self._store = StateStore(self._states, belongs_to)
        self._writer = StateWriter(self._store)
        state = self._store.load()
        if state is None:
            self._log = TrainingLog(self.folder / LOG_FILE)
            return Standing()
        learner.load_state_dict(state.tensors)
        position = dict(state.position)
        self._log = TrainingLog(self.folder / LOG_FILE, position.pop("log_bytes"))
        self._saved = state.step
        return Standing(**position)

    def write(self, event: str, **fields: Any) -> None:
        """Append to the log."""
        self._log.write(event, **fields)

    def put(self, head: Eagle3Head) -> None:
        """Replace the draft's weights whole."""
        with tempfile.TemporaryDirectory(prefix=".draft-", dir=self._states) as name:
            save_draft(Path(name), head.config, head, self._d2t)
            fsync(Path(name) / WEIGHTS_FILE)
            (Path(name) / WEIGHTS_FILE).replace(self.folder / WEIGHTS_FILE)
        fsync(self.folder)

    def after_step(self, learner: Learner, standing: Standing) -> None:
        """Write a training state when it is time: beside training, unless every step has one."""
        every = self._every_steps
        if every == 1:
            self.save(learner, standing)
        elif 0 < every <= standing.step - self._saved and self._writer.free:
            position = self._position(standing)
            self._writer.write(learner.state_dict(), standing.step, position, timeout=0.0)
            self._saved = standing.step

    def save(self, learner: Learner, standing: Standing) -> None:
        """Write a training state now. Raises OSError."""
        self._writer.wait(_WRITE_SECONDS)
        self._store.save(learner.state_dict(), standing.step, self._position(standing))
        self._saved = standing.step

    def finish(self) -> None:
        """After ``close``, of a fit that is done: draw the plot; nothing is left to resume."""
        draw(read_log(self.folder / LOG_FILE), self.folder / PLOT_FILE)
        shutil.rmtree(self._states)

    def close(self) -> None:
        """Wait for what is being written."""
        self._writer.close(_WRITE_SECONDS)
        self._log.sync()
        self._log.close()

    @property
    def _states(self) -> Path:
        return self.folder / STATE_FOLDER

    def _position(self, standing: Standing) -> Facts:
        return asdict(standing) | {"log_bytes": self._log.sync()}

    def _create(self, head: Eagle3Head) -> None:
        with folder_written_whole(self.folder) as temporary:
            save_draft(temporary, head.config, head, self._d2t)
            (temporary / LOG_FILE).touch()
            (temporary / STATE_FOLDER).mkdir()
