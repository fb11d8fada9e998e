"""What the ledger remembers in memory is what its database says."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from draft_trainer.ingest.store import Ledger, keys_of, ranges
from slipstream.errors import RefusedError

A, B, C, D = (keys_of("run")(name) for name in "abcd")


def add(ledger: Ledger, *keys: bytes) -> list[int | None]:
    with ledger.transaction():
        return ledger.add([(key, 64 * at, 64, "{}") for at, key in enumerate(keys)])


def drop(ledger: Ledger, *numbers: int) -> None:
    with ledger.transaction():
        ledger.drop(numbers)


def test_keys_are_numbered_once(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger", 10)
    assert add(ledger, A, B, A) == [1, 2, None]
    assert add(ledger, B, C) == [None, 3]
    assert [ledger.knows(key) for key in (A, B, C)] == [True] * 3
    ledger.close()
    again = Ledger(tmp_path / "ledger", 10)
    assert add(again, A, B, C) == [None] * 3
    assert [row.number for row in again.held()] == [1, 2, 3]
    assert add(again, D) == [4]
    again.close()


def test_the_oldest_of_what_was_dropped_is_forgotten_whatever_the_order(tmp_path: Path) -> None:
    keys = [keys_of("run")(str(number)) for number in range(1, 13)]
    ledger = Ledger(tmp_path / "ledger", 3)
    assert add(ledger, *keys) == list(range(1, 13))
    drop(ledger, 9, 2, 3)
    assert all(map(ledger.knows, keys))
    # 2 and 3 are older than 5; 1 and 4 are held.
    drop(ledger, 5, 11)
    assert [n for n, key in enumerate(keys, 1) if not ledger.knows(key)] == [2, 3]
    assert [row.number for row in ledger.held()] == [1, 4, 6, 7, 8, 10, 12]
    ledger.close()
    again = Ledger(tmp_path / "ledger", 3)
    assert [n for n, key in enumerate(keys, 1) if not again.knows(key)] == [2, 3]
    drop(again, 12, 1, 10)
    assert [n for n, key in enumerate(keys, 1) if not again.knows(key)] == [1, 2, 3, 5, 9]
    assert again.rows()["samples"] == 7
    assert add(again, keys[0], keys[3], keys[11]) == [13, None, None]
    again.close()


@pytest.mark.parametrize(
    ("numbers", "expected"),
    [
        ([], []),
        ([4], [(4, 4)]),
        ([3, 1, 2], [(1, 3)]),
        ([9, 2, 3, 7, 8, 5], [(2, 3), (5, 5), (7, 9)]),
    ],
)
def test_ranges(numbers: list[int], expected: list[tuple[int, int]]) -> None:
    assert ranges(numbers) == expected


def test_what_was_rolled_back_is_not_known(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger", 1)
    add(ledger, A)
    drop(ledger, 1)
    with pytest.raises(RefusedError, match="disk is full"), ledger.transaction():
        assert ledger.add([(B, 0, 64, "{}")]) == [2]
        # Of those that are dropped only the newest is remembered, and so A is new again.
        ledger.drop([2])
        assert ledger.knows(B) and not ledger.knows(A)
        assert ledger.add([(A, 64, 64, "{}")]) == [3]
        ledger.drop([3])
        assert ledger.add([(C, 128, 64, "{}")]) == [4]
        ledger.drop([4])
        assert [ledger.knows(key) for key in (A, B, C)] == [False, False, True]
        raise sqlite3.OperationalError("database or disk is full")
    assert [ledger.knows(key) for key in (A, B, C)] == [True, False, False]
    # The sample that was not acknowledged is sent again.
    assert add(ledger, A, B) == [None, 2]
    drop(ledger, 2)
    assert ledger.knows(B) and not ledger.knows(A)
    assert ledger.rows()["samples"] == 1
    ledger.close()


def test_a_ledger_with_indexes_is_read_and_written(tmp_path: Path) -> None:
    # As every ledger had them before keys, and then the numbers of what is dropped, were in memory.
    Ledger(tmp_path / "ledger", 10).close()
    with closing(sqlite3.connect(tmp_path / "ledger")) as database, database:
        database.execute("CREATE UNIQUE INDEX keys ON samples (key)")
        database.execute("CREATE INDEX dropped ON samples (number) WHERE start IS NULL")
        database.execute("CREATE INDEX held ON samples (number) WHERE start IS NOT NULL")
        database.execute("INSERT INTO samples (key, start, size) VALUES (?, NULL, 64)", (A,))
    ledger = Ledger(tmp_path / "ledger", 1)
    assert add(ledger, A, B) == [None, 2]
    drop(ledger, 2)
    assert not ledger.knows(A) and add(ledger, A) == [3]
    ledger.close()
