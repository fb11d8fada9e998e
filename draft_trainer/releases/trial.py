"""Trials: the live acceptance of a release against the last good one's, before it was replaced.

A release is live on the whole fleet while it is on trial. Releases that each lose a little could
all pass one trial after another; the tolerance is therefore of the best of the recent good ones
(``Pointer.standing``). One server that contradicts all others proves nothing about the release: it
is left out, by name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from draft_trainer.config import TrialConfig
from draft_trainer.ingest.run import Run
from draft_trainer.releases.confidence import (
    Arm,
    Batch,
    Figures,
    Interval,
    condensed,
    decide,
    drafts_of,
)
from draft_trainer.releases.pointer import Pointer
from draft_trainer.releases.states import ReleaseEvent
from draft_trainer.releases.watch import AcceptanceWatch

HISTORY_SECONDS = 300.0
"""The time for which a release's acceptance counts while nothing is compared with it yet."""

FEWEST_SERVERS = 3
"""Fewest drafting servers of which one may be left out: of two, either may be the broken one."""


@dataclass(frozen=True)
class TrialResult:
    """The result of a trial.

    Args:
        version: release that was on trial.
        live_at: ``Pointer.live_at`` of that trial.
        event: PASS, FAIL or FIND_TOO_LITTLE.
        reason: the figures, for people.
        figures: live acceptance of the release.
        ratio: its acceptance length over the incumbent's; 1 where that one left no figures.
    """

    version: int
    live_at: float | None
    event: ReleaseEvent
    reason: str
    figures: Figures = ()
    ratio: float = 1.0

    def is_of(self, now: Pointer) -> bool:
        """Return whether this is the result of the trial under way."""
        return now.on_trial and (now.live, now.live_at) == (self.version, self.live_at)


@dataclass(eq=False)
class Trials:
    """Decides trials, which themselves are on disk (``Pointer``).

    A trial that a restart interrupts goes on: its live acceptance is collected anew, and
    ``max_seconds`` begins again.

    Args:
        config: the [trial] section.
        most: returns the tokens that one verification step can accept, now.
        watch: of the fleet's live acceptance.
        run: returns the run that is fed; what was drafted before it began says nothing of its
            policy.
    """

    config: TrialConfig
    most: Callable[[], int]
    watch: AcceptanceWatch
    run: Callable[[], Run | None] = lambda: None
    _started: float = field(default_factory=time.monotonic)
    _began: float = field(default_factory=time.monotonic)
    _before: Pointer | None = None

    def resume(self, now: Pointer) -> None:
        """Take over what the trainer before this one knew."""
        self._before = now

    def begin(self) -> None:
        """Count only what is drafted from now on for the trial under way."""
        self._began = time.monotonic()

    def figures(self, version: int, addresses: Sequence[str]) -> Figures | None:
        """Return a release's acceptance in the ``HISTORY_SECONDS`` before its newest draft, because
        a loop that trains drafts nothing meanwhile; None where that is too little.

        After a start the figures from before it count until there are as many seconds of newer
        ones: a trainer that restarts knows as much of its incumbent as the one before.

        Args:
            version: the release.
            addresses: of the servers that serve it.
        """
        seen = self.watch.seen(version, addresses, self._of_run(self._started))
        far = (seen[-1].at if seen else time.monotonic()) - HISTORY_SECONDS
        batches, before = [one.batch for one in seen if one.at > far], self._before
        if far < self._started and before is not None and version == before.incumbent:
            batches = [*before.known(self._run_id, time.time()), *batches]
        figures = condensed(batches)
        return figures if drafts_of(figures) >= self.config.min_drafts else None

    def result(self, now: Pointer, addresses: Sequence[str]) -> TrialResult | None:
        """Return the result of the trial under way, once there is one.

        A release with enough figures passes where the last good one left none to compare with, as
        in the first minutes of a run: the gate has compared the two, and the next release has its
        figures.

        Args:
            now: the pointer.
            addresses: of the servers that have what is on trial.

        Returns:
            None while it is not known, and after the trial was found undecided.
        """
        if not now.on_trial:
            return None
        began = self._of_run(self._began)
        mine = self.watch.since(now.live, addresses, began)
        theirs = now.known(self._run_id, now.left_good_at)
        candidate, incumbent = self._intervals(mine, theirs)
        if candidate is not None and incumbent is None:
            text = f"draft {now.incumbent} left nothing to compare with"
            return TrialResult(now.live, now.live_at, ReleaseEvent.PASS, text, condensed(mine))
        text = "too few verification steps in time to tell"
        if candidate is not None and incumbent is not None:
            max_loss = 1.0 - (1.0 - self.config.max_loss) / now.standing
            passes, without = decide(candidate, incumbent, max_loss), ""
            if not passes and (odd := self._odd_server(now.live, addresses, began)):
                others = [address for address in addresses if address != odd]
                rest = self.watch.since(now.live, others, began)
                found = self._intervals(rest, theirs)[0]
                if found is not None and decide(found, incumbent, max_loss):
                    passes, mine, candidate = True, rest, found
                    without = f"; without {odd}, which accepts far less than the other servers"
            text = f"{_text(now.live, candidate)}; {_text(now.incumbent, incumbent)}, before it"
            text += without
            if candidate.positions < self.most():
                text += f"; of the first {candidate.positions} of {self.most()} draft tokens"
            if passes is not None:
                event = ReleaseEvent.PASS if passes else ReleaseEvent.FAIL
                ratio = candidate.length / incumbent.length
                figures = condensed(mine)
                return TrialResult(now.live, now.live_at, event, text, figures, ratio)
        # The second covers all releases that replaced one another without a verdict.
        seconds = max(time.monotonic() - self._began, time.time() - now.left_good_at)
        if now.undecided or seconds <= self.config.max_seconds:
            return None
        return TrialResult(now.live, now.live_at, ReleaseEvent.FIND_TOO_LITTLE, text)

    @property
    def _run_id(self) -> str:
        run = self.run()
        return "" if run is None else run.run_id

    def _of_run(self, begin: float) -> float:
        run = self.run()
        return begin if run is None else max(begin, run.began)

    def _odd_server(self, version: int, addresses: Sequence[str], began: float) -> str:
        """Return the one server whose acceptance of a release is far below that of the others, by
        the same test as a trial's; empty: there is none."""
        batches = {a: self.watch.since(version, [a], began) for a in addresses}
        enough = [a for a, b in batches.items() if drafts_of(b) >= self.config.min_drafts]
        if len(enough) < FEWEST_SERVERS:
            return ""
        found = {a: self._intervals(batches[a])[0] for a in enough}
        lowest = min(enough, key=lambda a: 0.0 if (i := found[a]) is None else i.mean)
        others = [address for address in addresses if address != lowest]
        one, rest = self._intervals(batches[lowest], self.watch.since(version, others, began))
        if one is None or rest is None:
            return ""
        return lowest if decide(one, rest, self.config.max_loss) is False else ""

    def _intervals(self, *sides: Sequence[Batch]) -> list[Interval | None]:
        """Return intervals for drafts as long as all sides tried them; None for a side that has too
        few steps."""
        arms = []
        for batches in sides:
            arms.append(Arm(self.config.design_effect))
            for batch in batches:
                arms[-1].add(batch)
        known = [arm.positions(self.config.min_drafts) for arm in arms]
        positions = min((self.most(), *filter(None, known)))
        # Half of the error rate for each of the two intervals.
        return [
            arm.interval(self.config.alpha / 2, positions) if enough else None
            for arm, enough in zip(arms, known, strict=True)
        ]


def _text(version: int, found: Interval) -> str:
    return (
        f"draft {version}: acceptance length {found.length:.3f} "
        f"({1 + found.low:.3f} .. {1 + found.high:.3f}) over {found.drafts} verification steps"
    )
