"""A contestant's worker process, as the parent sees it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


class WorkerError(RuntimeError):
    """The process ended; its last words are in the message."""


class WorkerProcess:
    """Runs ``benchmarks.acceptance_curve.worker`` on one core with one thread.

    Args:
        python: interpreter of its environment.
        core: the core that it may run on.
        log: its stderr goes there.
        given: what the worker's ``main`` takes.
    """

    def __init__(self, python: Path, core: int, log: Path, given: dict[str, Any]) -> None:
        self._name, self._log = given["name"], log
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        # The peer's environment has this project's packages, but not its editable installation.
        paths = {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'proto'}"}
        with log.open("a") as stderr:
            self._process = subprocess.Popen(
                [str(python), "-m", "benchmarks.acceptance_curve.worker", json.dumps(given)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                cwd=ROOT,
                env=os.environ | threads | paths,
            )
        os.sched_setaffinity(self._process.pid, {core})

    def wait_ready(self) -> None:
        """Until it has read its data and warmed up. Raises WorkerError when it ended."""
        self._answer()

    def train(self, tokens: int, folder: Path) -> dict[str, Any]:
        """See ``Worker.train``. Raises WorkerError when it ended."""
        assert self._process.stdin
        self._process.stdin.write(f"{tokens} {folder}\n")
        self._process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """End the process."""
        if self._process.poll() is None and self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            last = "\n".join(self._log.read_text().splitlines()[-15:])
            raise WorkerError(f"{self._name} ended ({self._process.wait()}), {self._log}:\n{last}")
        return json.loads(line)  # type: ignore[no-any-return]
