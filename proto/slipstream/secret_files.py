"""Files with secrets and certificates: readable by whom they concern, and read again on change."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from slipstream.refusal import RefusedError

_OTHERS = 0o007
_Stamp = tuple[tuple[int, int, int, int] | None, ...]


class WatchedFiles:
    """Whether any of several files is another than when it was last asked.

    Asked at every use instead of by a thread: a look is a few microseconds, and a rotation is seen
    by the first call after it. Links are followed, as Kubernetes swaps a secret's.
    """

    def __init__(self, paths: Iterable[Path]) -> None:
        self._paths = tuple(paths)
        self._seen: _Stamp | None = None

    def changed(self) -> bool:
        """Whether to read the files (again); True the first time."""
        stamp = tuple(_stamp(path) for path in self._paths)
        changed = stamp != self._seen
        # Before the files are read: what changes meanwhile is seen next time.
        self._seen = stamp
        return changed


def read_secret(path: Path, field: str) -> bytes:
    """A file that only its owner and group may read.

    Raises:
        RefusedError: it is missing or everybody may read it; never with its content.
    """
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_mode & _OTHERS:
                raise RefusedError(
                    field,
                    f"{path}, which everybody on this machine may read",
                    "a secret's file, for its owner and group alone",
                    f"chmod o= {path} (in Kubernetes: defaultMode: 0440 on the secret's volume), "
                    "and replace the secret if others use this machine",
                )
            return file.read()
    except OSError as error:
        raise unreadable(path, field, error) from error


def read_public(path: Path, field: str) -> bytes:
    """A certificate's file. Raises RefusedError: it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, field, error) from error


def unreadable(path: Path, field: str, error: OSError) -> RefusedError:
    """What is raised for a file that is not there or not ours."""
    return RefusedError(
        field,
        f"{path} ({error.strerror or error})",
        "a file that this process can read",
        "check the path, and the file's owner and mode",
    )


def _stamp(path: Path) -> tuple[int, int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_size
