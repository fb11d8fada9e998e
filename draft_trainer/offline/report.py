"""Reports of a fit: ``training.jsonl``, a plot of it, and progress on the terminal.

The log has one JSON object a line, each with its ``event``:

==============  ==================================================================================
``start``       settings, paths and SHA-256 of what is trained on, and how much of it there is
``step``        of one optimizer step: step, epoch, tokens (all so far), loss, step_loss and
                step_acceptance and step_top1 (one entry per TTT step), outside_mass, grad_norm,
                learning_rate, skipped, seconds
``evaluation``  of the held-out share: step, tokens, acceptance_length, standard_error,
                accepted_per_position, best (whether these weights are the draft now), seconds
``end``         step, tokens, seconds, and the best evaluation's step and acceptance_length
==============  ==================================================================================

Numbers that are not finite are null. ``seconds`` counts the time spent training, over restarts.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskID

from draft_trainer.files import written_whole
from draft_trainer.recordings.recording import Recording

LOG_FILE = "training.jsonl"
_MOST_POINTS = 400


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


def draw(events: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot acceptance length, acceptance per TTT step and loss against tokens, as an SVG.

    Args:
        events: of ``read_log``.
        path: of the SVG. Raises OSError where it cannot be written.
    """
    # Here, because fits of seconds and ``--help`` need not wait for it.
    import matplotlib
    from matplotlib.figure import Figure

    steps = [e for e in events if e["event"] == "step" and e["loss"] is not None]
    evaluations = [e for e in events if e["event"] == "evaluation"]
    steps = steps[:: math.ceil(len(steps) / _MOST_POINTS) or 1]
    tokens = [e["tokens"] for e in steps]
    figure = Figure(figsize=(15, 4), layout="constrained")
    length, acceptance, loss = figure.subplots(1, 3)
    length.plot(
        [e["tokens"] for e in evaluations], [e["acceptance_length"] for e in evaluations], "o-"
    )
    length.set_title("Estimated acceptance length, held out")
    for step in range(len(steps[0]["step_acceptance"]) if steps else 0):
        # A step without valid anchors is null; matplotlib leaves a gap at NaN.
        rates = [e["step_acceptance"][step] for e in steps]
        acceptance.plot(
            tokens, [math.nan if r is None else r for r in rates], label=f"TTT step {step}"
        )
    if steps:
        acceptance.legend()
    acceptance.set_title("Expected acceptance per step, training")
    loss.plot(tokens, [e["loss"] for e in steps])
    loss.set_title("Loss, training")
    for axes in (length, acceptance, loss):
        axes.set_xlabel("tokens trained on")
        axes.grid(alpha=0.3)
    with matplotlib.rc_context({"svg.fonttype": "none"}), written_whole(path) as temporary:
        figure.savefig(temporary, format="svg")


@contextmanager
def progress_of(console: Console, what: str) -> Iterator[tuple[Progress, TaskID]]:
    """A progress bar on a terminal, nothing elsewhere."""
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        yield progress, progress.add_task(what, total=None)


def open_recording(directory: Path, console: Console) -> Recording:
    """Open a recording, showing how far the verification of its files is."""
    with progress_of(console, "verifying recorded states") as (progress, task):
        return Recording(
            directory, lambda done, total: progress.update(task, completed=done, total=total)
        )


def say(console: Console, text: str) -> None:
    """Print one line as it is: no markup, no wrapping."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)
