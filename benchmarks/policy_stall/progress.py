"""Says on standard error how far a case is."""

from __future__ import annotations

import sys
import time

_EVERY_SECONDS = 10.0


class Progress:
    """Of one case.

    Args:
        name: of the case.
        rounds: how many it takes, warm-up and checks included.
        verbose: a line for every round; else one every ten seconds.
    """

    def __init__(self, name: str, rounds: int, verbose: bool) -> None:
        self._name, self._rounds, self._verbose = name, rounds, verbose
        self._done = 0
        self._began = self._said = time.monotonic()

    def say(self, text: str) -> None:
        """A line, now."""
        self._said = time.monotonic()
        seconds = self._said - self._began
        print(f"{self._name}: {seconds:.0f} s, {text}", file=sys.stderr, flush=True)

    def round(self, what: str) -> None:
        """One more is done."""
        self._done += 1
        if self._verbose or time.monotonic() - self._said > _EVERY_SECONDS:
            self.say(f"round {self._done} of {self._rounds}{what and ': ' + what}")
