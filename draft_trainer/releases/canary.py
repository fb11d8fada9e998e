"""Trials of releases: live acceptance against the last good release's, before it was replaced.

A release is live on the whole fleet while it is on trial. It is compared with what the last good
release did when the fleet served that one; where too little is known of it there is no verdict.

Looking after each report must not spend the error rate, so each side has a confidence sequence of
the mean accepted tokens per verification step: with probability 1 - alpha it covers the true mean
at *every* time at once (asymptotic confidence sequence with a Gaussian mixture: Waudby-Smith,
Arbour, Sinha, Kennedy and Ramdas 2021, arXiv 2103.06476, theorem 2.2 and its choice of rho).

Steps of one sequence, and of one prompt's samples, are correlated. Their number is therefore
divided by a design effect: the larger of a configured floor and of what the variance between blocks
says (method of batch means; blocks are merged in pairs as they grow in number, so that they outgrow
the correlation's length).
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate, pairwise, takewhile
from operator import add

from draft_trainer.config import CanaryConfig
from draft_trainer.ingest.run import Run
from draft_trainer.releases.fleet import Fleet
from draft_trainer.releases.promotions import HISTORY_SECONDS, Batch, Figures, Promotion, Trial
from slipstream.v1 import rollout_server_pb2 as pb

TUNED_FOR = 100.0
"""Effective verification steps at which the interval is tightest."""

MAX_BLOCKS = 32
MIN_BLOCKS = 8


@dataclass(frozen=True)
class Interval:
    """Accepted tokens per verification step of a draft of ``positions`` tokens: the mean and its
    bounds."""

    positions: int
    drafts: int
    mean: float
    low: float
    high: float

    @property
    def length(self) -> float:
        """Acceptance length, the bonus token included."""
        return 1.0 + self.mean


class Arm:
    """One draft version's side of a comparison.

    A server that adapts the draft length proposes fewer tokens in some steps than in others. The
    mean is therefore of drafts as long as the comparison asks for: each position is a share of the
    steps that tried it, and counts with the inverse of how often that was.
    """

    def __init__(self, design_effect: float) -> None:
        self._floor = design_effect
        self._sum = Batch((), ())
        self._blocks: list[Batch] = []
        self._block_drafts = 1

    @property
    def drafts(self) -> int:
        """Verification steps."""
        return self._sum.drafts

    def add(self, batch: Batch) -> None:
        """Add what came since the last report."""
        if not batch.drafts:
            return
        self._sum += batch
        if self._blocks and self._blocks[-1].drafts < self._block_drafts:
            self._blocks[-1] += batch
        else:
            self._blocks.append(batch)
        if len(self._blocks) > MAX_BLOCKS:
            merged = [a + b for a, b in zip(self._blocks[::2], self._blocks[1::2], strict=False)]
            self._blocks = merged + self._blocks[2 * len(merged) :]
            self._block_drafts = min(block.drafts for block in merged)

    def positions(self, least: int) -> int:
        """How many, from the first one, were tried at least ``least`` times."""
        return sum(1 for _ in takewhile(lambda tried: tried >= least, self._sum.tried))

    def interval(self, alpha: float, positions: int) -> Interval:
        """Bounds of the mean that fail once in 1 / ``alpha`` trials.

        Args:
            alpha: error rate.
            positions: of a draft, at least one; each was tried.
        """
        tried, accepted = self._sum.tried[:positions], self._sum.accepted[:positions]
        shares = [one / steps for one, steps in zip(accepted, tried, strict=True)]
        weights = [self.drafts / steps for steps in tried]
        mean = sum(shares)
        # A step with a accepted tokens counts at positions 0 .. a-1.
        values = list(accumulate(weights))
        ended = [one - after for one, after in pairwise((*accepted, 0))]
        total = sum(count * value for count, value in zip(ended, values, strict=True))
        squares = sum(count * value**2 for count, value in zip(ended, values, strict=True))
        # Two steps more, one with no and one with all tokens accepted: no certainty from few.
        variance = (squares + values[-1] ** 2) / (self.drafts + 2)
        variance -= ((total + values[-1]) / (self.drafts + 2)) ** 2
        effect = self._measured_effect(shares, weights) / variance
        n = self.drafts / max(self._floor, effect)
        log_alpha = -2.0 * math.log(alpha)
        rho2 = (log_alpha + math.log(log_alpha + 1.0)) / TUNED_FOR
        t = n * rho2 + 1.0
        radius = math.sqrt(variance * 2.0 * t / (n * n * rho2) * math.log(math.sqrt(t) / alpha))
        return Interval(
            positions,
            self.drafts,
            mean,
            max(0.0, mean - radius),
            min(float(positions), mean + radius),
        )

    def _measured_effect(self, shares: Sequence[float], weights: Sequence[float]) -> float:
        """Variance of a step that would explain the one between blocks; 0 while unknown."""
        if len(self._blocks) < MIN_BLOCKS:
            return 0.0
        spread = 0.0
        for block in self._blocks:
            beyond = sum(
                weight * (accepted - share * tried)
                for weight, share, accepted, tried in zip(
                    weights, shares, block.accepted, block.tried, strict=False
                )
            )
            spread += beyond**2 / block.drafts
        return spread / (len(self._blocks) - 1)


def decide(candidate: Interval, incumbent: Interval, max_loss: float) -> bool | None:
    """Whether the candidate keeps the acceptance length but for a share ``max_loss``; None while
    that is not known."""
    kept = 1.0 - max_loss
    if 1.0 + candidate.high < kept * (1.0 + incumbent.low):
        return False
    if 1.0 + candidate.low > kept * (1.0 + incumbent.high):
        return True
    return None


INTERVAL_MS = 500
STREAM_SECONDS = 600.0
RETRY_SECONDS = 1.0
KEPT = 2048
"""Batches of one server, one each ``INTERVAL_MS``."""

OFTEN = 64
"""Servers that report every ``INTERVAL_MS``; of a larger fleet, as many reports a second arrive and
as many batches are kept as of this one."""


@dataclass(frozen=True)
class Seen:
    """One batch of one draft version on one server, and when it was reported (monotonic s)."""

    at: float
    version: int
    batch: Batch


class AcceptanceWatch:
    """Follows every rollout server's acceptance counters and keeps the recent past. Thread-safe.

    One thread and one stream per server, opened again when it ends: a server may come, go and
    restart. Counters only grow while a process lives; one that fell is of a new process and counts
    from 0.
    """

    def __init__(
        self,
        fleet: Fleet,
        on_report: Callable[[str, pb.ServerState], None] = lambda *report: None,
    ) -> None:
        self._fleet = fleet
        self._on_report = on_report
        self._changed = threading.Condition()
        self._revision = 0
        self._seen: dict[str, deque[Seen]] = {}
        self._threads: dict[str, tuple[threading.Thread, threading.Event]] = {}
        self._stopped = False
        self._size = 0

    @property
    def _scale(self) -> float:
        return max(1.0, self._size / OFTEN)

    def follow(self, addresses: Iterable[str]) -> None:
        """Watch these servers and no others."""
        wanted = set(addresses)
        with self._changed:
            if self._stopped or wanted == self._threads.keys():
                return
            for address in set(self._threads) - wanted:
                self._threads.pop(address)[1].set()
            self._size = len(wanted)
            kept = math.ceil(KEPT / self._scale)
            self._seen = {a: deque(self._seen.get(a, ()), maxlen=kept) for a in wanted}
            for address in wanted - set(self._threads):
                over = threading.Event()
                thread = threading.Thread(
                    target=self._watch, args=(address, over), name=f"watch-{address}", daemon=True
                )
                # Where there is none to be had, the next look at the fleet tries again.
                thread.start()
                self._threads[address] = (thread, over)

    def seen(self, version: int, addresses: Iterable[str], begin: float) -> list[Seen]:
        """What a draft version did on these servers after ``begin``, oldest first."""
        with self._changed:
            found = [
                seen
                for address in addresses
                for seen in self._seen.get(address, ())
                if seen.version == version and seen.at > begin
            ]
        return sorted(found, key=lambda seen: seen.at)

    def since(self, version: int, addresses: Iterable[str], begin: float) -> list[Batch]:
        """The same without the times."""
        return [seen.batch for seen in self.seen(version, addresses, begin)]

    def recent(self, seconds: float) -> list[tuple[str, Seen]]:
        """What was reported in the last ``seconds``, each with its server's address."""
        begin = time.monotonic() - seconds
        with self._changed:
            return [
                (address, seen)
                for address, batches in self._seen.items()
                for seen in takewhile(lambda seen: seen.at > begin, reversed(batches))
            ]

    def wait_beyond(self, revision: int, timeout: float) -> int:
        """Block until a report came, or ``timeout`` seconds; returns the revision then."""
        with self._changed:
            self._changed.wait_for(lambda: self._revision > revision, timeout)
            return self._revision

    def wake(self) -> None:
        """As if a report had come."""
        with self._changed:
            self._revision += 1
            self._changed.notify_all()

    def stop(self, timeout: float) -> bool:
        """End the threads; their streams end when the fleet's channels close."""
        with self._changed:
            self._stopped = True
            threads, self._threads = self._threads, {}
        for _, over in threads.values():
            over.set()
        deadline = time.monotonic() + timeout
        for thread, _ in threads.values():
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread, _ in threads.values())

    def _watch(self, address: str, over: threading.Event) -> None:
        before: dict[int, Batch] | None = None
        while not over.is_set():
            interval = round(INTERVAL_MS * self._scale)
            for report in self._fleet.client(address).watch(interval, STREAM_SECONDS):
                before = self._note(address, report, before)
                if over.is_set():
                    return
            over.wait(RETRY_SECONDS)

    def _note(
        self, address: str, report: pb.AcceptanceReport, before: dict[int, Batch] | None
    ) -> dict[int, Batch]:
        # Also where nothing was drafted: a server may run without drafts.
        self._on_report(address, report.state)
        now = {
            c.draft_version: Batch(tuple(c.tried_per_position), tuple(c.accepted_per_position))
            for c in report.counters
        }
        if before is None:
            # The age of these counts is unknown: they only say where to begin.
            return now
        with self._changed:
            for version, counts in now.items():
                grown = counts.since(before.get(version, Batch((), ())))
                if grown.drafts > 0 and address in self._seen:
                    self._seen[address].append(Seen(time.monotonic(), version, grown))
            self._revision += 1
            self._changed.notify_all()
        return now


FIGURES_KEPT = 64


@dataclass(frozen=True)
class TrialResult:
    """How a trial ended.

    Args:
        trial: which.
        event: "canary_promoted", "canary_rolled_back" or "canary_undecided".
        reason: the figures, for people.
        figures: of the release that was on trial.
    """

    trial: Trial
    event: str
    reason: str
    figures: Figures = ()


@dataclass(eq=False)
class Canary:
    """Decides trials, which themselves are on disk (``Promotion.trial``).

    A trial that a restart interrupts goes on: its live acceptance is collected anew, and
    ``max_seconds`` begins again.

    Args:
        config: the [canary] section.
        most: tokens that one verification step can accept, now.
        watch: of the fleet's live acceptance.
        run: that is fed; what was drafted before it began says nothing of its policy.
    """

    config: CanaryConfig
    most: Callable[[], int]
    watch: AcceptanceWatch
    run: Callable[[], Run | None] = lambda: None
    _started: float = field(default_factory=time.monotonic)
    _began: float = field(default_factory=time.monotonic)
    _before: Promotion | None = None

    def resume(self, now: Promotion) -> None:
        """Take over what the trainer before this one knew."""
        self._before = now

    def begin(self) -> None:
        """Only what is drafted from now on counts for the trial under way."""
        self._began = time.monotonic()

    def figures(self, version: int, addresses: Iterable[str]) -> Figures | None:
        """A release's acceptance in the ``HISTORY_SECONDS`` before its newest draft, because a loop
        that trains drafts nothing meanwhile; None where that is too little.

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
        figures = _figures(batches)
        return figures if _drafts(figures) >= self.config.min_drafts else None

    def result(self, now: Promotion, fleet: Fleet) -> TrialResult | None:
        """The result of the trial under way, once there is one.

        Args:
            now: the pointer.
            fleet: whose servers have what is on trial.

        Returns:
            None while it is not known, and after the trial was found undecided.
        """
        trial = now.trial
        if trial is None:
            return None
        began = self._of_run(self._began)
        mine = self.watch.since(trial.version, fleet.addresses, began)
        candidate, incumbent = self._intervals(mine, now.known(self._run_id, trial.began_at))
        fine = None
        if candidate is None or incumbent is None:
            text = "too few verification steps in time to tell"
            if incumbent is None:
                text = f"draft {trial.incumbent} left nothing to compare with"
        else:
            text = f"{_text(trial.version, candidate)}; {_text(trial.incumbent, incumbent)}"
            text += ", before it"
            if candidate.positions < self.most():
                text += f"; of the first {candidate.positions} of {self.most()} draft tokens"
            fine = decide(candidate, incumbent, self.config.max_loss)
        if fine is not None:
            event = "canary_promoted" if fine else "canary_rolled_back"
            return TrialResult(trial, event, text, _figures(mine))
        # An operator who went back to what passed does not want the incumbent again.
        back = trial.version in now.good or trial.incumbent not in now.good
        if candidate is not None and incumbent is None and back:
            return TrialResult(trial, "canary_promoted", text, _figures(mine))
        # The second: of all the releases that replaced one another without a verdict.
        seconds = max(time.monotonic() - self._began, time.time() - trial.began_at)
        if trial.undecided or seconds <= self.config.max_seconds:
            return None
        return TrialResult(trial, "canary_undecided", text)

    @property
    def _run_id(self) -> str:
        run = self.run()
        return "" if run is None else run.run_id

    def _of_run(self, begin: float) -> float:
        run = self.run()
        return begin if run is None else max(begin, run.began)

    def _intervals(self, *sides: Sequence[Batch]) -> list[Interval | None]:
        """Of drafts as long as both sides tried them; None of a side that has too few steps."""
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


def _drafts(batches: Sequence[Batch]) -> int:
    return sum(batch.drafts for batch in batches)


def _figures(batches: Sequence[Batch]) -> Figures:
    """At most ``FIGURES_KEPT`` with the same sums: neighbours are added up."""
    stride = -(-len(batches) // FIGURES_KEPT) or 1
    groups = [batches[start : start + stride] for start in range(0, len(batches), stride)]
    return tuple(reduce(add, group) for group in groups)


def _text(version: int, found: Interval) -> str:
    return (
        f"draft {version}: acceptance length {found.length:.3f} "
        f"({1 + found.low:.3f} .. {1 + found.high:.3f}) over {found.drafts} verification steps"
    )
