"""Ray places two rollout servers and keeps them; a real draft trainer finds and publishes to them.

Real vLLM in their place: ``python -m benchmarks.ray_fleet``.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from draft_trainer.cli.main import main as draft_trainer
from draft_trainer.releases.registry import Registry
from examples.arithmetic_grpo.processes import Services
from rollout_server.cli import main as rollout_server
from rollout_server.ray.fleet import FleetPlan, RayFleet, Report, write_members
from tests.deploy.fleet import (
    cluster,  # noqa: F401
    kept,
    memory_server,
    pids,
    second_release,
    served,
    trainer_of,
    wait_for,
)

pytestmark = pytest.mark.slow

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'slipstream-rl[ray]'")

PATIENCE = 240.0


def test_fleet_restarts_killed_server_and_trainer_heals_it(tmp_path: Path, draft_dir: Path) -> None:
    wanted = second_release(Registry(tmp_path / "registry"), draft_dir)
    trainer = trainer_of(tmp_path, draft_dir)
    with kept(tmp_path, memory_server(tmp_path, str(draft_dir))) as fleet, Services(trainer):
        trainer.wait_ready(PATIENCE)
        wait_for(lambda: len(fleet.addresses()) == 2)
        both = fleet.addresses()
        assert both == [f"127.0.0.1:{port}" for port in fleet.controls]
        address = ["--address", trainer.health]
        assert draft_trainer(["releases", "promote", "1", *address]) == 0
        assert [served(a) for a in both] == [wanted, wanted]

        # The server's process is killed: its replica ends, and Ray starts another.
        ports = fleet.controls
        first, actor = pids(ports[0]), fleet.reports[0].pid
        os.kill(first["server"], signal.SIGKILL)
        wait_for(lambda: fleet.reports[0].pid != actor)
        wait_for(lambda: served(both[0]) == wanted and fleet.addresses() == both)
        assert not {*pids(ports[0]).values()} & {*first.values()}

        # The actor's is killed: its supervisor ends the server, or the port would stay taken.
        second, actor = pids(ports[1]), fleet.reports[1].pid
        os.kill(actor, signal.SIGKILL)
        wait_for(lambda: fleet.reports[1].pid != actor)
        wait_for(lambda: served(both[1]) == wanted and fleet.addresses() == both)
        assert not {*pids(ports[1]).values()} & {*second.values()}
        # The other one served on.
        assert served(both[0]) == wanted
    assert fleet.addresses() == []
    wait_for(lambda: not pids(ports[0]) and not pids(ports[1]))


def test_fleet_ends_when_first_start_is_refused(tmp_path: Path) -> None:
    with kept(tmp_path, memory_server(tmp_path, "refuse")) as fleet:
        wait_for(lambda: fleet.refusal is not None)
    assert fleet.refusal is not None and fleet.refusal.field == "rollout server"
    assert "refused to start" in str(fleet.refusal)


def test_fleet_larger_than_cluster_starts_no_server(tmp_path: Path) -> None:
    with kept(tmp_path, memory_server(tmp_path, "draft"), 3, ready_seconds=1.0) as fleet:
        wait_for(lambda: fleet.refusal is not None)
        assert not any(map(pids, fleet.controls))
    assert fleet.refusal is not None and fleet.refusal.field == "--replicas"
    assert "3 of 1 CPUs and 0 GPUs each" in str(fleet.refusal) and "add nodes" in str(fleet.refusal)


def test_fleet_invalid_options_refused_before_ray(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["policy", "--draft", "draft"]
    members = ["--members", str(tmp_path / "fleet")]
    for options, found in (
        (["--replicas", "0", *members, *model], "--replicas"),
        (["--replicas", "2", "--cpus", "0", *members, *model], "--cpus, --gpus"),
        (["--replicas", "2", *members, *model, "--control-port=1"], "--control-port"),
        (["--replicas", "2", "--members", str(tmp_path / "no" / "fleet"), *model], "--members"),
        (["--replicas", "2", *members, *model, "--first-port", "65535"], "--first-port"),
        (["--replicas", "2", *members, *model, "--trainer-ranks=2"], "draft-trainer serve"),
        (["--replicas", "2", *members, *model, "--trainer", "a.toml"], "draft-trainer serve"),
        (
            ["--replicas", "2", *members, *model, "--control-certificate=c.pem"],
            "--ca: found nothing",
        ),
        (["--replicas", "2", *members, *model, "--control_client_ca", "c"], "--control-client-ca"),
    ):
        assert rollout_server(["fleet", *options]) == 2
        assert found in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_fleet_survives_full_disk(tmp_path: Path) -> None:
    told: list[dict[int, Report]] = []
    fleet = RayFleet.__new__(RayFleet)
    fleet._plan, fleet._on_change = FleetPlan((), 1, tmp_path / "no" / "fleet"), told.append
    now, fleet._reports = {0: Report(1, "a:1")}, {}
    fleet._tell(now)
    assert told == [] and fleet._reports == {}
    (tmp_path / "no").mkdir()
    fleet._tell(now)
    assert told == [now] and fleet._reports == now
    assert fleet._plan.members.read_text() == "a:1\n"


def test_fleet_members_file_replaced_atomically(tmp_path: Path) -> None:
    write_members(tmp_path / "fleet", ["a:1", "b:2"])
    with (tmp_path / "fleet").open() as reader:
        write_members(tmp_path / "fleet", ["c:3"])
        assert reader.read() == "a:1\nb:2\n"
    assert (tmp_path / "fleet").read_text() == "c:3\n"
    assert [path.name for path in tmp_path.iterdir()] == ["fleet"]
