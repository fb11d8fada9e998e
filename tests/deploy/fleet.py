"""Rollout servers and trainer ranks that Ray places, or a trainer beside them."""

from __future__ import annotations

import os
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import grpc
import pytest
import torch

from draft_trainer.drafters.eagle3.checkpoint import Eagle3
from draft_trainer.releases.registry import Registry
from examples.arithmetic_grpo.processes import Service, free_port
from examples.local_services import ONE_THREAD, script
from rollout_server.ray_fleet import FleetPlan, RayFleet, Report
from rollout_server.ray_ranks import RanksPlan
from slipstream.client import open_channel
from slipstream.errors import RefusedError
from slipstream.security import NONE, ClientCredentials
from slipstream.tensors import digest_of_specs
from slipstream.v1 import release_pb2
from slipstream.v1 import rollout_server_pb2 as pb
from slipstream.v1 import rollout_server_pb2_grpc as pb_grpc


def share_packages() -> None:
    """Have Ray's workers find packages where we found them."""
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)


def start_ray() -> None:
    """A cluster of this machine alone."""
    import ray

    share_packages()
    ray.init(
        # Its own, whatever cluster runs on this machine, or has left its address behind.
        address="local",
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=80 << 20,
        logging_level="ERROR",
        log_to_driver=False,
    )


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """Start Ray for a module that imports this."""
    import ray

    start_ray()
    yield
    ray.shutdown()


class Kept:
    """A fleet whose file is kept by a thread; ``command`` starts a server.

    ``training`` has every number of ranks that trained, in order.
    """

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        replicas: int = 2,
        ready_seconds: float = 600.0,
        credentials: ClientCredentials = NONE,
        cpus: float = 1.0,
        ranks: RanksPlan | None = None,
    ) -> None:
        self.members = folder / "fleet"
        self.training: list[int] = []
        self.reports: dict[int, Report] = {}
        self.refusal: RefusedError | None = None
        first = free_ports(2 * replicas)
        self.plan = FleetPlan(
            tuple(command),
            replicas=replicas,
            members=self.members,
            cpus=cpus,
            first_port=first,
            first_control_port=first + replicas,
            ready_seconds=ready_seconds,
            stop_seconds=10.0,
            host="127.0.0.1",
            credentials=credentials,
        )
        self.controls = [first + replicas + index for index in range(replicas)]
        self._stop = threading.Event()
        self._fleet = RayFleet(
            self.plan, lambda reports: self.reports.update(reports), ranks, self.training.append
        )
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._fleet.keep(self._stop.is_set)
        except RefusedError as error:
            self.refusal = error

    def addresses(self) -> list[str]:
        return self.members.read_text().split()

    def rank_actor(self, index: int) -> int:
        """The process of a rank's actor."""
        import ray

        assert self._fleet._ranks is not None
        return int(ray.get(self._fleet._ranks.actors.handles[index].report.remote()).pid)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(240)
        assert not self._thread.is_alive()
        self._fleet.close()


def free_ports(count: int) -> int:
    """The first of ``count`` ports in a row that are free, below those of the system."""
    while True:
        first = random.randrange(20_000, 32_000)
        with ExitStack() as probes:
            try:
                for port in range(first, first + count):
                    probes.enter_context(socket.socket()).bind(("127.0.0.1", port))
            except OSError:
                continue
            return first


@contextmanager
def kept(
    folder: Path,
    command: Sequence[str],
    replicas: int = 2,
    ready_seconds: float = 600.0,
    credentials: ClientCredentials = NONE,
    cpus: float = 1.0,
    ranks: RanksPlan | None = None,
) -> Iterator[Kept]:
    fleet = Kept(folder, command, replicas, ready_seconds, credentials, cpus, ranks)
    try:
        yield fleet
    finally:
        fleet.close()


def trainer_of(folder: Path, draft: Path) -> Service:
    """A draft trainer that finds the fleet in its file."""
    config, address = trainer_file(folder, draft)
    command = [script("draft-trainer"), "serve", "--config", str(config)]
    return Service("draft-trainer", command, folder / "trainer.log", address, ONE_THREAD)


def ranks_of(config: Path, address: str, size: int, cpus: float, gpus: float) -> RanksPlan:
    """The plan of a trainer's ranks."""
    command = (sys.executable, "-m", "draft_trainer.cli.main", "serve", "--config", str(config))
    return RanksPlan(command, size, address, cpus, gpus, host="127.0.0.1", ready_seconds=300.0)


def trainer_file(folder: Path, draft: Path) -> tuple[Path, str]:
    """Write a trainer's configuration; the file and the trainer's address."""
    config, port = folder / "trainer.toml", free_port()
    config.write_text(
        f"[server]\nport = {port}\nmetrics_port = 0\nshared_memory = ''\n"
        f'[draft]\ninitial = "{draft}"\nregistry = "registry"\n'
        "[replay]\ncapacity_bytes = 1048576\n[training]\ncpu_kernels = 'off'\n"
        '[publish]\nrollout_servers = ["file:fleet"]\nreconcile_s = 0.5\n'
    )
    return config, f"127.0.0.1:{port}"


def memory_server(folder: Path, draft: str) -> list[str]:
    """The command of a server without vLLM."""
    module = [sys.executable, "-m", "tests.deploy.memory_server"]
    return [*module, draft, "--folder", str(folder)]


def wait_for(what: Callable[[], bool], seconds: float = 240.0) -> float:
    """Seconds until ``what`` holds. AssertionError: not within ``seconds``."""
    began = time.monotonic()
    while not what():
        assert time.monotonic() < began + seconds
        time.sleep(0.2)
    return time.monotonic() - began


def pids(control_port: int) -> dict[str, int]:
    """The processes of one replica: its supervisor and its server."""
    found = _processes(str(control_port))
    return {"supervisor" if supervises else "server": pid for pid, supervises in found.items()}


def rank_pids(config: Path) -> dict[int, int]:
    """The trainer's processes, by rank."""
    found = {}
    for pid, supervises in _processes(str(config)).items():
        with suppress(OSError):
            entries = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
            if not supervises:
                variables = dict(entry.partition("=")[::2] for entry in entries)
                found[int(variables["RANK"])] = pid
    return found


def _processes(word: str) -> dict[int, bool]:
    """Processes with ``word`` on their command line; True for supervisors."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile
            words = (entry / "cmdline").read_bytes().decode().split("\0")
            if word in words:
                found[int(entry.name)] = "rollout_server.owned_process" in words
    return found


def served(address: str) -> tuple[int, bytes] | None:
    """Version and digest of the draft that a server has live; None while it does not answer."""
    with open_channel(address) as channel:
        try:
            state = pb_grpc.RolloutServerStub(channel).GetState(pb.GetStateRequest(), timeout=10)
        except grpc.RpcError:
            return None
    return state.draft_version, state.draft_sha256


def second_release(registry: Registry, draft: Path) -> tuple[int, bytes]:
    """Release 1, unlike the draft that the servers start with: its version and digest."""
    registry.import_initial(draft)
    head = Eagle3().read(registry.path(0)).draft()
    with torch.no_grad():
        next(iter(head.parameters())).add_(0.01)
    release = registry.create(
        head,
        release_pb2.ReleaseManifest(
            parent_version=0, trained_against_policy_version=1, run_id="ray", ttt_steps=3
        ),
    )
    return release.draft_version, digest_of_specs(registry.get(release.draft_version).tensors)
