"""The outbox: bounded, sheds the oldest policy first, loses count of nothing."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest
import torch

from policy_bridge.outbox import Entry, Outbox, file_bytes
from policy_bridge.stats import Counters
from slipstream.sample import Sample, header_of, layout_of
from slipstream.shm import MemoryLostError, SharedFile
from slipstream.tensors import Bytes

pytestmark = pytest.mark.contract("never waits")

# The smallest block has 256 bytes: sizes here are multiples of that.
UNIT = 256


def sample(name: str, version: int, units: int = 1) -> Sample:
    """One whose block is of so many units."""
    layout = next(
        layout
        for tokens in range(1, 64)
        for hidden in range(1, 64)
        if (layout := layout_of(tokens, 1, hidden, torch.float32)).nbytes == units * UNIT
    )
    block = torch.randint(0, 256, (layout.nbytes,), dtype=torch.uint8)
    return Sample(header_of(name, version, 1.0, (1,), layout), block)


def take_one(outbox: Outbox) -> Entry | None:
    """The next sample, which counts as sent."""
    return next(iter(outbox.take(lambda entry: True, 1, outbox._blocks)), None)


@pytest.fixture
def counters() -> Counters:
    return Counters()


def test_outbox_holds_at_most_capacity_bytes(counters: Counters) -> None:
    outbox = Outbox(5 * UNIT, counters)
    taken = sum(outbox.put(sample(f"a{i}", 1)) for i in range(10))
    assert (taken, outbox.nbytes, len(outbox)) == (5, 5 * UNIT, 5)
    assert counters.snapshot().shed == {"outbox_full": 5}
    assert counters.snapshot().shed_bytes == 5 * UNIT
    assert not outbox.put(sample("big", 9, units=6))
    assert counters.snapshot().shed == {"outbox_full": 5, "too_large": 1}
    assert outbox.nbytes == 5 * UNIT


def test_outbox_full_sheds_older_policy_versions_only(counters: Counters) -> None:
    outbox = Outbox(5 * UNIT, counters)
    for name, version in (("a", 1), ("b", 2), ("c", 1), ("d", 2), ("e", 3)):
        assert outbox.put(sample(name, version))
    assert outbox.put(sample("f", 3))  # a goes
    assert outbox.put(sample("g", 3, units=2))  # c and b go
    assert not outbox.put(sample("h", 2))  # nothing is older
    assert counters.snapshot().shed == {"superseded": 3, "outbox_full": 1}
    order = []
    while head := take_one(outbox):
        order.append(head.sample_id)
    assert order == ["d", "e", "f", "g"]


def test_outbox_full_sheds_lowest_priority_of_version(counters: Counters) -> None:
    outbox = Outbox(5 * UNIT, counters)
    for name, version, priority in (
        ("a", 2, 9),
        ("b", 2, 3),
        ("c", 2, 3),
        ("d", 1, 15),
        ("e", 2, 5),
    ):
        assert outbox.put(sample(name, version), priority)
    gone = []
    for name in "fghi":
        before = set(outbox._held)
        taken = outbox.put(sample(name, 2), 5)
        gone += sorted(before - set(outbox._held))
        assert taken == (name in "fgh")
    # The older version whatever its priority, then the lowest, the oldest of equals; never equals.
    assert gone == ["d", "b", "c"]
    assert counters.snapshot().shed == {"superseded": 3, "outbox_full": 1}
    assert outbox.put(sample("j", 3), 0)
    assert set(outbox._held) == {"a", "f", "g", "h", "j"}


def test_outbox_shed_samples_leave_no_bookkeeping(counters: Counters) -> None:
    """The head waits for credit for ever; what is superseded behind it must not pile up."""
    outbox = Outbox(5 * UNIT, counters)
    for version in range(2000):
        assert outbox.put(sample(f"v{version}", version))
        outbox.peek(0.0)
    sizes = [len(outbox._held), len(outbox._waiting), len(outbox._sizes), len(outbox._bins)]
    assert sizes == [5, 5, 5, 5]


def test_outbox_put_cost_is_independent_of_size(
    counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """O(1): as many samples are read with 10 held as with 2000, shedding included."""
    reads = []
    nbytes = Entry.nbytes.fget  # type: ignore[attr-defined]
    for held in (10, 2000):
        outbox = Outbox(held * UNIT, counters)
        one = sample("", 1)
        for number in range(held):
            one.header.sample_id, one.header.policy_version = f"s{number}", 1 + number % 2
            assert outbox.put(one, number % 16)
        count = 0

        def counted(entry: Entry) -> int:
            nonlocal count
            count += 1
            return nbytes(entry)  # type: ignore[no-any-return]

        monkeypatch.setattr(Entry, "nbytes", property(counted))
        assert outbox.put(sample("new", 3))
        monkeypatch.undo()
        reads.append(count)
    assert reads[0] == reads[1] < 20


def test_outbox_block_reads_back_or_is_lost(counters: Counters) -> None:
    outbox = Outbox(5 * UNIT, counters)
    one = sample("a", 1)
    assert outbox.put(one)
    entry = outbox.peek(0.0)
    assert entry is not None
    assert entry.read().tobytes() == one.block.numpy().tobytes()
    assert not one.header.packed.HasField("span")
    os.pwrite(entry.blocks.file._descriptor, b"x" * 9, entry.header.packed.span.offset)
    with pytest.raises(MemoryLostError, match="other bytes"):
        entry.read()


def test_outbox_shed_in_flight_keeps_its_memory_until_ack(counters: Counters) -> None:
    outbox = Outbox(5 * UNIT, counters)
    for name in "abcde":
        assert outbox.put(sample(name, 1))
    first = take_one(outbox)
    assert first is not None and outbox.flight == UNIT
    block, place = first.read(), first.header.packed.span.offset
    assert outbox.put(sample("f", 2))
    assert counters.snapshot().shed == {"superseded": 1} and "a" not in outbox._held
    newest = outbox._held["f"]
    assert newest.header.packed.span.offset != place
    assert first.read().tobytes() == block.tobytes()
    # Answered late: it is not counted again, and its part is free.
    counted: list[str] = []
    assert not outbox.settle("a", lambda: counted.append("a")) and outbox.flight == 0
    assert counted == []
    assert outbox.put(sample("g", 2))
    assert outbox._held["g"].header.packed.span.offset == place


def test_outbox_move_to_file_keeps_intact_samples(counters: Counters, tmp_path: Path) -> None:
    outbox = Outbox(8 * UNIT, counters)
    given = {name: sample(name, 1) for name in "abcd"}
    for one in given.values():
        assert outbox.put(one)
    damaged = outbox._held["b"]
    os.pwrite(damaged.blocks.file._descriptor, b"x" * 9, damaged.header.packed.span.offset)
    made = SharedFile.create(tmp_path, file_bytes(8 * UNIT))
    blocks = outbox.move_to(made)
    assert counters.snapshot().shed == {"shared_memory_lost": 1}
    for name in "acd":
        assert outbox._held[name].blocks is blocks
        assert outbox._held[name].read().tobytes() == given[name].block.numpy().tobytes()


@pytest.mark.parametrize("shared", [False, True])
def test_outbox_grows(counters: Counters, tmp_path: Path, shared: bool) -> None:
    outbox = Outbox(2 * UNIT, counters)
    if shared:
        outbox.move_to(SharedFile.create(tmp_path, file_bytes(2 * UNIT)))
    given = {name: sample(name, 1, 96) for name in "abc"}
    assert not outbox.put(given["a"])
    outbox.grow(96 * UNIT)
    assert outbox.outgrown == shared
    assert outbox.put(given["a"])
    outbox.grow(3 * 96 * UNIT)
    outbox.grow(UNIT)
    assert outbox.capacity_bytes == 3 * 96 * UNIT and outbox.outgrown == shared
    if shared:
        outbox.move_to(SharedFile.create(tmp_path, file_bytes(outbox.capacity_bytes)))
    assert not outbox.outgrown
    assert outbox.put(given["b"]) and outbox.put(given["c"])
    for name, one in given.items():
        assert outbox._held[name].read().tobytes() == one.block.numpy().tobytes()


def test_outbox_sample_shed_while_it_moves_frees_its_memory_once(
    counters: Counters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next sample has all of the file, and keeps its bytes."""
    units = 96  # A lost part of this size is more than the gaps that a file has room for.
    outbox = Outbox(4 * units * UNIT, counters)
    for name in "abcd":
        assert outbox.put(sample(name, 1, units))
    write = SharedFile.write

    def shed_then_write(file: SharedFile, offset: int, block: Bytes) -> None:
        outbox.shed("superseded", 1)
        write(file, offset, block)

    with monkeypatch.context() as moving:
        moving.setattr(SharedFile, "write", shed_then_write)
        outbox.move_to(SharedFile.create(tmp_path, file_bytes(4 * units * UNIT)))
    assert counters.snapshot().shed == {"superseded": 4}
    given = [sample(name, 2, units) for name in "efgh"]
    assert [outbox.put(one) for one in given] == [True] * 4
    found = [entry.read().tobytes() for entry in outbox.take(lambda entry: True, 4)]
    assert found == [one.block.numpy().tobytes() for one in given]


def test_outbox_move_to_truncated_file_keeps_samples(counters: Counters, tmp_path: Path) -> None:
    outbox = Outbox(8 * UNIT, counters)
    given = {name: sample(name, 1) for name in "abcdefgh"}
    for one in given.values():
        assert outbox.put(one)
    made = SharedFile.create(tmp_path, file_bytes(8 * UNIT))
    os.ftruncate(made._descriptor, 4096)
    blocks = outbox.move_to(made)
    assert blocks.lost and "as it was made" in counters.snapshot().transport_reason
    # They go inline, and into the next file that has space.
    for target in (None, SharedFile.create(tmp_path, file_bytes(8 * UNIT))):
        moved = None if target is None else outbox.move_to(target)
        for name, one in given.items():
            entry = outbox._held[name]
            assert entry.blocks is not blocks and (moved is None or entry.blocks is moved)
            assert entry.read().tobytes() == one.block.numpy().tobytes()
    assert counters.snapshot().shed == {}


def test_outbox_truncated_file_is_replaced(counters: Counters, tmp_path: Path) -> None:
    outbox = Outbox(8 * UNIT, counters)
    outbox.move_to(SharedFile.create(tmp_path, file_bytes(8 * UNIT)))
    first, second = sample("a", 1), sample("b", 1)
    assert outbox.put(first)
    lost = outbox._blocks
    os.ftruncate(lost.file._descriptor, 4096)
    assert outbox.put(second)
    assert lost.lost and outbox._blocks is not lost
    assert "as it was made" in counters.snapshot().transport_reason
    assert outbox._held["b"].read().tobytes() == second.block.numpy().tobytes()
    with pytest.raises(MemoryLostError, match="ends at byte"):
        outbox._held["a"].read()


def test_outbox_takes_answers_before_copy(counters: Counters) -> None:
    outbox = Outbox(5 * UNIT, counters)
    assert outbox.takes(5 * UNIT, 1, 0) and not outbox.takes(6 * UNIT, 1, 0)
    for name in "abcde":
        assert outbox.put(sample(name, 1), 7)
    assert outbox.takes(UNIT, 2, 0) and outbox.takes(UNIT, 1, 8)
    assert not outbox.takes(UNIT, 1, 7)
    assert len(outbox) == 5
    assert counters.snapshot().shed == {"too_large": 1, "outbox_full": 1}


def test_outbox_sample_larger_than_older_ones_sheds_nothing(counters: Counters) -> None:
    outbox = Outbox(5 * UNIT, counters)
    for name, version in (("a", 1), ("b", 2), ("c", 2), ("d", 2), ("e", 2)):
        assert outbox.put(sample(name, version))
    assert not outbox.put(sample("f", 2, units=2))
    assert len(outbox) == 5
    assert counters.snapshot().shed == {"outbox_full": 1}


def test_outbox_sent_samples_held_until_ack_requeued_in_order(
    counters: Counters,
) -> None:
    outbox = Outbox(5 * UNIT, counters)
    for name in "abc":
        outbox.put(sample(name, 1))
    for _ in range(2):
        assert take_one(outbox)
    assert outbox.nbytes == 3 * UNIT
    assert outbox.settle("a") and not outbox.settle("a") and not outbox.settle("c")
    assert outbox.nbytes == 2 * UNIT
    assert outbox.requeue_sent() == {"b"}
    order = []
    while head := take_one(outbox):
        order.append(head.sample_id)
    assert order == ["b", "c"]
    assert outbox.settle("b") and outbox.settle("c")
    assert outbox.wait_empty(0.0)


def test_outbox_wait_empty_waits_for_sample_being_written(
    counters: Counters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a flush would say that everything was sent while a sample is still on its way in."""
    outbox, writing, go_on = Outbox(5 * UNIT, counters), threading.Event(), threading.Event()
    write = SharedFile.write

    def slow_write(file: SharedFile, offset: int, block: Bytes) -> None:
        writing.set()
        assert go_on.wait(60.0)
        write(file, offset, block)

    monkeypatch.setattr(SharedFile, "write", slow_write)
    thread = threading.Thread(target=outbox.put, args=(sample("a", 1),))
    thread.start()
    assert writing.wait(60.0)
    empty = outbox.wait_empty(0.0)
    go_on.set()
    thread.join(60.0)
    assert not empty and not outbox.wait_empty(0.0)
    assert take_one(outbox) and outbox.settle("a")
    assert outbox.wait_empty(0.0)


def test_outbox_sample_shed_after_peek_is_not_sent(counters: Counters) -> None:
    outbox = Outbox(UNIT, counters)
    outbox.put(sample("a", 1))
    head = outbox.peek(0.0)
    assert head is not None
    assert outbox.put(sample("b", 2))
    assert not outbox.holds(head)
    assert [entry.sample_id for entry in outbox.take(lambda entry: True, 9)] == ["b"]
    assert counters.snapshot().shed == {"superseded": 1}


def test_outbox_close_wakes_waiter_and_sheds_rest(counters: Counters) -> None:
    outbox = Outbox(5 * UNIT, counters)
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(outbox.peek(60.0)))
    thread.start()
    outbox.close()
    thread.join(10.0)
    assert found == [None]
    assert not outbox.put(sample("a", 1))
    assert counters.snapshot().shed["closed"] == 1


def test_outbox_threads_settle_or_shed_each_sample_once(counters: Counters) -> None:
    outbox, settled = Outbox(10 * UNIT, counters), []

    def fill(worker: int) -> None:
        for i in range(200):
            outbox.put(sample(f"{worker}-{i}", i % 7))

    def empty() -> None:
        while outbox.peek(60.0) is not None:
            if (head := take_one(outbox)) and outbox.settle(head.sample_id):
                settled.append(head.sample_id)

    threads = [threading.Thread(target=fill, args=(n,)) for n in range(4)]
    drain = threading.Thread(target=empty)
    for thread in [*threads, drain]:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert outbox.wait_empty(30.0)
    outbox.close()
    drain.join(30.0)
    assert len(settled) == len(set(settled))
    assert len(settled) + sum(counters.snapshot().shed.values()) == 800
