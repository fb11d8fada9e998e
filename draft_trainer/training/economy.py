"""Decides whether to train now: the generation time that training saves against its cost.

One decision a policy version. Training for one version more pays while what it saves exceeds what
it takes.

Saving. Where drafts run, generation takes as many steps as tokens over the acceptance length L: a
draft that is better by g saves g / (L + g) of its time. A server on which no draft runs, because
none pays, gains what lies beyond the break-even, the acceptance length from which drafts pay: L
over the speed-up while they ran, and at least the L of a draft that does not run. Half of what such
an L has raised it by fades each version in which every server drafts, or in which L is below what
once paid; above that, a server itself tries the draft now and then, and a lower load shows. A gain
that the policy takes back in a version takes no L beyond the break-even. A server that reports no
speed-up, or was switched off, is taken to draft. The saving lasts for ``economy.horizon_versions``
versions, or until the policy's movement has taken all of L.

Gain. g is the greater of what the served draft's L is below the reference length, on the newest
held-out states, and of what training has gained a version lately. The reference length is what
training is known to reach: that of the last release when it was made, before the first that of the
first measurement; two in a row above it, as of a policy that became easier to draft for, move it
half way to the lesser. A version whose candidates gain nothing moves it half way to L: a loss that
training cannot regain is not paid for without end. A candidate that passed the gate and was not
promoted, as on a full disk, is no such version's, unless a release is pinned.

A draft that was released for this policy has lost nothing yet: training begins once it does. What
is not known for ``LOOK_VERSIONS`` versions, as an L that could not be measured since, counts as
paying. Nothing of one run's policy and prompts counts in another.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from draft_trainer.config import EconomyConfig
from slipstream.v1 import rollout_server_pb2 as pb
from slipstream.v1.release_pb2 import GateFigures

SMOOTHING = 0.5
"""Weight of the newest version in means over versions."""

START, STOP = 1.2, 0.8
"""Saving over cost at which training begins, and ends; between them noise switches nothing."""

LOOK_VERSIONS = 3
"""Policy versions without training while figures are missing; after them it counts as paying."""

QUIET = 0.1
"""Saving over cost, by what the draft has lost alone, up to which it holds: it is then measured
again after twice as many versions as the last time, ``MOST_BETWEEN`` at most, and in every version
beyond it."""

MOST_BETWEEN = 4

ASSUMED_SHARE = 0.5
"""Share of a version's seconds that training for it costs, until that is measured: between none, on
idle cores, and all of them."""

LEAST_ACCEPTED = 0.5
"""Share of proposed tokens below which a draft is trained, whatever it has lost, until that gained
something, for ``LOOK_VERSIONS`` judged versions at most: it has more to learn than a policy's
movement takes from it."""


@dataclass(frozen=True)
class CoreSeconds:
    """Of a process's threads since their start, summed: seconds that they ran on a core, and that
    they were ready to and another had it."""

    ran: float
    waited: float

    def taken_since(self, before: CoreSeconds) -> float:
        """About how long others waited because of this process.

        The kernel shares a contended core evenly: two that want it wait for each other as long as
        they run. Who waits for several takes no more than it runs.
        """
        return max(0.0, min(self.ran - before.ran, self.waited - before.waited))


def core_seconds(pid: int | None = None, nice: int | None = None) -> CoreSeconds | None:
    """What the kernel counts; None where it does not.

    Source: Linux, Documentation/scheduler/sched-stats.rst.

    Args:
        pid: of the process; None: this one.
        nice: only of threads with this one: those that train, and no others of a process that
            does more; None: of all.
    """
    if sys.platform != "linux":
        return None
    ran = waited = counted = 0
    for task in Path(f"/proc/{pid or 'self'}/task").iterdir():
        try:
            counts = (task / "schedstat").read_text().split()
            counted += int(counts[0])
            if nice is not None and os.getpriority(os.PRIO_PROCESS, int(task.name)) != nice:
                continue
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread ended meanwhile, or the kernel does not count
        ran, waited = ran + int(counts[0]), waited + int(counts[1])
    return CoreSeconds(ran / 1e9, waited / 1e9) if counted else None


def training_nice(configured: int) -> int:
    """Of threads that train, if this one starts them: only root may lower what they inherit."""
    return max(configured, os.getpriority(os.PRIO_PROCESS, 0))


@dataclass(frozen=True)
class Decision:
    """For one policy version.

    Attributes:
        policy_version: that it is for.
        train: whether to train.
        reason: in words, with the figures.
        saving_seconds: of generation, expected while the gain lasts; None while unknown.
        cost_seconds: of the loop, that one version's training takes; None while unknown.
    """

    policy_version: int
    train: bool
    reason: str
    saving_seconds: float | None = None
    cost_seconds: float | None = None


class Economy:
    """Keeps the measurements and the last decision. ``served`` is thread-safe; the rest belongs to
    the training thread.

    Args:
        config: the [economy] section.
        clock: monotonic seconds.
        cores: what this process has had of the cores so far; None where unknown.
    """

    def __init__(
        self,
        config: EconomyConfig,
        clock: Callable[[], float] = time.monotonic,
        cores: Callable[[], CoreSeconds | None] = core_seconds,
    ) -> None:
        self.config = config
        self._clock, self._cores = clock, cores
        self._lock = threading.Lock()
        self._busy: dict[str, float] = {}
        self._generated: dict[str, float] = {}
        self._speed_ups: dict[str, float] = {}
        self._paid: float | None = None
        self._run_id: str | None = None
        self.begin("")

    def begin(self, run_id: str) -> None:
        """Of a run, unless it has begun: keeps what the servers' speed says and nothing else."""
        if run_id == self._run_id:
            return
        self._run_id = run_id
        self.last: Decision | None = None
        self._began = self._clock()
        self._cores_before = self._cores()
        self._trained = 0.0
        self._gained = 0.0
        self._lost = 0.0
        self._judged = self._measured = False
        self._unknown = self._unmeasured = self._failed = self._unjudged = 0
        self._measure_at, self._between = 0, 1
        self._seconds: float | None = None
        self._generation: float | None = None
        self._cost: float | None = None
        self._progress: float | None = None
        self._drift: float | None = None
        self._break_even = self._paid
        self._reference: float | None = None
        self._length: float | None = None
        self._proposed = 0

    @property
    def looks_only(self) -> bool:
        """Whether samples serve to measure the served draft, not to train."""
        last = self.last
        return self.config.mode != "always" if last is None else not last.train

    @property
    def measures_next(self) -> bool:
        """Whether the states that the next policy version's step captures serve to measure the
        served draft: that is in the version after it."""
        last = self.last
        return last is None or self.measures(last.policy_version + 2)

    def measures(self, policy_version: int) -> bool:
        """Whether the served draft is measured before that version is decided for."""
        return policy_version >= self._measure_at

    def served(self, address: str, state: pb.ServerState) -> None:
        """A server's report: how long its engine has taken steps since its start, and its gain."""
        with self._lock:
            now, before = state.engine_seconds, self._busy.get(address)
            self._busy[address] = now
            if before is not None:
                # A server that restarted counts from 0.
                grown = now - before if now >= before else now
                self._generated[address] = self._generated.get(address, 0.0) + grown
            if state.HasField("speed_up") and 0.0 < state.speed_up < 100.0:
                self._speed_ups[address] = state.speed_up
            elif not state.speculation_enabled and state.speculation_wanted:
                self._speed_ups[address] = 1.0
            elif not state.speculation_enabled:
                # Switched off: that does not say whether drafts pay.
                self._speed_ups.pop(address, None)

    def trained(self, seconds: float) -> None:
        """An optimizer step took that long."""
        self._trained += seconds

    def compared(self, figures: GateFigures, released: bool, pinned: bool = False) -> None:
        """The gate's estimates on the newest held-out states.

        Args:
            figures: of a candidate.
            released: whether it was promoted.
            pinned: whether none can be. Else one that passed and was not promoted, as on a full
                disk, does not say that training gains nothing.
        """
        length, gain = figures.incumbent_acceptance_length, figures.difference
        self.measured(length)
        self._judged = self._judged or pinned or not figures.passed
        if released:
            # Not the candidate's own length, by which it was chosen of several.
            self._gained += gain
            self._reference = self._length = length + gain

    def measured(self, length: float, proposed: int = 0) -> None:
        """The served draft's estimate on the newest held-out states, of ``proposed`` tokens."""
        self._measured = True
        if self._reference is None:
            self._reference = length
        if self._length is not None:
            lesser = min(self._length, length)
            self._reference = max(self._reference, _smoothed(self._reference, lesser))
            self._lost += self._length - length
        self._length, self._proposed = length, proposed or self._proposed

    def decide(self, policy_version: int) -> Decision:
        """For the versions from now on; ``policy_version`` is the newest."""
        last = self.last
        if last is None or policy_version != last.policy_version:
            self._end_version(first=last is None)
            training = last is not None and last.train
            self.last = last = self._decide(policy_version, training)
        return last

    def _end_version(self, first: bool) -> None:
        now, cores = self._clock(), self._cores()
        seconds, self._began = now - self._began, now
        took = None
        if cores is not None and self._cores_before is not None:
            took = cores.taken_since(self._cores_before)
        self._cores_before = cores
        with self._lock:
            generated, self._generated = self._generated, {}
            if generated:
                # Servers that left count no longer.
                kept = generated.keys() & self._speed_ups.keys()
                self._speed_ups = {address: self._speed_ups[address] for address in kept}
        trained, gained, lost = self._trained, self._gained, self._lost
        self._trained = self._gained = self._lost = 0.0
        judged, measured = self._judged, self._measured
        self._judged = self._measured = False
        if first:
            return
        self._seconds = _smoothed(self._seconds, seconds)
        self._unmeasured += 1
        if measured:
            self._drift = _smoothed(self._drift, lost / self._unmeasured)
            self._unmeasured = 0
        if judged and gained <= 0 and self._length is not None:
            self._failed += 1
            self._reference = _smoothed(self._reference, self._length)
        if generated:
            # Engines generate side by side: a version waits for the slowest.
            slowest = max(generated.values())
            # The first version's reports may come after it.
            if slowest or self._generation is not None:
                self._generation = _smoothed(self._generation, slowest)
        if trained:
            share = self.config.training_share
            if share is not None or took is None:
                took = trained * (1.0 if share is None else share)
            self._cost = _smoothed(self._cost, took)
            self._unjudged += 1
        if judged or gained:
            # Candidates may be several versions apart, and the last one is judged in a pause.
            self._progress = _smoothed(self._progress, gained / max(self._unjudged, 1))
            self._unjudged = 0
        elif trained and self._unjudged > LOOK_VERSIONS:
            self._progress = _smoothed(self._progress, 0.0)

    def _decide(self, version: int, training: bool) -> Decision:
        mode = self.config.mode
        if mode != "when-it-pays":
            return Decision(version, mode == "always", f"economy.mode is {mode}")
        generation, seconds, length = self._generation, self._seconds, self._length
        if self._unmeasured >= self._between + LOOK_VERSIONS:
            # Due and not had for so long: nobody knows what the draft has lost.
            length, self._unknown = None, LOOK_VERSIONS
        if generation is None or seconds is None or length is None:
            self._unknown += 1
            known = {
                "generation": generation,
                "the seconds of a policy version": seconds,
                "the draft's acceptance on held-out states": length,
            }
            names = ", ".join(name for name, value in known.items() if value is None)
            train = self._unknown > LOOK_VERSIONS
            waited = f"{self._unknown} of {LOOK_VERSIONS} policy versions waited for them"
            text = "training counts as paying" if train else waited
            return Decision(version, train, f"not known yet, {text}: {names}")
        cost, assumed = self._cost, ""
        if cost is None:
            cost, assumed = seconds * self._assumed_share(), " (assumed)"
        weak = length - 1 < LEAST_ACCEPTED * self._proposed
        if weak and not self._progress and self._failed < LOOK_VERSIONS:
            reason = f"{length:.3f} of {1 + self._proposed} possible: training is tried"
            return Decision(version, True, f"acceptance length {reason}", None, cost)
        lost = max((self._reference or length) - length, 0.0)
        progress, drift = self._progress or 0.0, max(self._drift or 0.0, 0.0)
        gain = max(lost, progress)
        lasts: float = self.config.horizon_versions
        if drift:
            lasts = min(lasts, max(1.0, (length + gain - 1) / drift))
        reach = length + max(lost, progress - drift)
        saving = lasts * generation * self._saved_share(length, gain, reach)
        train = saving > cost * (STOP if training else START)
        # What training gained lately does not change while it is paused: the draft may hold.
        if train or saving * lost > cost * QUIET * gain:
            self._between = 1
            self._measure_at = version + 1
        elif not self._unmeasured:
            # A measurement for which there were too few states says nothing: it is made again.
            self._between = min(2 * self._between, MOST_BETWEEN)
            self._measure_at = version + self._between
        text = (
            f"training {'pays' if train else 'does not pay'}: {gain:.3f} of acceptance length "
            f"{length:.3f} saves {saving:.3g} s of generation in {lasts:.3g} policy versions, "
            f"training for one takes {cost:.3g} s{assumed}"
        )
        return Decision(version, train, text, saving, cost)

    def _assumed_share(self) -> float:
        share = self.config.training_share
        if share is not None:
            return share
        return 1.0 if self._cores_before is None else ASSUMED_SHARE

    def _saved_share(self, length: float, gain: float, reach: float) -> float:
        """Of a version's generation, by a draft that is better by ``gain`` and that gets to
        ``reach`` while the policy moves."""
        with self._lock:
            speed_ups = list(self._speed_ups.values())
        drafting = [speed_up for speed_up in speed_ups if speed_up != 1.0]
        saved = gain / (length + gain)
        if drafting:
            self._paid = _smoothed(self._paid, length / (sum(drafting) / len(drafting)))
        all_draft = len(drafting) == len(speed_ups)
        # Above what paid, a server that is off has tried the draft since, and would draft.
        if self._paid is not None and (all_draft or length < self._paid):
            self._break_even = _smoothed(self._break_even, self._paid)
        if all_draft:
            return saved
        self._break_even = max(self._break_even or 0.0, length)
        beyond = max(0.0, 1 - self._break_even / reach)
        return saved + (beyond - saved) * (1 - len(drafting) / len(speed_ups))


def _smoothed(old: float | None, new: float) -> float:
    return new if old is None else old + SMOOTHING * (new - old)
