"""Progress of long work for a person: one live line in a terminal, a line now and then in a log."""

from __future__ import annotations

import sys
import time
from typing import TextIO

LINE_SECONDS = 10.0
LIVE_SECONDS = 0.1


class Progress:
    """Writes to a stream; silent without one. Costs next to nothing when called too often.

    Args:
        stream: where to; None for nowhere (ranks other than 0).
    """

    def __init__(self, stream: TextIO | None = sys.stderr) -> None:
        self._stream = stream
        self._live = stream is not None and stream.isatty()
        self._shown_at = -LINE_SECONDS
        self._width = 0

    @property
    def due(self) -> bool:
        """Whether ``update`` would show something: for those who must compute what to say."""
        pause = LIVE_SECONDS if self._live else LINE_SECONDS
        return self._stream is not None and time.monotonic() - self._shown_at >= pause

    def update(self, text: str) -> None:
        """How far it is; replaces what was said before in a terminal."""
        if self.due:
            self._shown_at = time.monotonic()
            self._write(text, end="" if self._live else "\n")

    def say(self, text: str) -> None:
        """Something that stays."""
        self._write(text, end="\n")

    def _write(self, text: str, end: str) -> None:
        if self._stream is None:
            return
        if self._live:
            padding = " " * max(self._width - len(text), 0)
            self._width = 0 if end else len(text)
            text = f"\r{text}{padding}"
        self._stream.write(text + end)
        self._stream.flush()


def duration(seconds: float) -> str:
    """As a person says it: 45 s, 3 min 20 s, 2 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02} min"
