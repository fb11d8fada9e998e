"""The file of shared memory in which a bridge keeps its samples for the trainer to read.

The bridge makes it, writes each block once with ``pwrite`` and names it in the header of a stream;
the trainer opens it by name, size and nonce: equal nonces prove that both see the same memory, also
from two containers with different views of /dev/shm. Nobody maps it, so a file that is cut short
is a short read or a refusal on both sides and never a SIGBUS.

As soon as the trainer has answered, the bridge removes the name: nothing is left when either of
them is killed from then on. A name that its bridge could not remove is recognised because its
``flock`` is no longer held.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
import struct
import tempfile
from bisect import bisect_left, insort
from collections.abc import Callable
from pathlib import Path

from slipstream.errors import RefusedError, StatusCode
from slipstream.tensors import Bytes
from slipstream.v1 import release_pb2

HEADER_BYTES = 4096
NONCE_BYTES = 16

_MAGIC, _VERSION = b"SLIPSAMP", 2
_HEADER = struct.Struct(f"<8sIIQ{NONCE_BYTES}s")  # magic, version, header bytes, size, nonce
_NAME = re.compile(r"slipstream-samples-[0-9a-f]{32}")
_INLINE = "states go inline until then"


class MemoryLostError(RefusedError):
    """The file is shorter than it was made, or has no memory for a block (DATA_LOSS)."""

    @classmethod
    def of(cls, found: str, expected: str) -> MemoryLostError:
        """Make the error from what was found and what was expected."""
        advice = f"look for what truncates files there, or enlarge the volume; {_INLINE}"
        code, reason = StatusCode.DATA_LOSS, release_pb2.REFUSAL_REASON_MEMORY_LOST
        return cls("shared_memory", found, expected, advice, code, reason)


class SharedFile:
    """An open file of samples: ``create`` and ``anonymous`` for a bridge, ``open`` for a trainer.

    Attributes:
        name: file name in the directory; empty for an anonymous one, which nobody else can open.
        nbytes: size of the file, header included.
        nonce: 16 random bytes, in the header too.
    """

    def __init__(self, descriptor: int, path: Path | None, nbytes: int, nonce: bytes) -> None:
        self._descriptor = descriptor
        self._path = path
        self.name = "" if path is None else path.name
        self.nbytes = nbytes
        self.nonce = nonce

    @classmethod
    def create(cls, directory: Path, nbytes: int) -> SharedFile:
        """Create a file, locked while this process lives; memory is taken as it is written.

        Raises RefusedError: no such directory, or less free in it than ``nbytes``.
        """
        path = directory / f"slipstream-samples-{secrets.token_hex(16)}"
        nonce = secrets.token_bytes(NONCE_BYTES)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _no_memory(f"{directory} ({error.strerror})", nbytes) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = os.fstatvfs(descriptor)
            if free.f_bavail * free.f_frsize < nbytes:
                raise _no_memory(f"{free.f_bavail * free.f_frsize} bytes in {directory}", nbytes)
            os.ftruncate(descriptor, nbytes)
            os.pwrite(descriptor, _HEADER.pack(_MAGIC, _VERSION, HEADER_BYTES, nbytes, nonce), 0)
        except (OSError, RefusedError) as error:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            if isinstance(error, OSError):
                raise _no_memory(f"{directory} ({error.strerror})", nbytes) from error
            raise
        return cls(descriptor, path, nbytes, nonce)

    @classmethod
    def anonymous(cls, nbytes: int) -> SharedFile:
        """Create memory without a name, for samples that go inline."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("slipstream-samples", os.MFD_CLOEXEC)
        else:
            # uv's Pythons have none before July 2026: https://github.com/astral-sh/uv/issues/15081
            with tempfile.TemporaryFile(dir="/dev/shm") as file:
                descriptor = os.dup(file.fileno())
        return cls(descriptor, None, nbytes, b"")

    @classmethod
    def open(cls, directory: Path, name: str, nbytes: int, nonce: bytes) -> SharedFile:
        """Open the file that a client names, to read it.

        Raises RefusedError: it is not there, or it is not the client's.
        """
        advice = f"mount the directory of the policy's shared memory here too; {_INLINE}"
        if not _NAME.fullmatch(name) or nbytes <= HEADER_BYTES:
            raise RefusedError(
                "shared_memory.name", f"{name[:64]!r} of {nbytes} bytes", _NAME.pattern, advice
            )
        path = directory / name
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            descriptor = os.open(path, flags)
        except OSError as error:
            raise RefusedError(
                "shared_memory", f"{path} ({error.strerror})", "the client's file", advice
            ) from error
        try:
            found = os.fstat(descriptor)
            header = _HEADER.pack(_MAGIC, _VERSION, HEADER_BYTES, nbytes, nonce)
            ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
            if not ours or found.st_size != nbytes:
                raise RefusedError(
                    "shared_memory",
                    f"{path} of another kind, owner or size",
                    f"{nbytes} bytes",
                    advice,
                )
            if len(nonce) != NONCE_BYTES or os.pread(descriptor, _HEADER.size, 0) != header:
                raise RefusedError(
                    "shared_memory",
                    f"{path} with another format or nonce",
                    "the client's file",
                    advice,
                )
        except (OSError, RefusedError):
            os.close(descriptor)
            raise
        return cls(descriptor, path, nbytes, nonce)

    def write(self, offset: int, block: Bytes) -> None:
        """Write a block. Raises MemoryLostError: the file was cut short, or its memory is full."""
        size = os.fstat(self._descriptor).st_size
        if size < self.nbytes and self.name:
            raise MemoryLostError.of(
                f"a file of {size} bytes", f"{self.nbytes} bytes, as it was made"
            )
        done = 0
        while done < len(block):
            try:
                done += os.pwrite(self._descriptor, block[done:].data, offset + done)
            except OSError as error:
                raise MemoryLostError.of(
                    f"{error.strerror} at byte {offset + done}", f"memory for {self.nbytes} bytes"
                ) from error

    def read_into(self, offset: int, block: Bytes) -> None:
        """Fill ``block``, uint8 [n], from the file. Raises MemoryLostError: it ends before that."""
        done = 0
        while done < len(block):
            count = os.preadv(self._descriptor, [block[done:].data], offset + done)
            if count == 0:
                raise MemoryLostError.of(
                    f"a file that ends at byte {offset + done}",
                    f"{self.nbytes} bytes, as it was made",
                )
            done += count

    def remove_name(self) -> None:
        """Remove the file's name; its memory stays until both sides have closed it. Idempotent."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None

    def close(self, close: Callable[[int], None] = os.close) -> None:
        """Close this side's descriptor. Idempotent."""
        # A default, because at the interpreter's exit ``os`` may be gone before this object.
        if self._descriptor >= 0:
            close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self.close()


def remove_stale(directory: Path) -> list[str]:
    """Remove files of dead bridges, which no longer hold their locks; returns their names."""
    removed = []
    for path in directory.glob("slipstream-samples-*"):
        if not _NAME.fullmatch(path.name):
            continue
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            # Removed meanwhile, or another user's.
            continue
        try:
            found = os.fstat(descriptor)
            ours = stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if ours and os.pread(descriptor, len(_MAGIC), 0) in (_MAGIC, b""):
                path.unlink(missing_ok=True)
                removed.append(path.name)
        except OSError:
            continue
        finally:
            os.close(descriptor)
    return removed


class FreeList:
    """The free parts of a range of bytes, merged where they touch; the best fit is taken.

    Attributes:
        nbytes: how many are free.
    """

    def __init__(self) -> None:
        self.nbytes = 0
        self._sizes: dict[int, int] = {}  # start -> size
        self._starts: dict[int, int] = {}  # end -> start
        self._by_size: list[tuple[int, int]] = []

    def take(self, size: int) -> int | None:
        """Take ``size`` bytes, and return their start; None if no free part is as large."""
        index = bisect_left(self._by_size, (size, 0))
        if index == len(self._by_size):
            return None
        length, start = self._by_size[index]
        self._remove(start, length)
        if length > size:
            self._add(start + size, length - size)
        return start

    def give(self, start: int, size: int) -> None:
        """Make [start, start + size) free, no part of which may be free already."""
        if (before := self._starts.get(start)) is not None:
            length = self._sizes[before]
            self._remove(before, length)
            start, size = before, length + size
        if (after := self._sizes.get(start + size)) is not None:
            self._remove(start + size, after)
            size += after
        self._add(start, size)

    def _add(self, start: int, size: int) -> None:
        self._sizes[start], self._starts[start + size] = size, start
        insort(self._by_size, (size, start))
        self.nbytes += size

    def _remove(self, start: int, size: int) -> None:
        del self._sizes[start], self._starts[start + size]
        del self._by_size[bisect_left(self._by_size, (size, start))]
        self.nbytes -= size


def _no_memory(found: str, nbytes: int) -> RefusedError:
    return RefusedError(
        "shared_memory",
        found,
        f"a directory in memory with {nbytes} free bytes",
        f"mount a larger memory-backed volume there, or lower outbox_bytes; {_INLINE}",
        StatusCode.RESOURCE_EXHAUSTED,
    )
