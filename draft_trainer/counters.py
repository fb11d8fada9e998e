"""What the trainer counts: prometheus_client metrics, increased where the fact happens.

``server.status`` puts them into ``TrainerStatus``; ``/metrics`` serves their registry.

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
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import json_format
from prometheus_client import CollectorRegistry, Counter, Histogram

from draft_trainer.files import written_whole
from slipstream.errors import RefusedError
from slipstream.metrics import unit_of
from slipstream.security import REASONS
from slipstream.v1 import console_pb2 as pb
from slipstream.v1 import release_pb2

SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
ACKNOWLEDGEMENT_BUCKETS = (0.0005, 0.001, 0.0025, *SECONDS_BUCKETS[:-2])

PREFIX = "slipstream_trainer_"

_FLEET_EVENTS = {
    "committed": ("publishes", "committed"),
    "stage_failed": ("publishes", "stage_failed"),
    "not_committed": ("publishes", "not_committed"),
    "policy_only": ("publishes", "policy_only"),
    "policy_failed": ("publishes", "policy_failed"),
    "rolled_back": ("roll_backs", "commit_failed"),
    "rolled_back_by_hand": ("roll_backs", "by_hand"),
    "interrupted": ("roll_backs", "interrupted"),
    "canary_promoted": ("trials", "promoted"),
    "canary_undecided": ("trials", "undecided"),
    "canary_rolled_back": ("trials", "rolled_back"),
}
"""Events of a publish, each with the counter that counts it and its label."""


@dataclass(frozen=True)
class Servers:
    """Rollout servers when they were last asked: known, reachable of them, and of these ready ones
    and those on the release that they should serve."""

    known: int
    reachable: int
    ready: int
    current: int


class Counters:
    """What the trainer counts, as prometheus_client metrics on a registry of their own.

    A counter whose label values are known beforehand has a series for each from the start on:
    ``increase`` does not see the first event of a series that appears with it.

    Attributes:
        registry: holds every metric here, for ``/metrics``.
        loss: training loss of the last step; None before it.
        step_acceptance: expected acceptance at each TTT step of the last step, each in [0, 1].
        idle: whether there is nothing to train on.
        training_error: why the training thread ended; empty while it runs.
        servers: the fleet when it was last asked; None before that.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.loss: float | None = None
        self.loss_total = 0.0
        self.step_acceptance: tuple[float, ...] = ()
        self.idle = True
        self.training_error = ""
        self.servers: Servers | None = None

        self.access_refused = self._counter(
            "access_refused", "Calls without the right to make them.", "reason", REASONS
        )
        self.samples = self._counter(
            "samples",
            "Samples that arrived, by outcome.",
            "outcome",
            ("accepted", "duplicate", "refused"),
        )
        self.samples_refused = self._counter(
            "samples_refused",
            "Refused samples, by field of VerifierStates or by what had no capacity for them.",
            "field",
        )
        self.received_bytes = self._counter(
            "received_bytes",
            "Bytes that arrived in streams of samples.",
            "transport",
            ("grpc", "shared_memory"),
        )
        self.acknowledgement_seconds = self._histogram(
            "acknowledgement_seconds",
            "Seconds from a sample's arrival to its acknowledgement, which follows its recording.",
            ACKNOWLEDGEMENT_BUCKETS,
        )
        self.policy_announcements = self._counter(
            "policy_announcements", "Policy versions that were registered."
        )
        self.samples_trained = self._counter(
            "samples_trained", "Samples trained on, once per epoch."
        )
        self.samples_evicted = self._counter(
            "samples_evicted",
            "Samples evicted: `capacity` to make room, untrained; `stale` for a policy version "
            "too old, untrained; `unsaved` to make room, trained on but not in a training state "
            "yet; `undone` of those whose training was lost with a kill.",
            "reason",
            ("capacity", "stale", "unsaved", "undone"),
        )
        self.samples_recorded = self._counter(
            "samples_recorded", "Samples written to disk (`recording.directory`)."
        )
        self.recording_shed = self._counter(
            "recording_shed",
            "Samples not written to disk, by reason.",
            "reason",
            ("queue_full", "busy", "capacity", "policy_forgotten", "write_failed"),
        )

        self.tokens_trained = self._counter("tokens_trained", "Step-0 anchors trained on.")
        self.train_steps = self._counter("train_steps", "Optimizer steps.")
        self.train_steps_skipped = self._counter(
            "train_steps_skipped", "Steps skipped: not finite or no anchor."
        )
        self.train_seconds = self._counter("train_seconds", "Time in training steps.")

        self.verdicts = self._counter(
            "verdicts",
            "Gate results.",
            "verdict",
            ("passed", "failed", "not_measured", "write_failed"),
        )
        self.publishes = self._counter(
            "publishes",
            "Publishes, by how they ended: `committed` everywhere; `stage_failed` or "
            "`not_committed`, so that nothing changed; `policy_only` and `policy_failed` for a "
            "policy without a draft. Those that were undone are roll backs.",
            "outcome",
            ("committed", "stage_failed", "not_committed", "policy_only", "policy_failed"),
        )
        self.roll_backs = self._counter(
            "roll_backs",
            "Releases taken back: `commit_failed` where a server did not take it, `trial` where "
            "live acceptance fell, `by_hand`, and `interrupted` where the trainer ended between "
            "commits.",
            "reason",
            ("commit_failed", "trial", "by_hand", "interrupted"),
        )
        self.trials = self._counter(
            "trials",
            "Trials of releases, by how they ended.",
            "outcome",
            ("promoted", "undecided", "rolled_back"),
        )
        self.heals = self._counter(
            "heals",
            "Servers put on the release that they should serve, by what was wrong: another draft "
            "version, other content under the same number, or a server that reports that it is not "
            "ready.",
            "reason",
            ("other_version", "other_content", "not_ready"),
        )
        self.heals_failed = self._counter(
            "heals_failed",
            "Attempts at that which failed; they are repeated.",
            "reason",
            ("other_version", "other_content", "not_ready"),
        )
        self.stage_seconds = self._histogram(
            "stage_seconds", "Seconds to stage on one server.", SECONDS_BUCKETS
        )
        self.commit_seconds = self._histogram(
            "commit_seconds", "Seconds from commit to answer on one server.", SECONDS_BUCKETS
        )

    def refused(self, field: str) -> None:
        """A sample was refused for ``field`` (one of the fixed names of ``ingest``)."""
        self.samples.labels("refused").inc()
        self.samples_refused.labels(field).inc()

    def received(self, nbytes: Mapping[str, int], waited: Sequence[tuple[float, int]]) -> None:
        """Samples were acknowledged.

        Args:
            nbytes: bytes that they took, by transport.
            waited: pairs of seconds from arrival to acknowledgement and number of samples.
        """
        for transport, size in nbytes.items():
            self.received_bytes.labels(transport).inc(size)
        for seconds, samples in waited:
            for _ in range(samples):
                self.acknowledgement_seconds.observe(seconds)

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
        self.samples_trained.inc(samples)
        self.train_seconds.inc(seconds)
        if skipped:
            self.train_steps_skipped.inc()
            return
        self.train_steps.inc()
        self.tokens_trained.inc(tokens)
        self.loss, self.step_acceptance = loss, tuple(step_acceptance)
        self.loss_total += loss or 0.0

    def published(self, event: str) -> None:
        """Something was done to the fleet: an event of ``PublishLog``, policy_only or
        policy_failed."""
        name, label = _FLEET_EVENTS[event]
        counter: Counter = getattr(self, name)
        counter.labels(label).inc()
        if event == "canary_rolled_back":
            self.roll_backs.labels("trial").inc()

    def healed(self, reason: str, done: bool) -> None:
        """A server was put on the release that it should serve, or an attempt at it failed.

        Args:
            reason: other_version, other_content or not_ready.
            done: whether it is.
        """
        (self.heals if done else self.heals_failed).labels(reason).inc()

    def looked(self, servers: Servers) -> None:
        """Every server was asked what it serves."""
        self.servers = servers

    def fleet_events(self) -> dict[str, int]:
        """How often each event of ``published`` happened, ``healed`` and ``not_healed`` too; those
        that did not are absent."""
        found = {}
        for event, (name, label) in _FLEET_EVENTS.items():
            found[event] = by_label(getattr(self, name)).get(label, 0)
        found["healed"] = sum(by_label(self.heals).values())
        found["not_healed"] = sum(by_label(self.heals_failed).values())
        return {event: count for event, count in found.items() if count}

    def _counter(
        self, name: str, text: str, label: str = "", values: Sequence[str] = ()
    ) -> Counter:
        labels = (label,) if label else ()
        counter = Counter(PREFIX + name, text, labels, unit=unit_of(name), registry=self.registry)
        for value in values:
            counter.labels(value)
        return counter

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return Histogram(
            PREFIX + name, text, unit=unit_of(name), registry=self.registry, buckets=buckets
        )


def by_label(metric: Counter) -> dict[str, int]:
    """Values of a metric with one label, by the label's value; those at 0 are absent."""
    return {
        next(iter(sample.labels.values())): int(sample.value)
        for sample in metric.collect()[0].samples  # type: ignore[index]
        if sample.value and not sample.name.endswith("_created")
    }


def total(metric: Counter) -> float:
    """Value of a metric without labels."""
    return metric.collect()[0].samples[0].value  # type: ignore[index,no-any-return]


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
