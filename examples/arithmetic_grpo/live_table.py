"""The table that grows while the demo runs."""

from __future__ import annotations

import sys

from examples.arithmetic_grpo.records import ADAPTED, FROZEN, OFF, StepRecord

_COLUMNS = (
    ("step", 7),
    ("draft", 6),
    ("against", 8),
    ("alpha frozen", 13),
    ("alpha adapted", 14),
    ("reward", 7),
    ("style", 7),
    ("correct", 8),
    ("tok/s off", 10),
    ("frozen", 7),
    ("adapted", 8),
    ("gen s", 6),
    ("step s", 7),
    ("draft s", 8),
)
_HEADER_EVERY = 20


class LiveTable:
    """Prints a line per step; alpha is the acceptance length, tok/s that of the step's rounds."""

    def __init__(self, steps: int) -> None:
        self._steps = steps

    def show(self, record: StepRecord) -> None:
        """Print one step."""
        if record.step % _HEADER_EVERY == 0:
            print(" ".join(name.rjust(width) for name, width in _COLUMNS))
        frozen, adapted, off = (record.arms[arm] for arm in (FROZEN, ADAPTED, OFF))
        cells = (
            f"{record.step + 1}/{self._steps}",
            str(record.draft_version),
            "-" if record.trained_against is None else str(record.trained_against),
            _length(frozen.acceptance_length),
            _length(adapted.acceptance_length),
            f"{record.reward:.2f}",
            f"{frozen.style_share:.2f}",
            f"{frozen.correct:.2f}",
            f"{off.tokens / off.seconds:.0f}",
            f"{frozen.tokens / frozen.seconds:.0f}",
            f"{adapted.tokens / adapted.seconds:.0f}",
            f"{record.seconds['generation']:.1f}",
            f"{sum(record.seconds.values()):.1f}",
            f"{record.draft_train_seconds:.1f}",
        )
        line = " ".join(cell.rjust(width) for cell, (_, width) in zip(cells, _COLUMNS, strict=True))
        print(line, flush=True)

    def note(self, text: str) -> None:
        """Show a passing line on a terminal; nothing where output goes to a file."""
        if sys.stdout.isatty():
            print(f"\r\033[K{text}", end="", flush=True)


def _length(value: float | None) -> str:
    return "no drafts" if value is None else f"{value:.2f}"
