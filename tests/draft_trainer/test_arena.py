"""The mapped file: its free list against a model, its views, and a file system that is full."""

from __future__ import annotations

import errno
import gc
import os
import random
import threading
from pathlib import Path

import pytest
import torch

from draft_trainer.ingest.arena import ALIGNMENT, MOST_SHARED, Arena, FreeList, aligned
from slipstream.errors import RefusedError, StatusCode


def test_aligned() -> None:
    assert [aligned(n) for n in (0, 1, 64, 65)] == [64, 64, 64, 128]


@pytest.mark.parametrize("seed", range(4))
def test_free_list_against_a_map_of_every_unit(seed: int) -> None:
    rng = random.Random(seed)
    size = 300
    free = FreeList(size)
    units = [False] * size
    taken: dict[int, int] = {}
    for _ in range(4000):
        if rng.random() < 0.55:
            wanted = rng.randrange(1, 40)
            start = free.take(wanted)
            runs = "".join("x" if unit else "." for unit in units).split("x")
            fitting = [len(run) for run in runs if len(run) >= wanted]
            assert (start is None) == (not fitting)
            if start is not None:
                assert not any(units[start : start + wanted])
                run = next(n for at, n in _runs(units) if at <= start < at + n)
                assert run == min(fitting)
                units[start : start + wanted] = [True] * wanted
                taken[start] = wanted
        elif taken:
            start = rng.choice(list(taken))
            wanted = taken.pop(start)
            free.give(start, wanted)
            units[start : start + wanted] = [False] * wanted
        # What is free is known in as few parts as possible, and to the byte.
        assert free.parts() == _runs(units)
        assert free.free == units.count(False)
    again = FreeList(size, taken.items())
    assert again.parts() == free.parts() and again.free == free.free


def _runs(units: list[bool]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for at, used in enumerate(units):
        if not used:
            if runs and sum(runs[-1]) == at:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((at, 1))
    return runs


def test_an_extent_is_reused_only_when_nothing_views_it(tmp_path: Path) -> None:
    arena = Arena(tmp_path / "a", 4 * ALIGNMENT)
    extent = arena.allocate(2 * ALIGNMENT)
    assert extent is not None
    extent.owned = True
    view = torch.from_numpy(arena.view(extent, 100)).fill_(7)
    part = view[10:20].view(torch.bfloat16)[1:].view(2, 2)
    del view
    arena.disown(extent)
    assert (arena.used, arena.leased) == (2 * ALIGNMENT, 2 * ALIGNMENT)
    other = arena.allocate(2 * ALIGNMENT)
    assert other is not None and other.start != extent.start
    assert arena.allocate(ALIGNMENT) is None
    assert (part.view(torch.uint8) == 7).all()
    del part
    third = arena.allocate(2 * ALIGNMENT)
    assert third is not None and third.start == extent.start


def test_an_extent_that_nobody_owns_is_free_with_its_last_view(tmp_path: Path) -> None:
    arena = Arena(tmp_path / "a", ALIGNMENT)
    extent = arena.allocate(ALIGNMENT)
    assert extent is not None
    first, second = arena.view(extent, 8), arena.view(extent, 8)
    del first
    assert arena.is_viewed(extent) and arena.allocate(ALIGNMENT) is None
    del second
    assert not arena.is_viewed(extent) and arena.used == 0


def test_extents_of_one_call_lie_one_after_the_other_where_there_is_room(tmp_path: Path) -> None:
    arena = Arena(tmp_path / "a", 16 * ALIGNMENT)
    sizes = [2 * ALIGNMENT, ALIGNMENT, 3 * ALIGNMENT]
    extents = arena.allocate_all(sizes)
    assert [(e.start, e.size) for e in extents if e] == [(0, 128), (128, 64), (192, 192)]
    middle = arena.allocate(4 * ALIGNMENT)
    assert middle is not None and middle.start == 6 * ALIGNMENT
    assert extents[0] is not None
    arena.give_back(extents[0])
    # Two parts are free, of 2 and of 6: nothing of 7 is, and each takes what fits it best.
    again = arena.allocate_all([2 * ALIGNMENT, 5 * ALIGNMENT])
    assert [extent and extent.start for extent in again] == [0, 10 * ALIGNMENT]
    assert arena.allocate_all([2 * ALIGNMENT, ALIGNMENT])[0] is None
    assert arena.used == arena.size
    assert arena.allocate_all([]) == []


def test_neighbours_share_a_view_and_are_free_when_it_ends(tmp_path: Path) -> None:
    arena = Arena(tmp_path / "a", 4 * MOST_SHARED)
    half = MOST_SHARED // 2
    sizes = [half, half, half, ALIGNMENT]
    extents = [extent for extent in arena.allocate_all(sizes) if extent is not None]
    far = arena.allocate(2 * MOST_SHARED)
    assert far is not None
    views = arena.view_all([*extents, far])
    # Two make as much as one view may cover; what is larger has one of its own.
    assert [(len(view), at) for view, at in views] == [
        *[(MOST_SHARED, 0), (MOST_SHARED, half)],
        *[(half + ALIGNMENT, 0), (half + ALIGNMENT, half)],
        (2 * MOST_SHARED, 0),
    ]
    assert views[0][0] is views[1][0] and views[2][0] is views[3][0]
    for number, ((view, at), extent) in enumerate(zip(views, [*extents, far], strict=True)):
        view[at : at + extent.size] = number
    assert [int(arena.view(extent, 1)[0]) for extent in extents] == [0, 1, 2, 3]
    extents[0].owned = True
    kept = views[3][0][half:]
    del views, view
    # Whoever holds a part holds its neighbours too, but nothing else.
    assert arena.leased == half + ALIGNMENT
    assert [arena.is_viewed(extent) for extent in extents] == [False, False, True, True]
    assert arena.used == half + half + ALIGNMENT
    del kept
    assert (arena.leased, arena.used) == (0, half)
    arena.disown(extents[0])
    assert arena.used == 0 and arena.allocate(arena.size) is not None


def test_those_that_are_disowned_together_are_free_each_when_nothing_views_it(
    tmp_path: Path,
) -> None:
    arena = Arena(tmp_path / "a", 8 * ALIGNMENT)
    extents = [extent for extent in arena.allocate_all([ALIGNMENT] * 8) if extent is not None]
    for extent in extents:
        extent.owned = True
    view = arena.view(extents[3], 8)
    # In any order; the first four are neighbours but for the one that is viewed.
    arena.disown(*(extents[at] for at in (6, 0, 1, 2, 3, 5)))
    assert arena._free.parts() == [(0, 192), (320, 128)]
    del view
    assert arena.used == 2 * ALIGNMENT
    assert arena._free.parts() == [(0, 256), (320, 128)]


def test_views_that_end_on_other_threads_are_counted(tmp_path: Path) -> None:
    arena = Arena(tmp_path / "a", 64 * ALIGNMENT)
    views = []
    for _ in range(64):
        extent = arena.allocate(ALIGNMENT)
        assert extent is not None
        views.append([arena.view(extent, ALIGNMENT) for _ in range(4)])
    assert arena.leased == arena.size

    def end(part: int) -> None:
        for view in views[part::4]:
            view.clear()

    threads = [threading.Thread(target=end, args=(part,)) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    gc.collect()
    assert (arena.leased, arena.used) == (0, 0)


def test_a_full_file_system_is_a_refusal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(number: int, offset: int, size: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(RefusedError) as caught:
        Arena(tmp_path / "a", 1 << 20)
    assert caught.value.field == "replay.directory"
    assert caught.value.code is StatusCode.RESOURCE_EXHAUSTED
    assert "No space left" in caught.value.found
    assert f"{1 << 20} bytes (replay.capacity_bytes)" in caught.value.expected


def test_its_blocks_are_allocated_from_the_start(tmp_path: Path) -> None:
    Arena(tmp_path / "a", 1 << 20)
    assert (tmp_path / "a").stat().st_blocks * 512 >= 1 << 20
