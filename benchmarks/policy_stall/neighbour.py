"""Is the other core a core of its own? A host may run two virtual cores on one physical core.

Seen on a shared machine: in one look of eleven an arithmetic loop took 1.5 to 1.9 times as long
while the other virtual core was busy, in the rest no longer than alone. What the bridge's threads
do there is then not free, whatever they do.
"""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from benchmarks.policy_stall.affinity import confine
from benchmarks.policy_stall.trainers import TIED

SHARED_RATIO = 1.3
"""From here on a look has found one physical core; memory alone costs less (see ``_SIZE``)."""

_SIZE, _REPEATS = 256, 12
"""Square float32 matrices that stay in a core's own cache, multiplied so often: about 4 ms."""

_BEGIN_SECONDS = 0.01
_BUSY = f"""
import torch
torch.set_num_threads(1)
matrix = torch.randn({_SIZE}, {_SIZE})
print(flush=True)
while True:
    matrix @ matrix
"""


class Neighbour(AbstractContextManager["Neighbour"]):
    """A process that keeps another core busy when it is told to, and is stopped otherwise.

    Args:
        core: whose.
    """

    def __init__(self, core: int) -> None:
        self._core = core
        self._matrix = torch.randn(_SIZE, _SIZE)

    def __enter__(self) -> Neighbour:
        self.process = subprocess.Popen(
            [*TIED, sys.executable, "-c", _BUSY], stdout=subprocess.PIPE
        )
        assert self.process.stdout is not None
        self.process.stdout.readline()
        confine(self.process.pid, {self._core})
        self.process.send_signal(signal.SIGSTOP)
        return self

    def look(self, busy_first: bool) -> float:
        """Seconds of the loop while the other core is busy, over those while it is not."""
        seconds = {busy: self._seconds(busy) for busy in (busy_first, not busy_first)}
        self.process.send_signal(signal.SIGSTOP)
        return seconds[True] / seconds[False]

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    def _seconds(self, busy: bool) -> float:
        self.process.send_signal(signal.SIGCONT if busy else signal.SIGSTOP)
        time.sleep(_BEGIN_SECONDS)
        found = []
        for _ in range(3):
            began = time.perf_counter()
            for _ in range(_REPEATS):
                self._matrix @ self._matrix
            found.append(time.perf_counter() - began)
        return min(found)


def summary(looks: Sequence[float]) -> dict[str, Any]:
    """Of ``Neighbour.look``s: how many, their median, the share that found one physical core."""
    return {
        "looks": len(looks),
        "median": statistics.median(looks),
        "shared": sum(look >= SHARED_RATIO for look in looks) / len(looks),
    }
