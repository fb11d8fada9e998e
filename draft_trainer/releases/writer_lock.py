"""One process writes a registry; who reads it never waits for it and never needs it."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from types import TracebackType

from slipstream.refusal import RefusedError, StatusCode

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
