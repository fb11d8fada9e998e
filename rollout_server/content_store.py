"""Tensors on the host by content: sent once, kept while anything needs them.

One file of raw bytes per tensor, in a private directory (in memory where the
host has /dev/shm), named by SHA-256 and dtype. Workers map the files, so nothing
is copied between receiving a tensor and loading it, and a release that was
served before is committed again without the network.

Bounded in bytes. A tensor is held while a stage, the live weights or the ones
before them name it; the others leave in least-recently-used order.

The private directory of a content store: in shared memory, and swept after a kill.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import uuid
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from slipstream.errors import RefusedError, StatusCode
from slipstream.tensors import bytes_of


@dataclass(frozen=True)
class Key:
    """A tensor's content.

    Attributes:
        sha256: hex digest of its bytes.
        dtype: part of the key because whether bytes are finite depends on it.
        size: in bytes.
    """

    sha256: str
    dtype: str
    size: int


@dataclass
class Room:
    """Bytes that were set aside and not used yet."""

    left: int


class ContentStore:
    """See the module. Not thread-safe: the event loop owns it, ``write`` apart.

    Args:
        directory: private, exists; removed by ``close``.
        capacity: bound in bytes.

    Attributes:
        capacity: the bound.
    """

    def __init__(self, directory: Path, capacity: int) -> None:
        self._directory = directory
        self.capacity = capacity
        self._kept: OrderedDict[Key, None] = OrderedDict()
        self._holders: Counter[Key] = Counter()
        self._reserved = 0
        self._bytes = 0

    @property
    def bytes(self) -> int:
        """Bytes on the host, reservations included."""
        return self._bytes + self._reserved

    def __contains__(self, key: Key) -> bool:
        return key in self._kept

    def path(self, key: Key) -> Path:
        """Where a tensor's bytes are, or will be."""
        return self._directory / f"{key.sha256}.{key.dtype}"

    def hold(self, keys: Iterable[Key]) -> None:
        """Keep these until ``release``; they may arrive later."""
        for key in keys:
            self._holders[key] += 1
            if key in self._kept:
                self._kept.move_to_end(key)

    def release(self, keys: Iterable[Key]) -> None:
        """Undo one ``hold``; the content stays until the room is needed."""
        for key in keys:
            self._holders[key] -= 1
            if self._holders[key] <= 0:
                del self._holders[key]

    @contextlib.contextmanager
    def room(self, size: int) -> Iterator[Room]:
        """Set ``size`` bytes aside while tensors arrive.

        Raises:
            RefusedError: they do not fit beside what is held (RESOURCE_EXHAUSTED).
        """
        self._make_room(size)
        self._reserved += size
        room = Room(size)
        try:
            yield room
        finally:
            self._reserved -= room.left

    def write(self, key: Key, tensor: torch.Tensor) -> None:
        """Write a tensor's bytes; may run in several threads. ``add`` makes them count.

        Raises:
            RefusedError: the directory is full, or cannot be written (RESOURCE_EXHAUSTED).
        """
        # A name of its own: two stages of one content would cut each other's file short.
        partial = self.path(key).with_suffix(f".{uuid.uuid4().hex}")
        try:
            try:
                partial.write_bytes(bytes_of(tensor))
                partial.rename(self.path(key))
            except OSError:
                partial.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise RefusedError(
                "tensors",
                f"{self._directory} ({error.strerror})",
                f"a directory with room for {key.size} bytes",
                "free some memory or disk space on the rollout server, or lower --stage-bytes",
                StatusCode.RESOURCE_EXHAUSTED,
            ) from error

    def add(self, key: Key, room: Room) -> None:
        """Know a tensor whose bytes were written into ``room``."""
        room.left -= key.size
        self._reserved -= key.size
        if key not in self._kept:
            self._kept[key] = None
            self._bytes += key.size

    def drop(self, keys: Iterable[Key]) -> None:
        """Forget content that nobody holds, such as that of a refused stage."""
        for key in keys:
            if key in self._kept and key not in self._holders:
                self._remove(key)

    def close(self) -> None:
        """Remove every file."""
        shutil.rmtree(self._directory, ignore_errors=True)
        self._kept.clear()

    def _make_room(self, size: int) -> None:
        for key in [key for key in self._kept if key not in self._holders]:
            if self.bytes + size <= self.capacity:
                break
            self._remove(key)
        if self.bytes + size > self.capacity:
            raise RefusedError(
                "tensors",
                f"{size} bytes beside {self.bytes} that are held",
                f"at most {self.capacity} bytes",
                "abort stages that are not needed, or raise --stage-bytes",
                StatusCode.RESOURCE_EXHAUSTED,
            )

    def _remove(self, key: Key) -> None:
        # A worker that has the file mapped keeps its pages.
        self.path(key).unlink(missing_ok=True)
        del self._kept[key]
        self._bytes -= key.size


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
