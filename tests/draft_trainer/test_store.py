"""The sample store: bounds, order, what a restart finds, and draws that weights have not seen."""

from __future__ import annotations

import random
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from draft_trainer.ingest.arena import ALIGNMENT, aligned
from draft_trainer.ingest.database import FILE
from draft_trainer.ingest.store import ARENA, SampleStore
from slipstream.errors import RefusedError, StatusCode
from tests.draft_trainer.samples import (
    all_drawn,
    is_intact,
    nbytes,
    open_store,
    put,
    received,
    rows_of,
    times_drawn,
)

SIZE = aligned(nbytes(16))


def test_store_capacity_evicts_oldest_versions_first(tmp_path: Path) -> None:
    evicted: Counter[str] = Counter()
    store = open_store(tmp_path, 10 * SIZE, on_evicted=lambda why, n: evicted.update({why: n}))
    store.begin("run", {})
    for i in range(40):
        assert put(store, f"s{i}", version=i // 4)
        assert store.counts().nbytes <= store.capacity_bytes == 10 * SIZE
    counts = store.counts()
    assert counts.resident == 10 and counts.nbytes == 10 * SIZE
    assert evicted == {"capacity": 30}
    drawn = store.draw("run", 10**6).samples
    assert {s.sample_id for s in drawn} == {f"s{i}" for i in range(30, 40)}
    assert [s.policy_version for s in drawn] == [9] * 4 + [8] * 4 + [7] * 2
    assert all(is_intact(sample) for sample in drawn)


def test_drawn_batch_keeps_its_bytes_until_freed(tmp_path: Path) -> None:
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
    assert store.counts().resident == 6 and store.counts().nbytes == 10 * SIZE
    # While the batch is read, room for six samples is all there is.
    held = [received(store, f"t{i}") for i in range(6)]
    assert store.credit_bytes() == 0
    with pytest.raises(RefusedError) as caught:
        store.reserve(1)
    assert caught.value.code is StatusCode.RESOURCE_EXHAUSTED
    assert f"{10 * SIZE} of them read or received now" in caught.value.expected
    assert store.counts().resident == 0
    batch.clear()
    assert all(put(store, f"u{i}") for i in range(4))
    assert store.accept("run", held) == [True] * 6


def test_store_finds_duplicates_after_restart(tmp_path: Path) -> None:
    store = open_store(tmp_path, ledger_entries=3, max_epochs=1)
    store.begin("run", {})
    samples = [received(store, name) for name in ("a", "b", "a")]
    assert store.accept("run", samples) == [True, True, False]
    del samples
    assert store.counts().nbytes == 2 * SIZE
    assert store.seen("run", "a") and not store.seen("run", "c")
    store.close()
    store = open_store(tmp_path, ledger_entries=3, max_epochs=1)
    samples = [received(store, name) for name in ("a", "c", "b", "c")]
    assert store.accept("run", samples) == [False, True, False, False]
    del samples
    assert store.counts().nbytes == 3 * SIZE
    # Ids outlive their samples, the newest three of them; ids of samples that are held, always.
    all_drawn(store)
    store.saved(store.draws)
    assert store.counts().resident == 0 == store.counts().nbytes
    for name in ("d", "e", "f"):
        assert put(store, name)
    assert store.seen("run", "a")
    store.saved(0)
    all_drawn(store)
    store.saved(store.draws)
    assert [store.seen("run", name) for name in "abcdef"] == [False] * 3 + [True] * 3
    # Another run's ids are others.
    store.begin("ru", {})
    assert put(store, "nf")
    store.begin("run", {})
    assert store.seen("run", "f")


def test_store_restart_finds_samples_policies_and_run(tmp_path: Path) -> None:
    options: dict[str, Any] = {"held_out_fraction": 0.5}
    store = open_store(tmp_path, **options)
    store.begin("run", {"hidden_size": 8})
    for i in range(40):
        put(store, f"s{i}", version=1 + i % 2)
    store.put_policy("run", 1, ("aa", "bb"))
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
    assert {s.policy_version for s in store.held_out("run", newest_versions=1)} == {2}
    # It draws as the one before would have, or did.
    assert all_drawn(store, tokens=5 * 16) == following
    assert store.policies() == [(1, ["aa", "bb"])]
    with pytest.raises(RefusedError, match="which began meanwhile"):
        store.put_policy("other", 1, ("aa", "bb"))
    assert not store.keep_versions("other", [])
    assert store.keep_versions("run", [2]) and store.policies() == []
    assert {s.policy_version for s in store.held_out("run")} == {2}


def test_exhausted_samples_stay_until_a_state_has_them(tmp_path: Path) -> None:
    evicted: Counter[str] = Counter()
    store = open_store(
        tmp_path, 10 * SIZE, max_epochs=1, on_evicted=lambda why, n: evicted.update({why: n})
    )
    store.begin("run", {})
    for i in range(10):
        put(store, f"s{i}")
    first = all_drawn(store, tokens=4 * 16)
    assert figures(store) == (4, 6, 10 * SIZE)
    put(store, "new")
    assert (*figures(store)[:2], evicted) == (3, 7, {"unsaved": 1})
    all_drawn(store, tokens=2 * 16)
    assert store.counts().unsaved == 5
    store.saved(1)
    assert figures(store) == (2, 5, 7 * SIZE)
    store.close()
    # The second draw is lost with the weights; of the first, which a state has, nothing returns.
    store = open_store(
        tmp_path, 10 * SIZE, max_epochs=1, on_evicted=lambda why, n: evicted.update({why: n})
    )
    store.rewind(1, 0)
    assert (*figures(store)[:2], evicted) == (0, 7, {"unsaved": 1})
    assert not set(all_drawn(store)) & set(first)
    # Where even that state is damaged, what is left of the first draw cannot return.
    store.close()
    store = open_store(
        tmp_path, 10 * SIZE, max_epochs=1, on_evicted=lambda why, n: evicted.update({why: n})
    )
    store.rewind(0, 0)
    assert evicted == {"unsaved": 1, "undone": 4} and store.counts().pending == 7
    assert rows_of(store)["draws"] == 0


def test_rewind_to_release_keeps_draws_before_it(tmp_path: Path) -> None:
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
    assert store.counts().pending == 8
    assert all_drawn(store, tokens=4 * 16) == after
    store.close()
    # Killed between writing release 2 and noting it.
    store = open_store(tmp_path, max_epochs=1)
    store.rewind(None, 2)
    assert store.counts().pending == 4
    assert not set(all_drawn(store)) & {*before, *after}


@pytest.mark.parametrize("resumed", [None, 1000], ids=["first start", "reboot"])
@pytest.mark.parametrize("moment", ["before", "between", "after"])
def test_kill_while_release_is_noted_repeats_no_sample(
    tmp_path: Path, resumed: int | None, moment: str
) -> None:
    """The release's weights have seen every draw. After a reboot the samples are new, and the
    training state, which goes on with its own numbers, is older than the release."""
    store = open_store(tmp_path, max_epochs=2)
    store.rewind(resumed, 0)
    store.begin("run", {})
    for i in range(8):
        put(store, f"s{i}")
    seen = [*all_drawn(store, tokens=4 * 16), *all_drawn(store, tokens=8 * 16)]

    def killed(draw: int) -> None:
        """Forget draws as ``saved`` does, and end before or after that."""
        if moment == "after":
            SampleStore.saved(store, draw)
        raise KeyboardInterrupt

    if moment != "before":
        store.saved = killed  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            store.released(1)
    store.close()
    store = open_store(tmp_path, max_epochs=2)
    store.rewind(None, 1)
    while drawn := all_drawn(store):
        seen += drawn
    assert Counter(seen) == dict.fromkeys((f"s{i}" for i in range(8)), 2)


def test_skipped_state_does_not_claim_later_draws(tmp_path: Path) -> None:
    """A training state that cannot be read at two starts, and can at the third, has not seen what
    was drawn meanwhile: a draw number is never used twice, also if a start is killed at once."""
    store = open_store(tmp_path, max_epochs=1)
    store.begin("run", {})
    for name in "ab":
        put(store, name)
        all_drawn(store)
        store.saved(store.draws)
    store.close()
    for _ in range(2):
        # The state of draw 1 is resumed instead of that of draw 2.
        store = open_store(tmp_path, max_epochs=1)
        store.rewind(1, 0)
        store.close()
    store = open_store(tmp_path, max_epochs=1)
    put(store, "new")
    assert all_drawn(store) == ["new"]
    store.close()
    store = open_store(tmp_path, max_epochs=1)
    store.rewind(2, 0)
    assert all_drawn(store) == ["new"]


def test_rewind_past_damaged_release_repeats_its_draws(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_epochs=2)
    store.begin("run", {})
    for i in range(8):
        put(store, f"s{i}")
    before = all_drawn(store, tokens=4 * 16)
    store.released(1)
    after = all_drawn(store, tokens=4 * 16)
    store.released(2)
    store.close()
    # No state either: the weights are those of release 1.
    store = open_store(tmp_path, max_epochs=2)
    store.rewind(None, 1)
    assert times_drawn(store, before) == dict.fromkeys(before, 1)
    assert times_drawn(store, after) == dict.fromkeys(after, 0)


def test_draw_numbers_go_on_from_older_state(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_epochs=1)
    store.rewind(1000, 0)
    store.begin("run", {})
    put(store, "a")
    assert all_drawn(store) == ["a"] and store.draws == 1001
    store.close()
    store = open_store(tmp_path, max_epochs=1)
    store.rewind(1000, 0)
    assert store.counts().pending == 1


def test_put_back_undoes_the_last_draw(tmp_path: Path) -> None:
    store = open_store(tmp_path, max_epochs=2)
    store.begin("run", {})
    for i in range(6):
        put(store, f"s{i}", version=1 + i % 2)
    for _ in range(3):
        drawn = store.draw("run", 10**6)
        assert len(drawn.samples) == 6
        store.put_back(drawn)
        assert store.counts().pending == 6
    all_drawn(store)
    drawn = store.draw("run", 10**6)
    assert store.counts().unsaved == 6
    store.put_back(drawn)
    store.keep_versions("run", [2])
    assert (store.counts().unsaved, store.counts().resident) == (0, 3)
    assert len(all_drawn(store)) == 3
    store.close()
    store = open_store(tmp_path, max_epochs=2)
    assert store.counts().unsaved == 3 == store.counts().resident


def test_draw_ahead_is_full_bounded_and_undone(tmp_path: Path) -> None:
    store = open_store(tmp_path, 8 * SIZE, max_epochs=1)
    store.begin("run", {})
    for i in range(6):
        put(store, f"s{i}")
    first = store.draw("run", 16)
    assert not store.draw("run", 16 * 5, ahead=True).samples, "more may come for it"
    assert not store.draw("run", 16 * 4, ahead=True).samples, "half of the space is for others"
    second = store.draw("run", 16 * 3, ahead=True)
    assert [len(first.samples), len(second.samples)] == [1, 3]
    # What is not trained on after all goes back together.
    store.put_back(first)
    assert store.counts().pending == 6
    del first, second
    number = store.draw("run", 16).number
    all_ahead = [s.sample_id for s in store.draw("run", 16 * 2, ahead=True).samples]
    store.saved(number)
    assert len(all_ahead) == 2 and store.counts().pending == 3
    store.close()
    # Killed while the one ahead was not trained on.
    store = open_store(tmp_path, 8 * SIZE, max_epochs=1)
    store.rewind(number, 0)
    assert set(all_drawn(store)) >= set(all_ahead) and store.counts().resident == 5


def test_new_run_begins_with_empty_store(tmp_path: Path) -> None:
    store = open_store(tmp_path, 10 * SIZE)
    store.begin("one", {})
    for i in range(10):
        put(store, f"s{i}")
    samples = store.draw("one", 10**6).samples
    kept = samples.pop()
    samples.clear()
    store.begin("two", {})
    assert figures(store) == (0, 0, SIZE) and store.counts().resident == 0
    assert all_drawn(store, "one") == [] == store.held_out("one")
    for i in range(9):
        assert put(store, f"s{i}")
    assert is_intact(kept) and len(all_drawn(store, "two")) == 9


def test_store_size_is_bounded_over_a_run(tmp_path: Path) -> None:
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
            fill.append(store.counts().nbytes / capacity)
            rows.append(rows_of(store)["samples"])
            sizes.append(sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file()))
    half = len(rows) // 2
    assert max(rows) <= 100 + capacity // aligned(nbytes(4))
    # The write-ahead log ends a few pages beyond its bound, as the transactions fall.
    assert max(sizes[half:]) <= 1.01 * max(sizes[:half])
    # About twenty samples fit: what is free between them and the next one's room is not much.
    assert sum(fill[3:]) / len(fill[3:]) > 0.75 and max(fill) <= 1
    assert (tmp_path / FILE).stat().st_size < 200_000
    assert (tmp_path / ARENA).stat().st_size == capacity + ALIGNMENT


def test_draws_table_is_bounded_without_states(tmp_path: Path) -> None:
    """Forgotten samples keep no draws, with ``state_every_steps = 0`` or on a full disk."""
    store = open_store(tmp_path, 20 * SIZE, ledger_entries=50, max_epochs=2)
    store.begin("run", {})
    for number in range(400):
        assert put(store, f"s{number}", number // 10)
        all_drawn(store)
    rows = rows_of(store)
    assert rows["draws"] <= 2 * rows["samples"] <= 2 * (50 + 20)
    # What is left is undone all the same.
    store.rewind(0, 0)
    assert rows_of(store)["draws"] == 0
    assert store._db.one("SELECT total(times_drawn) FROM samples") == 0


def test_store_threads_lose_no_sample(tmp_path: Path) -> None:
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
    assert store.counts().nbytes == 0


def test_smaller_capacity_evicts_what_lies_beyond(tmp_path: Path) -> None:
    evicted: Counter[str] = Counter()
    store = open_store(tmp_path, 10 * SIZE)
    store.begin("run", {})
    for i in range(10):
        put(store, f"s{i}")
    store.close()
    store = open_store(tmp_path, 7 * SIZE, on_evicted=lambda why, n: evicted.update({why: n}))
    assert evicted == {"capacity": 3} and store.counts().nbytes == 7 * SIZE
    assert all(is_intact(sample) for sample in store.draw("run", 10**6).samples)


def figures(store: SampleStore) -> tuple[int, int, int]:
    """Unsaved, pending, bytes."""
    counts = store.counts()
    return counts.unsaved, counts.pending, counts.nbytes
