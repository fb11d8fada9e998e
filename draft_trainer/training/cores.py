"""Measures the seconds that training takes from others on the cores that it shares."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CoreSeconds:
    """The seconds that a process's threads ran on a core since their start, and that they were
    ready to and another thread had it; sums over the threads."""

    ran: float
    waited: float

    def taken_since(self, before: CoreSeconds) -> float:
        """Estimate how long others waited because of this process.

        The kernel shares a contended core evenly: two that want it wait for each other as long as
        they run. Who waits for several takes no more than it runs.
        """
        return max(0.0, min(self.ran - before.ran, self.waited - before.waited))


def core_seconds(pid: int | None = None, nice: int | None = None) -> CoreSeconds | None:
    """Read what the kernel counts; None where it does not.

    Source: Linux, Documentation/scheduler/sched-stats.rst.

    Args:
        pid: of the process; None: this one.
        nice: only of threads with this one: those that train, and no others of a process that
            does more; None: of all.
    """
    if sys.platform != "linux":
        return None
    ran = waited = counted = 0
    for task in Path(f"/proc/{pid or 'self'}/task").iterdir():
        try:
            counts = (task / "schedstat").read_text().split()
            counted += int(counts[0])
            if nice is not None and os.getpriority(os.PRIO_PROCESS, int(task.name)) != nice:
                continue
        except (FileNotFoundError, ProcessLookupError):
            continue  # the thread ended meanwhile, or the kernel does not count
        ran, waited = ran + int(counts[0]), waited + int(counts[1])
    return CoreSeconds(ran / 1e9, waited / 1e9) if counted else None


def training_nice(configured: int) -> int:
    """The nice value of threads that train, if this one starts them: only root may lower what they
    inherit."""
    return max(configured, os.getpriority(os.PRIO_PROCESS, 0))
