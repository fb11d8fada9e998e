"""Commits by what they changed and how they ended, and how long they took."""

from __future__ import annotations

from collections import Counter

from rollout_server.control import Committed
from slipstream.durations import Durations

BOUNDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
KINDS = ("draft", "policy", "both", "rollback")


class CommitCounts:
    """``control.CommitObserver``.

    Attributes:
        outcomes: commits by kind and outcome.
        seconds: from a call's arrival to the worker's answer, by kind.
        stall: that the engine stood still, by kind.
    """

    def __init__(self) -> None:
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.seconds = {kind: Durations(BOUNDS) for kind in KINDS}
        self.stall = {kind: Durations(BOUNDS) for kind in KINDS}

    def committed(self, kind: str, outcome: str, took: Committed | None) -> None:
        """One that was tried."""
        self.outcomes[kind, outcome] += 1
        if took is not None:
            self.seconds[kind] = self.seconds[kind].observe(took.seconds)
            self.stall[kind] = self.stall[kind].observe(took.worker_seconds)
