"""A release's trial: a share of the servers serves it, and live acceptance decides.

With servers on both sides the two drafts are compared over the same minutes. Where
every server has the new one (one server, or ``canary.share = 1``) it is compared with
what the incumbent did on the same servers just before.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from draft_trainer.config import CanaryConfig
from draft_trainer.releases.acceptance_watch import AcceptanceWatch
from draft_trainer.releases.sequential import Arm, Batch, Interval, verdict

HISTORY_SECONDS = 300.0
"""How far back an incumbent's figures count where none of its servers are left."""


@dataclass(frozen=True)
class Trial:
    """One release against the one before it.

    Args:
        version: on trial.
        incumbent: what it must not lose much against.
        servers: that serve it.
        others: that serve the incumbent meanwhile; empty when there are none left.
        began: monotonic seconds.
    """

    version: int
    incumbent: int
    servers: tuple[str, ...]
    others: tuple[str, ...]
    began: float

    @property
    def shared(self) -> bool:
        """Both drafts are live, each on its own servers."""
        return bool(self.others)


@dataclass(frozen=True)
class Verdict:
    """How a trial ended.

    Args:
        trial: which.
        event: canary_promoted, canary_rolled_back or canary_undecided.
        reason: the figures, for people.
    """

    trial: Trial
    event: str
    reason: str

    @property
    def keep(self) -> bool:
        """The release stays."""
        return self.event != "canary_rolled_back"


class Canary:
    """Chooses servers, keeps the trial under way, judges it. Thread-safe.

    Args:
        config: shares, bounds and the error rate.
        most: tokens of a draft (k).
        watch: live acceptance.
    """

    def __init__(self, config: CanaryConfig, most: int, watch: AcceptanceWatch) -> None:
        self._config = config
        self._most = most
        self._watch = watch
        self._lock = threading.Lock()
        self._trial: Trial | None = None
        self.begun = threading.Event()
        """Set while a trial is under way."""

    @property
    def trial(self) -> Trial | None:
        """The trial under way."""
        with self._lock:
            return self._trial

    def choose(self, holders: Sequence[str]) -> tuple[str, ...]:
        """Who gets a release first, of the servers that hold it."""
        count = max(1, math.floor(self._config.share * len(holders) + 1e-9))
        return tuple(sorted(holders)[:count])

    def begin(
        self, version: int, incumbent: int, servers: Sequence[str], others: Sequence[str]
    ) -> None:
        """``version`` went live on ``servers``; replaces a trial that is under way.

        Args:
            version: on trial.
            incumbent: what went before it.
            servers: that serve it.
            others: that go on with the incumbent until there is a verdict.
        """
        began = time.monotonic()
        with self._lock:
            self._trial = Trial(version, incumbent, tuple(servers), tuple(others), began)
        self.begun.set()

    def end(self) -> None:
        """No trial is under way any more."""
        with self._lock:
            self._trial = None
        self.begun.clear()

    def judge(self) -> Verdict | None:
        """The verdict, once there is one. The trial stays until ``end``."""
        trial = self.trial
        if trial is None:
            return None
        watch, config = self._watch, self._config
        mine = watch.since(trial.version, trial.servers, trial.began)
        theirs = (
            watch.since(trial.incumbent, trial.others, trial.began)
            if trial.shared
            else watch.before(trial.incumbent, trial.servers, trial.began, HISTORY_SECONDS)
        )
        if not trial.shared and sum(b.drafts for b in theirs) < config.min_drafts:
            return Verdict(
                trial, "canary_undecided", f"draft {trial.incumbent} left nothing to compare with"
            )
        candidate, incumbent = self._interval(mine), self._interval(theirs)
        late = time.monotonic() - trial.began > config.max_seconds
        if candidate is None or incumbent is None:
            text = "too few drafts in time to tell"
            return Verdict(trial, "canary_undecided", text) if late else None
        text = f"{_text(trial.version, candidate)}; {_text(trial.incumbent, incumbent)}"
        if len(theirs) and not trial.shared:
            text += ", before it"
        fine = verdict(candidate, incumbent, config.max_loss)
        if fine is None:
            return Verdict(trial, "canary_undecided", text) if late else None
        return Verdict(trial, "canary_promoted" if fine else "canary_rolled_back", text)

    def _interval(self, batches: Sequence[Batch]) -> Interval | None:
        arm = Arm(self._most, self._config.design_effect)
        for batch in batches:
            arm.add(batch)
        if arm.drafts < self._config.min_drafts:
            return None
        # Half of the error rate for each of the two intervals.
        return arm.interval(self._config.alpha / 2)


def _text(version: int, found: Interval) -> str:
    return (
        f"draft {version}: acceptance length {found.length:.3f} "
        f"({1 + found.low:.3f} .. {1 + found.high:.3f}) over {found.drafts} drafts"
    )
