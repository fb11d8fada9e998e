"""Which samples were accepted, where they lie, and which draws a saved state may not contain yet.

SQLite in WAL mode, without fsync: what was committed survives kill -9, because it is in the page
cache. A crash of the machine may lose it, and ``placement`` then begins anew.

A sample's row outlives the sample, so that it is recognised when it is sent again; its ``start``
is NULL then. The keys of all rows are in memory too, and the numbers of those that are dropped: an
index of hashes made every sample change a page of its own, and with indexes of what is held and
what is dropped a row that came and went took 8 us, where it takes 4 without. Rows are numbered as
they come and mostly leave in that order, so that one statement drops a whole range of them. Draws
are numbered over the whole life of the ledger. The draws since the training state that a restart
may resume are kept one by one, so that they can be undone.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from slipstream.refusal import RefusedError, StatusCode

FORMAT = 1

_SCHEMA = """
CREATE TABLE facts (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE samples (
    number INTEGER PRIMARY KEY,
    key BLOB NOT NULL,
    start INTEGER,
    size INTEGER NOT NULL,
    layout TEXT,
    times_drawn INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE draws (draw INTEGER NOT NULL, number INTEGER NOT NULL);
CREATE INDEX draws_by_draw ON draws (draw);
CREATE TABLE policies (version INTEGER PRIMARY KEY, lm_head TEXT NOT NULL, embed TEXT NOT NULL);
"""


@dataclass(frozen=True)
class Row:
    """A sample that is held: its number, its extent, how it lies there, how often it was drawn."""

    number: int
    start: int
    size: int
    layout: str
    times_drawn: int


class Ledger:
    """The database. Not thread-safe: its owner has the lock, and makes the transactions.

    Args:
        path: of the database, made if it is missing.
        entries: rows of dropped samples that are kept, the newest.

    Raises:
        RefusedError: it is damaged (DATA_LOSS), or of another format (FAILED_PRECONDITION).
    """

    def __init__(self, path: Path, entries: int) -> None:
        self._path = path
        self._entries = entries
        # SQLite's own mode would let others read it in a folder that they may enter.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            for pragma in ("locking_mode=EXCLUSIVE", "journal_mode=WAL", "synchronous=OFF"):
                self._database.execute(f"PRAGMA {pragma}")
            (version,) = self._database.execute("PRAGMA user_version").fetchone()
            if version == 0:
                self._database.executescript(
                    f"BEGIN; {_SCHEMA} PRAGMA user_version={FORMAT}; COMMIT;"
                )
            elif version != FORMAT:
                raise RefusedError(
                    str(path),
                    f"format {version}",
                    f"format {FORMAT}",
                    "remove its folder: samples that were not trained on yet are lost with it",
                    StatusCode.FAILED_PRECONDITION,
                )
            self._load()
        except sqlite3.DatabaseError as error:
            self._database.close()
            raise RefusedError(
                str(path),
                error,
                "a sound SQLite database",
                "remove its folder: samples that were not trained on yet are lost with it",
                StatusCode.DATA_LOSS,
            ) from error
        except RefusedError:
            self._database.close()
            raise

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """All of the body's changes or none.

        Raises:
            RefusedError: they cannot be written (RESOURCE_EXHAUSTED); nothing was changed.
        """
        try:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._database.execute("COMMIT")
            except BaseException:
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                # A fifth of a second for a quarter of a million rows; a full disk is rare.
                self._load()
                raise
        except sqlite3.OperationalError as error:
            raise RefusedError(
                "replay.directory",
                f"{self._path}: {error}",
                "room for the ledger of samples",
                "free some room there",
                StatusCode.RESOURCE_EXHAUSTED,
            ) from error

    def add(self, rows: Iterable[tuple[bytes, int, int, str]]) -> list[int | None]:
        """Record accepted samples: key, start, size and layout of each.

        Returns:
            The number of each, or None where its key was recorded before.
        """
        numbers: list[int | None] = []
        fresh = []
        for row in rows:
            if row[0] in self._known:
                numbers.append(None)
                continue
            self._known.add(row[0])
            fresh.append((self._next, *row))
            numbers.append(self._next)
            self._next += 1
        self._database.executemany(
            "INSERT INTO samples (number, key, start, size, layout) VALUES (?, ?, ?, ?, ?)", fresh
        )
        return numbers

    def knows(self, key: bytes) -> bool:
        """Whether a sample was recorded, and is not forgotten."""
        return key in self._known

    def drop(self, numbers: Sequence[int]) -> None:
        """Their extents may be used again; their keys are remembered for a while."""
        self._database.executemany(
            "UPDATE samples SET start = NULL, layout = NULL WHERE number BETWEEN ? AND ?",
            ranges(numbers),
        )
        for number in numbers:
            heappush(self._dropped, number)
        beyond = len(self._dropped) - self._entries
        if beyond > 0:
            oldest = ranges([heappop(self._dropped) for _ in range(beyond)])
            query = "SELECT key FROM samples WHERE number BETWEEN ? AND ?"
            for span in oldest:
                self._known.difference_update(
                    [key for (key,) in self._database.execute(query, span)]
                )
            self._database.executemany("DELETE FROM samples WHERE number BETWEEN ? AND ?", oldest)

    def held(self) -> list[Row]:
        """Every sample that was not dropped, in the order of arrival."""
        query = (
            "SELECT number, start, size, layout, times_drawn FROM samples "
            "WHERE start IS NOT NULL ORDER BY number"
        )
        return [Row(*row) for row in self._database.execute(query)]

    def record_draw(self, draw: int, numbers: Iterable[int]) -> None:
        """These samples were drawn, together, with that number."""
        rows = [(draw, number) for number in numbers]
        self._database.executemany("INSERT INTO draws VALUES (?, ?)", rows)
        self._database.executemany(
            "UPDATE samples SET times_drawn = times_drawn + 1 WHERE number = ?",
            [(number,) for _, number in rows],
        )

    def undo_draws(self, first: int, last: int | None = None) -> tuple[int, int]:
        """Take back the draws from ``first`` to ``last``, both included; None for all after it.

        Returns:
            How often a sample was drawn in them, and how many of those samples are gone.
        """
        span = (first, 1 << 62 if last is None else last)
        drawn, gone = self._database.execute(
            "SELECT count(*), count(DISTINCT CASE WHEN start IS NULL THEN draws.number END) "
            "FROM draws LEFT JOIN samples USING (number) WHERE draw BETWEEN ? AND ?",
            span,
        ).fetchone()
        self._database.execute(
            "UPDATE samples SET times_drawn = times_drawn - (SELECT count(*) FROM draws "
            "WHERE draws.number = samples.number AND draw BETWEEN ?1 AND ?2) "
            "WHERE number IN (SELECT number FROM draws WHERE draw BETWEEN ?1 AND ?2)",
            span,
        )
        self._database.execute("DELETE FROM draws WHERE draw BETWEEN ? AND ?", span)
        return drawn, gone

    def last_draws(self) -> dict[int, int]:
        """The last draw of every sample whose draws may still be undone, by its number."""
        return dict(self._database.execute("SELECT number, max(draw) FROM draws GROUP BY number"))

    def forget_draws(self, through: int) -> None:
        """The draws up to this one are never undone any more."""
        self._database.execute("DELETE FROM draws WHERE draw <= ?", (through,))

    def clear(self) -> None:
        """Drop every sample, draw and policy version: another run begins."""
        self.drop([row.number for row in self.held()])
        self._database.execute("DELETE FROM draws")
        self._database.execute("DELETE FROM policies")

    def put_policy(self, version: int, lm_head: str, embed: str) -> None:
        """A policy version is known, of matrices with these names."""
        self._database.execute(
            "INSERT OR REPLACE INTO policies VALUES (?, ?, ?)", (version, lm_head, embed)
        )

    def forget_policies(self, versions: Iterable[int]) -> None:
        """These policy versions are known no more."""
        self._database.executemany(
            "DELETE FROM policies WHERE version = ?", [(version,) for version in versions]
        )

    def policies(self) -> list[tuple[int, str, str]]:
        """Version and matrices of every known policy version, oldest first."""
        return list(self._database.execute("SELECT * FROM policies ORDER BY version"))

    def set_fact(self, name: str, value: object) -> None:
        """Keep a JSON-able value under a name."""
        text = json.dumps(value)
        self._database.execute("INSERT OR REPLACE INTO facts VALUES (?, ?)", (name, text))

    def fact(self, name: str, default: Any) -> Any:
        """The value under a name; ``default`` where none was kept yet."""
        row = self._database.execute("SELECT value FROM facts WHERE name = ?", (name,)).fetchone()
        return default if row is None else json.loads(row[0])

    def rows(self) -> dict[str, int]:
        """Rows of every table that grows."""
        return {
            table: self._database.execute(f"SELECT count(*) FROM {table}").fetchone()[0]
            for table in ("samples", "draws", "policies")
        }

    def close(self) -> None:
        """Leave one file."""
        self._database.close()

    def _load(self) -> None:
        query = "SELECT number, key, start IS NULL FROM samples ORDER BY number"
        self._known: set[bytes] = set()
        # A heap, the oldest first; what is sorted is one.
        self._dropped: list[int] = []
        self._next = 1
        for number, key, is_dropped in self._database.execute(query):
            self._known.add(key)
            if is_dropped:
                self._dropped.append(number)
            self._next = number + 1


def ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """First and last of every run of neighbours among numbers, ascending."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and number == found[-1][1] + 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def keys_of(run_id: str) -> Callable[[str], bytes]:
    """What makes 16 bytes of a sample's id, for the samples of a run."""
    # The length keeps ("a", "bc") and ("ab", "c") apart.
    run = f"{len(run_id)}:{run_id}"

    def key_of(sample_id: str) -> bytes:
        return hashlib.blake2b((run + sample_id).encode(), digest_size=16).digest()

    return key_of
