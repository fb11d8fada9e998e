"""The private directory of a content store: in shared memory, and swept after a kill."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "slipstream-rollout-"
# A directory has its name once it is locked: nobody takes a new one for an abandoned one.
_UNLOCKED_PREFIX = "slipstream-starting-"
# Open for the life of the process: the kernel takes the locks back, whatever ends it.
_locks: list[int] = []


def make_directory(capacity: int, shared_memory: Path = SHARED_MEMORY) -> Path:
    """A private directory for ``capacity`` bytes: in shared memory if there is room.

    What servers that were killed left there is removed first: 34 of them had filled a host.
    """
    parent = Path(tempfile.gettempdir())
    if shared_memory.is_dir():
        _sweep(shared_memory)
        if shutil.disk_usage(shared_memory).free >= 2 * capacity:
            parent = shared_memory
    made = Path(tempfile.mkdtemp(prefix=_UNLOCKED_PREFIX, dir=parent))
    lock = os.open(made, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    fcntl.flock(lock, fcntl.LOCK_EX)
    _locks.append(lock)
    return made.rename(parent / made.name.replace(_UNLOCKED_PREFIX, _PREFIX))


def _sweep(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}*"):
        try:
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            # Gone by now, or not one of ours.
            continue
        try:
            if os.fstat(lock).st_uid == os.geteuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            # Its server lives.
            continue
        finally:
            os.close(lock)
