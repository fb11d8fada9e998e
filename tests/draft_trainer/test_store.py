"""The sample store: bounds, order, what a restart finds, and draws that weights have not seen."""

from __future__ import annotations

import random
import sqlite3
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from draft_trainer.drafters.policy import PolicyHead
from draft_trainer.ingest.arena import aligned
from draft_trainer.ingest.store import ARENA, LEDGER, Ledger, SampleStore
from slipstream.errors import RefusedError, StatusCode
from slipstream.tensors import digest
from tests.draft_trainer.samples import (
    all_drawn,
    content,
    is_intact,
    nbytes,
    open_store,
    put,
    received,
)

SIZE = aligned(nbytes(16))


def test_bytes_never_exceed_the_capacity_and_old_versions_go_first(tmp_path: Path) -> None:
    evicted: Counter[str] = Counter()
    store = open_store(tmp_path, 10 * SIZE, on_evicted=lambda why, n: evicted.update({why: n}))
    store.begin("run", {})
    for i in range(40):
        assert put(store, f"s{i}", version=i // 4)
        assert store.nbytes <= store.capacity_bytes == 10 * SIZE
    assert len(store) == 10 and store.nbytes == 10 * SIZE
    assert evicted == {"capacity": 30}
    drawn = store.draw("run", 10**6).samples
    assert {s.sample_id for s in drawn} == {f"s{i}" for i in range(30, 40)}
    assert [s.policy_version for s in drawn] == [9] * 4 + [8] * 4 + [7] * 2
    assert all(is_intact(sample) for sample in drawn)


def test_a_batch_keeps_its_bytes_while_others_need_the_room(tmp_path: Path) -> None:
    store = open_store(tmp_path, 10 * SIZE, max_epochs=1)
    store.begin("run", {})
    for i in range(10):
        put(store, f"s{i}")
    batch = store.draw("run", 4 * 16).samples
    assert len(batch) == 4 and store.credit_bytes() == 6 * SIZE
    store.released(0)  # Those four may go now, but for the batch.
    for i in range(10, 40):
        put(store, f"s{i}")
    assert all(is_intact(sample) for sample in batch)
    assert len(store) == 6 and store.nbytes == 10 * SIZE
    # While the batch is read, six samples' room is all there is.
    held = [received(store, f"t{i}") for i in range(6)]
    assert store.credit_bytes() == 0
    with pytest.raises(RefusedError) as caught:
        store.reserve(1)
    assert caught.value.code is StatusCode.RESOURCE_EXHAUSTED
    assert f"{10 * SIZE} of them read or received now" in caught.value.expected
    assert len(store) == 0
    batch.clear()
    assert all(put(store, f"u{i}") for i in range(4))
    assert store.accept(held) == [True] * 6


def test_too_large_for_the_whole_arena(tmp_path: Path) -> None:
    store = open_store(tmp_path, 10 * SIZE)
    store.begin("run", {})
    put(store, "a")
    with pytest.raises(RefusedError) as caught:
        store.reserve(10 * SIZE + 1)
    assert (caught.value.field, caught.value.found) == ("sample", f"{10 * SIZE + 1} bytes")
    assert f"at most {10 * SIZE} bytes (replay.capacity_bytes)" in caught.value.expected
    assert len(store) == 1


def test_reservations_come_back(tmp_path: Path) -> None:
    store = open_store(tmp_path, 10 * SIZE)
    store.begin("run", {})
    first = store.reserve(100)
    assert first.block.ctypes.data % 64 == 0 and first.block.shape == (100,)
    assert store.nbytes == 128
    first.release()
    first.release()
    assert store.nbytes == 0
    second = store.reserve(100)
    view = second.block[3:]
    del second
    assert store.nbytes == 128
    del view
    assert store.nbytes == 0


def test_duplicates_in_one_call_and_after_a_restart(tmp_path: Path) -> None:
    store = open_store(tmp_path, ledger_entries=3, max_epochs=1)
    store.begin("run", {})
    pairs = [received(store, name) for name in ("a", "b", "a")]
    assert store.accept(pairs) == [True, True, False]
    del pairs
    assert store.nbytes == 2 * SIZE
    assert store.seen("a") and not store.seen("c")
    store.close()
    store = open_store(tmp_path, ledger_entries=3, max_epochs=1)
    assert not put(store, "a") and put(store, "c") and store.nbytes == 3 * SIZE
    # Ids outlive their samples, the newest three of them; ids of samples that are held, always.
    all_drawn(store)
    store.saved(store.draws)
    assert len(store) == 0 == store.nbytes
    for name in ("d", "e", "f"):
        assert put(store, name)
    assert store.seen("a")
    store.saved(0)
    all_drawn(store)
    store.saved(store.draws)
    assert [store.seen(name) for name in "abcdef"] == [False] * 3 + [True] * 3
    # Another run's ids are others.
    store.begin("ru", {})
    assert put(store, "nf")
    store.begin("run", {})
    assert store.seen("f")


def test_a_restart_finds_samples_policies_held_out_share_and_run(tmp_path: Path) -> None:
    options: dict[str, Any] = {"held_out_fraction": 0.5}
    store = open_store(tmp_path, **options)
    store.begin("run", {"hidden_size": 8})
    for i in range(40):
        put(store, f"s{i}", version=1 + i % 2)
    head = PolicyHead(1, torch.randn(6, 4), torch.randn(9, 4))
    digests = (digest(head.lm_head_rows), digest(head.embed_tokens))
    kept = store.keep_policy("run", head, digests)
    assert torch.equal(kept.embed_tokens, head.embed_tokens)
    held = [s.sample_id for s in store.held_out("run")]
    all_drawn(store, tokens=5 * 16)
    number = store.draws
    store.saved(number)
    following = all_drawn(store, tokens=5 * 16)
    store.close()

    store = open_store(tmp_path, **options)
    assert store.run == ("run", {"hidden_size": 8})
    store.rewind(number, 0)
    samples = store.held_out("run")
    assert [s.sample_id for s in samples] == held and 10 <= len(held) <= 30
    assert all(is_intact(sample) for sample in samples)
    # It draws as the one before would have, or did.
    assert all_drawn(store, tokens=5 * 16) == following
    ((found, names),) = store.policies()
    assert found.policy_version == 1 and names == digests
    assert torch.equal(found.lm_head_rows, head.lm_head_rows)
    with pytest.raises(RefusedError, match="which began meanwhile"):
        store.keep_policy("other", head, digests)
    store.keep_versions("run", [2])
    assert store.policies() == [] and list((tmp_path / "policies").iterdir()) == []
    assert {s.policy_version for s in store.held_out("run")} == {2}


def test_draws_that_no_state_has_are_undone(tmp_path: Path) -> None:
    """Epochs as the weights see them: those up to the state, then those after the restart."""
    seen: Counter[str] = Counter()
    store = open_store(tmp_path, 1 << 20, max_epochs=3)
    store.begin("run", {})
    for i in range(30):
        put(store, f"s{i}")
    rng = random.Random(0)
    draws: list[tuple[int, list[str]]] = []
    saved = 0
    for _ in range(200):
        names = all_drawn(store, tokens=rng.randrange(1, 100))
        if not names:
            break
        draws.append((store.draws, names))
        if rng.random() < 0.2:
            saved = store.draws
            store.saved(saved)
        if rng.random() < 0.2:
            store.close()
            store = open_store(tmp_path, 1 << 20, max_epochs=3)
            store.rewind(saved, 0)
            draws = [(number, names) for number, names in draws if number <= saved]
            assert store.unsaved == 0
    for _, names in draws:
        seen.update(names)
    assert set(seen.values()) == {3} and len(seen) == 30
    assert store._ledger.rows()["draws"] <= 90


def test_spent_samples_stay_until_a_state_has_them_and_give_way_first(tmp_path: Path) -> None:
    evicted: Counter[str] = Counter()
    store = open_store(
        tmp_path, 10 * SIZE, max_epochs=1, on_evicted=lambda why, n: evicted.update({why: n})
    )
    store.begin("run", {})
    for i in range(10):
        put(store, f"s{i}")
    first = all_drawn(store, tokens=4 * 16)
    assert (store.unsaved, store.pending, store.nbytes) == (4, 6, 10 * SIZE)
    put(store, "new")
    assert (store.unsaved, store.pending, evicted) == (3, 7, {"unsaved": 1})
    all_drawn(store, tokens=2 * 16)
    assert store.unsaved == 5
    store.saved(1)
    assert (store.unsaved, store.nbytes) == (2, 7 * SIZE)
    store.close()
    # The second draw is lost with the weights; of the first, which a state has, nothing returns.
    store = open_store(
        tmp_path, 10 * SIZE, max_epochs=1, on_evicted=lambda why, n: evicted.update({why: n})
    )
    store.rewind(1, 0)
    assert (store.unsaved, store.pending, evicted) == (0, 7, {"unsaved": 1})
    assert not set(all_drawn(store)) & set(first)
    # Where even that state is damaged, what is left of the first draw cannot return.
    store.close()
    store = open_store(
        tmp_path, 10 * SIZE, max_epochs=1, on_evicted=lambda why, n: evicted.update({why: n})
    )
    store.rewind(0, 0)
    assert evicted == {"unsaved": 1, "undone": 4} and store.pending == 7


def test_weights_of_a_release_have_seen_what_was_drawn_before_it(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_epochs=1)
    store.begin("run", {})
    for i in range(12):
        put(store, f"s{i}")
    before = all_drawn(store, tokens=4 * 16)
    store.released(1)
    after = all_drawn(store, tokens=4 * 16)
    store.close()
    # No state: the weights are those of release 1.
    store = open_store(tmp_path, max_epochs=1)
    store.rewind(None, 1)
    assert store.pending == 8
    assert all_drawn(store, tokens=4 * 16) == after
    store.close()
    # Killed between writing release 2 and noting it.
    store = open_store(tmp_path, max_epochs=1)
    store.rewind(None, 2)
    assert store.pending == 4
    assert not set(all_drawn(store)) & {*before, *after}


def test_a_state_from_before_this_ledger_is_never_reached_by_its_numbers(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_epochs=1)
    store.rewind(1000, 0)
    store.begin("run", {})
    put(store, "a")
    assert all_drawn(store) == ["a"] and store.draws == 1001
    store.close()
    store = open_store(tmp_path, max_epochs=1)
    store.rewind(1000, 0)
    assert store.pending == 1


def test_a_batch_that_was_put_back_is_as_if_it_had_not_been_drawn(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_epochs=2)
    store.begin("run", {})
    for i in range(6):
        put(store, f"s{i}", version=1 + i % 2)
    for _ in range(3):
        drawn = store.draw("run", 10**6)
        assert len(drawn.samples) == 6
        store.put_back(drawn)
        assert store.pending == 6
    all_drawn(store)
    drawn = store.draw("run", 10**6)
    assert store.unsaved == 6
    store.put_back(drawn)
    store.keep_versions("run", [2])
    assert (store.unsaved, len(store)) == (0, 3)
    assert len(all_drawn(store)) == 3
    store.close()
    store = open_store(tmp_path, max_epochs=2)
    assert store.unsaved == 3 and len(store) == 0


def test_another_run_begins_empty_and_the_old_one_draws_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path, 10 * SIZE)
    store.begin("one", {})
    for i in range(10):
        put(store, f"s{i}")
    samples = store.draw("one", 10**6).samples
    kept = samples.pop()
    samples.clear()
    store.begin("two", {})
    assert store.nbytes == SIZE and len(store) == 0 == store.pending
    assert all_drawn(store, "one") == [] == store.held_out("one")
    for i in range(9):
        assert put(store, f"s{i}")
    assert is_intact(kept) and len(all_drawn(store, "two")) == 9


def test_nothing_grows_with_the_length_of_a_run(tmp_path: Path) -> None:
    """Fifty times the capacity, in samples of many sizes, half of it never trained on."""
    capacity = 40 * SIZE
    store = open_store(tmp_path, capacity, ledger_entries=100, max_epochs=2)
    store.begin("run", {})
    rng = random.Random(0)
    streamed = number = 0
    fill, sizes, rows = [], [], []
    while streamed < 50 * capacity:
        tokens = rng.randrange(4, 64)
        number += 1
        assert put(store, f"s{number}", number // 100, tokens)
        streamed += aligned(nbytes(tokens))
        if rng.random() < 0.3:
            all_drawn(store, tokens=64)
        if rng.random() < 0.05:
            store.saved(store.draws)
        if number % 50 == 0:
            fill.append(store.nbytes / capacity)
            rows.append(store._ledger.rows()["samples"])
            sizes.append(sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file()))
    half = len(rows) // 2
    assert max(rows) <= 100 + capacity // aligned(nbytes(4))
    # The write-ahead log ends a few pages beyond its bound, as the transactions fall.
    assert max(sizes[half:]) <= 1.01 * max(sizes[:half])
    # About twenty samples fit: what is free between them and the next one's room is not much.
    assert sum(fill[3:]) / len(fill[3:]) > 0.75 and max(fill) <= 1
    ledger = tmp_path / LEDGER
    assert ledger.stat().st_size < 200_000
    assert (tmp_path / ARENA).stat().st_size == capacity


def test_puts_and_draws_from_many_threads_lose_nothing(tmp_path: Path) -> None:
    store = open_store(tmp_path, 1 << 20, max_epochs=1)
    store.begin("run", {})
    drawn: list[list[str]] = [[] for _ in range(2)]
    done = threading.Event()

    def add(part: int) -> None:
        for i in range(100):
            assert put(store, f"{part}-{i}")
            assert not put(store, f"{part}-{i // 2}")

    def draw(part: int) -> None:
        while True:
            last = done.is_set()
            samples = store.draw("run", 100).samples
            assert all(is_intact(sample) for sample in samples)
            drawn[part] += [sample.sample_id for sample in samples]
            if last and not samples:
                return

    adders = [threading.Thread(target=add, args=(i,)) for i in range(3)]
    drawers = [threading.Thread(target=draw, args=(i,)) for i in range(2)]
    for thread in (*adders, *drawers):
        thread.start()
    for thread in adders:
        thread.join(60)
    done.set()
    for thread in drawers:
        thread.join(60)
    names = drawn[0] + drawn[1]
    assert len(names) == len(set(names)) == 300
    store.saved(store.draws)
    assert store.nbytes == 0


def test_a_smaller_arena_gives_up_what_lies_beyond_it(tmp_path: Path) -> None:
    evicted: Counter[str] = Counter()
    store = open_store(tmp_path, 10 * SIZE)
    store.begin("run", {})
    for i in range(10):
        put(store, f"s{i}")
    store.close()
    store = open_store(tmp_path, 7 * SIZE, on_evicted=lambda why, n: evicted.update({why: n}))
    assert evicted == {"capacity": 3} and store.nbytes == store.capacity_bytes == 7 * SIZE
    assert all(is_intact(sample) for sample in store.draw("run", 10**6).samples)


def test_a_ledger_that_cannot_be_written_accepts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store(tmp_path, 3 * SIZE)
    store.begin("run", {})
    for name in "abc":
        put(store, name)

    def full(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "drop", full)
        with pytest.raises(RefusedError) as caught:
            store.reserve(100)
        assert (caught.value.field, caught.value.code) == (
            "replay.directory",
            StatusCode.RESOURCE_EXHAUSTED,
        )
    assert len(store) == 3 and store.nbytes == 3 * SIZE
    pair = received(store, "d")
    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "add", full)
        with pytest.raises(RefusedError, match=r"disk is full"):
            store.accept([pair])
    assert not store.seen("d")
    assert store.accept([pair]) == [True]
    assert sorted(all_drawn(store)) == ["b", "c", "d"]


def test_a_damaged_ledger_is_refused(tmp_path: Path) -> None:
    open_store(tmp_path).close()
    (tmp_path / LEDGER).write_bytes(content("noise", 8192).numpy().tobytes())
    with pytest.raises(RefusedError) as caught:
        open_store(tmp_path)
    assert caught.value.code is StatusCode.DATA_LOSS
    assert "remove its folder" in caught.value.next_step


def test_a_sample_outside_its_reservation_is_an_error_of_the_caller(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    store.begin("run", {})
    reservation, sample = received(store, "a")
    other: SampleStore | object = store.reserve(100)
    with pytest.raises(AssertionError, match="does not lie in the reservation"):
        store.accept([(other, sample)])  # type: ignore[list-item]
    assert store.accept([(reservation, sample)]) == [True]


def test_a_duplicate_among_many_is_told_apart_whether_it_came_before_or_with_them(
    tmp_path: Path,
) -> None:
    store = open_store(tmp_path / "s")
    assert put(store, "b")
    many = [received(store, name) for name in ("a", "b", "c", "a", "d")]
    assert store.accept(many) == [True, False, True, False, True]
    assert [store.seen(name) for name in "abcde"] == [True, True, True, True, False]
    assert len(store) == 4
    # Each is drawn from its own bytes: numbers were not mixed up.
    drawn = store.draw("", 1 << 20).samples
    assert sorted(sample.sample_id for sample in drawn) == ["a", "b", "c", "d"]
    for sample in drawn:
        fresh, other = received(store, sample.sample_id)
        assert torch.equal(sample.aux.view(torch.int16), other.aux.view(torch.int16))
        fresh.release()
    store.close()
