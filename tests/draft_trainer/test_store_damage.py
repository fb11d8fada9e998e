"""Damage to the files of the store costs the damaged samples: counted, logged, never trained on."""

from __future__ import annotations

import logging
import os
import random
import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import torch

from draft_trainer.drafters.policy import PolicyHead
from draft_trainer.ingest.database import FILE
from draft_trainer.ingest.run import Run
from draft_trainer.ingest.store import ARENA, SampleStore
from slipstream.errors import RefusedError, StatusCode
from slipstream.v1 import draft_trainer_pb2 as pb
from tests.draft_trainer.samples import all_drawn, is_intact, open_store, put, times_drawn
from tests.draft_trainer.test_full_disk import full_disk

CAPACITY = 1 << 20
SAMPLES = 400
NAMES = [f"s{i}" for i in range(SAMPLES)]
POLICY = pb.PolicySpec(hidden_size=4, vocab_size=9, num_hidden_layers=6)


@pytest.fixture
def evicted() -> Counter[str]:
    return Counter()


@pytest.fixture
def reopen(tmp_path: Path, evicted: Counter[str]) -> Callable[[], SampleStore]:
    def count(reason: str, samples: int) -> None:
        evicted[reason] += samples

    return lambda: open_store(tmp_path, CAPACITY, max_epochs=2, on_evicted=count)


def filled(store: SampleStore) -> SampleStore:
    store.begin("run", {"hidden_size": 8})
    assert all(put(store, name, version=1 + i // 100) for i, name in enumerate(NAMES))
    all_drawn(store, tokens=50 * 16)
    all_drawn(store, tokens=50 * 16)
    return store


def extents(store: SampleStore, count: int) -> list[tuple[int, int, str]]:
    """Number, start and id of some samples."""
    query = "SELECT number, start FROM samples WHERE start IS NOT NULL AND number % 7 = 0 LIMIT ?"
    return [(number, start, NAMES[number - 1]) for number, start in store._db.execute(query, count)]


def flip(path: Path, offset: int, count: int = 1) -> None:
    """Invert bytes of a file in place, as a failing disk would."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        data = os.pread(descriptor, count, offset)
        os.pwrite(descriptor, bytes(byte ^ 0xFF for byte in data), offset)
    finally:
        os.close(descriptor)


def drained(store: SampleStore) -> Counter[str]:
    """Train on everything that is left; every sample that comes is what was put in."""
    seen: Counter[str] = Counter()
    while samples := store.draw("run", 1000).samples:
        assert all(is_intact(sample) for sample in samples)
        seen.update(sample.sample_id for sample in samples)
    return seen


def works(store: SampleStore, name: str = "new") -> None:
    """It accepts, recognises, draws and saves."""
    if store.run is None:
        store.begin("run", {})
    assert put(store, name) and not put(store, name) and store.seen("run", name)
    assert name in drained(store)
    store.saved(store.draws)
    store.rewind(store.draws, 0)
    assert store.counts().nbytes == 0


@pytest.mark.parametrize("running", [True, False])
def test_damaged_samples_are_dropped_by_name(
    tmp_path: Path,
    reopen: Callable[[], SampleStore],
    evicted: Counter[str],
    caplog: pytest.LogCaptureFixture,
    running: bool,
) -> None:
    store = filled(reopen())
    damaged = extents(store, 5)
    if not running:
        store.close()
    for _, start, _ in damaged:
        flip(tmp_path / ARENA, start + 40)
    if not running:
        store = reopen()
    seen = drained(store)
    assert evicted == {"damaged": 5}
    assert not {name for _, _, name in damaged} & set(seen)
    assert len(seen) == SAMPLES - 5
    assert all(str(number) in caplog.text for number, *_ in damaged)
    # They were accepted: what comes again is not new, and their space is used again.
    assert all(store.seen("run", name) for _, _, name in damaged)
    store.saved(store.draws)
    assert store.counts().nbytes == 0


def test_damaged_held_out_samples_are_dropped(tmp_path: Path, evicted: Counter[str]) -> None:
    count: Callable[[str, int], None] = lambda reason, n: evicted.update({reason: n})  # noqa: E731
    store = open_store(tmp_path, CAPACITY, held_out_fraction=0.5, on_evicted=count)
    filled(store)
    before = len(store.held_out("run"))
    query = "SELECT start FROM samples WHERE held_out AND start IS NOT NULL LIMIT 3"
    for (start,) in store._db.execute(query).fetchall():
        flip(tmp_path / ARENA, start + 100, 8)
    samples = store.held_out("run")
    assert len(samples) == before - 3 and all(is_intact(sample) for sample in samples)
    assert evicted == {"damaged": 3}


ROWS = (
    "header = zeroblob(20)",
    "header = 'text'",
    "seal = seal + 1",
    "policy_version = 3",
    "tokens = 1",
    "held_out = 1",
    "start = start + 64",
    "start = 'x'",
    "size = 1 << 40",
    "size = NULL",
)


@pytest.mark.parametrize(
    ("change", "running"),
    [
        *((change, False) for change in ROWS),
        *((change, True) for change in ("seal = seal + 1", "start = 'x'", "size = NULL")),
    ],
)
def test_damaged_index_rows_are_dropped(
    reopen: Callable[[], SampleStore], evicted: Counter[str], change: str, running: bool
) -> None:
    store = filled(reopen())
    with store._db.transaction():
        store._db.execute(f"UPDATE samples SET {change} WHERE number = 17")
    if not running:
        store.close()
        store = reopen()
    seen = drained(store)
    seen.update(sample.sample_id for sample in store.held_out("run"))
    assert NAMES[16] not in seen and len(seen) >= SAMPLES - 2
    assert 1 <= evicted["damaged"] + evicted["capacity"] <= 2
    works(store)


def leaves(path: Path) -> list[int]:
    """Pages of a database that are no root of a table: without that nothing of it is found."""
    with closing(sqlite3.connect(f"file:{path}?immutable=1", uri=True)) as database:
        roots = {page for (page,) in database.execute("SELECT rootpage FROM sqlite_master")}
    return [page for page in range(2, path.stat().st_size // 4096 + 1) if page not in roots]


def middle(path: Path) -> None:
    pages = leaves(path)
    flip(path, (pages[len(pages) // 2] - 1) * 4096, 4096)


def root(path: Path, table: str = "samples") -> None:
    """Nothing of the table is found without it."""
    with closing(sqlite3.connect(f"file:{path}?immutable=1", uri=True)) as database:
        query = "SELECT rootpage FROM sqlite_master WHERE name = ?"
        (page,) = database.execute(query, (table,)).fetchone()
    flip(path, (page - 1) * 4096, 4096)


def several(path: Path) -> None:
    for page in leaves(path)[::5]:
        flip(path, (page - 1) * 4096, 200)


def header(path: Path) -> None:
    flip(path, 0, 100)


def everything(path: Path) -> None:
    path.write_bytes(random.Random(0).randbytes(path.stat().st_size))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2 + 100)


def empty(path: Path) -> None:
    os.truncate(path, 0)


def another_format(path: Path) -> None:
    # PRAGMA user_version
    flip(path, 60, 4)


@pytest.mark.parametrize("damage", [middle, several, root, header, everything, cut, another_format])
def test_damaged_index_is_rebuilt_at_start(
    tmp_path: Path,
    reopen: Callable[[], SampleStore],
    evicted: Counter[str],
    damage: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    filled(reopen()).close()
    damage(tmp_path / FILE)
    with caplog.at_level(logging.ERROR):
        store = reopen()
    assert "is damaged" in caplog.text and "rows are saved" in caplog.text
    seen = drained(store)
    assert len(seen) + evicted["damaged"] == SAMPLES
    assert f"{len(seen)} rows are saved, {evicted['damaged']} are lost" in caplog.text
    # What can be read of the file is not given up.
    assert damage in (root, header, everything, cut) or len(seen) > SAMPLES // 3
    works(store)
    # It is mended: the next start finds nothing wrong.
    store.close()
    caplog.clear()
    before = Counter(evicted)
    store = reopen()
    assert caplog.text == "" and evicted == before
    store.close()
    assert {path.name for path in tmp_path.iterdir()} == {FILE, ARENA}


@pytest.mark.parametrize("damage", [middle, several, everything, cut, empty])
def test_damaged_index_is_rebuilt_while_running(
    tmp_path: Path,
    reopen: Callable[[], SampleStore],
    evicted: Counter[str],
    damage: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = filled(reopen())
    batch = store.draw("run", 10 * 16).samples
    # Everything is in the file, and nothing of it in memory.
    store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    store._db.execute("PRAGMA shrink_memory")
    damage(tmp_path / FILE)
    last, exhausted = store.draws, store.counts().unsaved
    seen = drained(store)
    assert "is damaged" in caplog.text
    assert store.run == ("run", {"hidden_size": 8})
    assert all(is_intact(sample) for sample in batch)
    batch.clear()
    assert SAMPLES - exhausted <= len(seen) + evicted["damaged"] <= SAMPLES
    works(store)
    assert store.draws > last


@pytest.mark.parametrize("room", [0, 48 << 10], ids=["none", "for a part of the rows"])
def test_index_repair_on_a_full_disk_loses_no_row(
    tmp_path_factory: pytest.TempPathFactory, room: int
) -> None:
    folder, copy = tmp_path_factory.mktemp("store"), tmp_path_factory.mktemp("copy")
    store = filled(open_store(folder, CAPACITY, max_epochs=2))
    store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    store._db.execute("PRAGMA shrink_memory")
    several(folder / FILE)
    shutil.copytree(folder, copy, dirs_exist_ok=True)
    with full_disk(room):
        for _ in range(2):
            with pytest.raises(RefusedError) as caught:
                drained(store)
            assert caught.value.code is StatusCode.RESOURCE_EXHAUSTED
            assert not (folder / f"{FILE}-rebuilt").exists()
    seen = drained(store)
    with_space = drained(open_store(copy, CAPACITY, max_epochs=2))
    assert seen.keys() == with_space.keys() and len(seen) > SAMPLES // 3
    works(store)


@pytest.mark.parametrize("running", [True, False])
def test_random_index_damage_is_survived(
    tmp_path: Path, reopen: Callable[[], SampleStore], running: bool
) -> None:
    rng = random.Random(int(running))
    for _ in range(8):
        store = filled(reopen()) if not (tmp_path / FILE).exists() else reopen()
        store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        if running:
            store._db.execute("PRAGMA shrink_memory")
        else:
            store.close()
        for _ in range(rng.randrange(1, 6)):
            size = (tmp_path / FILE).stat().st_size
            flip(tmp_path / FILE, rng.randrange(size), rng.choice((1, 16, 600, 5000)))
        if not running:
            store = reopen()
        drained(store)
        works(store, f"new {rng.random()}")
        store.begin(f"run {rng.random()}", {})
        store.begin("run", {})
        for name in NAMES:
            put(store, f"{rng.random()}{name}")
        all_drawn(store, tokens=100 * 16)
        store.close()


def test_damaged_write_ahead_log_is_survived(
    tmp_path: Path, reopen: Callable[[], SampleStore]
) -> None:
    store = filled(reopen())
    # As kill -9 leaves it.
    saved = {path.name: path.read_bytes() for path in tmp_path.iterdir() if FILE in path.name}
    store.close()
    for name, data in saved.items():
        (tmp_path / name).write_bytes(data)
    log = tmp_path / f"{FILE}-wal"
    flip(log, log.stat().st_size // 2, 64)
    store = reopen()
    drained(store)
    works(store)


def test_damaged_policy_matrix_drops_its_samples(
    tmp_path: Path, reopen: Callable[[], SampleStore], evicted: Counter[str]
) -> None:
    store = reopen()
    store.begin("run", {})
    run = Run("run", POLICY, store, max_policy_lag=4)
    embed = torch.randn(9, 4)
    for version in (1, 2, 3):
        run.add_policy(PolicyHead(version, torch.randn(6, 4), embed))
        for name in "abc":
            put(store, f"{name}{version}", version)
    assert len(list((tmp_path / "policies").iterdir())) == 4
    damaged = dict(store.policies())[2][0]
    store.close()
    flip(tmp_path / "policies" / f"{damaged}.safetensors", 100)
    store = reopen()
    run = Run("run", POLICY, store, max_policy_lag=4)
    assert run.heads.versions == (1, 3) and evicted == {"damaged": 3}
    assert torch.equal(run.heads.get(3).embed_tokens, embed)
    assert sorted(all_drawn(store)) == [f"{name}{version}" for name in "abc" for version in (1, 3)]
    assert len(list((tmp_path / "policies").iterdir())) == 3


def test_samples_of_forgotten_version_are_stale_after_kill(
    reopen: Callable[[], SampleStore], evicted: Counter[str]
) -> None:
    store = reopen()
    store.begin("run", {})
    run = Run("run", POLICY, store, max_policy_lag=0)
    run.add_policy(PolicyHead(1, torch.randn(6, 4), torch.randn(9, 4)))
    for name in "abc":
        put(store, name, 1)
    while all_drawn(store):
        pass
    run.add_policy(PolicyHead(2, torch.randn(6, 4), torch.randn(9, 4)))
    assert evicted == {}, "they wait for a state that contains their draws"
    # As kill -9: no state was saved.
    store.close()
    store = reopen()
    store.rewind(0, 0)
    run = Run("run", POLICY, store, max_policy_lag=0)
    assert run.heads.versions == (2,) and evicted == {"stale": 3}


def test_samples_beyond_lowered_policy_lag_are_stale(
    reopen: Callable[[], SampleStore], evicted: Counter[str]
) -> None:
    store = reopen()
    store.begin("run", {})
    run = Run("run", POLICY, store, max_policy_lag=4)
    for version in range(1, 6):
        run.add_policy(PolicyHead(version, torch.randn(6, 4), torch.randn(9, 4)))
        put(store, f"{version}", version)
    run = Run("run", POLICY, store, max_policy_lag=1)
    assert run.heads.versions == (4, 5) and evicted == {"stale": 3}


def test_damaged_index_facts_are_dropped(
    reopen: Callable[[], SampleStore], caplog: pytest.LogCaptureFixture
) -> None:
    store = filled(reopen())
    store.put_policy("run", 1, ("aa", "bb"))
    store.put_policy("run", 2, ("cc", "dd"))
    with store._db.transaction():
        # Still JSON, and still a version.
        store._db.execute("""UPDATE meta SET value = '["run", {"h": 1}]' WHERE name = 'run'""")
        store._db.execute("UPDATE meta SET value = '[[1, 2, 3]]' WHERE name = 'policies'")
    store.close()
    store = reopen()
    assert store.run is None and "run is damaged" in caplog.text
    assert store.policies() == []
    works(store)


def test_index_facts_survive_damage_while_running(
    tmp_path: Path, reopen: Callable[[], SampleStore], evicted: Counter[str]
) -> None:
    store = reopen()
    store.begin("run", {})
    run = Run("run", POLICY, store, max_policy_lag=4)
    for version in (1, 2, 3):
        run.add_policy(PolicyHead(version, torch.randn(6, 4), torch.randn(9, 4)))
    assert put(store, "before", 3) and all_drawn(store) == ["before"]
    store.released(1)
    store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    store._db.execute("PRAGMA shrink_memory")
    root(tmp_path / FILE, "meta")
    # The index is rebuilt for the draw, which is noted there.
    assert put(store, "after", 3) and sorted(all_drawn(store)) == ["after", "before"]
    store.close()
    store = reopen()
    run = Run("run", POLICY, store, max_policy_lag=4)
    assert store.run == ("run", {}) and run.heads.versions == (1, 2, 3) and evicted == {}
    # The release contains the first draw, and not the second one.
    store.rewind(None, 1)
    assert times_drawn(store, ("before", "after")) == {"before": 1, "after": 0}


def test_draws_of_lost_samples_do_not_count_for_new_ones(
    tmp_path: Path, reopen: Callable[[], SampleStore]
) -> None:
    store = reopen()
    store.begin("run", {})
    assert all(put(store, name) for name in "abc") and len(all_drawn(store)) == 3
    # As if the page of the newest row could not be read.
    store._db.execute("DELETE FROM samples WHERE number = 3")
    store.close()
    another_format(tmp_path / FILE)
    store = reopen()
    assert put(store, "d") and "d" in all_drawn(store)
    assert store._db.one("SELECT max(number) FROM samples") == 3
    # As after kill -9: no state contains either draw.
    store.rewind(0, 0)
    assert times_drawn(store, "abd") == dict.fromkeys("abd", 0)
