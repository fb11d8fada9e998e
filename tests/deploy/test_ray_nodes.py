"""Four servers on two Ray nodes, and a trainer beside them: one node is lost, another joins."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draft_trainer.cli.main import main as draft_trainer
from draft_trainer.releases.registry import Registry
from examples.arithmetic_grpo.processes import Services
from tests.deploy.fleet import (
    kept,
    memory_server,
    pids,
    second_release,
    served,
    share_packages,
    trainer_of,
    wait_for,
)

pytestmark = pytest.mark.slow

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'slipstream-rl[ray]'")

PATIENCE = 240.0
NODE = {"num_cpus": 2, "object_store_memory": 80 << 20}


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Two raylets on this machine, each with a place for two replicas."""
    from ray.cluster_utils import Cluster

    share_packages()
    made = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    made.add_node(**NODE)
    ray.init(address=made.address, logging_level="ERROR", log_to_driver=False)
    yield made
    ray.shutdown()
    made.shutdown()


def test_fleet_heals_after_node_loss(cluster: Any, tmp_path: Path, draft_dir: Path) -> None:
    wanted = second_release(Registry(tmp_path / "registry"), draft_dir)
    trainer = trainer_of(tmp_path, draft_dir)
    server = memory_server(tmp_path, str(draft_dir))
    with kept(tmp_path, server, 4) as fleet, Services(trainer):
        trainer.wait_ready(PATIENCE)
        wait_for(lambda: len(fleet.addresses()) == 4, PATIENCE)
        four = fleet.addresses()
        assert draft_trainer(["releases", "promote", "1", "--address", trainer.health]) == 0
        assert [served(address) for address in four] == [wanted] * 4

        lost_node = next(node for node in cluster.list_all_nodes() if not node.is_head())
        raylet = lost_node.all_processes["raylet"][0].process
        before = dict(fleet.reports)
        os.kill(raylet.pid, signal.SIGKILL)
        wait_for(lambda: len(fleet.addresses()) == 2, PATIENCE)
        left = fleet.addresses()
        assert [served(address) for address in left] == [wanted] * 2
        # Their servers end with their actors: no port stays taken.
        lost = [port for port in fleet.controls if f"127.0.0.1:{port}" not in left]
        wait_for(lambda: not any(map(pids, lost)), PATIENCE)

        cluster.add_node(**NODE)
        wait_for(lambda: fleet.addresses() == four, PATIENCE)
        wait_for(lambda: [served(address) for address in four] == [wanted] * 4, PATIENCE)
        # Those of the other node went on as they were.
        same = sorted(n for n in before if fleet.reports[n].pid == before[n].pid)
        assert [f"127.0.0.1:{fleet.controls[n]}" for n in same] == left
    assert fleet.addresses() == []
    wait_for(lambda: not any(map(pids, fleet.controls)), PATIENCE)
