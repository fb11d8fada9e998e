"""``rollout-server fleet``: several rollout servers, placed and kept by Ray."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from slipstream.credentials import ClientCredentials
from slipstream.refusal import RefusedError

_OURS = ("--port", "--control-host", "--control-port")


def build_parser() -> argparse.ArgumentParser:
    """Options of the fleet; all others are ``rollout-server serve``'s."""
    parser = argparse.ArgumentParser(
        prog="rollout-server fleet",
        usage="rollout-server fleet --replicas N --members FILE [options] MODEL --draft DIR "
        "[any option of rollout-server serve]",
        description="Ray places N rollout servers and starts one again that ended or hangs. "
        "Replica i listens on its node's address, on the first ports plus i. FILE lists the "
        'control planes that serve: publish.rollout_servers = ["file:FILE"]. Runs until SIGTERM '
        "or SIGINT, then ends them all.",
        allow_abbrev=False,
    )
    parser.add_argument("--replicas", type=int, required=True, metavar="N")
    parser.add_argument("--members", type=Path, required=True, metavar="FILE")
    parser.add_argument("--cpus", type=float, default=1.0, help="of each replica (default: 1)")
    parser.add_argument("--gpus", type=float, default=0.0, help="of each replica (default: 0)")
    parser.add_argument(
        "--host",
        default="",
        help="that all listen on, where all are on one machine (default: each its node's address)",
    )
    parser.add_argument("--first-port", type=int, default=8000, help="OpenAI API (default: 8000)")
    parser.add_argument(
        "--first-control-port", type=int, default=50061, help="control plane (default: 50061)"
    )
    parser.add_argument(
        "--ready-timeout-s", type=float, default=600.0, help="of a start (default: 600)"
    )
    parser.add_argument(
        "--ca", type=Path, metavar="FILE", help="on every node: PEM of the CA of their certificate"
    )
    parser.add_argument(
        "--server-name", default="", help="name in it, where that is not a node's address"
    )
    parser.add_argument(
        "--ray-address", default="auto", help="of the cluster (default: the one of this node)"
    )
    return parser


def fleet(arguments: Sequence[str]) -> int:
    """Run until a signal. Returns 0.

    Raises:
        RefusedError: an option cannot be used, Ray is missing or cannot be reached, or a server
            refuses to start.
    """
    args, serve = build_parser().parse_known_args(list(arguments))
    if args.replicas < 1:
        raise RefusedError("--replicas", args.replicas, "at least 1", "say how many")
    for option in _OURS:
        if any(a == option or a.startswith(f"{option}=") for a in serve):
            raise RefusedError(option, "given", "not given", "use the first ports; Ray gives hosts")
    if not args.members.resolve().parent.is_dir():
        raise RefusedError(
            "--members", args.members.resolve().parent, "a folder", "make it or name another"
        )
    credentials = ClientCredentials(ca=args.ca, server_name=args.server_name)
    credentials.check("--")
    try:
        import ray
    except ImportError as error:
        raise RefusedError(
            "ray", "not installed", "installed", "pip install 'slipstream[ray]'"
        ) from error
    from rollout_server.ray_fleet import FleetPlan, RayFleet, Report

    def show(reports: dict[int, Report]) -> None:
        serving = [report for report in reports.values() if report.control]
        names = " ".join(f"openai={r.http} control={r.control}" for r in serving)
        print(f"rollout-fleet: {len(serving)} of {args.replicas} serve {names}", flush=True)

    stop = threading.Event()
    try:
        ray.init(address=args.ray_address)
    except ConnectionError as error:
        raise RefusedError(
            "--ray-address", f"{args.ray_address} ({error})", "a running Ray", "ray start --head"
        ) from error
    # After ray.init, which takes SIGTERM for itself.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: stop.set())
    try:
        plan = FleetPlan(
            (sys.executable, "-m", "rollout_server.cli", "serve", *serve),
            args.replicas,
            args.members,
            args.cpus,
            args.gpus,
            args.first_port,
            args.first_control_port,
            args.ready_timeout_s,
            host=args.host,
            credentials=credentials,
        )
        running = RayFleet(plan, show)
        try:
            running.keep(stop)
        finally:
            running.close()
    finally:
        ray.shutdown()
    return 0
