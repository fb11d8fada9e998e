"""The trainer's own counters, kept once: the status call and Prometheus both read them here.

Plain numbers behind one lock; nothing here knows of gRPC or Prometheus.

What happened, in order: a bounded log in the registry that outlives the process.

Its numbers go on over restarts, so that somebody who followed a trainer asks the next
one for what came after the last number, and misses and repeats nothing.

What was done to the fleet and why: one JSON object a line beside the releases.

The gate's verdicts, those on candidates that were dropped too: a bounded log in the registry.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from google.protobuf import json_format

from draft_trainer.files import written_whole
from slipstream.errors import RefusedError
from slipstream.metrics import Durations
from slipstream.v1 import console_pb2 as pb
from slipstream.v1 import release_pb2

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
        """A call was refused for what its caller showed (``slipstream.security.REASONS``)."""
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


logger = logging.getLogger(__name__)

FILE_NAME = "events.jsonl"
KEPT = 1000
MAX_BYTES = 512 << 10
REASON_CHARACTERS = 600

_VERDICTS: dict[str, pb.EventKind] = {
    "passed": pb.EVENT_KIND_GATE_PASSED,
    "failed": pb.EVENT_KIND_GATE_FAILED,
    "not_measured": pb.EVENT_KIND_GATE_NOT_MEASURED,
    "write_failed": pb.EVENT_KIND_RELEASE_NOT_WRITTEN,
}


class EventLog:
    """The newest ``KEPT`` events, and all of the newest half to one MiB in two files. Thread-safe.

    Written through to the page cache, not to the disk: kill -9 loses nothing, a power cut the
    last seconds, and no caller waits for a disk. A line that a power cut tore is left out.

    Args:
        root: the registry's folder.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / FILE_NAME
        self._changed = threading.Condition()
        self._events = deque(_read(self._older, self._path), maxlen=KEPT)
        self._newest = self._events[-1].number if self._events else 0
        self._torn = self._path.exists() and not self._path.read_bytes().endswith(b"\n")

    @property
    def _older(self) -> Path:
        return self._path.with_suffix(".jsonl.1")

    def note(
        self,
        kind: pb.EventKind,
        *,
        draft_version: int | None = None,
        policy_version: int | None = None,
        server: str = "",
        reason: str = "",
    ) -> None:
        """Keep one more event and wake those who wait for it."""
        with self._changed:
            self._newest += 1
            event = pb.Event(
                number=self._newest,
                time=time.time(),
                kind=kind,
                draft_version=draft_version,
                policy_version=policy_version,
                server=server,
                reason=reason[:REASON_CHARACTERS],
            )
            self._events.append(event)
            self._write(event)
            self._changed.notify_all()

    def published(self, event: str, version: int, reason: str) -> None:
        """As ``PublishLog.note``: its names are those of the kinds."""
        kind = getattr(pb, f"EVENT_KIND_{event.upper()}")
        self.note(kind, draft_version=version, reason=reason)

    def judged(self, verdict: release_pb2.Verdict) -> None:
        """The gate decided."""
        against = "trained_against_policy_version"
        self.note(
            _VERDICTS[verdict.outcome],
            draft_version=verdict.draft_version if verdict.HasField("draft_version") else None,
            policy_version=getattr(verdict, against) if verdict.HasField(against) else None,  # type: ignore[arg-type]
            reason=verdict.reason,
        )

    def after(self, number: int, newest: int = 0) -> list[pb.Event]:
        """Events with a higher number, at most the newest so many (0: all), oldest first.

        A number that no event has yet is of another log: then all of them.
        """
        with self._changed:
            first = number if number <= self._newest else 0
            return [event for event in self._events if event.number > first][-newest:]

    def wait_beyond(self, number: int, timeout: float) -> bool:
        """Block until there is an event with a higher number; False after ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._newest > number, timeout)

    def _write(self, event: pb.Event) -> None:
        line = json_format.MessageToJson(event, preserving_proto_field_name=True, indent=None)
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write("\n" * self._torn + line + "\n")
                self._torn = False
                full = file.tell() >= MAX_BYTES
            if full:
                self._path.replace(self._older)
        except OSError as error:
            # A full disk must not keep a roll back from being made.
            logger.error("%s: %s; not written: %s", self._path, error.strerror, line)


def _read(*paths: Path) -> Iterable[pb.Event]:
    for path in paths:
        if not path.exists():
            continue
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                yield json_format.Parse(line, pb.Event(), ignore_unknown_fields=True)
            except json_format.ParseError as error:
                logger.warning("%s: a line was left out: %s", path, error)


FILE_NAME_PUBLISH_LOG = "publishes.jsonl"
MAX_BYTES_PUBLISH_LOG = 1 << 20


class PublishLog:
    """Appends; keeps the newest one to two MiB in two files. Thread-safe.

    Args:
        root: the registry's folder.
        on_note: told of every event too, with the arguments of ``note``.
    """

    def __init__(
        self, root: Path, on_note: Callable[[str, int, str], None] = lambda *event: None
    ) -> None:
        self._path = root / FILE_NAME_PUBLISH_LOG
        self._on_note = on_note
        self._lock = threading.Lock()

    def note(self, event: str, version: int, reason: str) -> None:
        """Write one line, on disk on return.

        A disk that is full does not stop a roll back: the line then goes to the
        process's own log alone, as an error.

        Args:
            event: committed, stage_failed, rolled_back, healed and so on (docs/operations.md).
            version: the release that it is about.
            reason: for people.
        """
        self._on_note(event, version, reason)
        line = {"time": time.time(), "event": event, "draft_version": version, "reason": reason}
        try:
            with self._lock, self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())
                if file.tell() >= MAX_BYTES_PUBLISH_LOG:
                    self._path.replace(self._path.with_suffix(".jsonl.1"))
        except OSError as error:
            logger.error("%s: %s; not written: %s", self._path, error.strerror, line)


VERDICTS_FILE = "verdicts.jsonl"
KEPT_VERDICTS = 500


class VerdictLog:
    """The newest ``KEPT_VERDICTS`` verdicts, on disk as soon as ``add`` returns. Thread-safe.

    Args:
        root: the registry's folder.
        on_add: told of every verdict.

    Raises:
        RefusedError: the file is not what this class writes.
    """

    def __init__(
        self,
        root: Path,
        on_add: Callable[[release_pb2.Verdict], None] = lambda verdict: None,
    ) -> None:
        self._on_add = on_add
        self._path = root / VERDICTS_FILE
        self._lock = threading.Lock()
        self._verdicts = deque(read_verdicts(root), maxlen=KEPT_VERDICTS)

    def add(self, verdict: release_pb2.Verdict) -> None:
        """Keep one more. Raises OSError: it is kept until the process ends, but not on disk."""
        self._on_add(verdict)
        with self._lock:
            self._verdicts.append(verdict)
            with written_whole(self._path) as temporary, temporary.open("w") as file:
                file.writelines(f"{_line(one)}\n" for one in self._verdicts)

    def newest(self, count: int) -> list[release_pb2.Verdict]:
        """The newest so many (0: all), oldest first."""
        with self._lock:
            return list(self._verdicts)[-count:]


def read_verdicts(root: Path) -> list[release_pb2.Verdict]:
    """The verdicts of a registry, oldest first; none where there is no log.

    Raises:
        RefusedError: the file is not what ``VerdictLog`` writes.
    """
    path = root / VERDICTS_FILE
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        return [json_format.Parse(line, release_pb2.Verdict()) for line in lines]
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError, json_format.ParseError, AttributeError) as error:
        raise RefusedError(
            str(path),
            str(error),
            "one verdict a line, as the trainer writes them",
            "restore the file, or move it away to start a new log",
        ) from error


def _line(verdict: release_pb2.Verdict) -> str:
    return json_format.MessageToJson(
        verdict, preserving_proto_field_name=True, indent=None, ensure_ascii=False
    )
