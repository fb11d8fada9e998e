"""Starts, watches and stops the demo's two services as real processes."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from slipstream.client import open_channel

_POLL_SECONDS = 0.25


class ServiceError(RuntimeError):
    """A service did not start, or ended early; the text quotes the end of its log."""


def free_port(ports: range = range(20_000, 28_000)) -> int:
    """A TCP port on loopback that is free now.

    Below those that the system gives to connections: what is to listen there may take a minute to
    start, and until then nothing else takes the port by chance.
    """
    while True:
        port = random.SystemRandom().choice(ports)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Service:
    """One child process in a session of its own, with its output in a log file.

    Args:
        name: for messages.
        argv: the command.
        log: where stdout and stderr go.
        health: host:port whose standard gRPC health tells readiness.
        env: added to this process's environment.
    """

    def __init__(
        self,
        name: str,
        argv: Sequence[str],
        log: Path,
        health: str,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.log, self.health = name, log, health
        self._argv = list(argv)
        self._env = {**os.environ, **(env or {})}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process; returns at once."""
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                self._argv,
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self._env,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Process id. Raises ServiceError before ``start``."""
        if self._process is None:
            raise ServiceError(f"{self.name} was not started")
        return self._process.pid

    def usage(self) -> tuple[float, int]:
        """CPU seconds of the running process so far, and its peak resident bytes."""
        folder = Path("/proc") / str(self.pid)
        # The command's name, in brackets, may have blanks; utime and stime are fields 14 and 15.
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
        cpu = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
        return cpu, int(status["VmHWM"].split()[0]) * 1024

    def wait_ready(self, timeout: float) -> float:
        """Wait until gRPC health says SERVING; returns the seconds it took.

        Raises:
            ServiceError: the process ended, or was not ready within ``timeout`` seconds.
        """
        began = time.monotonic()
        while time.monotonic() - began < timeout:
            self.check()
            # A channel of its own for each question: one that found nobody waits longer each time.
            with open_channel(self.health, own_connection=True) as channel:
                stub = health_pb2_grpc.HealthStub(channel)
                try:
                    answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=2)
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        return time.monotonic() - began
                except grpc.RpcError:
                    pass  # not listening yet: that is what is being waited for
            time.sleep(_POLL_SECONDS)
        raise ServiceError(f"{self.name} was not ready in {timeout:.0f} s{self._log_tail()}")

    def check(self) -> None:
        """Raise ServiceError if the process has ended."""
        if self._process is None or self._process.poll() is not None:
            status = "not started" if self._process is None else self._process.returncode
            raise ServiceError(f"{self.name} ended (status {status}){self._log_tail()}")

    @property
    def alive(self) -> bool:
        """True if the process was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def wait_ended(self, timeout: float) -> None:
        """Wait for a process that ends by itself. Raises ServiceError: it did not."""
        try:
            if self._process is not None:
                self._process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise ServiceError(f"{self.name} goes on{self._log_tail()}") from error

    def stop(self, grace: float = 20.0) -> int | None:
        """SIGTERM, then SIGKILL to the whole session after ``grace`` seconds; the exit status."""
        process = self._process
        if process is None:
            return None
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(grace)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(5)
        return process.returncode

    def _log_tail(self, lines: int = 25) -> str:
        text = (
            self.log.read_text(errors="replace").splitlines()[-lines:] if self.log.exists() else []
        )
        return f"; the end of {self.log}:\n  " + "\n  ".join(text)


class Services:
    """Stops every service it was given, last first, whatever happened."""

    def __init__(self, *services: Service) -> None:
        self._services = services

    def __enter__(self) -> Services:
        for service in self._services:
            service.start()
        return self

    def __exit__(self, *_: object) -> None:
        for service in reversed(self._services):
            service.stop()

    def check(self) -> None:
        """Raise ServiceError if any has ended."""
        for service in self._services:
            service.check()
