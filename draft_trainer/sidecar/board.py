"""The trainer's own counters, kept once: the status call and Prometheus both read them here.

Plain numbers behind one lock; nothing here knows of gRPC or Prometheus.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from slipstream.durations import Durations

SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
_NONE = Durations(SECONDS_BUCKETS)
_NONE_ACKNOWLEDGED = Durations((0.0005, 0.001, 0.0025, *SECONDS_BUCKETS[:-2]))


@dataclass(frozen=True)
class GateResult:
    """The last gate verdict. Lengths are None where nothing could be measured."""

    verdict: str
    candidate: float | None
    incumbent: float | None
    half_width: float | None
    anchors: int
    text: str


@dataclass(frozen=True)
class Servers:
    """Rollout servers at a look: known, reachable of them, and of these ready ones and those on
    the release that they should serve."""

    known: int
    reachable: int
    ready: int
    current: int


@dataclass
class Counts:
    """Everything that was counted since the process started, at one instant."""

    samples_accepted: int = 0
    samples_duplicate: int = 0
    samples_refused: int = 0
    samples_trained: int = 0
    samples_recorded: int = 0
    train_steps: int = 0
    train_steps_skipped: int = 0
    tokens_trained: int = 0
    train_seconds: float = 0.0
    loss: float | None = None
    loss_total: float = 0.0
    step_acceptance: tuple[float, ...] = ()
    idle: bool = True
    gate: GateResult | None = None
    training_error: str = ""
    refused_by_field: Counter[str] = field(default_factory=Counter)
    evicted_by_reason: Counter[str] = field(default_factory=Counter)
    gate_verdicts: Counter[str] = field(default_factory=Counter)
    publishes: Counter[str] = field(default_factory=Counter)
    recording_shed: Counter[str] = field(default_factory=Counter)
    received_bytes: Counter[str] = field(default_factory=Counter)
    access_refused: Counter[str] = field(default_factory=Counter)
    heals: Counter[str] = field(default_factory=Counter)
    heals_failed: Counter[str] = field(default_factory=Counter)
    policy_announcements: int = 0
    servers: Servers | None = None
    acknowledgement_seconds: Durations = _NONE_ACKNOWLEDGED
    stage_seconds: Durations = _NONE
    commit_seconds: Durations = _NONE
    revision: int = 0

    @property
    def samples_evicted(self) -> int:
        """Samples that were given up untrained, or whose training was lost with a kill."""
        return self.evicted_by_reason.total() - self.evicted_by_reason["unsaved"]


class Board:
    """Thread-safe holder of one ``Counts``; every change wakes those who watch."""

    def __init__(self) -> None:
        self._counts = Counts()
        self._changed = threading.Condition()

    def read(self) -> Counts:
        """The numbers now, all of them copies."""
        with self._changed:
            now = self._counts
            values = {f.name: getattr(now, f.name) for f in fields(now)}
            copies = {n: Counter(v) for n, v in values.items() if isinstance(v, Counter)}
            return replace(now, **copies)  # type: ignore[arg-type]

    def wait_beyond(self, revision: int, timeout: float) -> bool:
        """Block until something changed since ``revision``; False when ``timeout`` s passed."""
        with self._changed:
            return self._changed.wait_for(lambda: self._counts.revision > revision, timeout)

    def touch(self) -> None:
        """Something outside these counters changed (a version, a promotion)."""
        self._change()

    def accepted(self, samples: int) -> None:
        """Samples were taken."""
        with self._changed:
            self._change(samples_accepted=self._counts.samples_accepted + samples)

    def received(self, nbytes: Mapping[str, int], waited: Sequence[tuple[float, int]]) -> None:
        """Samples were answered.

        Args:
            nbytes: that they took, by transport.
            waited: seconds from arrival to acknowledgement, and of how many samples.
        """
        with self._changed:
            self._counts.received_bytes.update(nbytes)
            total = self._counts.acknowledgement_seconds
            for seconds, samples in waited:
                total = total.observe(seconds, samples)
            self._change(acknowledgement_seconds=total)

    def announced(self) -> None:
        """A policy version became known."""
        with self._changed:
            self._change(policy_announcements=self._counts.policy_announcements + 1)

    def duplicate(self) -> None:
        """A sample came that had been taken before."""
        with self._changed:
            self._change(samples_duplicate=self._counts.samples_duplicate + 1)

    def refused(self, field_name: str) -> None:
        """A sample was refused for ``field_name`` (one of the fixed names of ``ingest``)."""
        with self._changed:
            self._counts.refused_by_field[field_name] += 1
            self._change(samples_refused=self._counts.samples_refused + 1)

    def evicted(self, reason: str, samples: int) -> None:
        """Samples were given up: capacity, stale, unsaved or undone; see ``SampleStore``."""
        with self._changed:
            self._counts.evicted_by_reason[reason] += samples
            self._change()

    def recorded(self, samples: int) -> None:
        """Samples were written to disk."""
        with self._changed:
            if samples:
                self._change(samples_recorded=self._counts.samples_recorded + samples)

    def recording_shed(self, reason: str, samples: int) -> None:
        """Samples were not: queue_full, busy, capacity, policy_forgotten, write_failed."""
        with self._changed:
            self._counts.recording_shed[reason] += samples
            self._change()

    def access_refused(self, reason: str) -> None:
        """A call was refused for what its caller showed (``slipstream.access.REASONS``)."""
        with self._changed:
            # Nobody is woken: a flood of refusals must not become a flood of status messages.
            self._counts.access_refused[reason] += 1

    def idle(self, idle: bool) -> None:
        """Whether there is nothing to train on."""
        with self._changed:
            if idle != self._counts.idle:
                self._change(idle=idle)

    def trained(
        self,
        *,
        samples: int,
        tokens: int,
        seconds: float,
        skipped: bool,
        loss: float | None,
        step_acceptance: Sequence[float],
    ) -> None:
        """One optimizer step, or one that was skipped for a non-finite loss or gradient."""
        with self._changed:
            now = self._counts
            self._change(
                train_steps=now.train_steps + (not skipped),
                train_steps_skipped=now.train_steps_skipped + skipped,
                samples_trained=now.samples_trained + samples,
                tokens_trained=now.tokens_trained + (0 if skipped else tokens),
                train_seconds=now.train_seconds + seconds,
                loss=now.loss if skipped else loss,
                loss_total=now.loss_total + (0.0 if skipped or loss is None else loss),
                step_acceptance=now.step_acceptance if skipped else tuple(step_acceptance),
            )

    def gated(self, result: GateResult) -> None:
        """A verdict of the gate."""
        with self._changed:
            self._counts.gate_verdicts[result.verdict] += 1
            self._change(gate=result)

    def staged(self, seconds: float) -> None:
        """One server staged one release."""
        with self._changed:
            self._change(stage_seconds=self._counts.stage_seconds.observe(seconds))

    def committed(self, seconds: float) -> None:
        """One server committed one release."""
        with self._changed:
            self._change(commit_seconds=self._counts.commit_seconds.observe(seconds))

    def published(self, outcome: str) -> None:
        """Something was done to the fleet: an event of ``PublishLog``, policy_only or
        policy_failed."""
        with self._changed:
            self._counts.publishes[outcome] += 1
            self._change()

    def healed(self, reason: str, done: bool) -> None:
        """A server was put on the release that it should serve, or an attempt at it failed.

        Args:
            reason: other_version, other_content or not_ready.
            done: whether it is.
        """
        with self._changed:
            (self._counts.heals if done else self._counts.heals_failed)[reason] += 1
            self._change()

    def looked(self, servers: Servers) -> None:
        """Every server was asked what it serves."""
        with self._changed:
            if servers != self._counts.servers:
                self._change(servers=servers)

    def training_failed(self, text: str) -> None:
        """The training thread ended with an error; the service goes on without it."""
        self._change(training_error=text)

    def _change(self, **changes: object) -> None:
        # The condition's lock is re-entrant: callers that add to a number hold it already.
        with self._changed:
            # In place: copying thirty fields was a twentieth of what taking a MiB of states cost.
            for name, value in changes.items():
                setattr(self._counts, name, value)
            self._counts.revision += 1
            self._changed.notify_all()
