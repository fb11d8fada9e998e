"""The mapped file of samples: its allocator against a model, and its views."""

from __future__ import annotations

import gc
import random
import threading
from pathlib import Path

import pytest
import torch

from draft_trainer.ingest.arena import ALIGNMENT, Arena
from slipstream.tensors import Bytes


def start_of(arena: Arena, block: Bytes) -> int:
    return arena.start_of(block.ctypes.data)


def retained(arena: Arena, units: int) -> int:
    """Reserve, own, view no more; the start."""
    block = arena.reserve(units * ALIGNMENT)
    assert block is not None
    start = start_of(arena, block)
    arena.retain(start)
    return start


@pytest.mark.parametrize("seed", range(4))
def test_arena_allocations_match_a_reference_model(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    size = 300
    arena = Arena(tmp_path / "a", size * ALIGNMENT)
    units = [False] * size
    taken: dict[int, int] = {}
    for _ in range(1500):
        if rng.random() < 0.55:
            wanted = rng.randrange(1, 40)
            block = arena.reserve(wanted * ALIGNMENT - rng.randrange(ALIGNMENT))
            fitting = [n for _, n in _runs(units) if n >= wanted]
            assert (block is None) == (not fitting)
            if block is not None:
                start = start_of(arena, block) // ALIGNMENT
                assert not any(units[start : start + wanted])
                # The smallest gap that fits.
                gap = next(n for at, n in _runs(units) if at <= start < at + n)
                assert gap == min(fitting)
                units[start : start + wanted] = [True] * wanted
                arena.retain(start * ALIGNMENT)
                taken[start] = wanted
        elif taken:
            start = rng.choice(list(taken))
            wanted = taken.pop(start)
            del block
            arena.release(start * ALIGNMENT, wanted * ALIGNMENT)
            units[start : start + wanted] = [False] * wanted
            block = None
        assert arena.used == units.count(True) * ALIGNMENT
        if rng.random() < 0.01:
            block = None
            extents = [(start * ALIGNMENT, n * ALIGNMENT) for start, n in taken.items()]
            assert arena.restart(extents) == []
    gaps = [(start // ALIGNMENT, n // ALIGNMENT) for start, n in sorted(arena._free._sizes.items())]
    # What is free is known in as few parts as possible.
    assert gaps == _runs(units)


def _runs(units: list[bool]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for at, used in enumerate(units):
        if not used:
            if runs and sum(runs[-1]) == at:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((at, 1))
    return runs


def test_arena_extent_is_reused_only_when_nothing_views_it(tmp_path: Path) -> None:
    arena = Arena(tmp_path / "a", 4 * ALIGNMENT)
    start = retained(arena, 2)
    view = torch.from_numpy(arena.view(start, 100)).fill_(7)
    part = view[10:20].view(torch.bfloat16)[1:].view(2, 2)
    del view
    arena.release(start, 2 * ALIGNMENT)
    assert (arena.used, arena.pinned) == (2 * ALIGNMENT, 2 * ALIGNMENT)
    assert arena.is_viewed(start) and retained(arena, 2) != start
    assert arena.reserve(1) is None
    assert (part.view(torch.uint8) == 7).all()
    del part
    assert retained(arena, 2) == start


def test_arena_views_ended_on_other_threads_are_counted(tmp_path: Path) -> None:
    arena = Arena(tmp_path / "a", 64 * ALIGNMENT)
    views = []
    for _ in range(64):
        block = arena.reserve(ALIGNMENT)
        assert block is not None
        views.append([block, *(arena.view(start_of(arena, block), 8) for _ in range(3))])
    del block
    assert arena.pinned == arena.size

    def end(part: int) -> None:
        for view in views[part::4]:
            view.clear()

    threads = [threading.Thread(target=end, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    gc.collect()
    assert (arena.pinned, arena.used) == (0, 0)


def test_arena_restart_names_impossible_extents(tmp_path: Path) -> None:
    unit = ALIGNMENT
    arena = Arena(tmp_path / "a", 10 * unit)
    for _ in range(5):
        retained(arena, 2)
    owned, lost = arena.view(2 * unit, 2 * unit), arena.view(6 * unit, 2 * unit)
    extents = [
        (0, 2 * unit),  # sound
        (2 * unit, 2 * unit),  # sound, and viewed
        (unit, unit),  # within the first
        (5 * unit, 2 * unit),  # into what is viewed
        (6 * unit, unit),  # another size than what is viewed
        (8 * unit + 1, unit),  # not aligned
        (9 * unit, 2 * unit),  # beyond the end
        (-unit, unit),
        (8 * unit, 0),
        (2 * unit, 2 * unit),  # twice
    ]
    assert sorted(arena.restart(extents)) == [2, 3, 4, 5, 6, 7, 8, 9]
    assert arena.used == 6 * unit
    del lost
    assert arena.used == 4 * unit
    del owned
    assert arena.used == 4 * unit
    arena.release(0, 2 * unit)
    arena.release(2 * unit, 2 * unit)
    assert arena.used == 0 and arena.reserve(10 * unit) is not None


def test_arena_file_is_allocated_at_once(tmp_path: Path) -> None:
    Arena(tmp_path / "a", 1 << 20)
    assert (tmp_path / "a").stat().st_blocks * 512 >= 1 << 20
