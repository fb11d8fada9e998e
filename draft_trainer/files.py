"""Atomic file writes: after a kill, a file is complete on disk or absent."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from slipstream.errors import RefusedError, StatusCode

SAFETENSORS_PART = r"\.tmp\w{6}"
"""The names of safetensors' (0.8) temporary files, beside the file it writes: a process that is
killed meanwhile leaves one."""


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
    with _rename_at_end(Path(name), path) as temporary:
        yield temporary


@contextmanager
def folder_written_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary folder for plain files; it becomes the new folder ``path`` at the end.

    Otherwise as ``written_whole``.

    Raises:
        RefusedError: ``path`` exists.
        OSError: the parent folder cannot be written, or the disk is full.
    """
    check_free(path, "folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    name = tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent)
    with _rename_at_end(Path(name), path) as temporary:
        yield temporary


@contextmanager
def _rename_at_end(temporary: Path, path: Path) -> Iterator[Path]:
    folder = temporary.is_dir()
    try:
        yield temporary
        # mkstemp and safetensors leave 0600; a server under another user reads these files.
        temporary.chmod(0o755 if folder else 0o644)
        for part in (*(temporary.iterdir() if folder else ()), temporary):
            fsync(part)
        temporary.rename(path)
        fsync(path.parent)
    except SafetensorError as error:
        # SafetensorError is all that tells of a full disk.
        raise OSError(f"{path}: {error}") from error
    finally:
        if folder:
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)


def fsync(path: Path) -> None:
    """Write a file's content, or a folder's entries, to disk before returning."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_free(path: Path, field: str) -> None:
    """Raise RefusedError if something exists at ``path``."""
    if path.exists() or path.is_symlink():
        raise RefusedError(
            f"{field} {path}", "something there", "a free name", "remove it, or choose another"
        )


def lock_file(path: Path) -> int:
    """Make a file if there is none and take its exclusive lock, which ends with the process.

    Returns:
        The descriptor that holds the lock.

    Raises:
        BlockingIOError: another descriptor holds it.
        OSError: it cannot be opened, or is a link.
        RefusedError: the file system has no locks.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError) and error.errno in (errno.ENOSYS, errno.ENOLCK):
            raise RefusedError(
                str(path),
                f"a file system without locks ({error.strerror})",
                "one with locks",
                "name a folder on a local disk, or mount it with locks (Lustre: -o flock)",
                StatusCode.FAILED_PRECONDITION,
            ) from error
        raise
    return descriptor


def unlock_file(descriptor: int) -> None:
    """Drop the lock and close the descriptor that ``lock_file`` returned.

    Closing alone leaves it locked while a process lives that was forked meanwhile, such as a worker
    of a framework's data loader.
    """
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)
