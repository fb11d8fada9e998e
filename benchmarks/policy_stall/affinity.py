"""Which cores the threads of a process may use."""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path


def confine(pid: int, cores: Collection[int], but: Collection[int] = ()) -> None:
    """Keep all threads that a process has now, and those that they begin, on ``cores``.

    Args:
        pid: of the process.
        cores: they may run on.
        but: native ids of threads that are left as they are.
    """
    for thread in Path(f"/proc/{pid}/task").iterdir():
        if int(thread.name) not in but:
            # Not one that ended meanwhile, at which `taskset -a` gives up.
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), cores)
