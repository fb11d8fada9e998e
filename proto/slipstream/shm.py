"""The file of shared memory that a bridge writes samples into and a trainer reads them from.

The trainer makes it, the bridge opens it by the name, the size and the nonce that OpenRun answered:
equal nonces prove that both see the same memory, also from two containers with different views of
/dev/shm. As soon as the bridge has it open the trainer removes its name, so that nothing is left
when either of them is killed; a name that its trainer could not remove is recognised by the lock
that died with that trainer.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import secrets
import struct
from pathlib import Path

import numpy as np

from slipstream.checksum import Bytes
from slipstream.errors import RefusedError, StatusCode

HEADER_BYTES = 4096
NONCE_BYTES = 16

_MAGIC, _VERSION = b"SLIPRING", 1
_HEADER = struct.Struct(f"<8sIIQ{NONCE_BYTES}s")  # magic, version, header bytes, size, nonce
_NAME = re.compile(r"slipstream-ring-[0-9a-f]{32}")


class RingTruncatedError(RefusedError):
    """The file is shorter than it was made: nothing in it is to be touched any more."""

    @classmethod
    def of(cls, found: str, nbytes: int) -> RingTruncatedError:
        """A ring of ``nbytes`` bytes, with what was found instead."""
        return cls(
            "shared_memory",
            found,
            f"{nbytes} bytes, as it was made",
            "look for who truncates files there; states go by gRPC until then",
            StatusCode.DATA_LOSS,
        )


class RingFile:
    """One end's mapping of a ring. ``create`` on the trainer's side, ``attach`` on the bridge's.

    Attributes:
        name: file name in the directory.
        nbytes: size of the file, header included.
        nonce: what both ends must read in the header.
    """

    def __init__(self, descriptor: int, path: Path, nbytes: int, nonce: bytes) -> None:
        self._descriptor = descriptor
        self._path = path
        self.name = path.name
        self.nbytes = nbytes
        self.nonce = nonce
        # Its pages in the page table at once: a fault costs more than copying a page.
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        self._map = mmap.mmap(descriptor, nbytes, flags)
        self._bytes: Bytes = np.frombuffer(self._map, dtype=np.uint8)

    @classmethod
    def create(cls, directory: Path, nbytes: int) -> RingFile:
        """A new ring, all of whose memory is taken now: later a full file system would be SIGBUS.

        Raises:
            RefusedError: no such directory, or no room in it.
        """
        path = directory / f"slipstream-ring-{secrets.token_hex(16)}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.posix_fallocate(descriptor, 0, nbytes)
                nonce = secrets.token_bytes(NONCE_BYTES)
                os.pwrite(
                    descriptor, _HEADER.pack(_MAGIC, _VERSION, HEADER_BYTES, nbytes, nonce), 0
                )
                return cls(descriptor, path, nbytes, nonce)
            except OSError:
                path.unlink(missing_ok=True)
                os.close(descriptor)
                raise
        except OSError as error:
            raise RefusedError(
                "server.shared_memory",
                f"{directory} ({error.strerror})",
                f"a directory in memory with room for {nbytes} bytes",
                "mount a memory-backed volume there, or lower server.ring_bytes",
                StatusCode.RESOURCE_EXHAUSTED,
            ) from error

    @classmethod
    def attach(cls, directory: Path, name: str, nbytes: int, nonce: bytes) -> RingFile:
        """The ring that a trainer offers.

        Raises:
            RefusedError: it is not there, or it is not the trainer's.
        """
        path = directory / name
        advice = (
            "mount the trainer's shared-memory directory here too; states go by gRPC until then"
        )
        if not _NAME.fullmatch(name) or nbytes <= HEADER_BYTES:
            raise RefusedError(
                "shared_memory.name", f"{name!r} of {nbytes} bytes", _NAME.pattern, advice
            )
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise RefusedError(
                "shared_memory", f"{path} ({error.strerror})", "the trainer's ring", advice
            ) from error
        try:
            expected = _HEADER.pack(_MAGIC, _VERSION, HEADER_BYTES, nbytes, nonce)
            same_size = os.fstat(descriptor).st_size == nbytes
            if not same_size or os.pread(descriptor, _HEADER.size, 0) != expected:
                raise RefusedError(
                    "shared_memory",
                    f"{path} with another size, format or nonce",
                    "the memory that the trainer made",
                    advice,
                )
            return cls(descriptor, path, nbytes, nonce)
        except (OSError, RefusedError):
            os.close(descriptor)
            raise

    def check(self) -> None:
        """Call before touching the memory: beyond the end of a truncated file that is SIGBUS.

        Raises:
            RingTruncatedError: that is what it is.
        """
        size = os.fstat(self._descriptor).st_size
        if size < self.nbytes:
            raise RingTruncatedError.of(f"{size} bytes", self.nbytes)

    def span(self, offset: int, nbytes: int) -> Bytes:
        """uint8 [nbytes] of the ring; the caller has checked the bounds and called ``check``."""
        return self._bytes[offset : offset + nbytes]

    def remove_name(self) -> None:
        """Take the file's name away; the memory stays until both ends have closed it."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Let go of the memory, as soon as the last span of it is gone. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            # Not unmapped by hand: another thread may still be copying out of it.
            del self._map, self._bytes


def remove_stale(directory: Path) -> list[str]:
    """Remove rings whose trainer is dead, by the lock that it no longer holds; their names."""
    removed = []
    for path in directory.glob("slipstream-ring-*"):
        if not _NAME.fullmatch(path.name):
            continue
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            # Gone in the meantime, or somebody else's.
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(path.name)
        except OSError:
            continue
        finally:
            os.close(descriptor)
    return removed
