"""Runs a command for an owner and ends it when the owner dies, however it dies.

    python -m rollout_server.keeper COMMAND ...

The owner holds this process's standard input and starts it in a session of its own. A Ray
worker that was killed leaves its children behind otherwise: a server on a port that the next
replica wants, with a GPU's memory.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress

GRACE_SECONDS = 3.0
"""That the command has to end once its owner is gone."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the command's exit status; 128 + N where signal N ended it."""
    asked = threading.Event()
    # Before the command is there: asked in between, this process ended and left it behind.
    signal.signal(signal.SIGTERM, lambda number, frame: asked.set())
    child = subprocess.Popen(list(sys.argv[1:] if argv is None else argv), stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda number, frame: child.terminate())
    if asked.is_set():
        child.terminate()
    ended = os.pidfd_open(child.pid)
    waiting = select.poll()
    waiting.register(ended, select.POLLIN)
    # Nobody writes: readable means closed.
    waiting.register(sys.stdin.fileno(), select.POLLIN | select.POLLHUP)
    if ended not in dict(waiting.poll()):
        child.terminate()
        with suppress(subprocess.TimeoutExpired):
            child.wait(GRACE_SECONDS)
        os.killpg(0, signal.SIGKILL)
    status = child.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
