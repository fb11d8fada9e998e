"""The processes of one fault table: servers and a trainer that may be killed at any time."""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import grpc
import torch

from benchmarks.publish_faults import server_process, trainer_process
from draft_trainer.config import TrialConfig
from draft_trainer.drafters.eagle3.checkpoint import Eagle3
from draft_trainer.releases.registry import Registry, open_pointer
from examples.arithmetic_grpo.processes import free_port
from slipstream.client import open_channel
from slipstream.tensors import digest_of_specs
from slipstream.v1 import release_pb2
from slipstream.v1 import rollout_server_pb2 as pb
from slipstream.v1 import rollout_server_pb2_grpc as pb_grpc

DRAFT = Path(__file__).resolve().parents[2] / "examples" / "arithmetic_grpo" / "draft"
RELEASES = 7
PATIENCE = 30.0
"""Seconds within which the fleet must be right again."""


class TrainerDiedError(RuntimeError):
    """The trainer's process ended instead of answering."""


class Rig:
    """Servers, a registry with ``RELEASES`` releases, and a trainer.

    Processes are forked from one that has imported everything, so that starting one again
    costs a moment and not seconds.

    Args:
        folder: registry, fault files.
        servers: how many.
    """

    trial = TrialConfig()
    publish: Mapping[str, Any] = {}
    """Keys of the trainer's [publish], over those that suit processes that die."""

    def __init__(self, folder: Path, servers: int) -> None:
        self._context = mp.get_context("forkserver")
        self._context.set_forkserver_preload([server_process.__name__, trainer_process.__name__])
        self.root = folder / "registry"
        write_releases(self.root, RELEASES)
        ports = set[int]()
        while len(ports) < servers:
            ports.add(free_port())
        self._ports = [*ports]
        self._faults = [folder / f"fault-{index}" for index in range(servers)]
        self.addresses = tuple(f"127.0.0.1:{port}" for port in self._ports)
        self._servers: list[Any] = [None] * servers
        self._trainer: Any = None
        self._pipe: Connection | None = None
        self._channels: list[grpc.Channel] = [open_channel(a) for a in self.addresses]
        self._stubs = [pb_grpc.RolloutServerStub(channel) for channel in self._channels]

    def start(self) -> None:
        """Start whatever is not running; every server answers, the trainer is ready."""
        for index, process in enumerate(self._servers):
            if process is None or not process.is_alive():
                self.start_server(index)
        if self._trainer is None or not self._trainer.is_alive():
            self.start_trainer()

    def watch(self, index: int) -> None:
        """Begin to count for one run of the table; ``index`` is the server that it will hit."""

    def check(self) -> None:
        """Raise AssertionError where requests went wrong since ``watch``."""

    def start_server(self, index: int) -> None:
        """Start one server with the draft that it was first started with."""
        process = self._context.Process(
            target=server_process.serve,
            args=(str(DRAFT), self._ports[index], str(self._faults[index])),
            daemon=True,
        )
        process.start()
        self._servers[index] = process
        deadline = time.monotonic() + PATIENCE
        while self.state(index) is None:
            if time.monotonic() > deadline:
                raise RuntimeError(f"server {index} did not start")
            time.sleep(0.02)

    def start_trainer(self) -> dict[str, Any]:
        """Start the trainer; return its first answer: ready, or why not."""
        self._trainer, self._pipe = self._new_trainer()
        return self._answer()

    def _new_trainer(self) -> tuple[Any, Connection]:
        pipe, theirs = self._context.Pipe()
        process = self._context.Process(
            target=trainer_process.run,
            args=(str(self.root), self.addresses, theirs, self.trial, self.publish),
            daemon=True,
        )
        process.start()
        theirs.close()
        return process, pipe

    def second_trainer(self) -> dict[str, Any]:
        """Start another trainer on the same registry; return what it says before it ends."""
        process, pipe = self._new_trainer()
        answer: dict[str, Any] = pipe.recv() if pipe.poll(PATIENCE) else {}
        pipe.close()
        process.join(PATIENCE)
        return answer

    def ask(self, *command: object) -> dict[str, Any]:
        """Send the trainer a command; return its answer. Raises TrainerDiedError."""
        assert self._pipe is not None
        try:
            self._pipe.send(command)
        except OSError as error:
            self._trainer.join(PATIENCE)
            raise TrainerDiedError(command) from error
        return self._answer()

    def arm(self, index: int, fault: str) -> None:
        """Set the next thing that goes wrong on a server."""
        # Renamed, because the server may look at any time.
        part = self._faults[index].with_suffix(".part")
        part.write_text(fault)
        part.rename(self._faults[index])

    def kill_server(self, index: int) -> None:
        """Kill a server with SIGKILL."""
        self._kill(self._servers[index])

    def kill_trainer(self) -> None:
        """Kill the trainer with SIGKILL."""
        self._kill(self._trainer)

    def wait_ended(self, index: int) -> None:
        """Wait until a server that was told to die has done so."""
        self._servers[index].join(PATIENCE)
        assert not self._servers[index].is_alive(), f"server {index} still runs"

    def state(self, index: int) -> pb.ServerState | None:
        """Return what a server serves; None while it does not answer."""
        try:
            return self._stubs[index].GetState(pb.GetStateRequest(), timeout=2, wait_for_ready=True)
        except grpc.RpcError:
            return None

    def settled(self) -> int:
        """Wait until every server serves the wanted release, whole; return its version.

        Raises:
            AssertionError: they did not in time, or the registry cannot be read.
        """
        registry = Registry(self.root)
        wanted = {v: digest_of_specs(registry.get(v).tensors) for v in registry.versions()}
        deadline = time.monotonic() + PATIENCE
        aim = self.ask("wanted")["wanted"]
        while True:
            states = [self.state(index) for index in range(len(self._servers))]
            seen = {
                (s.draft_version, s.draft_sha256 == wanted[s.draft_version], not s.not_ready)
                if s is not None
                else None
                for s in states
            }
            if seen == {(aim, True, True)}:
                return int(aim)
            assert time.monotonic() < deadline, f"not on one release: {states}"
            time.sleep(0.02)

    def stop(self) -> None:
        """End every process."""
        for process in (*self._servers, self._trainer):
            self._kill(process)
        for channel in self._channels:
            channel.close()

    def _answer(self) -> dict[str, Any]:
        assert self._pipe is not None
        try:
            if not self._pipe.poll(2 * PATIENCE):
                raise AssertionError("the trainer does not answer")
            answer: dict[str, Any] = self._pipe.recv()
        except (EOFError, ConnectionError) as error:
            self._trainer.join(PATIENCE)
            raise TrainerDiedError from error
        return answer

    @staticmethod
    def _kill(process: Any) -> None:
        if process is not None and process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
            process.join(PATIENCE)


def write_releases(root: Path, count: int) -> Registry:
    """Write a registry of the example's draft and slightly altered copies of it."""
    registry = Registry(root)
    registry.import_initial(DRAFT)
    open_pointer(registry)
    head = Eagle3().read(registry.path(0)).draft()
    generator = torch.Generator().manual_seed(0)
    for version in range(1, count):
        with torch.no_grad():
            for parameter in head.parameters():
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(0.01 * parameter.std() * noise)
        registry.create(
            head,
            release_pb2.ReleaseManifest(
                parent_version=version - 1, trained_against_policy_version=version
            ),
        )
    registry.close()
    return registry
