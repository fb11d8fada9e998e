"""state.db: everything that must survive a kill of the trainer, in one SQLite file.

Pointer, intent, trial, gate results, events and history. Changes that belong together
are one transaction, on disk (synchronous=FULL) before any thread sees them: there is no intent to
commit without its event.

A writer holds the lock of ``state.lock`` from open to close, which is also the lock of the
registry's folder; the kernel drops it with the process. Readers share the file with the writer:
each waits only for the other's transactions.
"""

from __future__ import annotations

import logging
import os
import secrets
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar, cast

from google.protobuf.message import DecodeError, Message

from draft_trainer.files import lock_file, unlock_file
from slipstream.errors import RefusedError, StatusCode, clean
from slipstream.v1 import console_pb2, draft_trainer_pb2, release_pb2

logger = logging.getLogger(__name__)

STATE_FILE, LOCK_FILE = "state.db", "state.lock"
SCHEMA_VERSION = 3
LOCK_SECONDS = 5.0
"""The time that a transaction waits for another process's."""

GATE_RESULTS_KEPT = 500
EVENTS_KEPT = 10_000
REASON_CHARACTERS = 600
RECENT_SNAPSHOTS = 120
THINNED_SNAPSHOTS = 400

KINDS = (
    *("trainer_started", "trainer_stopped", "training_failed"),
    *("run_opened", "run_resumed", "policy_announced"),
    *("gate_passed", "gate_failed", "gate_not_measured", "release_not_written"),
    *("committed", "stage_failed", "not_committed", "rolled_back", "interrupted"),
    *("trial_passed", "trial_undecided", "trial_rolled_back", "rolled_back_by_hand"),
    *("healed", "server_joined", "server_left", "server_unreachable", "server_back"),
    *("server_not_ready", "server_ready", "speculation_off", "speculation_on"),
)
"""The kinds of events; docs/operations.md says what each means."""

_LOG = "number INTEGER PRIMARY KEY AUTOINCREMENT, message BLOB NOT NULL"
_SCHEMA = (
    """CREATE TABLE pointer (
        id INTEGER PRIMARY KEY CHECK (id = 0), document TEXT NOT NULL, checksum TEXT NOT NULL)""",
    f"CREATE TABLE gate_results ({_LOG})",
    f"CREATE TABLE events ({_LOG})",
    f"CREATE TABLE history ({_LOG})",
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
        RefusedError: FAILED_PRECONDITION, another process holds the lock, or the folder cannot be
            written; DATA_LOSS, the file is damaged.
    """

    def __init__(self, root: Path, write: bool = True) -> None:
        self.path = root / STATE_FILE
        self.owner = ""
        self.lock = threading.RLock()
        self._lock_file: int | None = None
        self._after_commit: list[Callable[[], None]] | None = None
        if self.path.is_symlink():
            code = StatusCode.FAILED_PRECONDITION
            raise RefusedError(str(self.path), "a link", "a plain file", "put the file there", code)
        there = self.path.exists() and self.path.stat().st_size > 0
        if write:
            self._lock_file = self._take_lock()
        # A reader with write access rolls back what a killed writer left half done.
        mode = "rwc" if write else "rw" if os.access(self.path, os.W_OK) else "ro"
        try:
            with self._translated_errors():
                self._db = sqlite3.connect(
                    f"{self.path.absolute().as_uri()}?mode={mode}"
                    if write or there
                    else ":memory:",
                    uri=True,
                    timeout=LOCK_SECONDS,
                    isolation_level=None,
                    check_same_thread=False,
                )
                try:
                    self._open(write or not there)
                except BaseException:
                    self._db.close()
                    raise
            self.events = Events(self)
            self.gate_results = GateResults(self)
            self.history = History(self)
        except BaseException:
            self._unlock()
            raise

    def _take_lock(self) -> int:
        path = self.path.parent / LOCK_FILE
        try:
            descriptor = lock_file(path)
        except BlockingIOError as error:
            pid = path.read_text().strip()
            raise RefusedError(
                "registry",
                f"{path.parent}, held by process {pid}",
                "a registry that no other process writes",
                "use the trainer that runs on it (--address), or stop it first",
                StatusCode.FAILED_PRECONDITION,
            ) from error
        except OSError as error:
            raise self._not_writable(error.strerror or str(error)) from error
        with suppress(OSError):
            os.truncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        return descriptor

    def _open(self, make: bool) -> None:
        self._db.execute("PRAGMA synchronous = FULL" if make else "PRAGMA query_only = ON")
        if make:
            # The journal file stays, rather than being created and removed by every transaction.
            self._db.execute("PRAGMA journal_mode = PERSIST")
        self._db.execute("BEGIN IMMEDIATE" if make else "BEGIN")
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        (tables,) = self._db.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        if make and not version and not tables:
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
        (number,) = self._db.execute("PRAGMA application_id").fetchone()
        if make and not number:
            # application_id is a field of SQLite's file header for the application's use.
            number = secrets.randbelow(2**31 - 1) + 1
            self._db.execute(f"PRAGMA application_id = {number}")
        # The lock file's inode tells the trainer of a copied folder from this one.
        inode = 0 if self._lock_file is None else os.fstat(self._lock_file).st_ino
        self.owner = f"{number:08x}{inode:x}"
        damage = [text for (text,) in self._db.execute("PRAGMA quick_check")]
        if damage != ["ok"]:
            raise self.damaged("; ".join(damage[:3]))
        self._db.execute("COMMIT")

    def close(self) -> None:
        """Close the database and release the lock. Later calls are refused."""
        with self.lock:
            self._db.close()
            self._unlock()

    def _unlock(self) -> None:
        if self._lock_file is not None:
            unlock_file(self._lock_file)
            self._lock_file = None

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Make all changes of a ``with`` block, on disk at its end, or none.

        A transaction inside another one of the same thread is part of that one.

        Raises:
            RefusedError: the disk is full or cannot be written, or the file is damaged.
        """
        with self.lock, self._translated_errors():
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
        """Call ``callback`` once the transaction under way is on disk."""
        assert self._after_commit is not None
        self._after_commit.append(callback)

    def query(self, statement: str, *values: object) -> list[tuple]:  # type: ignore[type-arg]
        """Return the rows of one statement. Raises RefusedError as ``transaction`` does."""
        with self.lock, self._translated_errors():
            return self._db.execute(statement, values).fetchall()

    def append(self, table: str, message: Message) -> int:
        """Add a message to a log, and return its number. Raises RefusedError as ``transaction``."""
        statement, value = f"INSERT INTO {table} (message) VALUES (?)", message.SerializeToString()
        with self.lock, self._translated_errors():
            # Without RETURNING, which SQLite 3.34 (RHEL 9) lacks.
            return cast(int, self._db.execute(statement, (value,)).lastrowid)

    def messages(
        self, table: str, kind: type[M], after: int = 0, newest: int = 0
    ) -> list[tuple[int, M]]:
        """Return messages of a log with their numbers, oldest first.

        Args:
            table: the log.
            kind: the type of its messages.
            after: only those with a higher number.
            newest: at most the newest so many; 0: all.

        Raises:
            RefusedError: DATA_LOSS, a row is not such a message.
        """
        rows = self.query(
            f"SELECT number, message FROM {table} WHERE number > ? ORDER BY number DESC LIMIT ?",
            after,
            newest or -1,
        )
        try:
            return [(number, kind.FromString(data)) for number, data in reversed(rows)]
        except DecodeError as error:
            raise self.damaged(f"a row that is no {kind.__name__} ({error})") from error

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise self._refusal(error) from error

    def _refusal(self, error: sqlite3.Error) -> RefusedError:
        name = getattr(error, "sqlite_errorname", "")
        if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            return self._not_writable(f"locked for more than {LOCK_SECONDS:.0f} s")
        disk = ("SQLITE_IOERR", "SQLITE_FULL", "SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PERM")
        if name.startswith(disk):
            return self._not_writable(_disk_error(self.path.parent) or str(error))
        return self.damaged(str(error))

    def _not_writable(self, reason: str) -> RefusedError:
        return RefusedError(
            "draft.registry",
            f"{self.path} ({reason})",
            "a folder that can be written",
            "check its owner, its mode and the free space",
            StatusCode.FAILED_PRECONDITION,
        )

    def damaged(self, found: str) -> RefusedError:
        """Return the error to raise where the file is not what was written."""
        return RefusedError(
            str(self.path),
            f"a damaged file: {found}",
            "the database that the trainer wrote",
            "restore it from a copy, or move it away and name the release to serve: "
            f"draft-trainer releases promote N --registry {self.path.parent}",
            StatusCode.DATA_LOSS,
        )


def described(event: console_pb2.Event) -> str:
    """Return what an event is about, in one line for people."""
    parts = []
    if event.HasField("draft_version"):
        parts.append(f"draft {event.draft_version}")
    if event.HasField("policy_version"):
        parts.append(f"policy {event.policy_version}")
    if event.server:
        parts.append(clean(event.server))
    text, reason = ", ".join(parts), clean(event.reason)
    return f"{text}: {reason}" if text and reason else text or reason


class Events:
    """The log of events in order, of which the newest ``EVENTS_KEPT`` are kept. Thread-safe.

    Numbers go on over restarts: a client that followed one trainer asks the next one for what came
    after the last number, and misses and repeats nothing.

    Attributes:
        newest: number of the newest event; 0 before the first.
    """

    def __init__(self, state: State) -> None:
        self._state = state
        ((newest,),) = state.query("SELECT coalesce(max(number), 0) FROM events")
        self.newest: int = newest

    def note(
        self,
        kind: str,
        *,
        draft_version: int | None = None,
        policy_version: int | None = None,
        server: str = "",
        reason: str = "",
    ) -> None:
        """Keep one more event of ``KINDS``, in the transaction under way if there is one.

        A full disk must not keep the fleet from being rolled back: outside a transaction an event
        that cannot be written is logged instead.
        """
        assert kind in KINDS, kind
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
                    number = self._state.append("events", event)
                    self._state.query("DELETE FROM events WHERE number <= ?", number - EVENTS_KEPT)
                    self._state.after_commit(lambda: self._notify(number, event))
            except RefusedError as error:
                if not alone:
                    raise
                logger.error("%s; event not written: %s", error, event)

    def _notify(self, number: int, event: console_pb2.Event) -> None:
        logger.info("event %d: %s: %s", number, event.kind, described(event))
        self.newest = number

    def since(self, number: int, newest: int = 0) -> list[console_pb2.Event]:
        """Return events with a higher number, at most the newest so many (0: all), oldest first.

        A number that no event has yet comes from another log: then all are returned.
        """
        first = number if number <= self.newest else 0
        found = self._state.messages("events", console_pb2.Event, first, newest)
        for event_number, event in found:
            event.number = event_number
        return [event for _, event in found]


class GateResults:
    """The gate's newest ``GATE_RESULTS_KEPT`` results, of dropped candidates too. Thread-safe."""

    def __init__(self, state: State) -> None:
        self._state = state

    def add(self, result: release_pb2.Verdict) -> None:
        """Keep one more, with its event. Raises RefusedError: it cannot be written."""
        against = result.trained_against_policy_version
        unwritten = result.outcome == "write_failed"
        with self._state.transaction():
            number = self._state.append("gate_results", result)
            oldest = number - GATE_RESULTS_KEPT
            self._state.query("DELETE FROM gate_results WHERE number <= ?", oldest)
            self._state.events.note(
                "release_not_written" if unwritten else f"gate_{result.outcome}",
                draft_version=result.draft_version if result.HasField("draft_version") else None,
                policy_version=(
                    against if result.HasField("trained_against_policy_version") else None
                ),
                reason=result.reason,
            )

    def newest(self, count: int) -> list[release_pb2.Verdict]:
        """Return the newest ``count`` results (0: all), oldest first."""
        found = self._state.messages("gate_results", release_pb2.Verdict, newest=count)
        return [result for _, result in found]


class History:
    """Snapshots of the trainer's status over its whole life, restarts included. Thread-safe.

    The newest ``RECENT_SNAPSHOTS`` are all kept. Of the older ones every 2^n-th is kept, with the
    smallest n that leaves at most ``THINNED_SNAPSHOTS``: counters only grow, so what is left out
    changes no difference between two that are kept.
    """

    def __init__(self, state: State) -> None:
        self._state = state

    def add(self, status: draft_trainer_pb2.TrainerStatus) -> None:
        """Keep one more. Raises RefusedError: it cannot be written."""
        with self._state.transaction():
            number, stride = self._state.append("history", status), 1
            while number // stride > THINNED_SNAPSHOTS:
                stride *= 2
            self._state.query(
                "DELETE FROM history WHERE number <= ? AND number % ?",
                number - RECENT_SNAPSHOTS,
                stride,
            )

    def snapshots(self) -> list[draft_trainer_pb2.TrainerStatus]:
        """Return all that are kept, oldest first."""
        found = self._state.messages("history", draft_trainer_pb2.TrainerStatus)
        return [status for _, status in found]


def _disk_error(folder: Path) -> str:
    """Return why nothing can be written there, or "": SQLite says only that it failed."""
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(1 << 16))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or str(error)
    return ""
