"""state.db: everything a trainer must remember over a kill, in one SQLite file beside its releases.

Pointer, intent, pins, canary trial, gate results, events and history. Changes that belong together
are one transaction, on disk (synchronous=FULL) before any thread sees them: there is no intent to
commit without its event.

A writer keeps the file's exclusive SQLite lock from open to close, and that lock is also the lock
of the registry's folder. The kernel drops it with the process. A reader shares the file with other
readers and is refused while a trainer runs.
"""

from __future__ import annotations

import json
import logging
import os
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from slipstream.errors import RefusedError, StatusCode, clean
from slipstream.v1 import console_pb2, draft_trainer_pb2, release_pb2

logger = logging.getLogger(__name__)

STATE_FILE = "state.db"
SCHEMA_VERSION = 1
FIRST_DESIGN_FILES = (
    *("promoted.json", "pins.json", "verdicts.jsonl", "publishes.jsonl", "events.jsonl"),
)
LOCK_SECONDS = 0.5
"""How long an open waits for a reader, which holds the lock for one query."""

GATE_RESULTS_KEPT = 500
EVENTS_KEPT = 10_000
REASON_CHARACTERS = 600
RECENT_SNAPSHOTS = 120
THINNED_SNAPSHOTS = 400

_SCHEMA = (
    """CREATE TABLE promotion (
        id INTEGER PRIMARY KEY CHECK (id = 0),
        promoted INTEGER NOT NULL, pinned INTEGER NOT NULL, served TEXT NOT NULL,
        intent INTEGER, canaries TEXT NOT NULL, served_at REAL) STRICT""",
    """CREATE TABLE trial (
        id INTEGER PRIMARY KEY CHECK (id = 0),
        draft_version INTEGER NOT NULL, incumbent INTEGER NOT NULL,
        servers TEXT NOT NULL, others TEXT NOT NULL, began_at REAL NOT NULL,
        history TEXT NOT NULL) STRICT""",
    "CREATE TABLE pins (draft_version INTEGER PRIMARY KEY) STRICT",
    "CREATE TABLE gate_results (number INTEGER PRIMARY KEY, message BLOB NOT NULL) STRICT",
    """CREATE TABLE events (
        number INTEGER PRIMARY KEY AUTOINCREMENT, message BLOB NOT NULL) STRICT""",
    """CREATE TABLE history (
        number INTEGER PRIMARY KEY AUTOINCREMENT, time REAL NOT NULL, message BLOB NOT NULL)
        STRICT""",
    f"PRAGMA user_version = {SCHEMA_VERSION}",
)

M = TypeVar("M", bound=Message)


class State:
    """An open state.db. Thread-safe.

    Args:
        root: the registry's folder.
        write: take the lock and keep it until ``close``, and make the file if there is none. A
            reader of a folder without the file sees an empty one.

    Raises:
        RefusedError: FAILED_PRECONDITION, another process holds the lock, the folder cannot be
            written, or it is of the first design; DATA_LOSS, the file is damaged.
    """

    def __init__(self, root: Path, write: bool = True) -> None:
        self.path = root / STATE_FILE
        self.lock = threading.RLock()
        self._after_commit: list[Callable[[], None]] | None = None
        if self.path.is_symlink():
            code = StatusCode.FAILED_PRECONDITION
            raise RefusedError(str(self.path), "a link", "a plain file", "put the file there", code)
        there = self.path.exists() and self.path.stat().st_size > 0
        if not there:
            self._refuse_first_design()
        name = f"{self.path.absolute().as_uri()}?mode={'rwc' if write else 'rw'}"
        with self._refusing():
            self._db = sqlite3.connect(
                name if write or there else ":memory:",
                uri=True,
                timeout=LOCK_SECONDS,
                isolation_level=None,
                check_same_thread=False,
            )
        try:
            self._open(write)
            self.events = Events(self)
            self.gate_results = GateResults(self)
            self.history = History(self)
        except BaseException:
            self._db.close()
            raise

    def _open(self, write: bool) -> None:
        with self._refusing():
            if write:
                self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
                self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute("BEGIN EXCLUSIVE" if write else "BEGIN")
            (version,) = self._db.execute("PRAGMA user_version").fetchone()
            (tables,) = self._db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
            if not version and not tables:
                for statement in _SCHEMA:
                    self._db.execute(statement)
            elif version != SCHEMA_VERSION:
                raise RefusedError(
                    str(self.path),
                    f"schema version {version}",
                    f"schema version {SCHEMA_VERSION}, which this release of slipstream writes",
                    "run the release of slipstream that wrote it, or begin another draft.registry",
                    StatusCode.FAILED_PRECONDITION,
                )
            damage = [text for (text,) in self._db.execute("PRAGMA quick_check")]
            if damage != ["ok"]:
                raise self._damaged("; ".join(damage[:3]))
            self._db.execute("COMMIT")

    def close(self) -> None:
        """Let go of the lock. Later calls are refused."""
        with self.lock:
            self._db.close()

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All changes of a ``with`` block, on disk at its end or not made at all.

        Inside another one by the same thread it is part of that one.

        Raises:
            RefusedError: the disk is full or cannot be written, or the file is damaged.
        """
        with self.lock, self._refusing():
            if self._after_commit is not None:
                yield
                return
            callbacks: list[Callable[[], None]] = []
            self._after_commit = callbacks
            try:
                self._db.execute("BEGIN IMMEDIATE")
                yield
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
            finally:
                self._after_commit = None
            for callback in callbacks:
                callback()

    def after_commit(self, callback: Callable[[], None]) -> None:
        """Have ``callback`` called once the transaction under way is on disk."""
        assert self._after_commit is not None
        self._after_commit.append(callback)

    def query(self, statement: str, *values: object) -> list[tuple]:  # type: ignore[type-arg]
        """The rows of one statement. Raises RefusedError as ``transaction`` does."""
        with self.lock, self._refusing():
            return self._db.execute(statement, values).fetchall()

    def parsed(self, kind: type[M], data: bytes) -> M:
        """A column that holds a protobuf message. Raises RefusedError: it is none."""
        try:
            return kind.FromString(data)
        except DecodeError as error:
            raise self._damaged(f"a row that is no {kind.__name__} ({error})") from error

    def listed(self, text: str) -> list[Any]:
        """A column that holds a JSON list. Raises RefusedError: it is none."""
        try:
            return list(json.loads(text))
        except (ValueError, TypeError) as error:
            raise self._damaged(f"a list that is no JSON ({error})") from error

    def names(self, text: str) -> tuple[str, ...]:
        """A column that holds a JSON list of strings."""
        return tuple(map(str, self.listed(text)))

    def pins(self) -> frozenset[int]:
        """Releases that retention never removes."""
        return frozenset(version for (version,) in self.query("SELECT draft_version FROM pins"))

    def set_pins(self, pins: frozenset[int]) -> None:
        """Replace them. Raises RefusedError: they cannot be written."""
        with self.transaction():
            self._db.execute("DELETE FROM pins")
            self._db.executemany("INSERT INTO pins VALUES (?)", [(version,) for version in pins])

    @property
    def trial(self) -> Trial | None:
        """The canary trial under way."""
        columns = "draft_version, incumbent, servers, others, began_at, history"
        for version, incumbent, servers, others, began_at, history in self.query(
            f"SELECT {columns} FROM trial"
        ):
            lists = self.names(servers), self.names(others)
            past = tuple(tuple(map(int, one)) for one in self.listed(history))
            return Trial(version, incumbent, *lists, began_at, past)  # type: ignore[arg-type]
        return None

    def set_trial(self, trial: Trial | None) -> None:
        """Keep a trial, or that there is none. Raises RefusedError: it cannot be written."""
        with self.transaction():
            self._db.execute("DELETE FROM trial")
            if trial is not None:
                lists = json.dumps(trial.servers), json.dumps(trial.others)
                values = (trial.version, trial.incumbent, *lists, trial.began_at)
                self.query(
                    "INSERT INTO trial VALUES (0, ?, ?, ?, ?, ?, ?)",
                    *(*values, json.dumps(trial.history)),
                )

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._refusal(error) from error

    def _refusal(self, error: sqlite3.Error) -> RefusedError:
        name = getattr(error, "sqlite_errorname", "")
        if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            return RefusedError(
                "registry",
                f"{self.path.parent}, held by {_holder(self.path)}",
                "a registry that no other process writes",
                "ask the trainer that runs on it (--address), or stop it first",
                StatusCode.FAILED_PRECONDITION,
            )
        disk = ("SQLITE_IOERR", "SQLITE_FULL", "SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PERM")
        if name.startswith(disk):
            reason = _disk_error(self.path.parent) or str(error)
            return RefusedError(
                "draft.registry",
                f"{self.path} ({reason})",
                "a folder that can be written",
                "check its owner, its mode and the free space",
                StatusCode.FAILED_PRECONDITION,
            )
        return self._damaged(str(error))

    def _damaged(self, found: str) -> RefusedError:
        return RefusedError(
            str(self.path),
            f"a damaged file: {found}",
            "the database that the trainer wrote",
            "restore it from a copy, or move it away and name the release to serve: "
            f"draft-trainer releases promote N --registry {self.path.parent}",
            StatusCode.DATA_LOSS,
        )

    def _refuse_first_design(self) -> None:
        old = [name for name in FIRST_DESIGN_FILES if (self.path.parent / name).exists()]
        if old:
            raise RefusedError(
                "registry",
                f"{', '.join(old)} of the first design in {self.path.parent}",
                f"{STATE_FILE}, or a folder with releases alone",
                f"note what promoted.json names, move {', '.join(old)} away, then: "
                f"draft-trainer releases promote N --registry {self.path.parent}",
                StatusCode.FAILED_PRECONDITION,
            )


@dataclass(frozen=True)
class Trial:
    """One release on trial against the one before it.

    Args:
        version: on trial.
        incumbent: what it is compared with.
        servers: that serve it.
        others: that serve the incumbent meanwhile; empty when there are none.
        began_at: Unix time.
        history: the incumbent's verification steps on ``servers`` before it, where ``others`` is
            empty: drafts, accepted tokens and the sum of their squares, by report.
    """

    version: int
    incumbent: int
    servers: tuple[str, ...]
    others: tuple[str, ...]
    began_at: float
    history: tuple[tuple[int, int, int], ...] = ()

    @property
    def shared(self) -> bool:
        """Both drafts are live, each on its own servers."""
        return bool(self.others)


class Events:
    """What happened, in order. The newest ``EVENTS_KEPT`` are kept. Thread-safe.

    Numbers go on over restarts: a client that followed one trainer asks the next one for what came
    after the last number, and misses and repeats nothing.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        self._changed = threading.Condition()
        ((newest,),) = state.query("SELECT coalesce(max(number), 0) FROM events")
        self._newest: int = newest

    def note(
        self,
        kind: console_pb2.EventKind,
        *,
        draft_version: int | None = None,
        policy_version: int | None = None,
        server: str = "",
        reason: str = "",
    ) -> None:
        """Keep one more event, in the transaction under way if there is one.

        A disk that is full must not keep the fleet from being rolled back: outside a transaction an
        event that cannot be written goes to the log.
        """
        event = console_pb2.Event(
            time=time.time(),
            kind=kind,
            draft_version=draft_version,
            policy_version=policy_version,
            server=server,
            reason=clean(reason, REASON_CHARACTERS),
        )
        with self._state.lock:
            alone = self._state._after_commit is None
            try:
                with self._state.transaction():
                    self._add(event)
            except RefusedError as error:
                if not alone:
                    raise
                logger.error("%s; this event was not written: %s", error, event)

    def _add(self, event: console_pb2.Event) -> None:
        ((number,),) = self._state.query(
            "INSERT INTO events (message) VALUES (?) RETURNING number", event.SerializeToString()
        )
        self._state.query("DELETE FROM events WHERE number <= ?", number - EVENTS_KEPT)
        self._state.after_commit(lambda: self._notify(number))

    def _notify(self, number: int) -> None:
        with self._changed:
            self._newest = number
            self._changed.notify_all()

    def published(self, name: str, version: int, reason: str) -> None:
        """Something was done to the fleet."""
        kind = getattr(console_pb2, f"EVENT_KIND_{name.upper()}")
        self.note(kind, draft_version=version, reason=reason)

    def since(self, number: int, newest: int = 0) -> list[console_pb2.Event]:
        """Events with a higher number, at most the newest so many (0: all), oldest first.

        A number that no event has yet is of another log: then all of them.
        """
        with self._changed:
            first = number if number <= self._newest else 0
        rows = self._state.query(
            "SELECT number, message FROM events WHERE number > ? ORDER BY number DESC LIMIT ?",
            first,
            newest or -1,
        )
        events = []
        for event_number, data in reversed(rows):
            event = self._state.parsed(console_pb2.Event, data)
            event.number = event_number
            events.append(event)
        return events

    def wait_beyond(self, number: int, timeout: float) -> bool:
        """Block until there is an event with a higher number; False after ``timeout`` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self._newest > number, timeout)


_GATE_EVENTS: dict[str, console_pb2.EventKind] = {
    "passed": console_pb2.EVENT_KIND_GATE_PASSED,
    "failed": console_pb2.EVENT_KIND_GATE_FAILED,
    "not_measured": console_pb2.EVENT_KIND_GATE_NOT_MEASURED,
    "write_failed": console_pb2.EVENT_KIND_RELEASE_NOT_WRITTEN,
}


class GateResults:
    """The gate's newest ``GATE_RESULTS_KEPT`` results, of dropped candidates too. Thread-safe."""

    def __init__(self, state: State) -> None:
        self._state = state

    def add(self, result: release_pb2.Verdict) -> None:
        """Keep one more, with its event. Raises RefusedError: it cannot be written."""
        known = result.HasField
        with self._state.transaction():
            ((number,),) = self._state.query(
                "INSERT INTO gate_results (message) VALUES (?) RETURNING number",
                result.SerializeToString(),
            )
            self._state.query(
                "DELETE FROM gate_results WHERE number <= ?", number - GATE_RESULTS_KEPT
            )
            self._state.events.note(
                _GATE_EVENTS[result.outcome],
                draft_version=result.draft_version if known("draft_version") else None,
                policy_version=(
                    result.trained_against_policy_version
                    if known("trained_against_policy_version")
                    else None
                ),
                reason=result.reason,
            )

    def newest(self, count: int) -> list[release_pb2.Verdict]:
        """The newest so many (0: all), oldest first."""
        rows = self._state.query(
            "SELECT message FROM gate_results ORDER BY number DESC LIMIT ?", count or -1
        )
        return [self._state.parsed(release_pb2.Verdict, data) for (data,) in reversed(rows)]


class History:
    """Snapshots of the trainer's status over its whole life, restarts included. Thread-safe.

    The newest ``RECENT_SNAPSHOTS`` are all kept. Of the older ones every 2^n-th is, n as small as
    leaves at most ``THINNED_SNAPSHOTS``: counters only grow, so what is left out changes no
    difference between two that are kept.
    """

    def __init__(self, state: State) -> None:
        self._state = state

    def add(self, at: float, status: draft_trainer_pb2.TrainerStatus) -> None:
        """Keep one more, taken at Unix time ``at``. Raises RefusedError: it cannot be written."""
        with self._state.transaction():
            ((number,),) = self._state.query(
                "INSERT INTO history (time, message) VALUES (?, ?) RETURNING number",
                at,
                status.SerializeToString(),
            )
            stride = 1
            while number // stride > THINNED_SNAPSHOTS:
                stride *= 2
            self._state.query(
                "DELETE FROM history WHERE number <= ? AND number % ?",
                number - RECENT_SNAPSHOTS,
                stride,
            )

    def snapshots(self) -> list[tuple[float, draft_trainer_pb2.TrainerStatus]]:
        """All that are kept, oldest first, each with the Unix time at which it was taken."""
        rows = self._state.query("SELECT time, message FROM history ORDER BY number")
        kind = draft_trainer_pb2.TrainerStatus
        return [(at, self._state.parsed(kind, data)) for at, data in rows]


def _holder(path: Path) -> str:
    """The process that holds a lock on a file, as the kernel tells it (Linux)."""
    try:
        inode, locks = path.stat().st_ino, Path("/proc/locks").read_text()
    except OSError:
        return "another process"
    # 2: POSIX  ADVISORY  WRITE 26449 fe:00:2163106 1073741824 1073742335
    rows = [line.split() for line in locks.splitlines() if "POSIX" in line]
    pids = [row[4] for row in rows if row[5].endswith(f":{inode}") and int(row[4]) > 0]
    return f"process {pids[0]}" if pids else "another process"


def _disk_error(folder: Path) -> str:
    """Why nothing can be written there; empty where it can. SQLite says only that it failed."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 16))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or str(error)
    return ""
