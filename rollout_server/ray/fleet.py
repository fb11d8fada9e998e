"""``rollout-server fleet``: rollout servers that Ray places and restarts, listed in a file.

The file is what ``publish.rollout_servers = ["file:..."]`` of the draft trainer reads, so the
trainer knows nothing of Ray.

Each server has an **actor** (``Replica``), which starts it, watches it and ends itself when the
server has ended or hangs, or its node's raylet has ended; Ray then starts the actor again, on this
node or another, with the same arguments. On the same node it gets the same ports: the policy's
process keeps the addresses that it read at its start.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import grpc

from rollout_server.ray.actors import Actors, Places
from rollout_server.ray.owned_process import OwnedProcess
from rollout_server.vllm.preflight import check_paths, check_port_free
from slipstream.client import join_address, open_channel
from slipstream.errors import RefusedError
from slipstream.serving.identity import NONE, ClientCredentials
from slipstream.serving.server import serving, stop_signals

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

_REMOVED = ("--trainer", *(f"--trainer-{name}" for name in ("ranks", "cpus", "gpus", "address")))
_ADDRESSES = ("--port", "--control-host", "--control-port")


@dataclass(frozen=True)
class FleetPlan:
    """The replicas to place; replica i listens on the first ports plus i.

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
        self._control = join_address(self._host, self._control_port)
        self._report = Report(os.getpid())
        self._server: OwnedProcess | None = None
        self._stopping = threading.Event()
        self._raylet = os.getppid()
        self._thread = threading.Thread(target=self._run, name="replica", daemon=True)
        self._thread.start()

    def report(self) -> Report:
        """Return its state now."""
        return self._report

    def stop(self) -> None:
        """End the server: SIGTERM, then SIGKILL."""
        self._stopping.set()
        server = self._server
        if server is not None:
            server.terminate()
            self._thread.join(self._plan.stop_seconds)
            server.kill()

    def _run(self) -> None:
        try:
            end, refused = self._serve()
        except (RefusedError, OSError) as error:
            # The driver's node has the file of the CA; this one may not.
            end, refused = str(error), True
        if not self._stopping.is_set():
            self._end(end, refused)

    def _serve(self) -> tuple[str, bool]:
        """Run the server to its end, which is as of ``_watch``.

        Raises:
            RefusedError: the credentials for its control plane cannot be used.
            OSError: the process cannot be started.
        """
        self._wait_for_ports()
        channel = open_channel(self._control, credentials=self._plan.credentials)
        addresses: tuple[str, ...] = ("--host", self._host, "--port", str(self._port))
        addresses += ("--control-host", self._host, "--control-port", str(self._control_port))
        self._server = server = OwnedProcess((*self._plan.command, *addresses))
        ended = self._watch(server, channel)
        server.kill()
        return ended

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

    def _watch(self, server: OwnedProcess, channel: grpc.Channel) -> tuple[str, bool]:
        """Until the server ended or hangs, or the node is lost; which, and whether it refuses."""
        deadline = time.monotonic() + self._plan.ready_seconds
        with channel:
            while (status := server.wait(HEALTH_SECONDS)) is None:
                # Ray takes the node for lost and starts its actors on another.
                if os.getppid() != self._raylet:
                    return "lost its node", False
                try:
                    if serving(channel) and not self._report.control:
                        http = f"http://{join_address(self._host, self._port)}"
                        self._report = Report(os.getpid(), self._control, http)
                    if self._report.control:
                        deadline = time.monotonic() + SILENT_SECONDS
                except grpc.RpcError:
                    pass  # starting, or silent: the deadline decides
                if time.monotonic() > deadline:
                    return "hangs", False
        return f"ended with status {status}", status == REFUSED


class RayFleet:
    """Owns the actors. ``ray.init`` was called before.

    Args:
        plan: of the servers.
        on_change: called with the servers' reports.
    """

    def __init__(
        self,
        plan: FleetPlan,
        on_change: Callable[[dict[int, Report]], None] = lambda r: None,
    ) -> None:
        self._plan = plan
        self._on_change = on_change
        self._reports: dict[int, Report] = {}
        write_members(plan.members, ())
        self._places = Places(plan.replicas, plan.cpus, plan.gpus, plan.ready_seconds)
        arguments = [(plan, index) for index in range(plan.replicas)]
        self._replicas = Actors(Replica, arguments, self._places)

    def keep(self, stopping: Callable[[], bool]) -> None:
        """Keep the file up to date until ``stopping`` says so.

        Raises:
            RefusedError: a server refuses its options at its first start, Ray cannot start an
                actor, or the cluster has no place for all of them in ``ready_seconds``.
        """
        while not stopping():
            self._places.check()
            self._poll()
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """Empty the file; end every server and its actor."""
        with suppress(OSError):
            write_members(self._plan.members, ())
        self._replicas.stop(self._plan.stop_seconds)
        self._places.give_back()

    def _poll(self) -> None:
        now: dict[int, Report] = self._replicas.ask()
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
        'control planes that serve: publish.rollout_servers = ["file:FILE"]. '
        "Runs until SIGTERM or SIGINT, then stops everything.",
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
        ("--ready-timeout-s", 600.0, "bound of the placement, and of a start (default: 600)"),
        ("--server-name", "", "name in the servers' certificate, if not a node's address"),
        ("--ray-address", "auto", "the cluster (default: that of this node)"),
    ):
        parser.add_argument(option, type=type(default), default=default, help=text)
    ca = "PEM of the CA that signed the servers' certificates; same path on every node"
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
        found = f"{args.cpus:g} and {args.gpus:g} of each"
        raise RefusedError("--cpus, --gpus", found, "more than 0 of one of them", "set them")
    last = 65536 - args.replicas
    for option, port in (
        ("--first-port", args.first_port),
        ("--first-control-port", args.first_control_port),
    ):
        if not 0 < port <= last:
            expected = f"1 to {last}, for {args.replicas} replicas"
            raise RefusedError(option, port, expected, "choose another port")
    given = {word.partition("=")[0].replace("_", "-") for word in serve if word.startswith("--")}
    for option in _REMOVED:
        if option in given:
            next_step = "start draft-trainer serve yourself, one process: docs/deployment.md, Ray"
            raise RefusedError(option, "an option that was removed", "none", next_step)
    for option in _ADDRESSES:
        if option in given:
            raise RefusedError(option, "given", "not given", "use the first ports; Ray gives hosts")
    if "--control-client-ca" in given:
        next_step = "use --control-token: the fleet checks the health of servers without one"
        raise RefusedError("--control-client-ca", "given", "no client certificates", next_step)
    encrypted = "--control-certificate" in given
    if encrypted and args.ca is None:
        next_step = "name the PEM of the CA that signed it"
        raise RefusedError("--ca", "nothing, with --control-certificate", "its CA", next_step)
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
        credentials if encrypted else NONE,
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
    # After ray.init, which takes SIGTERM for itself.
    stopping = stop_signals()
    try:
        running = RayFleet(plan, show)
        try:
            running.keep(stopping)
        finally:
            running.close()
    finally:
        ray.shutdown()
    return 0
