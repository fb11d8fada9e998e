"""Rollout servers that Ray places, and a trainer beside them."""

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
from draft_trainer.releases.registry import Registry, open_pointer
from examples.arithmetic_grpo.processes import Service, free_port
from examples.local_services import ONE_THREAD, script
from rollout_server.ray.fleet import FleetPlan, RayFleet, Report
from slipstream.client import open_channel
from slipstream.errors import RefusedError
from slipstream.serving.identity import NONE, ClientCredentials
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
    """A fleet whose file is kept by a thread; ``command`` starts a server."""

    def __init__(
        self,
        folder: Path,
        command: Sequence[str],
        replicas: int = 2,
        ready_seconds: float = 600.0,
        credentials: ClientCredentials = NONE,
    ) -> None:
        self.members = folder / "fleet"
        self.reports: dict[int, Report] = {}
        self.refusal: RefusedError | None = None
        first = free_ports(2 * replicas)
        self.plan = FleetPlan(
            tuple(command),
            replicas=replicas,
            members=self.members,
            first_port=first,
            first_control_port=first + replicas,
            ready_seconds=ready_seconds,
            stop_seconds=10.0,
            host="127.0.0.1",
            credentials=credentials,
        )
        self.controls = [first + replicas + index for index in range(replicas)]
        self._stop = threading.Event()
        self._fleet = RayFleet(self.plan, lambda reports: self.reports.update(reports))
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._fleet.keep(self._stop.is_set)
        except RefusedError as error:
            self.refusal = error

    def addresses(self) -> list[str]:
        return self.members.read_text().split()

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
) -> Iterator[Kept]:
    fleet = Kept(folder, command, replicas, ready_seconds, credentials)
    try:
        yield fleet
    finally:
        fleet.close()


def trainer_of(folder: Path, draft: Path) -> Service:
    """A draft trainer that finds the fleet in its file."""
    config, port = folder / "trainer.toml", free_port()
    config.write_text(
        f"[server]\nport = {port}\nmetrics_port = 0\nshared_memory = ''\n"
        f'[draft]\ninitial = "{draft}"\nregistry = "registry"\n'
        "[replay]\ncapacity_bytes = 8388608\n[training]\ncpu_kernels = 'off'\n"
        '[publish]\nrollout_servers = ["file:fleet"]\nreconcile_s = 0.5\n'
    )
    command = [script("draft-trainer"), "serve", "--config", str(config)]
    log = folder / "trainer.log"
    return Service("draft-trainer", command, log, f"127.0.0.1:{port}", ONE_THREAD)


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
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended meanwhile
            words = (entry / "cmdline").read_bytes().decode().split("\0")
            if str(control_port) in words:
                supervises = "rollout_server.ray.owned_process" in words
                found["supervisor" if supervises else "server"] = int(entry.name)
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
    # As a trainer left it: releases without a pointer are refused as damage.
    open_pointer(registry)
    registry.close()
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
