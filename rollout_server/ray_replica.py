"""One rollout server as a Ray actor: starts it, watches over it, dies with it.

Ray starts an actor again whose process ended, on this node or another, with the same arguments.
So the actor ends its own process when its server has ended or hangs; there is no second
supervisor. On the same node the replica gets the same ports: the policy's process pushes weights
to the addresses that it was told when its run began.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

import grpc
import ray
from ray.util import get_node_ip_address

from slipstream.channel import open_channel
from slipstream.credentials import NONE, ClientCredentials
from slipstream.health import serving

REFUSED = 2
"""Exit status of a server that was asked for what it cannot do."""
LOOK_SECONDS = 2.0
SILENT_SECONDS = 60.0
"""Without any answer to a health check after which a server hangs."""
PORTS_SECONDS = 30.0
"""That a killed predecessor has to free its ports."""
AGAIN_SECONDS = 30.0
"""Before a replica that served once and is refused now tries again."""


@dataclass(frozen=True)
class Launch:
    """What a replica starts.

    Attributes:
        command: all but the addresses, which the replica appends: ``--host``, ``--port``,
            ``--control-host``, ``--control-port``.
        port: of the OpenAI API.
        control_port: of the control plane.
        ready_seconds: longest that it may take until health says SERVING.
        host: to listen on; empty: its node's address.
        credentials: to ask for its health with, where it has a certificate.
    """

    command: tuple[str, ...]
    port: int
    control_port: int
    ready_seconds: float
    host: str = ""
    credentials: ClientCredentials = NONE


@dataclass(frozen=True)
class Report:
    """How a replica is. ``control``: its control plane's address, empty until it serves."""

    pid: int
    control: str = ""
    http: str = ""
    refused: bool = False


class Replica:
    """The actor. Its constructor returns at once; ``report`` says when the server serves."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._host = launch.host or get_node_ip_address()
        self._report = Report(os.getpid())
        self._server: subprocess.Popen[bytes] | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replica", daemon=True)
        self._thread.start()

    def report(self) -> Report:
        """How it is now; ``pid`` is the actor's process."""
        return self._report

    def stop(self, grace: float) -> None:
        """End the server: SIGTERM, after ``grace`` seconds SIGKILL."""
        self._stopping.set()
        server = self._server
        if server is not None:
            server.terminate()
            self._thread.join(grace)
            _kill_all(server)

    def _run(self) -> None:
        self._wait_for_ports()
        launch, host = self._launch, self._host
        addresses: tuple[str, ...] = ("--host", host, "--port", str(launch.port))
        addresses += ("--control-host", host, "--control-port", str(launch.control_port))
        self._server = server = subprocess.Popen(
            [sys.executable, "-m", "rollout_server.keeper", *launch.command, *addresses],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        status = self._watch(server)
        _kill_all(server)
        if self._stopping.is_set():
            return
        print(f"rollout server {host}:{launch.control_port}: {status}", file=sys.stderr, flush=True)
        if server.returncode == REFUSED:
            if not ray.get_runtime_context().was_current_actor_reconstructed:
                # At the first start somebody is there to mend it.
                self._report = Report(os.getpid(), refused=True)
                return
            self._stopping.wait(AGAIN_SECONDS)
        os._exit(1)

    def _wait_for_ports(self) -> None:
        deadline = time.monotonic() + PORTS_SECONDS
        ports = (self._launch.port, self._launch.control_port)
        # Still taken after that: somebody else's, and the server refuses it by name.
        while not all(_free(self._host, port) for port in ports) and time.monotonic() < deadline:
            self._stopping.wait(0.2)

    def _watch(self, server: subprocess.Popen[bytes]) -> str:
        """Until the server ended or hangs; which of the two."""
        launch = self._launch
        control = f"{self._host}:{launch.control_port}"
        deadline = time.monotonic() + launch.ready_seconds
        with open_channel(control, credentials=launch.credentials) as channel:
            while not _ended(server, LOOK_SECONDS):
                try:
                    if serving(channel) and not self._report.control:
                        http = f"http://{self._host}:{launch.port}"
                        self._report = Report(os.getpid(), control, http)
                    if self._report.control:
                        deadline = time.monotonic() + SILENT_SECONDS
                except grpc.RpcError:
                    pass  # starting, or silent: the deadline decides
                if time.monotonic() > deadline:
                    return "hangs"
        return f"ended with status {server.returncode}"


def _free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def _ended(server: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        server.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _kill_all(server: subprocess.Popen[bytes]) -> None:
    """The keeper, the server and the engine's processes, which are one process group."""
    with suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)
    server.wait()
