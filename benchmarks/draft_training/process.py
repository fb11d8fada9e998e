"""A contestant's worker process, as the parent sees it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.draft_training.case import Case

ROOT = Path(__file__).resolve().parents[2]


class WorkerError(RuntimeError):
    """The process ended; its last words are in the message."""


class WorkerProcess:
    """Starts ``python -m benchmarks.draft_training.worker NAME`` on one core with one thread.

    Args:
        name: the contestant.
        python: interpreter of its environment.
        core: the core that it may run on; None leaves the choice to the scheduler.
        log: its stderr goes there.
    """

    def __init__(self, name: str, python: Path, core: int | None, log: Path) -> None:
        self.name = name
        self._log = log
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        # A pool of compilers would go on running beside the others' steps.
        quiet = {"TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONPATH": "", "PYTHONUNBUFFERED": "1"}
        with log.open("a") as stderr:
            self._process = subprocess.Popen(
                [str(python), "-m", "benchmarks.draft_training.worker", name],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd=ROOT,
                env=os.environ | threads | quiet,
            )
        if core is not None:
            os.sched_setaffinity(self._process.pid, {core})
        self.greeting = self._answer()

    def load(self, case: Case, setting: str) -> None:
        """Build the case in the process; idle until the next command."""
        self._ask(f"load {json.dumps({'case': case.to_dict(), 'setting': setting})}")

    def step(self) -> dict[str, Any]:
        """One step: "wall" and "cpu" seconds, "memory" bytes, "loss"."""
        return self._ask("step")

    def profile(self) -> dict[str, Any]:
        """Seconds of the parts of one step."""
        return self._ask("profile")

    def close(self) -> None:
        """End the process."""
        if self._process.poll() is None and self._process.stdin:
            self._process.stdin.close()
        self._process.wait(timeout=60)

    def _ask(self, line: str) -> dict[str, Any]:
        assert self._process.stdin
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            last = "\n".join(self._log.read_text().splitlines()[-15:])
            raise WorkerError(f"{self.name} ended ({self._process.wait()}), {self._log}:\n{last}")
        return json.loads(line)  # type: ignore[no-any-return]
