"""A process on the receiving side."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType


class Process:
    """``python -m`` of a module here, owned by whoever enters it.

    Args:
        argv: the module's name and its options.
        core: that it runs on; None leaves that open.

    Attributes:
        addresses: what it printed when it was ready.
    """

    def __init__(self, argv: Sequence[str], core: int | None) -> None:
        command = [sys.executable, "-m", *argv]
        if core is not None:
            command = ["taskset", "-c", str(core), *command]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.addresses = self._answer().split()

    def cpu_seconds(self) -> float:
        """CPU seconds of the process so far."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._answer())

    def __enter__(self) -> Process:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(30.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a process on the receiving side ended; its message is above")
        return line
