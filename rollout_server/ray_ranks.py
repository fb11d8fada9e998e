"""Ranks of the draft trainer that ``rollout-server fleet`` has Ray place, watch and replace.

A rank is an actor (``Rank``) with a process of ``draft-trainer serve``. Rank 0, the trainer's
server, stays on the driver's node, where the registry and the list of servers are.

torch.distributed cannot replace one rank. When one has ended, hangs or lost its node, all of them
start again and resume from the newest training state, as torchrun has it. A rank that has no place
for ``AGAIN_SECONDS`` is left out until it has one: fewer ranks train the same, more slowly.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any

import grpc

from rollout_server.owned_process import OwnedProcess
from rollout_server.ray_actors import (
    ANSWER_SECONDS,
    HEALTH_SECONDS,
    REFUSED,
    SILENT_SECONDS,
    Actors,
    Places,
)
from slipstream.client import open_channel, split_address
from slipstream.errors import RefusedError
from slipstream.security import NONE, ClientCredentials, is_loopback
from slipstream.serving import serving

AGAIN_SECONDS = 30.0
"""Between two starts of all ranks, and before a rank that is missing is left out."""


@dataclass(frozen=True)
class RanksPlan:
    """What is placed.

    ``command`` runs the trainer, by the same path on every node. ``address`` is rank 0's gRPC;
    ``credentials`` are used for it unless it is on loopback.
    """

    command: tuple[str, ...]
    size: int
    address: str
    cpus: float = 1.0
    gpus: float = 0.0
    ready_seconds: float = 600.0
    host: str = ""
    credentials: ClientCredentials = NONE
    stop_seconds: float = 20.0


@dataclass(frozen=True)
class Start:
    """One start of all ranks; its ``number`` grows. They meet at ``host`` and ``port``."""

    number: int = 0
    rank: int = 0
    size: int = 0
    host: str = ""
    port: int = 0


@dataclass(frozen=True)
class RankReport:
    """State of a rank: its newest start, and where a later one could meet on its node."""

    pid: int
    host: str
    port: int
    start: int = 0
    serves: bool = False
    end: str = ""
    refused: bool = False


class Rank:
    """The actor. It runs nothing until ``start``."""

    def __init__(self, plan: RanksPlan) -> None:
        from ray.util import get_node_ip_address

        self._plan = plan
        self._host = plan.host or get_node_ip_address()
        self._start = Start()
        self._report = self._nothing_yet()
        self._stopping = False
        self._changed = threading.Condition()
        self._raylet = os.getppid()
        self._thread = threading.Thread(target=self._run, name="rank", daemon=True)
        self._thread.start()

    def report(self) -> RankReport:
        """How it is now."""
        with self._changed:
            return self._report

    def start(self, start: Start) -> None:
        """End the process and start it as a rank of this start; returns at once."""
        with self._changed:
            self._start = start
            self._report = self._nothing_yet()
            self._changed.notify_all()

    def stop(self) -> None:
        """End the process: SIGTERM, then SIGKILL."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join(self._plan.stop_seconds + HEALTH_SECONDS)

    def _run(self) -> None:
        begun = self._start
        while True:
            with self._changed:
                while self._start == begun and not self._stopping:
                    self._changed.wait()
                if self._stopping:
                    return
                begun = self._start
            try:
                end, refused = self._run_one(begun)
            except RefusedError as error:
                # The file of the CA was checked when the command began.
                end, refused = str(error), True
            except OSError as error:
                end, refused = f"was not started: {error}", False
            if end:
                print(f"trainer rank {begun.rank}: {end}", file=sys.stderr, flush=True)
                self._tell(begun, serves=False, end=end, refused=refused)
            if os.getppid() != self._raylet:
                os._exit(1)

    def _run_one(self, start: Start) -> tuple[str, bool]:
        """Run the process of a start to its end, which is as of ``_watch``.

        Raises:
            RefusedError: the credentials for rank 0 cannot be used.
            OSError: the process cannot be started.
        """
        variables = {
            "RANK": start.rank,
            "WORLD_SIZE": start.size,
            "LOCAL_RANK": 0,  # Ray shows an actor its own GPUs alone
            "MASTER_ADDR": start.host,
            "MASTER_PORT": start.port,
        }
        environment = os.environ | {name: str(value) for name, value in variables.items()}
        process = OwnedProcess(self._plan.command, environment)
        try:
            end, refused = self._watch(process, start)
            if not end:
                # Ranks other than 0 ignore SIGTERM: they end when rank 0 does.
                process.terminate()
                process.wait(self._plan.stop_seconds)
        finally:
            process.kill()
        return end, refused

    def _watch(self, process: OwnedProcess, start: Start) -> tuple[str, bool]:
        """How the process ended, or that it hangs, and whether it refuses its options; an empty
        text where it is to be ended."""
        plan = self._plan
        host, _ = split_address(plan.address)
        credentials = NONE if is_loopback(host) else plan.credentials
        deadline, served = time.monotonic() + plan.ready_seconds, False
        with (
            nullcontext() if start.rank else open_channel(plan.address, credentials=credentials)
        ) as channel:
            while (status := process.wait(HEALTH_SECONDS)) is None:
                if os.getppid() != self._raylet:
                    return "lost its node", False
                if self._stopping or self._start != start:
                    return "", False
                if channel is None:
                    continue  # its exchanges with rank 0 have deadlines
                with suppress(grpc.RpcError):
                    served = serving(channel) or served
                    if served:
                        self._tell(start, serves=True)
                        deadline = time.monotonic() + SILENT_SECONDS
                if time.monotonic() > deadline:
                    if served:
                        return "hangs", False
                    seconds = f"{plan.ready_seconds:.0f} s"
                    return f"does not serve at --trainer-address {plan.address} in {seconds}", True
        return f"ended with status {status}", status == REFUSED

    def _nothing_yet(self) -> RankReport:
        return RankReport(os.getpid(), self._host, _free_port(self._host), self._start.number)

    def _tell(self, start: Start, **facts: Any) -> None:
        """Report this of a start, unless a later one was ordered meanwhile."""
        with self._changed:
            if self._start == start:
                self._report = replace(self._report, **facts)


class TrainerRanks:
    """The driver's side.

    Args:
        plan: of the ranks.
        places: whose first bundles are theirs, the first one on this node.
        on_change: called with the number of ranks that train, 0 while the trainer does not serve.
    """

    def __init__(
        self, plan: RanksPlan, places: Places, on_change: Callable[[int], None] = lambda n: None
    ) -> None:
        self._plan = plan
        self._on_change = on_change
        self.actors = Actors("trainer rank", Rank, [(plan,)] * plan.size, places, 0)
        self._number = 0
        self._running: tuple[int, ...] = ()  # actors of the newest start, in the order of ranks
        self._began = self._missing_since = 0.0
        self._told = 0

    def poll(self) -> None:
        """Start all ranks again where one has ended or is missing, or one more has a place.

        Raises:
            RefusedError: the trainer refuses its options at its first start, or does not serve at
                its address; Ray cannot start an actor.
        """
        reports = self.actors.ask()
        now = time.monotonic()
        if self._number == 1:
            self._check_first(reports)
        whole = bool(self._running) and all(
            index in reports and reports[index].start == self._number and not reports[index].end
            for index in self._running
        )
        training = len(self._running) if whole and reports[0].serves else 0
        if training != self._told:
            self._told = training
            self._on_change(training)
        if len(reports) == self._plan.size:
            self._missing_since = 0.0
        elif not self._missing_since:
            self._missing_since = now
        if whole and reports.keys() <= set(self._running):
            return
        # Those that are missing get their time, but not the driver's own node's.
        waits = self._missing_since and (
            not self._running or now < self._missing_since + AGAIN_SECONDS
        )
        if 0 not in reports or waits or (self._number and now < self._began + AGAIN_SECONDS):
            return
        self._start_all(reports)

    def _start_all(self, reports: dict[int, RankReport]) -> None:
        import ray

        self._number += 1
        self._running = tuple(sorted(reports))
        self._began = time.monotonic()
        size, host, port = len(self._running), reports[0].host, reports[0].port
        told = [
            self.actors.handles[index].start.remote(Start(self._number, rank, size, host, port))
            for rank, index in enumerate(self._running)
        ]
        # One that does not take it is found by the next poll.
        ray.wait(told, num_returns=len(told), timeout=ANSWER_SECONDS)

    def _check_first(self, reports: dict[int, RankReport]) -> None:
        for index, report in sorted(reports.items()):
            if report.refused:
                raise RefusedError(
                    "--trainer",
                    f"rank {index} {report.end}",
                    "a trainer that serves",
                    "read its message above; --trainer-address and --ca are as in its file",
                )


def _free_port(host: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
