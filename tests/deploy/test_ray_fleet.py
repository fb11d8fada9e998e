"""Ray places two rollout servers and keeps them; a real draft trainer finds and publishes to them.

Real vLLM in their place: ``python -m benchmarks.ray_fleet``.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from draft_trainer.cli.main import main as draft_trainer
from draft_trainer.releases.registry import Registry
from examples.arithmetic_grpo.processes import Service, Services, free_port
from rollout_server.cli import main as rollout_server
from slipstream.errors import RefusedError
from tests.deploy.fleet import second_release, served

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'slipstream[ray]'")
from rollout_server.ray_fleet import (  # noqa: E402
    FleetPlan,
    RayFleet,
    Report,
    write_members,
)

PATIENCE = 60.0


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """A local one."""
    # Ray's workers find the packages where this process found them.
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    ray.init(
        # Its own, whatever cluster runs on this machine, or has left its address behind.
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=80 << 20,
        logging_level="ERROR",
        log_to_driver=False,
    )
    yield
    ray.shutdown()


class Kept:
    """A fleet of two whose file is kept by a thread."""

    def __init__(self, folder: Path, draft: str) -> None:
        self.members = folder / "fleet"
        self.reports: dict[int, Report] = {}
        self.refusal: RefusedError | None = None
        first = free_port()
        command = (sys.executable, "-m", "tests.deploy.memory_server", draft)
        self.plan = FleetPlan(
            (*command, "--folder", str(folder)),
            replicas=2,
            members=self.members,
            first_port=first,
            first_control_port=first + 2,
            stop_seconds=10.0,
            host="127.0.0.1",
        )
        self._stop = threading.Event()
        self._fleet = RayFleet(self.plan, lambda reports: self.reports.update(reports))
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._fleet.keep(self._stop)
        except RefusedError as error:
            self.refusal = error

    def addresses(self) -> list[str]:
        return self.members.read_text().split()

    def close(self) -> None:
        self._stop.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()
        self._fleet.close()


@contextmanager
def kept(folder: Path, draft: str) -> Iterator[Kept]:
    fleet = Kept(folder, draft)
    try:
        yield fleet
    finally:
        fleet.close()


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def pids(control_port: int) -> dict[str, int]:
    """The processes of one replica: its keeper and its server."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue  # it ended meanwhile
        if str(control_port) in words and "tests.deploy.memory_server" in words:
            name = "keeper" if "rollout_server.ray_fleet" in words else "server"
            found[name] = int(entry.name)
    return found


def test_a_fleet_of_two_is_published_to_loses_one_and_heals(
    tmp_path: Path, draft_dir: Path
) -> None:
    wanted = second_release(Registry(tmp_path / "registry"), draft_dir)
    config, port = tmp_path / "trainer.toml", free_port()
    config.write_text(
        f"[server]\nport = {port}\nmetrics_port = 0\nshared_memory = ''\n"
        f'[draft]\ninitial = "{draft_dir}"\nregistry = "registry"\n'
        "[replay]\ncapacity_bytes = 1048576\n[training]\ncpu_kernels = 'off'\n"
        '[publish]\nrollout_servers = ["file:fleet"]\nreconcile_s = 0.5\n'
    )
    script = Path(sys.executable).parent / "draft-trainer"
    command = [str(script), "serve", "--config", str(config)]
    trainer = Service("draft-trainer", command, tmp_path / "log", f"127.0.0.1:{port}")
    with kept(tmp_path, str(draft_dir)) as fleet, Services(trainer):
        trainer.wait_ready(PATIENCE)
        wait_for(lambda: len(fleet.addresses()) == 2)
        both = fleet.addresses()
        assert both == [f"127.0.0.1:{fleet.plan.first_control_port + i}" for i in range(2)]
        address = ["--address", trainer.health]
        assert draft_trainer(["releases", "promote", "1", *address]) == 0
        assert [served(a) for a in both] == [wanted, wanted]

        # The server's process is killed: its replica ends, and Ray starts another.
        ports = [fleet.plan.first_control_port + i for i in range(2)]
        first, actor = pids(ports[0]), fleet.reports[0].pid
        os.kill(first["server"], signal.SIGKILL)
        wait_for(lambda: fleet.reports[0].pid != actor)
        wait_for(lambda: served(both[0]) == wanted and fleet.addresses() == both)
        assert not {*pids(ports[0]).values()} & {*first.values()}

        # The actor's is killed: its keeper ends the server, or the port would stay taken.
        second, actor = pids(ports[1]), fleet.reports[1].pid
        os.kill(actor, signal.SIGKILL)
        wait_for(lambda: fleet.reports[1].pid != actor)
        wait_for(lambda: served(both[1]) == wanted and fleet.addresses() == both)
        assert not {*pids(ports[1]).values()} & {*second.values()}
        # Nobody touched the other one meanwhile.
        assert served(both[0]) == wanted
    assert fleet.addresses() == []
    wait_for(lambda: not pids(ports[0]) and not pids(ports[1]))


def test_a_server_that_refuses_its_first_start_ends_the_fleet(tmp_path: Path) -> None:
    with kept(tmp_path, "refuse") as fleet:
        wait_for(lambda: fleet.refusal is not None)
    assert fleet.refusal is not None and fleet.refusal.field == "rollout server"
    assert "refused to start" in str(fleet.refusal)


def test_bad_options_are_refused_before_ray_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["policy", "--draft", "draft"]
    members = ["--members", str(tmp_path / "fleet")]
    for options, found in (
        (["--replicas", "0", *members, *model], "--replicas"),
        (["--replicas", "2", *members, *model, "--control-port=1"], "--control-port"),
        (["--replicas", "2", "--members", str(tmp_path / "no" / "fleet"), *model], "--members"),
    ):
        assert rollout_server(["fleet", *options]) == 2
        assert found in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_members_are_replaced_as_a_whole(tmp_path: Path) -> None:
    write_members(tmp_path / "fleet", ["a:1", "b:2"])
    with (tmp_path / "fleet").open() as reader:
        write_members(tmp_path / "fleet", ["c:3"])
        assert reader.read() == "a:1\nb:2\n"
    assert (tmp_path / "fleet").read_text() == "c:3\n"
    assert [path.name for path in tmp_path.iterdir()] == ["fleet"]
