"""The outbox: bounded, sheds the oldest policy first, loses count of nothing."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import pytest
import torch

from policy_bridge.outbox import HostPool, Outbox, Sample
from policy_bridge.stats import BridgeStats, Counters
from slipstream.sample import Layout


def sample(name: str, version: int, nbytes: int = 200) -> Sample:
    """One whose block is of so many bytes."""
    return lent(name, version, torch.zeros(nbytes, dtype=torch.uint8))


class Counted(Sample):
    """Counts how often anybody asks for a sample's size."""

    reads = 0

    @classmethod
    def of_200(cls, name: str, version: int) -> Counted:
        return cls(**vars(sample(name, version)))

    @property
    def nbytes(self) -> int:
        Counted.reads += 1
        return 200


@dataclass(frozen=True)
class Bytes(Layout):
    """The layout of a block of which nothing matters but its size."""

    size: int = 0

    @property
    def nbytes(self) -> int:  # type: ignore[override]
        return self.size


def lent(name: str, version: int, block: torch.Tensor | None) -> Sample:
    """One whose block is this memory."""
    assert block is not None
    layout = Bytes(1, 1, 1, torch.float32, size=block.nbytes)
    return Sample(name, version, 1.0, (1,), layout, block)


def stats(counters: Counters) -> BridgeStats:
    return counters.snapshot(
        connected=False, policy_version=None, outbox_samples=0, outbox_bytes=0, last_sync=None
    )


@pytest.fixture
def counters() -> Counters:
    return Counters()


def test_it_never_holds_more_than_its_bound(counters: Counters) -> None:
    outbox = Outbox(1000, counters)
    taken = sum(outbox.offer(sample(f"a{i}", 1), 1.0) for i in range(10))
    assert (taken, outbox.nbytes, len(outbox)) == (5, 1000, 5)
    assert stats(counters).shed == {"outbox_full": 5}
    assert stats(counters).shed_bytes == 1000
    assert not outbox.offer(sample("big", 9, nbytes=1025), 1.0)
    assert stats(counters).shed == {"outbox_full": 5, "too_large": 1}
    assert outbox.nbytes == 1000


def test_older_policies_make_room_and_newer_ones_do_not(counters: Counters) -> None:
    outbox = Outbox(1000, counters)
    for name, version in (("a", 1), ("b", 2), ("c", 1), ("d", 2), ("e", 3)):
        assert outbox.offer(sample(name, version), 1.0)
    assert outbox.offer(sample("f", 3), 1.0)  # a goes
    assert outbox.offer(sample("g", 3, nbytes=400), 1.0)  # c and b go
    assert not outbox.offer(sample("h", 2), 1.0)  # nothing is older
    assert stats(counters).shed == {"superseded": 3, "outbox_full": 1}
    order = []
    while (head := outbox.peek(0.0)) is not None:
        assert outbox.mark_sent(head)
        order.append(head.sample_id)
    assert order == ["d", "e", "f", "g"]


def test_among_one_versions_samples_the_least_wanted_make_room(counters: Counters) -> None:
    outbox = Outbox(1000, counters)
    for name, version, priority in (
        ("a", 2, 9),
        ("b", 2, 3),
        ("c", 2, 3),
        ("d", 1, 15),
        ("e", 2, 5),
    ):
        assert outbox.offer(sample(name, version), 1.0, priority)
    gone = []
    for name in "fghi":
        before = set(outbox._held)
        taken = outbox.offer(sample(name, 2), 1.0, 5)
        gone += sorted(before - set(outbox._held))
        assert taken == (name in "fgh")
    # The older version whatever its priority, then the lowest, the oldest of equals; never equals.
    assert gone == ["d", "b", "c"]
    assert stats(counters).shed == {"superseded": 3, "outbox_full": 1}
    assert outbox.offer(sample("j", 3), 1.0, 0)
    assert set(outbox._held) == {"a", "f", "g", "h", "j"}


def test_a_trainer_that_takes_nothing_leaves_no_trace_of_what_was_shed(counters: Counters) -> None:
    """The head waits for credit for ever; what is superseded behind it must not pile up."""
    outbox = Outbox(1000, counters)
    for version in range(2000):
        assert outbox.offer(sample(f"v{version}", version), 1.0)
        outbox.peek(0.0)
    sizes = [len(outbox._held), len(outbox._waiting), len(outbox._versions), len(outbox._bins)]
    assert sizes == [5, 5, 5, 5]


def test_offering_looks_at_no_other_sample(counters: Counters) -> None:
    """O(1): as many samples are read with 10 held as with 4000, shedding included."""
    reads = []
    for held in (10, 4000):
        outbox = Outbox(held * 200, counters)
        for number in range(held):
            assert outbox.offer(Counted.of_200(f"s{number}", 1 + number % 2), 1.0, number % 16)
        Counted.reads = 0
        assert outbox.offer(Counted.of_200("new", 3), 1.0)
        reads.append(Counted.reads)
    assert reads[0] == reads[1] < 10


def test_room_is_made_before_anything_is_copied_and_is_given_back(counters: Counters) -> None:
    pool = HostPool(1010)
    outbox = Outbox(1000, counters, pool)
    for name in "abc":
        loan = outbox.reserve(300, 1, 0, 1.0)
        assert loan is not None
        assert outbox.offer(lent(name, 1, loan), 1.0)
        del loan
    assert (outbox.nbytes, pool.held) == (900, 960)
    assert outbox.reserve(300, 1, 0, 1.0) is None
    head = outbox.peek(0.0)
    assert head is not None and outbox.mark_sent(head)
    # a is being read by whoever sends it: b's memory comes first.
    loan = outbox.reserve(300, 2, 0, 1.0)
    assert loan is not None
    assert set(outbox._held) == {"c"}
    del head, loan
    assert pool.held == 320
    assert outbox.offer(lent("d", 2, outbox.reserve(300, 2, 0, 1.0)), 1.0)
    outbox.shed("over")
    assert pool.held == 0
    assert stats(counters).shed == {"outbox_full": 1, "superseded": 2, "over": 2}


def test_a_sample_too_large_for_what_is_older_displaces_nothing(counters: Counters) -> None:
    outbox = Outbox(1000, counters)
    for name, version in (("a", 1), ("b", 2), ("c", 2), ("d", 2), ("e", 2)):
        assert outbox.offer(sample(name, version), 1.0)
    assert not outbox.offer(sample("f", 2, nbytes=400), 1.0)
    assert len(outbox) == 5
    assert stats(counters).shed == {"outbox_full": 1}


def test_sent_samples_count_until_acknowledged_and_come_again_in_order(
    counters: Counters,
) -> None:
    outbox = Outbox(1000, counters)
    for name in "abc":
        outbox.offer(sample(name, 1), 1.0)
    for _ in range(2):
        head = outbox.peek(0.0)
        assert head is not None and outbox.mark_sent(head)
    assert outbox.nbytes == 600
    assert outbox.settle("a") and not outbox.settle("a") and not outbox.settle("c")
    assert outbox.nbytes == 400
    assert outbox.requeue_sent() == {"b"}
    order = []
    while (head := outbox.peek(0.0)) is not None:
        assert outbox.mark_sent(head)
        order.append(head.sample_id)
    assert order == ["b", "c"]
    assert outbox.settle("b") and outbox.settle("c")
    assert outbox.wait_empty(0.0)


def test_a_sample_shed_after_the_peek_is_not_sent(counters: Counters) -> None:
    outbox = Outbox(200, counters)
    outbox.offer(sample("a", 1), 1.0)
    head = outbox.peek(0.0)
    assert head is not None
    assert outbox.offer(sample("b", 2), 1.0)
    assert not outbox.mark_sent(head)
    assert stats(counters).shed == {"superseded": 1}


def test_an_offer_keeps_its_deadline_and_counts(counters: Counters) -> None:
    outbox = Outbox(1000, counters)
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with outbox._changed:
            held.set()
            done.wait(10.0)

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(10.0)
    assert not outbox.offer(sample("a", 1), 0.01)
    done.set()
    thread.join(10.0)
    assert stats(counters).shed == {"deadline": 1}


def test_close_wakes_the_waiter_sheds_the_rest_and_takes_no_more(counters: Counters) -> None:
    outbox = Outbox(1000, counters)
    found: list[object] = []
    thread = threading.Thread(target=lambda: found.append(outbox.peek(60.0)))
    thread.start()
    outbox.close()
    thread.join(10.0)
    assert found == [None]
    assert not outbox.offer(sample("a", 1), 1.0)
    assert stats(counters).shed["closed"] == 1


def test_every_sample_of_many_threads_is_settled_or_shed(counters: Counters) -> None:
    outbox, settled = Outbox(2000, counters), []

    def fill(worker: int) -> None:
        for i in range(200):
            outbox.offer(sample(f"{worker}-{i}", i % 7), 5.0)

    def empty() -> None:
        while (head := outbox.peek(1.0)) is not None:
            if outbox.mark_sent(head) and outbox.settle(head.sample_id):
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
    assert len(settled) + sum(stats(counters).shed.values()) == 800
