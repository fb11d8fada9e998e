"""Which samples were accepted, where they lie, and which draws a saved state may not contain yet.

SQLite in WAL mode, without fsync: what was committed survives kill -9, because it is in the page
cache. A crash of the machine may lose it, and ``placement`` then begins anew.

A sample's row outlives the sample, so that it is recognised when it is sent again; its ``start``
is NULL then. The keys of all rows are in memory too: an index of hashes made every sample change a
page of its own, and with a quarter of a million of them that was half of what a row cost. Draws are
numbered over the whole life of the ledger. The draws since the training state that a restart may
resume are kept one by one, so that they can be undone.
"""

from __future__ import annotations

import hashlib
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
CREATE INDEX dropped ON samples (number) WHERE start IS NULL;
CREATE INDEX held ON samples (number) WHERE start IS NOT NULL;
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
        # By the transaction that is open, in order: keys, and whether they were known before.
        self._changes: list[tuple[bytes, bool]] = []
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
            query = "SELECT count(*) FROM samples WHERE start IS NULL"
            (self._dropped,) = self._database.execute(query).fetchone()
            self._known = {key for (key,) in self._database.execute("SELECT key FROM samples")}
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
        dropped = self._dropped
        self._changes = []
        try:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._database.execute("COMMIT")
            except BaseException:
                self._dropped = dropped
                for key, was_known in reversed(self._changes):
                    (self._known.add if was_known else self._known.discard)(key)
                if self._database.in_transaction:
                    self._database.execute("ROLLBACK")
                raise
        except sqlite3.OperationalError as error:
            raise RefusedError(
                "replay.directory",
                f"{self._path}: {error}",
                "room for the ledger of samples",
                "free some room there",
                StatusCode.RESOURCE_EXHAUSTED,
            ) from error

    def add(self, key: bytes, start: int, size: int, layout: str) -> int | None:
        """Record an accepted sample; its number, or None where its key was recorded before."""
        if key in self._known:
            return None
        cursor = self._database.execute(
            "INSERT INTO samples (key, start, size, layout) VALUES (?, ?, ?, ?)",
            (key, start, size, layout),
        )
        self._known.add(key)
        self._changes.append((key, False))
        return cursor.lastrowid

    def knows(self, key: bytes) -> bool:
        """Whether a sample was recorded, and is not forgotten."""
        return key in self._known

    def drop(self, numbers: Sequence[int]) -> None:
        """Their extents may be used again; their keys are remembered for a while."""
        self._database.executemany(
            "UPDATE samples SET start = NULL, layout = NULL WHERE number = ?",
            [(number,) for number in numbers],
        )
        self._dropped += len(numbers)
        beyond = self._dropped - self._entries
        if beyond > 0:
            oldest = "FROM samples WHERE start IS NULL ORDER BY number LIMIT ?"
            rows = self._database.execute(f"SELECT number, key {oldest}", (beyond,)).fetchall()
            self._database.executemany(
                "DELETE FROM samples WHERE number = ?", [(number,) for number, _ in rows]
            )
            keys = [key for _, key in rows]
            self._known.difference_update(keys)
            self._changes += [(key, True) for key in keys]
            self._dropped -= beyond

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


def key_of(run_id: str, sample_id: str) -> bytes:
    """16 bytes for a sample of a run."""
    # The length keeps ("a", "bc") and ("ab", "c") apart.
    text = f"{len(run_id)}:{run_id}{sample_id}"
    return hashlib.blake2b(text.encode(), digest_size=16).digest()
