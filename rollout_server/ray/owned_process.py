"""A process that ends when its owner does, however the owner ends.

A killed Ray worker leaves its children behind: a server on a port that the next replica needs, with
a GPU's memory. So a **supervisor** (``python -m rollout_server.ray.owned_process COMMAND``) runs
the command and ends it when its standard input, which the owner holds, is closed. It is not the
owner's own child: Ray kills the children of a worker that it ends, but not their children.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

GRACE_SECONDS = 3.0
"""The time that the command has to end once its owner is gone."""

_POLL_MS = 200


class OwnedProcess:
    """A command under its supervisor, in a session and process group of their own.

    Args:
        command: program and arguments.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._supervisor = subprocess.Popen(
            [sys.executable, "-m", "rollout_server.ray.owned_process", *command],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def wait(self, seconds: float) -> int | None:
        """Wait for its exit status, 128 + N if signal N ended it; None if it still runs."""
        with suppress(subprocess.TimeoutExpired):
            self._supervisor.wait(seconds)
        return self._supervisor.returncode

    def terminate(self) -> None:
        """Send SIGTERM to the command."""
        self._supervisor.terminate()

    def kill(self) -> None:
        """Send SIGKILL to the supervisor, the command and all that it started."""
        with suppress(ProcessLookupError):
            os.killpg(self._supervisor.pid, signal.SIGKILL)
        self._supervisor.wait()


def supervise(argv: Sequence[str] | None = None) -> int:
    """Run a command for the owner of this process's standard input, and end it when the owner dies.

    Started in a session of its own. Returns the command's exit status; 128 + N where signal N ended
    it.
    """
    asked: list[int] = []
    # Caught before there is a process to pass it on to: a SIGTERM in between must not be lost.
    signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))
    supervisor = os.fork()
    if supervisor:
        signal.signal(signal.SIGTERM, lambda number, frame: os.kill(supervisor, number))
        if asked:
            os.kill(supervisor, signal.SIGTERM)
        return _exit_status(os.waitstatus_to_exitcode(os.waitpid(supervisor, 0)[1]))
    child = subprocess.Popen(list(sys.argv[1:] if argv is None else argv), stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda number, frame: child.terminate())
    if asked:
        child.terminate()
    owner = select.poll()
    # Nothing is ever written there: readable means closed.
    owner.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    # Not by a pidfd: uv's Pythons have none before July 2026.
    while child.poll() is None and not owner.poll(_POLL_MS):
        pass
    if child.returncode is None:
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_SECONDS)
        os.killpg(0, signal.SIGKILL)
    return _exit_status(child.wait())


def _exit_status(code: int) -> int:
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(supervise())
