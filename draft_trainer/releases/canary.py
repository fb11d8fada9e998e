"""Canary trials: some servers serve a release first, and live acceptance decides.

Where both drafts are live, each on its own servers, they are compared over the same minutes. Where
every server has the new one (one server, or ``canary.share = 1``) it is compared with what the
incumbent did on the same servers just before.

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

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from draft_trainer.config import CanaryConfig
from draft_trainer.releases.fleet import Fleet
from draft_trainer.state import State, Trial
from slipstream.v1 import rollout_server_pb2 as pb

TUNED_FOR = 100.0
"""Effective verification steps at which the interval is tightest."""

MAX_BLOCKS = 32
MIN_BLOCKS = 8


@dataclass(frozen=True)
class Batch:
    """Verification steps of one draft version between two reports: their number, the tokens
    accepted in all of them, and the sum over steps of the square of what was accepted."""

    drafts: int
    accepted: int
    squares: int


def batch_of(drafts: int, accepted_per_position: Iterable[int]) -> Batch:
    """From counters per position: a step with a accepted tokens counts at positions 0 .. a-1, and
    a^2 is the sum of the first a odd numbers."""
    per_position = list(accepted_per_position)
    return Batch(
        drafts,
        sum(per_position),
        sum((2 * place + 1) * count for place, count in enumerate(per_position)),
    )


@dataclass(frozen=True)
class Interval:
    """Accepted tokens per verification step: the mean and its bounds."""

    drafts: int
    mean: float
    low: float
    high: float

    @property
    def length(self) -> float:
        """Acceptance length, the bonus token included."""
        return 1.0 + self.mean


class Arm:
    """One draft version's side of a comparison."""

    def __init__(self, most: int, design_effect: float) -> None:
        self._most = most
        self._floor = design_effect
        self.drafts = self._accepted = self._squares = 0
        self._blocks: list[tuple[int, int]] = []
        self._block_drafts = 1

    def add(self, batch: Batch) -> None:
        """Add what came since the last report."""
        if not batch.drafts:
            return
        self.drafts += batch.drafts
        self._accepted += batch.accepted
        self._squares += batch.squares
        if self._blocks and self._blocks[-1][0] < self._block_drafts:
            drafts, accepted = self._blocks.pop()
            self._blocks.append((drafts + batch.drafts, accepted + batch.accepted))
        else:
            self._blocks.append((batch.drafts, batch.accepted))
        if len(self._blocks) > MAX_BLOCKS:
            pairs = zip(self._blocks[::2], self._blocks[1::2], strict=False)
            merged = [(a[0] + b[0], a[1] + b[1]) for a, b in pairs]
            self._blocks = merged + self._blocks[2 * len(merged) :]
            self._block_drafts = min(drafts for drafts, _ in merged)

    def interval(self, alpha: float) -> Interval:
        """Bounds of the mean that fail once in 1 / ``alpha`` trials. Needs at least one step."""
        mean = self._accepted / self.drafts
        # Two steps more, one with no and one with all tokens accepted: no certainty from few.
        variance = (self._squares + self._most**2) / (self.drafts + 2)
        variance -= ((self._accepted + self._most) / (self.drafts + 2)) ** 2
        n = self.drafts / max(self._floor, self._measured_effect(mean, variance))
        log_alpha = -2.0 * math.log(alpha)
        rho2 = (log_alpha + math.log(log_alpha + 1.0)) / TUNED_FOR
        t = n * rho2 + 1.0
        radius = math.sqrt(variance * 2.0 * t / (n * n * rho2) * math.log(math.sqrt(t) / alpha))
        return Interval(
            self.drafts, mean, max(0.0, mean - radius), min(float(self._most), mean + radius)
        )

    def _measured_effect(self, mean: float, variance: float) -> float:
        """Variance between blocks over that of independent steps; 1 while unknown."""
        if len(self._blocks) < MIN_BLOCKS:
            return 1.0
        spread = sum(drafts * (accepted / drafts - mean) ** 2 for drafts, accepted in self._blocks)
        return spread / (len(self._blocks) - 1) / variance


def decide(candidate: Interval, incumbent: Interval, max_loss: float) -> bool | None:
    """Whether the candidate keeps the acceptance length but for a share ``max_loss``; None while
    that is not known."""
    kept = 1.0 - max_loss
    if 1.0 + candidate.high < kept * (1.0 + incumbent.low):
        return False
    if 1.0 + candidate.low > kept * (1.0 + incumbent.high):
        return True
    return None


logger = logging.getLogger(__name__)

INTERVAL_MS = 100
STREAM_SECONDS = 600.0
RETRY_SECONDS = 1.0
KEPT = 2048


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
        on_growth: Callable[
            [str, pb.ServerState, int, int, Sequence[int]], None
        ] = lambda *growth: None,
    ) -> None:
        self._fleet = fleet
        self._on_growth = on_growth
        self._changed = threading.Condition()
        self._revision = 0
        self._seen: dict[str, deque[Seen]] = {}
        self._threads: dict[str, tuple[threading.Thread, threading.Event]] = {}
        self._stopped = False

    def follow(self, addresses: Iterable[str]) -> None:
        """Watch these servers and no others."""
        wanted = set(addresses)
        with self._changed:
            if self._stopped:
                return
            for address in set(self._threads) - wanted:
                self._threads.pop(address)[1].set()
                self._seen.pop(address, None)
            for address in wanted - set(self._threads):
                over = threading.Event()
                thread = threading.Thread(
                    target=self._watch, args=(address, over), name=f"watch-{address}", daemon=True
                )
                self._threads[address] = (thread, over)
                self._seen[address] = deque(maxlen=KEPT)
                thread.start()

    def since(self, version: int, addresses: Iterable[str], begin: float) -> list[Batch]:
        """What a draft version did on these servers after ``begin``, oldest first."""
        return [seen.batch for seen in self._of(version, addresses) if seen.at > begin]

    def before(
        self, version: int, addresses: Iterable[str], end: float, seconds: float
    ) -> list[Batch]:
        """What it did on them in the ``seconds`` before ``end``, oldest first."""
        return [s.batch for s in self._of(version, addresses) if end - seconds < s.at <= end]

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

    def _of(self, version: int, addresses: Iterable[str]) -> list[Seen]:
        with self._changed:
            found = [s for a in addresses for s in self._seen.get(a, ()) if s.version == version]
        return sorted(found, key=lambda seen: seen.at)

    def _watch(self, address: str, over: threading.Event) -> None:
        before: dict[int, list[int]] | None = None
        while not over.is_set():
            for report in self._fleet.client(address).watch(INTERVAL_MS, STREAM_SECONDS):
                before = self._note(address, report, before)
                if over.is_set():
                    return
            over.wait(RETRY_SECONDS)

    def _note(
        self, address: str, report: pb.AcceptanceReport, before: dict[int, list[int]] | None
    ) -> dict[int, list[int]]:
        now = {c.draft_version: [c.drafts, *c.accepted_per_position] for c in report.counters}
        if before is None:
            # The age of these counts is unknown: they only say where to begin.
            return now
        with self._changed:
            for version, counts in now.items():
                last = before.get(version, [])
                grown = [
                    count - (last[place] if place < len(last) else 0)
                    for place, count in enumerate(counts)
                ]
                if grown[0] < 0:
                    grown = counts
                if grown[0] > 0 and address in self._seen:
                    self._on_growth(address, report.state, version, grown[0], grown[1:])
                    seen = Seen(time.monotonic(), version, batch_of(grown[0], grown[1:]))
                    self._seen[address].append(seen)
            self._revision += 1
            self._changed.notify_all()
        return now


HISTORY_SECONDS = 300.0
"""How far back an incumbent's figures count where none of its servers are left."""

HISTORY_BATCHES = 64


@dataclass(frozen=True)
class TrialResult:
    """How a trial ended."""

    trial: Trial
    event: str
    reason: str

    @property
    def keep(self) -> bool:
        """The release stays."""
        return self.event != "canary_rolled_back"


class Canary:
    """Chooses servers, keeps the trial under way on disk, decides it. Thread-safe.

    A trial that a restart interrupts goes on: its live acceptance is collected anew, and
    ``max_seconds`` begins again.
    """

    def __init__(
        self, config: CanaryConfig, most: int, watch: AcceptanceWatch, state: State
    ) -> None:
        self._config = config
        self._most = most
        self._watch = watch
        self._state = state
        self._lock = threading.Lock()
        self._trial = state.trial if config.share else None
        self._began = time.monotonic()

    @property
    def trial(self) -> Trial | None:
        """The trial under way."""
        with self._lock:
            return self._trial

    def choose(self, holders: Sequence[str]) -> tuple[str, ...]:
        """The servers that get a release first, of those that hold it."""
        count = max(1, math.floor(self._config.share * len(holders) + 1e-9))
        return tuple(sorted(holders)[:count])

    def plan(
        self, version: int, incumbent: int, servers: Sequence[str], others: Sequence[str]
    ) -> Trial:
        """The trial of a release that has just gone live."""
        past: list[Batch] = []
        if not others:
            past = self._watch.before(incumbent, servers, time.monotonic(), HISTORY_SECONDS)
        history = tuple((b.drafts, b.accepted, b.squares) for b in merged(past, HISTORY_BATCHES))
        return Trial(version, incumbent, tuple(servers), tuple(others), time.time(), history)

    def begin(self, trial: Trial) -> None:
        """Keep a trial, in the transaction under way if there is one; replaces another one.

        Raises:
            RefusedError: it cannot be written.
        """
        began = time.monotonic()
        with self._state.transaction():
            self._state.set_trial(trial)
            self._state.after_commit(lambda: self._keep(trial, began))

    def end(self) -> None:
        """No trial is under way any more. Raises RefusedError: that cannot be written."""
        with self._state.transaction():
            self._state.set_trial(None)
            self._state.after_commit(lambda: self._keep(None, 0.0))

    def _keep(self, trial: Trial | None, began: float) -> None:
        with self._lock:
            self._trial, self._began = trial, began

    def result(self) -> TrialResult | None:
        """The result, once there is one. The trial stays until ``end``."""
        with self._lock:
            trial, began = self._trial, self._began
        if trial is None:
            return None
        watch, config = self._watch, self._config
        mine = watch.since(trial.version, trial.servers, began)
        theirs = [Batch(*figures) for figures in trial.history]
        if trial.shared:
            theirs = watch.since(trial.incumbent, trial.others, began)
        elif sum(batch.drafts for batch in theirs) < config.min_drafts:
            text = f"draft {trial.incumbent} left nothing to compare with"
            return TrialResult(trial, "canary_undecided", text)
        candidate, incumbent = self._interval(mine), self._interval(theirs)
        late = time.monotonic() - began > config.max_seconds
        if candidate is None or incumbent is None:
            text = "too few verification steps in time to tell"
            return TrialResult(trial, "canary_undecided", text) if late else None
        text = f"{_text(trial.version, candidate)}; {_text(trial.incumbent, incumbent)}"
        if not trial.shared:
            text += ", before it"
        fine = decide(candidate, incumbent, config.max_loss)
        if fine is None:
            return TrialResult(trial, "canary_undecided", text) if late else None
        return TrialResult(trial, "canary_promoted" if fine else "canary_rolled_back", text)

    def _interval(self, batches: Sequence[Batch]) -> Interval | None:
        arm = Arm(self._most, self._config.design_effect)
        for batch in batches:
            arm.add(batch)
        if arm.drafts < self._config.min_drafts:
            return None
        # Half of the error rate for each of the two intervals.
        return arm.interval(self._config.alpha / 2)


def merged(batches: Sequence[Batch], most: int) -> list[Batch]:
    """At most so many batches with the same sums: neighbours are added up."""
    stride = -(-len(batches) // most) or 1
    groups = [batches[start : start + stride] for start in range(0, len(batches), stride)]
    return [
        Batch(sum(b.drafts for b in g), sum(b.accepted for b in g), sum(b.squares for b in g))
        for g in groups
    ]


def _text(version: int, found: Interval) -> str:
    return (
        f"draft {version}: acceptance length {found.length:.3f} "
        f"({1 + found.low:.3f} .. {1 + found.high:.3f}) over {found.drafts} verification steps"
    )
