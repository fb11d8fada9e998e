"""One of each fault of the table, over real processes (``python -m benchmarks.feed_faults``)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from benchmarks.feed_faults.__main__ import targets_of, text_of
from benchmarks.feed_faults.books import ACCEPTED, Books, Records
from benchmarks.feed_faults.faults import FAULTS, GRPC, SHARED_MEMORY
from benchmarks.feed_faults.processes import ANSWERED, CAPTURED
from benchmarks.feed_faults.rig import Rig
from benchmarks.feed_faults.table import run
from draft_trainer.ingest.database import FILE, Database, key_of

pytestmark = pytest.mark.contract("exactly once")

PATIENCE = 180.0
RUN = "run"


@pytest.mark.slow
def test_feed_faults_lose_and_repeat_no_sample(tmp_path: Path) -> None:
    # Those over gRPC last: one change of the transport.
    last = ("both killed", "byte flipped in a message")
    plan = [(fault, GRPC if fault.name in last else SHARED_MEMORY) for fault in FAULTS]
    plan.sort(key=lambda row: row[1] == GRPC)
    rig = Rig(tmp_path, PATIENCE)
    try:
        # No bound on a call of the bridge: the machine of a test may be busy.
        table = run(rig, plan, random.Random(0), longest_call=PATIENCE)
    finally:
        rig.stop()
    missed = [target for target in targets_of(table) if not target.ok]
    # The number of kills is the long mode's.
    assert [target for target in missed if "kill -9" not in target.name] == [], text_of(table)
    assert table.total("runs") == len(plan) + 1
    assert table.recognised > 0 and table.refused["packed.checksum"] >= 2
    assert not rig.memory.exists()


def books(folder: Path, answered: str) -> Books:
    """Records of a policy that captured a to d, 3 anchors each, and got these acks."""
    (folder / CAPTURED).write_text("".join(f"{name} 3\n" for name in "abcd"))
    (folder / ANSWERED).write_text("".join(f"{name} {ACCEPTED} -\n" for name in answered))
    scratch = folder / "scratch"
    scratch.mkdir()
    return Books(Records(folder), RUN, 2, scratch)


def ledger(folder: Path, draws: dict[str, int]) -> Path:
    """A folder with a ledger of samples that were drawn so often, and are held no more."""
    held = folder / "samples"
    held.mkdir()
    rows = Database(held / FILE)
    rows.open()
    for name, times in draws.items():
        query = "INSERT INTO samples (key, held_out, times_drawn) VALUES (?, 0, ?)"
        rows.execute(query, key_of(RUN, name), times)
    rows.close()
    return held


def test_audit_finds_lost_samples(tmp_path: Path) -> None:
    found = books(tmp_path, "abc").audit(ledger(tmp_path, {"a": 2, "b": 1}), drained=False)
    assert (found.lost, found.twice, found.held) == (["c"], [], 2)


def test_audit_finds_samples_trained_too_seldom(tmp_path: Path) -> None:
    found = books(tmp_path, "ab").audit(ledger(tmp_path, {"a": 2, "b": 1, "c": 2}), drained=True)
    assert (found.lost, found.twice) == (["b"], [])


def test_audit_finds_samples_accepted_or_trained_twice(tmp_path: Path) -> None:
    found = books(tmp_path, "aab").audit(ledger(tmp_path, {"a": 2, "b": 3}))
    assert (found.lost, found.twice) == ([], ["a", "b"])
