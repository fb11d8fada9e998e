"""One of each disturbance of a trial, over real processes (``python -m benchmarks.trials``)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.trials.__main__ import DRILLS, Memory, begin, run

pytestmark = pytest.mark.contract("trial")


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Memory]:
    world = Memory(tmp_path_factory.mktemp("trials"))
    begin(world)
    yield world
    world.rig.stop()


@pytest.mark.parametrize("name", DRILLS, ids=lambda name: name.replace(" ", "-"))
def test_the_fleet_ends_on_a_release_that_passed(world: Memory, name: str) -> None:
    assert run(world, DRILLS[name], turn=1) in ("passed", "undecided, alerted")
