"""The log of a fit: ``training.jsonl``, one JSON object a line, each with its ``event``.

=============  ==================================================================================
``start``      settings, paths and SHA-256 of what is trained on, and how much of it there is
``step``       of one optimizer step: step, epoch, tokens (all so far), loss, step_loss and
               step_acceptance and step_top1 (one entry per TTT step), outside_mass, grad_norm,
               learning_rate, skipped, seconds
``evaluation``  of the held-out share: step, tokens, acceptance_length, standard_error,
               accepted_per_position, best (whether these weights are the draft now), seconds
``end``        step, tokens, seconds, and the best evaluation's step and acceptance_length
=============  ==================================================================================

Numbers that are not finite are null. ``seconds`` counts the time spent training, over restarts.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

from draft_trainer.training.learner_config import StepMetrics

LOG_FILE = "training.jsonl"


class TrainingLog:
    """Appends events. One process writes.

    Args:
        path: of the file; made when it is missing.
        keep_bytes: what is beyond is cut off: a resumed run writes those steps again.
    """

    def __init__(self, path: Path, keep_bytes: int = 0) -> None:
        self._file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o644), "r+b")
        self._file.truncate(keep_bytes)
        self._file.seek(0, os.SEEK_END)

    def write(self, event: str, **fields: Any) -> None:
        """One line; a reader sees it whole once it is there."""
        line = json.dumps({"event": event} | {k: _finite(v) for k, v in fields.items()})
        self._file.write(line.encode() + b"\n")
        self._file.flush()

    def sync(self) -> int:
        """Have everything on disk; how many bytes that is."""
        os.fsync(self._file.fileno())
        return self._file.tell()

    def close(self) -> None:
        """No more events."""
        self._file.close()


def step_fields(metrics: StepMetrics) -> dict[str, Any]:
    """What a ``step`` says of the learner's step."""
    return {
        "loss": metrics.loss,
        "step_loss": metrics.step_loss,
        "step_acceptance": metrics.step_acceptance,
        "step_top1": metrics.step_top1,
        "outside_mass": metrics.outside_mass,
        "grad_norm": metrics.grad_norm,
        "learning_rate": metrics.learning_rate,
        "skipped": metrics.skipped,
    }


def read_log(path: Path) -> list[dict[str, Any]]:
    """The events of a log, without a last line that a kill cut short."""
    lines = path.read_bytes().split(b"\n")[:-1]
    return [json.loads(line) for line in lines]


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return value
