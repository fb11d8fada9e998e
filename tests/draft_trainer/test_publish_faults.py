"""One of each fault of the table, over real processes (``python -m benchmarks.publish_faults``)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from benchmarks.publish_faults.faults import FAULTS, Fault, run
from benchmarks.publish_faults.rig import Rig

pytestmark = pytest.mark.contract("all or none")


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    rig = Rig(tmp_path_factory.mktemp("faults"), servers=2)
    yield rig
    rig.stop()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "-"))
def test_the_fleet_comes_right(rig: Rig, fault: Fault) -> None:
    run(rig, fault, turn=0)
