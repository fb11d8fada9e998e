"""A process that Ray placed ends with its owner."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import until

WAIT = 180
# Says its number, then ignores what asks it politely to end, as a server that hangs.
DEAF = (
    "import os, signal, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print(os.getpid(), flush=True); time.sleep(600)"
)


def supervise(*command: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "rollout_server.ray.owned_process", *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def pid_of(supervisor: subprocess.Popen[str]) -> int:
    assert supervisor.stdout is not None
    return int(supervisor.stdout.readline())


def end(supervisor: subprocess.Popen[str]) -> int:
    """Act as if the owner died: the kernel closes what it held."""
    assert supervisor.stdin is not None
    supervisor.stdin.close()
    return supervisor.wait(WAIT)


def test_exit_status_is_passed_on() -> None:
    with supervise(sys.executable, "-c", "import sys; sys.exit(2)") as supervisor:
        assert supervisor.wait(WAIT) == 2
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    with supervise(sys.executable, "-c", kill) as supervisor:
        assert supervisor.wait(WAIT) == 128 + signal.SIGKILL


def test_sigterm_is_passed_on() -> None:
    code = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(7));"
    code += "print(0, flush=True); signal.pause()"
    with supervise(sys.executable, "-c", code) as supervisor:
        pid_of(supervisor)
        supervisor.terminate()
        assert supervisor.wait(WAIT) == 7


@pytest.mark.parametrize("ray", [False, True], ids=["owner dies", "Ray ends it"])
def test_process_ends_with_owner(ray: bool) -> None:
    """Ray kills the worker's own child first, and then the worker ends."""
    with supervise(sys.executable, "-c", DEAF) as relay:
        child = pid_of(relay)
        if ray:
            relay.kill()
            relay.wait(WAIT)
        assert alive(child)
        assert end(relay) == -signal.SIGKILL
    until(lambda: not alive(child), WAIT)


def alive(pid: int) -> bool:
    """Not gone, and not waiting to be reaped by the parent of orphans here."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
