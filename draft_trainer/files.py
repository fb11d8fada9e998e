"""Files that are on disk whole or not at all, whatever instant the process is killed at.

One process writes a registry; who reads it never waits for it and never needs it.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from safetensors import SafetensorError

from slipstream.errors import RefusedError, StatusCode


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path`` to write to; it becomes ``path`` at the end.

    The content is fsynced before the rename and the folder after it. When the body or the disk
    fails, ``path`` is what it was before and the temporary file is gone.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """
    number, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    os.close(number)
    temporary = Path(name)
    try:
        yield temporary
        # mkstemp and safetensors leave 0600; a server under another user reads these files.
        temporary.chmod(0o644)
        fsync(temporary)
        temporary.replace(path)
        fsync(path.parent)
    except SafetensorError as error:
        # Its only name for a full disk.
        raise OSError(f"{path}: {error}") from error
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def folder_written_whole(path: Path) -> Iterator[Path]:
    """As ``written_whole`` for a new folder of plain files: yields a temporary folder.

    Raises:
        RefusedError: ``path`` is there already.
        OSError: the parent folder cannot be written, or the disk is full.
    """
    check_free(path, "folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        for file in (*temporary.iterdir(), temporary):
            fsync(file)
        temporary.rename(path)
        fsync(path.parent)
    except SafetensorError as error:
        raise OSError(f"{path}: {error}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def fsync(path: Path) -> None:
    """Have a file's content, or a folder's entries, on disk before going on."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_free(path: Path, field: str) -> None:
    """Raise RefusedError where something is at ``path``."""
    if path.exists() or path.is_symlink():
        raise RefusedError(
            f"{field} {path}", "something there", "a free name", "remove it, or choose another"
        )


LOCK_FILE = ".lock"


class WriterLock:
    """``flock`` on a file in the registry. The kernel lets go of it when its process dies.

    Nested use by the thread that holds it is free. Not thread-safe: its owner has a lock of its
    own around it.

    Args:
        root: the registry's folder.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / LOCK_FILE
        self._descriptor = -1
        self._depth = 0

    def __enter__(self) -> None:
        """Take it, without waiting.

        Raises:
            RefusedError: FAILED_PRECONDITION, another process (or another owner in this one)
                writes the registry; or the folder cannot be written.
        """
        if self._depth == 0:
            self._descriptor = self._acquire()
        self._depth += 1

    def __exit__(
        self,
        kind: type[BaseException] | None = None,
        error: BaseException | None = None,
        trace: TracebackType | None = None,
    ) -> None:
        self._depth -= 1
        if self._depth == 0:
            # The file stays: removing it would let two processes lock two files of one name.
            os.close(self._descriptor)

    def _acquire(self) -> int:
        # O_NOFOLLOW: the holder's name is written into it.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            descriptor = os.open(self._path, flags, 0o644)
        except OSError as error:
            raise RefusedError(
                "registry",
                f"{self._path} ({error.strerror})",
                "a folder that can be written, and a plain file",
                "check its owner, its mode and the free space",
                StatusCode.FAILED_PRECONDITION,
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(descriptor, 256).decode(errors="replace").strip()
            os.close(descriptor)
            raise RefusedError(
                "registry",
                f"{self._path.parent}, held by {holder or 'another process'}",
                "a registry that no other process writes",
                "ask the trainer that runs on it (--address), or stop it first",
                StatusCode.FAILED_PRECONDITION,
            ) from error
        os.truncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
        return descriptor
