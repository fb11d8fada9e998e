"""state.db: on disk before it is seen, locked while it is open, refused by name when damaged."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from draft_trainer import state as state_module
from draft_trainer.ingest.folder import SampleFolder
from draft_trainer.releases.confidence import Batch
from draft_trainer.releases.pointer import Good, Pointer, PointerStore, read_pointer
from draft_trainer.releases.states import ReleaseState
from draft_trainer.state import (
    GATE_RESULTS_KEPT,
    RECENT_SNAPSHOTS,
    STATE_FILE,
    THINNED_SNAPSHOTS,
    State,
)
from slipstream.errors import RefusedError, StatusCode
from slipstream.v1 import console_pb2 as pb
from slipstream.v1 import draft_trainer_pb2, release_pb2

FIGURES = (Batch((100, 100), (80, 50)), Batch((300, 40), (220, 20)))


@pytest.fixture
def state(tmp_path: Path) -> Iterator[State]:
    state = State(tmp_path)
    yield state
    state.close()


def fill(state: State) -> None:
    """Something in every table."""
    pointer = PointerStore(state, lambda version: None)
    pointer.go_live(2)
    pointer.begin_trial(3, FIGURES)
    pointer.found_too_little("idle")
    pointer.begin_commit(4)
    state.gate_results.add(release_pb2.Verdict(outcome="passed", draft_version=3, reason="gain"))
    state.history.add(draft_trainer_pb2.TrainerStatus(train_steps=4))


def test_closed_registry_is_unlocked_despite_forks(tmp_path: Path) -> None:
    """A training framework forks the workers of its data loader so."""
    state, samples = State(tmp_path), SampleFolder(None, tmp_path)
    waits, ends = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(ends)
        os.read(waits, 1)
        os._exit(0)
    try:
        state.close()
        samples.close(keep=True)
        State(tmp_path).close()
        SampleFolder(None, tmp_path).close(keep=True)
    finally:
        os.close(ends)
        os.waitpid(child, 0)
        os.close(waits)


def test_state_db_survives_kill(tmp_path: Path) -> None:
    script = """
import os, signal, sys
from pathlib import Path
from draft_trainer.state import State
from tests.draft_trainer.test_state import fill
state = State(Path(sys.argv[1]))
fill(state)
with state.transaction():
    state.query("DELETE FROM gate_results")
    state.events.note("healed", draft_version=1, reason="never")
    os.kill(os.getpid(), signal.SIGKILL)
"""
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert killed.returncode == -signal.SIGKILL
    state = State(tmp_path)
    now = PointerStore(state, lambda version: None).now
    assert (now.promoted, now.live, now.good_versions, now.intent) == (0, 3, (0, 2), 4)
    assert (now.undecided, now.figures) == ("idle", FIGURES)
    assert now.in_use == {0, 2, 3, 4}
    assert [v.reason for v in state.gate_results.newest(0)] == ["gain"]
    assert [e.kind for e in state.events.since(0)] == ["gate_passed"]
    assert [status.train_steps for status in state.history.snapshots()] == [4]
    state.close()


def test_state_transaction_is_all_or_nothing(state: State) -> None:
    pointer = PointerStore(state, lambda version: None)
    with pytest.raises(ZeroDivisionError), state.transaction():
        pointer.begin_commit(1)
        state.events.note("committed", draft_version=1)
        assert pointer.now.intent == 1
        assert state.events.newest == 0
        raise ZeroDivisionError
    assert pointer.now == Pointer(0, 0, (Good(0),)) and state.events.since(0) == []
    with state.transaction():
        pointer.begin_commit(1)
        state.events.note("committed", draft_version=1)
    assert state.events.newest == 1 and pointer.now.intent == 1


def test_promotion_of_missing_release_is_refused(state: State) -> None:
    def check(version: int) -> None:
        if version > 2:
            raise RefusedError("draft_version", version, "one of 0, 1, 2", "list the releases")

    pointer = PointerStore(state, check)
    pointer.go_live(1)
    before = pointer.now
    for move in (
        lambda: pointer.offer(7),
        lambda: pointer.promote(7, pin=True),
        lambda: pointer.begin_commit(7),
        lambda: pointer.go_live(7),
    ):
        with pytest.raises(RefusedError, match="found 7"):
            move()
        assert pointer.now == before


def test_pointer_refuses_transition_outside_the_table(state: State) -> None:
    pointer = PointerStore(state, lambda version: None)
    pointer.begin_commit(1)
    before = pointer.now
    for move in (
        lambda: pointer.found_too_little("nothing is on trial"),
        lambda: pointer.passed(()),
        lambda: pointer.begin_commit(2),
        lambda: pointer.begin_trial(0),
    ):
        with pytest.raises((RuntimeError, ValueError)):
            move()
        assert pointer.now == before


def test_pointer_passes_each_state_of_the_table(state: State) -> None:
    """One release, from its promotion to a roll back."""
    pointer, found = PointerStore(state, lambda version: None), list[ReleaseState]()
    for move in (
        lambda: pointer.offer(1),
        lambda: pointer.begin_commit(1),
        lambda: pointer.begin_trial(1),
        lambda: pointer.found_too_little("idle"),
        lambda: pointer.passed(FIGURES, 0.97),
        lambda: pointer.roll_back(),
    ):
        found.append(pointer.now.state_of(1))
        move()
    assert found == [*ReleaseState] and pointer.now.state_of(1) is ReleaseState.RELEASED
    assert (pointer.now.live, pointer.now.promoted, pointer.now.good_versions) == (0, 0, (0,))


@pytest.mark.parametrize("end", ["replaced", "fails", "passes"])
def test_good_release_on_trial_again_is_good_when_it_passes(state: State, end: str) -> None:
    pointer = PointerStore(state, lambda version: None)
    for version, ratio in ((1, 0.9), (2, 0.8)):
        pointer.begin_trial(version)
        pointer.passed(FIGURES, ratio)
    pointer.begin_commit(1)
    pointer.begin_trial(1)
    assert pointer.now.good_versions == (0, 2) and pointer.now.on_trial
    assert pointer.now.standing == pytest.approx(0.72), "of 2 over 0, by way of 1"
    if end == "passes":
        pointer.passed(FIGURES, 1.1)
        assert pointer.now.good_versions == (0, 2, 1)
        assert pointer.now.standing == pytest.approx(0.72 * 1.1)
        return
    if end == "fails":
        assert pointer.failed() == (1, 2)
    else:
        pointer.begin_trial(3)
    assert pointer.now.state_of(1) is ReleaseState.RELEASED
    assert pointer.now.good_versions == (0, 2)


def test_roll_back_skips_removed_releases(state: State) -> None:
    gone: set[int] = set()

    def check(version: int) -> None:
        if version in gone:
            raise RefusedError("draft_version", version, "another", "list the releases")

    pointer = PointerStore(state, check)
    for version in (1, 2, 3):
        pointer.go_live(version)
    gone.add(2)
    assert pointer.roll_back() == (3, 1)
    assert pointer.now.good_versions == (0, 1)
    gone.update((0, 1))
    with pytest.raises(RefusedError, match="found 0"):
        pointer.roll_back()


def test_events_are_numbered_bounded_and_escaped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_module, "EVENTS_KEPT", 50)
    state = State(tmp_path)
    for number in range(60):
        state.events.note("healed", reason=f"{number}\n\x1b[2J" + "x" * 5000)
    state.close()
    events = State(tmp_path).events
    kept = events.since(0)
    assert [e.number for e in kept] == [*range(11, 61)]
    assert kept[0].reason.isprintable() and kept[0].reason.startswith("10")
    assert len(kept[0].reason) < state_module.REASON_CHARACTERS + 100
    assert [e.number for e in events.since(57)] == [58, 59, 60]
    assert events.since(60) == []
    assert [e.number for e in events.since(0, newest=2)] == [59, 60]
    # A number of another registry's trainer: everything that is kept.
    assert len(events.since(77)) == 50


def test_gate_results_and_history_are_bounded(state: State) -> None:
    with state.transaction():
        for number in range(2000):
            state.gate_results.add(release_pb2.Verdict(outcome="failed", judged_at=number))
            state.history.add(draft_trainer_pb2.TrainerStatus(train_steps=number))
    assert len(state.gate_results.newest(0)) == GATE_RESULTS_KEPT
    assert [v.judged_at for v in state.gate_results.newest(2)] == [1998, 1999]
    times = [status.train_steps for status in state.history.snapshots()]
    assert times[-RECENT_SNAPSHOTS:] == [*range(2000 - RECENT_SNAPSHOTS, 2000)]
    assert len(times) <= RECENT_SNAPSHOTS + THINNED_SNAPSHOTS
    older = times[:-RECENT_SNAPSHOTS]
    assert {b - a for a, b in pairwise(older)} == {8}


def test_state_db_has_one_writer_and_many_readers(tmp_path: Path) -> None:
    empty = State(tmp_path, write=False)
    assert read_pointer(empty) is None and empty.events.since(0) == []
    assert list(tmp_path.iterdir()) == []
    writer = State(tmp_path)
    fill(writer)
    with pytest.raises(RefusedError, match=f"held by process {os.getpid()}") as caught:
        State(tmp_path)
    assert caught.value.code is StatusCode.FAILED_PRECONDITION
    before = (tmp_path / STATE_FILE).stat()
    one, two = State(tmp_path, write=False), State(tmp_path, write=False)
    assert read_pointer(one) == read_pointer(two) == read_pointer(writer)
    with pytest.raises(RefusedError), one.transaction():
        PointerStore(one, lambda version: None).offer(7)
    two.close()
    after = (tmp_path / STATE_FILE).stat()
    assert (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size)
    PointerStore(writer, lambda version: None).offer(7)
    assert read_pointer(one) == read_pointer(writer)
    one.close()
    writer.close()
    State(tmp_path).close()


def damage_header(path: Path) -> None:
    path.write_bytes(b"no database at all" * 100)


def damage_page(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096:8192] = os.urandom(4096)
    path.write_bytes(data)


def drop_a_table(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("DROP TABLE pointer")


def ruin_a_message(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("UPDATE gate_results SET message = x'ffff'")


def write_pointer(path: Path, document: object, checksum: object = None) -> None:
    """Replace the pointer, with the checksum of the new one unless another is given."""
    if checksum is None and isinstance(document, str):
        checksum = hashlib.sha256(document.encode()).hexdigest()
    with sqlite3.connect(path) as database:
        database.execute("UPDATE pointer SET document = ?, checksum = ?", (document, checksum))


def flip_a_bit(path: Path) -> None:
    """Live becomes 1, a release that never passed: the fleet would be put on it without a word."""
    with sqlite3.connect(path) as database:
        [(document, checksum)] = database.execute("SELECT document, checksum FROM pointer")
    assert '"live":3' in document
    write_pointer(path, document.replace('"live":3', '"live":1'), checksum)


def ruin_a_list(path: Path) -> None:
    write_pointer(path, "[0,")


def write_bytes(path: Path) -> None:
    write_pointer(path, b"\x00\xff", b"")


def write_impossible_pointer(path: Path) -> None:
    """A trial of a release against itself."""
    write_pointer(path, '{"promoted":0,"live":0,"good":[{"version":0}],"left_good_at":1.0}')


@pytest.mark.parametrize(
    "damage",
    [
        *(damage_header, damage_page, drop_a_table, ruin_a_message),
        *(flip_a_bit, ruin_a_list, write_bytes, write_impossible_pointer),
    ],
)
def test_damaged_state_db_is_refused_with_next_step(tmp_path: Path, damage) -> None:  # type: ignore[no-untyped-def]
    state = State(tmp_path)
    fill(state)
    state.close()
    damage(tmp_path / STATE_FILE)
    with pytest.raises(RefusedError) as caught:
        found = State(tmp_path)
        PointerStore(found, lambda version: None)
        found.gate_results.newest(0)
    assert caught.value.field == str(tmp_path / STATE_FILE)
    assert caught.value.code is StatusCode.DATA_LOSS
    assert "releases promote N --registry" in caught.value.next_step


def test_state_db_is_readable_by_old_sqlite(tmp_path: Path) -> None:
    """RHEL 9 has 3.34, which knows no STRICT."""
    state = State(tmp_path)
    tables = state.query("SELECT sql FROM sqlite_schema WHERE sql IS NOT NULL")
    state.close()
    assert len(tables) == 5 and not [sql for (sql,) in tables if "STRICT" in sql]


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_file_system_without_locks_is_refused(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(RefusedError, match=r"without locks .*-o flock"):
        State(tmp_path)


def test_state_db_of_older_trainer_is_read(tmp_path: Path) -> None:
    """It had a table of pins, and the kind of its events was a number, in field 3."""
    state = State(tmp_path)
    fill(state)
    event = b"\x18\x0a" + pb.Event(draft_version=7, reason="in 18 ms").SerializeToString()
    with state.transaction():
        state.query("CREATE TABLE pins (draft_version INTEGER PRIMARY KEY) STRICT")
        state.query("INSERT INTO pins VALUES (7)")
        state.query("INSERT INTO events (message) VALUES (?)", event)
    state.close()
    state = State(tmp_path)
    newest = state.events.since(0)[-1]
    assert (newest.kind, newest.draft_version, newest.reason) == ("", 7, "in 18 ms")
    state.close()


def test_state_db_of_other_schema_or_symlink_is_refused(tmp_path: Path) -> None:
    State(tmp_path).close()
    with sqlite3.connect(tmp_path / STATE_FILE) as database:
        database.execute("PRAGMA user_version = 9")
    with pytest.raises(RefusedError, match="schema version 9"):
        State(tmp_path)
    (tmp_path / STATE_FILE).rename(tmp_path / "elsewhere")
    (tmp_path / STATE_FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RefusedError, match="found a link"):
        State(tmp_path)
