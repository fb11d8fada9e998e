"""What Linux says of a process from outside: whether it is stopped, which files it has."""

from __future__ import annotations

import os
from pathlib import Path

_DELETED = " (deleted)"


def is_stopped(pid: int) -> bool:
    """Whether all of its threads are stopped, or over."""
    return all(_state(task) in "TtZX" for task in Path(f"/proc/{pid}/task").iterdir())


def open_files(pid: int, memory: Path) -> set[str]:
    """The files of samples that it has open and whose names are gone: those of streams."""
    prefix = f"{memory}/slipstream-samples-"
    names = {_link(path) for path in Path(f"/proc/{pid}/fd").iterdir()}
    return {name for name in names if name.startswith(prefix) and name.endswith(_DELETED)}


def open_descriptor(pid: int, memory: Path) -> int:
    """A descriptor of the one file of ``open_files``, to read and write; to be closed."""
    (name,) = open_files(pid, memory)
    first, *_ = [path for path in Path(f"/proc/{pid}/fd").iterdir() if _link(path) == name]
    return os.open(first, os.O_RDWR)


def _state(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def _link(path: Path) -> str:
    try:
        return str(path.readlink())
    except FileNotFoundError:
        return ""
