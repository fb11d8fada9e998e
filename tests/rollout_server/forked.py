"""``rollout-server`` as a fork of a process that has imported vLLM.

Two processes of a server import vLLM, one after the other, which is four fifths of its start. Here
one process imports it, once in a session: Python's fork server, which has no other thread. What
runs in the fork is the command from its first line, and an engine of one rank is a fork of that.
``python -m tests.rollout_server.forked serve ...`` imports vLLM itself: Model Runner V2, for which
vLLM is imported beside Triton.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.arithmetic_grpo.processes import Service

_IMPORTED = (
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "rollout_server.vllm.api_server",
    "rollout_server.vllm.launch",
    __name__,
)


class ForkedService(Service):
    """A ``rollout-server`` as a fork."""

    @classmethod
    def instead_of(cls, service: Service) -> ForkedService:
        """Make one in place of a service that was not started."""
        return cls(service.name, service._argv, service.log, service.health, service._env)

    @staticmethod
    def with_forked_engine(service: Service) -> Service:
        """Return a service that was not started as one that imports vLLM once."""
        command = [sys.executable, "-m", __name__, *service._argv[1:]]
        return Service(service.name, command, service.log, service.health, service._env)

    def start(self) -> None:
        """Start the process; returns at once."""
        self.log.write_bytes(b"")
        process: Any = _Forked(self._argv, self._env, self.log)
        self._process = process


class _Forked:
    """The needed part of a ``subprocess.Popen`` of ``rollout-server``.

    Args:
        argv: the command line; its first word is for messages.
        env: the whole environment.
        log: where its output is appended.
    """

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], log: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*_IMPORTED])
        self._argv = [*argv]
        self._process = context.Process(target=_run, args=(self._argv, dict(env), str(log)))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """None while it runs, -n after signal n."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """``returncode``."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end. Raises TimeoutExpired."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(self._argv, timeout or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal to this process alone, if it runs."""
        if self.returncode is None:
            os.kill(self.pid, number)


def _run(argv: list[str], env: Mapping[str, str], log: str) -> None:
    """Become, in the fork, what ``Popen`` would start, then the command."""
    gc.freeze()  # vLLM collects garbage while it starts: not among all that was imported
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.close(output)
    os.environ.clear()
    os.environ.update(env)
    _serve(argv)


def _serve(argv: list[str]) -> None:
    """The command, whose engine is a fork of this process. Does not return."""
    from vllm import envs

    from rollout_server.cli import main

    sys.argv = argv
    # Several ranks are spawned, as users have them: each imports vLLM and loads the plug-ins.
    if not any(word.endswith("-parallel-size") for word in argv):
        # Not in the environment, where vLLM's CPU platform writes "spawn".
        envs.environment_variables["VLLM_WORKER_MULTIPROC_METHOD"] = lambda: "fork"
        os.register_at_fork(after_in_child=_forget_signals)
    sys.exit(main(argv[1:]))


def _forget_signals() -> None:
    """A process that was spawned has none of the API server's handlers, nor its wake-up socket."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


if __name__ == "__main__":
    _serve(["rollout-server", *sys.argv[1:]])
