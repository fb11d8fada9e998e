"""Contestants in processes of their own: JSON lines in, JSON lines out, blocked between commands.

The parent holds a ``WorkerProcess``; the child calls ``serve``. A child runs on one core with one
thread, so that contestants that take turns do not disturb one another.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CLOSE_SECONDS = 60.0
# Killed with this process, however it ends.
TIED = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []


class WorkerError(RuntimeError):
    """The process ended; the message has the end of its log."""


class WorkerProcess:
    """Starts ``PYTHON -m MODULE ARGUMENTS``.

    Args:
        name: for messages.
        module: what it runs; calls ``serve``.
        arguments: its command line.
        log: receives its stderr.
        python: interpreter, of the contestant's own environment where it has one.
        core: the core that it runs on; None leaves the choice to the scheduler.

    Attributes:
        greeting: its first line.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        log: Path,
        python: Path = Path(sys.executable),
        core: int | None = None,
    ) -> None:
        self.name, self._log = name, log
        # Inductor's pool of compilers would run beside the other contestants' steps.
        settings = {
            **{"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
            **{"TORCHINDUCTOR_COMPILE_THREADS": "1", "HF_HUB_OFFLINE": "1"},
            "PYTHONUNBUFFERED": "1",
        }
        if python != Path(sys.executable):
            # Another environment lacks this project; its own packages come before the caller's.
            settings["PYTHONPATH"] = f"{ROOT}{os.pathsep}{ROOT / 'proto'}"
        with log.open("a") as stderr:
            self._process = subprocess.Popen(
                [*TIED, str(python), "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd=ROOT,
                env=os.environ | settings,
            )
        if core is not None:
            os.sched_setaffinity(self._process.pid, {core})
        self.greeting = self._answer()

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send one command and wait for its answer. Raises WorkerError when the process ended."""
        assert self._process.stdin
        self._process.stdin.write(json.dumps([command, arguments]) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        if self._process.poll() is None and self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            last = "\n".join(self._log.read_text().splitlines()[-15:])
            raise WorkerError(f"{self.name} ended ({self._process.wait()}), {self._log}:\n{last}")
        return json.loads(line)  # type: ignore[no-any-return]


def answers() -> Callable[[Mapping[str, Any]], None]:
    """Keep stdout for answers; whatever a library prints goes to stderr from here on."""
    stream = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return lambda answer: print(json.dumps(answer), file=stream)


def serve(
    answer: Callable[[Mapping[str, Any]], None],
    greeting: Mapping[str, Any],
    commands: Mapping[str, Callable[..., Mapping[str, Any]]],
) -> None:
    """Answer commands until stdin ends.

    Args:
        answer: from ``answers``, called before the slow imports print anything.
        greeting: sent first.
        commands: by name; called with the command's arguments.
    """
    answer(greeting)
    for line in sys.stdin:
        command, arguments = json.loads(line)
        answer(commands[command](**arguments))
