"""The connection to samples.db, and the recovery of a damaged file.

WAL without fsync: what was committed survives kill -9, because it is in the page cache. After a
reboot the folder is discarded (``folder``). Of a damaged file, the rows that can still be read are
copied to a new one.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from xxhash import xxh3_64_intdigest

from slipstream.errors import RefusedError, StatusCode
from slipstream.v1 import release_pb2

logger = logging.getLogger(__name__)

FILE = "samples.db"
FORMAT = 1

RESIDENT = "FROM samples WHERE start IS NOT NULL"
UNTRAINED = "times_drawn = 0 AND NOT held_out"
# Cast to numbers, whatever a damaged row has there.
EXTENT = "CAST(start AS INTEGER), CAST(ifnull(size, 0) AS INTEGER)"
_SEALED = "policy_version, tokens, held_out, tie, header, start, size"
_DRAW_ORDER = (
    # One policy version of age weighs as much as one epoch. Ties: a permutation that differs by
    # epoch, so that the order does not depend on earlier draws, and an undone draw is repeated.
    "times_drawn - policy_version, "
    "(tie * ((times_drawn * 2654435760 + 1) & 1073741823)) & 1073741823, number"
)
_TIE_BITS = 30
_READ = f"SELECT number, seal, {_SEALED} {RESIDENT}"
_SET = "INSERT OR REPLACE INTO meta VALUES (?, ?, ?)"

_TABLES = ("meta", "samples", "draws")
_SCHEMA = f"""
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL, seal INTEGER);
CREATE TABLE samples (
    number INTEGER PRIMARY KEY,
    key BLOB NOT NULL UNIQUE,
    policy_version INTEGER, tokens INTEGER, held_out INTEGER, tie INTEGER,
    header BLOB, start INTEGER, size INTEGER,  -- NULL once evicted; the key stays for a while
    seal INTEGER,  -- checksum of the seven columns before it
    times_drawn INTEGER NOT NULL DEFAULT 0, last_draw INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX by_worth ON samples (policy_version, times_drawn DESC, number, held_out, last_draw)
    WHERE start IS NOT NULL;
CREATE INDEX to_draw ON samples ({_DRAW_ORDER}) WHERE start IS NOT NULL AND held_out = 0;
CREATE TABLE draws (draw INTEGER NOT NULL, number INTEGER NOT NULL);
CREATE INDEX draws_by_draw ON draws (draw);
"""

_NO_SPACE = {
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
}
_UNREADABLE = {sqlite3.SQLITE_IOERR_READ, sqlite3.SQLITE_IOERR_SHORT_READ}
_MOST_MISSES = 1 << 18


class DamagedError(Exception):
    """The file cannot be used as it is; ``Database.repair`` saves what can be read."""


@dataclass(frozen=True)
class StoreCounts:
    """The numbers of samples and bytes that the store holds now.

    Attributes:
        pending: samples to train on that were never drawn.
        held_out: samples that never train and feed the gate.
        unsaved: exhausted samples that are kept until a training state contains their last draw.
        resident: all samples.
        nbytes: bytes of the arena in use.
    """

    pending: int
    held_out: int
    unsaved: int
    resident: int
    nbytes: int


class Database:
    """One connection, which locks the file. Not thread-safe: the store holds the lock.

    Args:
        path: created by ``open`` if missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._connection: sqlite3.Connection | None = None
        self._facts: dict[str, str] = {}  # meta's values by name: a repair keeps them all
        self._repairing: str | None = None  # the cause of a repair that did not end

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Translate SQLite's errors; what the body had not committed is rolled back.

        Raises:
            RefusedError: no space (RESOURCE_EXHAUSTED).
            DamagedError: any other error that a sound file does not cause.
        """
        try:
            yield
        except (sqlite3.ProgrammingError, sqlite3.NotSupportedError):
            raise
        except sqlite3.DatabaseError as error:
            if _is_damage(error):
                raise DamagedError(str(error)) from None
            raise self._refused(error) from error
        except OSError as error:
            raise self._refused(error) from error

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Make all of the body's changes or none, as part of an enclosing transaction if any."""
        connection = self._connected
        if connection.in_transaction:
            yield
            return
        facts = dict(self._facts)
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            connection.execute("COMMIT")
        except BaseException:
            self._facts = facts
            with suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            raise

    def execute(self, query: str, *values: Any) -> sqlite3.Cursor:
        """Run one statement."""
        return self._connected.execute(query, values)

    def one(self, query: str, *values: Any) -> Any:
        """Return the first column of the first row."""
        return self._connected.execute(query, values).fetchone()[0]

    def get(self, name: str, default: Any) -> Any:
        """The JSON value under a name; ``default`` where there is none."""
        return json.loads(self._facts[name]) if name in self._facts else default

    def set(self, name: str, value: Any) -> None:
        """Keep a JSON value under a name."""
        text = json.dumps(value)
        self.execute(_SET, name, text, seal_of(name, text))
        self._facts[name] = text

    def insert(self, row: tuple[Any, ...]) -> bool:
        """Add a sample: key, the sealed columns, seal. False where the key is known."""
        marks = ", ".join("?" * len(row))
        query = f"INSERT OR IGNORE INTO samples (key, {_SEALED}, seal) VALUES ({marks})"
        return self.execute(query, *row).rowcount == 1

    def next_batch(
        self, max_epochs: int, max_tokens: int, full: bool = False
    ) -> list[tuple[Any, ...]]:
        """Find samples to draw: newest policy version and fewest epochs first.

        Returns:
            Number, seal and the sealed columns of each: at most ``max_tokens``, or one sample. None
            where ``full``, unless there are more than these.
        """
        rows: list[tuple[Any, ...]] = []
        tokens = 0
        query = f"{_READ} AND held_out = 0 AND times_drawn < ? ORDER BY {_DRAW_ORDER} LIMIT ?"
        for row in self.execute(query, max_epochs, max(max_tokens, 1)):
            # A damaged row, whose seal is checked later, may have anything here.
            tokens += row[3] if isinstance(row[3], int) else 0
            if rows and tokens > max_tokens:
                return rows
            rows.append(row)
        return [] if full else rows

    def held_out(self, newest_versions: int) -> list[tuple[Any, ...]]:
        """Find held-out samples of so many newest versions that have any (-1: all); same rows."""
        return self.execute(
            f"{_READ} AND held_out AND policy_version IN (SELECT DISTINCT policy_version "
            f"{RESIDENT} AND held_out ORDER BY policy_version DESC LIMIT ?) ORDER BY number",
            newest_versions,
        ).fetchall()

    def counts(self, max_epochs: int, nbytes: int) -> StoreCounts:
        """Return how many samples there are; ``nbytes`` is what their arena uses."""
        pending, held_out, unsaved, resident = self.execute(
            f"SELECT total({UNTRAINED}), total(held_out), total(times_drawn >= ?), count(*) "
            f"{RESIDENT}",
            max_epochs,
        ).fetchone()
        return StoreCounts(int(pending), int(held_out), int(unsaved), resident, nbytes)

    def record_draw(self, draw: int, numbers: Iterable[int]) -> None:
        """Record that these samples were drawn together."""
        rows = [(draw, number) for number in numbers]
        with self.transaction():
            self._connected.executemany("INSERT INTO draws VALUES (?, ?)", rows)
            query = "UPDATE samples SET times_drawn = times_drawn + 1, last_draw = ?"
            self._connected.executemany(f"{query} WHERE number = ?", rows)
            self.set("last_draw", draw)

    def undo_draws(self, first: int) -> int:
        """Undo this draw and all later ones. Returns how many of their samples are gone."""
        gone = self.one(
            "SELECT count(DISTINCT number) FROM draws LEFT JOIN samples USING (number) "
            "WHERE start IS NULL AND draw >= ?",
            first,
        )
        with self.transaction():
            # Counted in one query: a subquery per sample would read every draw for every sample.
            self.execute(
                "UPDATE samples SET times_drawn = times_drawn - undone.times FROM "
                "(SELECT number, count(*) AS times FROM draws WHERE draw >= ? GROUP BY number) "
                "AS undone WHERE samples.number = undone.number",
                first,
            )
            self.execute("DELETE FROM draws WHERE draw >= ?", first)
        return int(gone)

    def evict(
        self, max_epochs: int, remembered: int, condition: str, *values: Any
    ) -> list[tuple[int, int, int, int]]:
        """Mark residents as evicted, and forget keys and draws of the oldest beyond ``remembered``.

        Returns:
            For each, its start and size, whether it is exhausted, and whether it is untrained.
        """
        condition = f"start IS NOT NULL AND {condition}"
        gone = self.execute(
            f"SELECT {EXTENT}, times_drawn >= ?, {UNTRAINED} FROM samples WHERE {condition}",
            *(max_epochs, *values),
        ).fetchall()
        update = "UPDATE samples SET start = NULL, size = NULL, header = NULL"
        self.execute(f"{update} WHERE {condition}", *values)
        forgotten = (
            "SELECT number FROM samples WHERE start IS NULL AND number <= "
            "(SELECT max(number) FROM samples) - ?"
        )
        for table in ("draws", "samples"):
            self.execute(f"DELETE FROM {table} WHERE number IN ({forgotten})", remembered)
        return gone

    def tokens_of_a_version(self) -> int:
        """Return the most tokens to train on that one of the newest three policy versions has."""
        totals = (
            # Among the newest samples: what a version has beyond them makes no difference.
            "SELECT sum(tokens) AS total FROM samples WHERE held_out = 0 AND tokens > 0 "
            "AND number > (SELECT max(number) FROM samples) - 4096 "
            "GROUP BY policy_version ORDER BY policy_version DESC LIMIT 3"
        )
        return int(self.one(f"SELECT ifnull(max(total), 0) FROM ({totals})"))

    def open(self) -> None:
        """Open the file, or create it. Idempotent. Raises DatabaseError where it is damaged."""
        if self._connection is not None:
            return
        # SQLite would create it with a mode that lets others read it in a folder they may enter.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        os.close(os.open(self.path, flags, 0o600))
        connection = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        try:
            for pragma in ("locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=OFF"):
                connection.execute(f"PRAGMA {pragma}")
            connection.execute("PRAGMA cache_size=-16000")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if version == 0:
                connection.executescript(f"BEGIN; {_SCHEMA} PRAGMA user_version={FORMAT}; COMMIT;")
            elif version != FORMAT:
                raise sqlite3.DatabaseError(f"format {version}")
            (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise sqlite3.DatabaseError(verdict)
            connection.execute("CREATE INDEX IF NOT EXISTS draws_by_number ON draws (number)")
            for name, text, seal in connection.execute("SELECT name, value, seal FROM meta"):
                if seal == seal_of(name, text):
                    self._facts.setdefault(name, text)
                else:
                    logger.error("%s: the value of %s is damaged and dropped", self.path, name)
        except BaseException:
            connection.close()
            raise
        self._connection = connection

    def repair(self, cause: str) -> None:
        """Copy the rows that can be read to a new file, and continue with that.

        If it raises, the file is as damaged as before, and the repair can be tried again.
        """
        self.close()
        self._repairing = cause
        rebuilt = self.path.with_name(f"{FILE}-rebuilt")
        try:
            self._copy_to(rebuilt)
            # Otherwise the damaged file's log would be applied to the new one.
            _unlink(self.path, but=self.path)
            rebuilt.replace(self.path)
        finally:
            _unlink(rebuilt)
        self.open()
        self._repairing = None

    def _copy_to(self, rebuilt: Path) -> None:
        _unlink(rebuilt)
        with (
            closing(sqlite3.connect(self.path, isolation_level=None)) as source,
            closing(sqlite3.connect(rebuilt, isolation_level=None)) as target,
        ):
            target.executescript(
                f"PRAGMA journal_mode=OFF; PRAGMA synchronous=OFF; BEGIN; {_SCHEMA}"
            )
            for table in _TABLES:
                for row in _readable(source, table):
                    marks = ", ".join("?" * len(row))
                    target.execute(f"INSERT OR IGNORE INTO {table} VALUES ({marks})", row)
            for name, text in self._facts.items():
                target.execute(_SET, (name, text, seal_of(name, text)))
            # New samples reuse the numbers of lost ones, and were not drawn.
            target.execute("DELETE FROM draws WHERE number NOT IN (SELECT number FROM samples)")
            target.execute(f"PRAGMA user_version={FORMAT}")
            target.execute("COMMIT")

    def close(self) -> None:
        """Close the connection, which leaves one file. Idempotent."""
        if self._connection is not None:
            with suppress(sqlite3.Error):
                self._connection.close()
            self._connection = None
        self._repairing = None

    @property
    def _connected(self) -> sqlite3.Connection:
        if self._repairing is not None:
            raise DamagedError(self._repairing)
        assert self._connection is not None
        return self._connection

    def _refused(self, error: Exception) -> RefusedError:
        found, expected = f"{self.path}: {error}", "space for the index of samples"
        advice = "free space there, and check the owner and mode of the folder"
        code, reason = StatusCode.RESOURCE_EXHAUSTED, release_pb2.REFUSAL_REASON_DISK
        return RefusedError("replay.directory", found, expected, advice, code, reason)


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    """Return whether the file is at fault, and not the space for it."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
    return code & 0xFF not in _NO_SPACE or code in _UNREADABLE


def _readable(database: sqlite3.Connection, table: str) -> Iterator[tuple[Any, ...]]:
    """Yield the rows of a damaged table, skipping to the next one that can be read."""
    query = f"SELECT rowid, * FROM {table} NOT INDEXED WHERE rowid > ? ORDER BY rowid"
    after, misses, most = -1, 0, _MOST_MISSES
    try:
        last = database.execute(f"SELECT max(rowid) FROM {table} NOT INDEXED").fetchone()[0] or 0
    except sqlite3.DatabaseError as error:
        # Rows that lack of space hides now can be read later: a copy without them would lose them.
        if not _is_damage(error):
            raise
        last, most = 1 << 62, most // 64
    while after < last and misses < most:
        try:
            for rowid, *row in database.execute(query, (after,)):
                after, misses = max(after, rowid), 0
                yield tuple(row)
            return
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise
            if not misses:
                logger.error("table %s after row %d: %s", table, after, error)
            after, misses = after + 1, misses + 1


def _unlink(path: Path, but: Path | None = None) -> None:
    """Remove a database and what SQLite keeps beside it."""
    for suffix in ("", "-wal", "-shm", "-journal"):
        file = path.with_name(f"{path.name}{suffix}")
        if file != but:
            file.unlink(missing_ok=True)


def key_of(run_id: str, sample_id: str) -> bytes:
    """Return the 16 bytes by which a sample of a run is recognised."""
    # The length distinguishes ("a", "bc") from ("ab", "c").
    text = f"{len(run_id)}:{run_id}{sample_id}"
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def tie_of(seed: int, sample_id: str) -> int:
    """Return the number that orders samples which are equally good to draw (``_DRAW_ORDER``)."""
    digest = hashlib.blake2b(f"{seed}:{sample_id}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> (32 - _TIE_BITS)


def seal_of(*columns: object) -> int:
    """Return a checksum of a row's columns. A sample's block has its own, in the header."""
    # SQLite's integers are signed.
    return xxh3_64_intdigest(repr(columns).encode()) - (1 << 63)


class Repairable(Protocol):
    """An owner of a database under a lock that can continue with what a repair leaves of it."""

    folder: Path
    _lock: threading.RLock
    _db: Database

    def _repair(self, cause: str) -> None: ...


P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound=Repairable)


def repairing(
    method: Callable[Concatenate[S, P], R],
) -> Callable[Concatenate[S, P], R]:
    """Call a method under the lock, and once more after repairing a damaged database.

    Methods change what is in memory only after their last transaction, so they can be repeated.
    """

    @functools.wraps(method)
    def call(store: S, *args: P.args, **options: P.kwargs) -> R:
        with store._lock:
            try:
                with store._db.errors():
                    return method(store, *args, **options)
            except DamagedError as error:
                cause = str(error)
            try:
                with store._db.errors():
                    store._repair(cause)
                    return method(store, *args, **options)
            except DamagedError as error:
                found, expected = f"{store.folder} ({error})", "the index as it was just rebuilt"
                advice, code = "check the disk, or set another folder", StatusCode.DATA_LOSS
                field, reason = "replay.directory", release_pb2.REFUSAL_REASON_DISK
                raise RefusedError(field, found, expected, advice, code, reason) from error

    return call
