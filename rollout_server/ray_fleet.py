"""``rollout-server fleet``: rollout servers that Ray places and restarts, listed in a file.

The file is what ``publish.rollout_servers = ["file:..."]`` of the draft trainer reads, so the
trainer knows nothing of Ray. Three processes for each server:

- the **actor** (``Replica``) starts the server, watches it and ends itself when the server has
  ended or hangs, or its node's raylet has ended; Ray then starts the actor again, on this node or
  another, with the same arguments. On the same node it gets the same ports: the policy's process
  keeps the addresses that it read at its start.
- the **supervisor** (``python -m rollout_server.ray_fleet COMMAND ...``) ends the server when the
  actor dies, however it dies. A killed Ray worker leaves its children behind otherwise: a server on
  a port that the next replica needs, with a GPU's memory.
- the **server**.
"""

from __future__ import annotations

import argparse
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from rollout_server.preflight import check_paths, check_port_free
from slipstream.client import open_channel
from slipstream.errors import RefusedError
from slipstream.security import NONE, ClientCredentials
from slipstream.serving import serving

logger = logging.getLogger(__name__)

REFUSED = 2
"""Exit status of a server that refuses its options."""

HEALTH_SECONDS = 2.0
SILENT_SECONDS = 60.0
"""Without any answer to a health check after which a server hangs."""

PORTS_SECONDS = 30.0
"""That a killed predecessor has to free its ports."""

AGAIN_SECONDS = 30.0
"""Before a replica that served once and is refused now tries again."""

POLL_SECONDS = 1.0
ANSWER_SECONDS = 5.0
"""Of an actor that runs; one that does not answer is being started again."""

GRACE_SECONDS = 3.0
"""That the server has to end once its actor is gone."""

_ADDRESSES = ("--port", "--control-host", "--control-port")


@dataclass(frozen=True)
class FleetPlan:
    """What is placed; replica i listens on the first ports plus i.

    ``command`` gets ``--host``, ``--port`` and the same two of the control plane appended; an empty
    ``host`` is each node's address.
    """

    command: tuple[str, ...]
    replicas: int
    members: Path
    cpus: float = 1.0
    gpus: float = 0.0
    first_port: int = 8000
    first_control_port: int = 50061
    ready_seconds: float = 600.0
    host: str = ""
    credentials: ClientCredentials = NONE
    stop_seconds: float = 20.0


@dataclass(frozen=True)
class Report:
    """State of a replica."""

    pid: int
    control: str = ""
    http: str = ""
    refused: bool = False


class Replica:
    """The actor. Its constructor returns at once; ``report`` says when the server serves."""

    def __init__(self, plan: FleetPlan, index: int) -> None:
        from ray.util import get_node_ip_address

        self._plan = plan
        self._host = plan.host or get_node_ip_address()
        self._port, self._control_port = plan.first_port + index, plan.first_control_port + index
        self._control = f"{self._host}:{self._control_port}"
        self._report = Report(os.getpid())
        self._server: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._raylet = os.getppid()
        self._thread = threading.Thread(target=self._run, name="replica", daemon=True)
        self._thread.start()

    def report(self) -> Report:
        """How it is now."""
        return self._report

    def stop(self) -> None:
        """End the server: SIGTERM, then SIGKILL."""
        self._stopping.set()
        server = self._server
        if server is not None:
            server.terminate()
            self._thread.join(self._plan.stop_seconds)
            _kill_all(server)

    def _run(self) -> None:
        self._wait_for_ports()
        try:
            channel = open_channel(self._control, credentials=self._plan.credentials)
        except RefusedError as error:
            # The file of the CA was checked on another node.
            self._end(str(error), refused=True)
            return
        addresses: tuple[str, ...] = ("--host", self._host, "--port", str(self._port))
        addresses += ("--control-host", self._host, "--control-port", str(self._control_port))
        self._server = server = subprocess.Popen(
            [sys.executable, "-m", "rollout_server.ray_fleet", *self._plan.command, *addresses],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        end = self._watch(server, channel)
        _kill_all(server)
        if not self._stopping.is_set():
            self._end(end, refused=server.returncode == REFUSED)

    def _end(self, why: str, refused: bool) -> None:
        """End this actor, which Ray starts again. Where the first start is refused the command ends
        instead, and its user reads why."""
        import ray

        print(f"rollout server {self._control}: {why}", file=sys.stderr, flush=True)
        if refused:
            if not ray.get_runtime_context().was_current_actor_reconstructed:
                self._report = Report(os.getpid(), refused=True)
                return
            self._stopping.wait(AGAIN_SECONDS)
        os._exit(1)

    def _wait_for_ports(self) -> None:
        deadline = time.monotonic() + PORTS_SECONDS
        for port in (self._port, self._control_port):
            # Still taken after that: by another program, and the server refuses it by name.
            while time.monotonic() < deadline and not self._stopping.is_set():
                try:
                    check_port_free("port", self._host, port)
                    break
                except RefusedError:
                    self._stopping.wait(0.2)

    def _watch(self, server: subprocess.Popen[bytes], channel: grpc.Channel) -> str:
        """Until the server ended or hangs, or the node is lost; which of them."""
        deadline = time.monotonic() + self._plan.ready_seconds
        with channel:
            while server.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    server.wait(HEALTH_SECONDS)
                # Ray takes the node for lost and starts its actors on another.
                if os.getppid() != self._raylet:
                    return "lost its node"
                try:
                    if serving(channel) and not self._report.control:
                        http = f"http://{self._host}:{self._port}"
                        self._report = Report(os.getpid(), self._control, http)
                    if self._report.control:
                        deadline = time.monotonic() + SILENT_SECONDS
                except grpc.RpcError:
                    pass  # starting, or silent: the deadline decides
                if time.monotonic() > deadline:
                    return "hangs"
        return f"ended with status {server.returncode}"


def _kill_all(server: subprocess.Popen[bytes]) -> None:
    """The supervisor, the server and the engine's processes, which are one process group."""
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()


class RayFleet:
    """Owns the actors. ``ray.init`` was called before."""

    def __init__(
        self, plan: FleetPlan, on_change: Callable[[dict[int, Report]], None] = lambda r: None
    ) -> None:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        self._plan = plan
        self._on_change = on_change
        self._reports: dict[int, Report] = {}
        self._asked: dict[int, Any] = {}
        write_members(plan.members, ())
        # All places at once, over the nodes: replicas on two survive the loss of one. For those of
        # a lost node Ray finds places on the others, or on one that joins later.
        wanted = {"CPU": plan.cpus, "GPU": plan.gpus}
        bundle = {name: amount for name, amount in wanted.items() if amount}
        self._places = placement_group([bundle] * plan.replicas, strategy="SPREAD")
        self._placed = self._places.ready()
        self._place_by = time.monotonic() + plan.ready_seconds
        self._replicas = [
            ray.remote(Replica)
            .options(
                num_cpus=plan.cpus,
                num_gpus=plan.gpus,
                max_restarts=-1,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._places, index),
            )
            .remote(plan, index)
            for index in range(plan.replicas)
        ]

    def keep(self, stop: threading.Event) -> None:
        """Keep the file up to date until ``stop`` is set.

        Raises:
            RefusedError: a server refuses its options at its first start, Ray cannot start its
                actor, or the cluster has no place for all of them in ``ready_seconds``.
        """
        while not stop.is_set():
            self._poll()
            stop.wait(POLL_SECONDS)

    def close(self) -> None:
        """Empty the file; end every server and its actor."""
        import ray
        from ray.util.placement_group import remove_placement_group

        with suppress(OSError):
            write_members(self._plan.members, ())
        ending = [replica.stop.remote() for replica in self._replicas]
        ray.wait(ending, num_returns=len(ending), timeout=self._plan.stop_seconds + 5)
        for replica in self._replicas:
            ray.kill(replica)
        remove_placement_group(self._places)

    def _poll(self) -> None:
        import ray
        from ray.exceptions import ActorDiedError, ActorUnavailableError

        self._check_placed()
        # One question at a time: while Ray starts an actor again, its questions wait.
        for index, replica in enumerate(self._replicas):
            if index not in self._asked:
                self._asked[index] = replica.report.remote()
        places = {ref: index for index, ref in self._asked.items()}
        answered, _ = ray.wait(list(places), num_returns=len(places), timeout=ANSWER_SECONDS)
        now: dict[int, Report] = {}
        for ref in answered:
            index = places[ref]
            del self._asked[index]
            try:
                # Unavailable: it died, and is being started again.
                with suppress(ActorUnavailableError):
                    now[index] = ray.get(ref)
            except ActorDiedError as error:
                raise RefusedError(
                    "rollout server",
                    f"replica {index}: {error}",
                    "an actor that starts",
                    "fix what it says",
                ) from error
        refused = [index for index, report in now.items() if report.refused]
        if refused:
            raise RefusedError(
                "rollout server",
                f"replica {refused[0]} refused to start",
                "a start",
                "read its message above",
            )
        if now != self._reports:
            self._tell(now)

    def _tell(self, now: dict[int, Report]) -> None:
        controls = [report.control for report in now.values() if report.control]
        try:
            write_members(self._plan.members, sorted(controls))
        except OSError as error:
            # The servers go on; the next poll writes it.
            logger.warning("%s was not written: %s", self._plan.members, error)
            return
        self._reports = now
        self._on_change(now)

    def _check_placed(self) -> None:
        import ray

        if self._placed is None:
            return
        if ray.wait([self._placed], timeout=0)[0]:
            self._placed = None
        elif time.monotonic() > self._place_by:
            plan = self._plan
            free = ray.available_resources()
            raise RefusedError(
                "--replicas",
                f"{plan.replicas} of {plan.cpus:g} CPUs and {plan.gpus:g} GPUs each, on a cluster "
                f"with {free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs free",
                f"a place for each in {plan.ready_seconds:.0f} s",
                "ask for fewer, or add nodes",
            )


def write_members(path: Path, addresses: Sequence[str]) -> None:
    """Replace the file as a whole: a reader never sees half a fleet. Raises OSError."""
    part = path.with_name(f".{path.name}.part")
    part.write_text("".join(f"{address}\n" for address in addresses), encoding="utf-8")
    part.replace(path)


def build_parser() -> argparse.ArgumentParser:
    """Options of the fleet; all others are ``rollout-server serve``'s."""
    parser = argparse.ArgumentParser(
        prog="rollout-server fleet",
        usage="rollout-server fleet --replicas N --members FILE [options] MODEL --draft DIR "
        "[any option of rollout-server serve]",
        description="Ray places N rollout servers and restarts a server that ended or hangs. "
        "Replica i listens on its node's address, on the first ports plus i. FILE lists the "
        'control planes that serve: publish.rollout_servers = ["file:FILE"]. Runs until SIGTERM '
        "or SIGINT, then stops all servers.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--replicas", type=int, required=True, metavar="N", help="number of servers"
    )
    parser.add_argument(
        "--members", type=Path, required=True, metavar="FILE", help="list of control planes"
    )
    for option, default, text in (
        ("--cpus", 1.0, "CPUs of each replica (default: 1)"),
        ("--gpus", 0.0, "GPUs of each replica (default: 0)"),
        ("--host", "", "address of all replicas (default: each its node's)"),
        ("--first-port", 8000, "OpenAI API of replica 0 (default: 8000)"),
        ("--first-control-port", 50061, "control plane of replica 0 (default: 50061)"),
        ("--ready-timeout-s", 600.0, "for the placement, and for a start (default: 600)"),
        ("--server-name", "", "name in their certificate, if not a node's address"),
        ("--ray-address", "auto", "the cluster (default: that of this node)"),
    ):
        parser.add_argument(option, type=type(default), default=default, help=text)
    ca = "PEM of the CA of their certificate, on every node"
    parser.add_argument("--ca", type=Path, metavar="FILE", help=ca)
    return parser


def fleet(arguments: Sequence[str]) -> int:
    """Run until a signal. Returns 0.

    Raises:
        RefusedError: an option cannot be used, Ray is missing or cannot be reached, or a server
            refuses to start.
    """
    args, serve = build_parser().parse_known_args(list(arguments))
    if args.replicas < 1:
        raise RefusedError("--replicas", args.replicas, "at least 1", "set it")
    if args.cpus < 0 or args.gpus < 0 or not args.cpus + args.gpus:
        found = f"{args.cpus:g} and {args.gpus:g} of a replica"
        raise RefusedError(
            "--cpus, --gpus", found, "more than 0 of one of them", "set what it needs"
        )
    for option in _ADDRESSES:
        if any(word == option or word.startswith(f"{option}=") for word in serve):
            raise RefusedError(option, "given", "not given", "use the first ports; Ray gives hosts")
    folder = args.members.resolve().parent
    if not folder.is_dir():
        raise RefusedError("--members", folder, "a folder", "make it or name another")
    check_paths()
    credentials = ClientCredentials(ca=args.ca, server_name=args.server_name)
    credentials.check("--")
    try:
        import ray
    except ImportError as error:
        next_step = "pip install 'slipstream-rl[ray]'"
        raise RefusedError("ray", "not installed", "installed", next_step) from error

    plan = FleetPlan(
        (sys.executable, "-m", "rollout_server.cli", "serve", *serve),
        *(args.replicas, args.members, args.cpus, args.gpus),
        *(args.first_port, args.first_control_port, args.ready_timeout_s, args.host),
        credentials,
    )

    def show(reports: dict[int, Report]) -> None:
        serving = [report for report in reports.values() if report.control]
        names = " ".join(f"openai={r.http} control={r.control}" for r in serving)
        print(f"rollout-fleet: {len(serving)} of {args.replicas} serve {names}", flush=True)

    try:
        ray.init(address=args.ray_address)
    except ConnectionError as error:
        found, next_step = f"{args.ray_address} ({error})", "ray start --head"
        raise RefusedError("--ray-address", found, "a running Ray", next_step) from error
    stop = threading.Event()
    # After ray.init, which takes SIGTERM for itself.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: stop.set())
    try:
        running = RayFleet(plan, show)
        try:
            running.keep(stop)
        finally:
            running.close()
    finally:
        ray.shutdown()
    return 0


def supervise(argv: Sequence[str] | None = None) -> int:
    """Run a command for the owner of this process's standard input, and end it when the owner dies.

    Started in a session of its own. Returns the command's exit status; 128 + N where signal N ended
    it.
    """
    asked = threading.Event()
    # Before the command runs: a SIGTERM in between must not leave it behind.
    signal.signal(signal.SIGTERM, lambda number, frame: asked.set())
    child = subprocess.Popen(list(sys.argv[1:] if argv is None else argv), stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda number, frame: child.terminate())
    if asked.is_set():
        child.terminate()
    ended = os.pidfd_open(child.pid)
    waiting = select.poll()
    waiting.register(ended, select.POLLIN)
    # Nothing is ever written there: readable means closed.
    waiting.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    if ended not in dict(waiting.poll()):
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_SECONDS)
        os.killpg(0, signal.SIGKILL)
    status = child.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(supervise())
