"""Ray places a trainer's two ranks beside a rollout server, and replaces a lost one."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from examples.arithmetic_grpo.processes import free_port
from rollout_server import ray_ranks
from rollout_server.ray_ranks import RanksPlan
from slipstream.client import open_channel
from tests.deploy.fleet import (
    cluster,  # noqa: F401
    kept,
    memory_server,
    rank_pids,
    ranks_of,
    wait_for,
)
from tests.draft_trainer.rig import Client, train
from tests.draft_trainer.test_cli import write_config

pytestmark = pytest.mark.slow

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'slipstream-rl[ray]'")

PATIENCE = 240.0


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_ranks, "AGAIN_SECONDS", 1.0)


def feed(client: Client, seed: int) -> int:
    """Open the run again and train on it; the steps of this start."""
    client.open()
    client.announce(1)
    return int(train(client, seed).train_steps)


def test_trainer_ranks_restart_after_rank_loss(tmp_path: Path) -> None:
    port = free_port()
    config = write_config(
        tmp_path,
        server={"port": port},
        training={"rank_timeout_s": 120.0},
        publish={"rollout_servers": [f"file:{tmp_path / 'fleet'}"]},
    )
    plan = ranks_of(config, f"127.0.0.1:{port}", 2, cpus=0.5, gpus=0)
    server = memory_server(tmp_path, str(tmp_path / "initial"))
    with kept(tmp_path, server, 1, cpus=0.5, ranks=plan) as fleet, open_channel(plan.address) as to:
        client = Client(to)
        wait_for(lambda: fleet.training == [2], PATIENCE)
        wait_for(lambda: len(fleet.addresses()) == 1, PATIENCE)
        first = rank_pids(config)
        assert sorted(first) == [0, 1]
        steps = [feed(client, 0)]

        # The process of rank 1: rank 0 cannot go on with another in its place.
        os.kill(first[1], signal.SIGKILL)
        wait_for(lambda: fleet.training == [2, 0, 2], PATIENCE)
        second = rank_pids(config)
        assert sorted(second) == [0, 1] and not {*first.values()} & {*second.values()}
        steps.append(feed(client, 1))

        # The actor of rank 0, and so its process: its supervisor ends it.
        os.kill(fleet.rank_actor(0), signal.SIGKILL)
        wait_for(lambda: fleet.training == [2, 0, 2, 0, 2], PATIENCE)
        third = rank_pids(config)
        assert sorted(third) == [0, 1] and not {*second.values()} & {*third.values()}
        steps.append(feed(client, 2))
    wait_for(lambda: not rank_pids(config))
    assert fleet.refusal is None
    # The second start had three seconds to save its state; the others could not lose a step.
    state = load_file(max((tmp_path / "registry" / "training-state").glob("state-*.safetensors")))
    assert int(state["counter.steps"]) >= steps[0] + steps[2]


def test_fleet_ends_when_trainer_refuses_first_start(tmp_path: Path) -> None:
    # As draft-trainer serve ends that refuses its configuration.
    command = (sys.executable, "-c", "raise SystemExit(2)")
    plan = RanksPlan(command, 2, "127.0.0.1:1", cpus=0.5, host="127.0.0.1")
    with kept(tmp_path, memory_server(tmp_path, "draft"), 1, cpus=0.5, ranks=plan) as fleet:
        wait_for(lambda: fleet.refusal is not None, PATIENCE)
    assert fleet.refusal is not None and fleet.refusal.field == "--trainer"
    assert "ended with status 2" in str(fleet.refusal) and fleet.training == []
