"""Measures the seconds that training takes from others on the cores that it shares."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CoreSeconds:
    """The seconds since their start that a process's threads ran on a core, and that they waited
    for one that another thread had; sums over the threads."""

    ran: float
    waited: float

    def taken_since(self, before: CoreSeconds) -> float:
        """Estimate how long others waited because of this process.

        The kernel shares a contended core evenly: two that want it wait for each other as long as
        they run. A thread that waits for several takes no more than it runs.
        """
        return max(0.0, min(self.ran - before.ran, self.waited - before.waited))


def core_seconds(pid: int | None = None, nice: int | None = None) -> CoreSeconds | None:
    """Read the kernel's counts of a process; None where it has none.

    Source: Linux, Documentation/scheduler/sched-stats.rst.

    Args:
        pid: of the process; None: this one.
        nice: counts only threads with this nice value, which are those that train in a process
            that does more; None: counts all.
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
    """Return the nice value of training threads that this thread starts: they inherit its own,
    which only root may lower."""
    return max(configured, os.getpriority(os.PRIO_PROCESS, 0))
