"""What happened, in order: a bounded log in the registry that outlives the process.

Its numbers go on over restarts, so that somebody who followed a trainer asks the next
one for what came after the last number, and misses and repeats nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from google.protobuf import json_format

from slipstream.v1 import console_pb2 as pb
from slipstream.v1 import release_pb2

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
