"""The order in which the sample store evicts and draws."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.draft_trainer.samples import (
    all_drawn,
    open_store,
    put,
    received,
    times_drawn,
)


def test_draw_order_follows_the_seed(tmp_path: Path) -> None:
    def drawn_after(interruptions: int, seed: int) -> list[str]:
        folder = tmp_path / f"{interruptions}-{seed}"
        store = open_store(folder, 1 << 18, max_epochs=3, seed=seed)
        store.begin("run", {})
        for i in range(30):
            put(store, f"s{i}", i % 2)
        names = []
        for step in range(60):
            if step < interruptions:
                store.put_back(store.draw("run", 7 * 16))
            names += all_drawn(store, tokens=5 * 16)
        assert {names.count(name) for name in names} == {3} and len(names) == 90
        # Not the same order in every epoch.
        first, second = (names[0:15], names[30:45])
        assert set(first) == {f"s{i}" for i in range(1, 30, 2)} and first != second
        return names

    assert drawn_after(0, 1) == drawn_after(9, 1) != drawn_after(0, 2)


def test_store_order_matches_a_sorting_model(tmp_path: Path) -> None:
    """Random arrivals, draws, undone draws and evictions."""
    rng = random.Random(0)
    store = open_store(tmp_path, 1 << 20, max_epochs=3, held_out_fraction=0.3)
    store.begin("run", {})
    model: dict[str, list[int]] = {}
    for i in range(600):
        action = rng.random()
        if action < 0.45:
            name = f"s{i}"
            store.accept("run", [received(store, name, i // 80, prompt=rng.randrange(40))])
            model[name] = [i // 80, 0]
        elif action < 0.75:
            held = {sample.sample_id for sample in store.held_out("run")}
            drawn: Any = store.draw("run", rng.randrange(1, 200))
            left = sorted(t - v for n, (v, t) in model.items() if n not in held and t < 3)
            found = [model[s.sample_id][1] - s.policy_version for s in drawn.samples]
            # One sample even above the bound.
            assert found == left[: len(found)] and bool(found) == bool(left)
            if rng.random() < 0.3:
                store.put_back(drawn)
            else:
                for sample in drawn.samples:
                    model[sample.sample_id][1] += 1
            sample = drawn = None
        else:
            before = set(times_drawn(store, model))
            store._evict_worst(1)
            for name in before - set(times_drawn(store, model)):
                # The one to go is exhausted, or of the oldest version and trained the most.
                version, times = model.pop(name)
                others = [(v, -t) for v, t in model.values() if t < 3]
                if times < 3:
                    assert (version, -times) <= min(others, default=(version, -times))
                    assert all(t < 3 for _, t in model.values())
        assert times_drawn(store, model) == {name: times for name, (_, times) in model.items()}
    held = {sample.sample_id for sample in store.held_out("run")}
    pending = sum(times == 0 for name, (_, times) in model.items() if name not in held)
    assert store.counts().pending == pending
