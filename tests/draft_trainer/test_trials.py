"""One of each disturbance of a trial, over real processes (``python -m benchmarks.trials``)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.trials.__main__ import Drill, Memory, all_drills, begin, run


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Memory]:
    world = Memory(tmp_path_factory.mktemp("trials"))
    begin(world)
    yield world
    world.rig.stop()


@pytest.mark.parametrize("drill", all_drills(), ids=lambda drill: drill.name.replace(" ", "-"))
def test_the_fleet_ends_on_a_release_that_passed(world: Memory, drill: Drill) -> None:
    run(world, drill, turn=1)
    assert drill.ended in (["passed"], ["undecided, alerted"])
