"""Where the samples lie, and whose they are.

A folder in /dev/shm while the trainer runs, where that has room; beside the registry otherwise, and
always after a clean stop, so that a run that is over holds no memory. A kill leaves the folder
where it is, and the next start finds it. Nothing here survives a crash or restart of the machine:
files whose pages may not have reached the disk are not trusted.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path

from draft_trainer.config import ReplayConfig
from draft_trainer.durable import written_whole
from draft_trainer.eagle3.head_config import HeadConfig
from draft_trainer.feed.store import ARENA, LEDGER, POLICIES
from slipstream.refusal import RefusedError, StatusCode

logger = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
_POINTER = "samples.json"
_AT_REST = "samples"
_OWNER = "owner.json"
_LOCK = "lock"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class SampleFolder:
    """The folder of a trainer's samples, locked. What was in it is adopted, moved or removed.

    Args:
        configured: replay.directory; None to choose.
        registry: folder of the releases that the samples train.
        need_bytes: room without which /dev/shm is not chosen.

    Raises:
        RefusedError: another process has it (FAILED_PRECONDITION), or it cannot be written.
    """

    def __init__(self, configured: Path | None, registry: Path, need_bytes: int) -> None:
        self._pointer = registry / _POINTER
        self._at_rest = registry / _AT_REST
        self._in_memory = configured is None
        try:
            found = _read(self._pointer)
            self._id = found.get("id") or uuid.uuid4().hex
            before = Path(found["directory"]) if found.get("directory") else None
            self.path = configured or _choose(registry, self._at_rest, need_bytes)
            self._lock = _locked(self.path)
            try:
                self._take_over(before)
            except BaseException:
                os.close(self._lock)
                raise
        except OSError as error:
            raise RefusedError(
                "replay.directory",
                f"{error.filename or configured} ({error.strerror})",
                "a folder of its own that can be made and written",
                "check its owner, its mode and the free space, or set another replay.directory",
                StatusCode.RESOURCE_EXHAUSTED,
            ) from error
        logger.info("samples are kept in %s", self.path)

    def _take_over(self, before: Path | None) -> None:
        if before is not None and before != self.path and _read(before / _OWNER) == self._owner:
            held = _locked(before)
            try:
                _clear(self.path)
                _copy(before, self.path, None)
                self._point_to(self.path)
                _remove(before)
            finally:
                os.close(held)
        elif _read(self.path / _OWNER) != self._owner:
            # Of a registry that was removed, or from before the machine started.
            _clear(self.path)
        _write(self.path / _OWNER, self._owner)
        self._point_to(self.path)

    def close(self, live: Iterable[tuple[int, int]] | None) -> None:
        """Release the folder; nothing of it stays in /dev/shm unless it was configured to be there.

        Args:
            live: (start, size) of what a restart needs of the arena; None where there is no run to
                continue.
        """
        if live is None:
            _remove(self.path)
            self._point_to(None)
        elif self._in_memory and self.path != self._at_rest:
            try:
                held = _locked(self._at_rest)
                try:
                    _clear(self._at_rest)
                    _copy(self.path, self._at_rest, live)
                    _write(self._at_rest / _OWNER, self._owner)
                    self._point_to(self._at_rest)
                finally:
                    os.close(held)
                _remove(self.path)
            except OSError as error:
                logger.error("the samples stay in %s: %s", self.path, error)
        self.leave()

    def leave(self) -> None:
        """Release the folder as it is."""
        os.close(self._lock)

    @property
    def _owner(self) -> dict[str, str]:
        boot = _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
        return {"id": self._id, "boot": boot}

    def _point_to(self, folder: Path | None) -> None:
        found = {"id": self._id, "directory": str(folder or "")}
        if _read(self._pointer) != found:
            with written_whole(self._pointer) as temporary:
                _write(temporary, found)


def room_needed(replay: ReplayConfig, draft: HeadConfig) -> int:
    """Bytes: the samples, the ledger, and the matrices of every policy version in bf16."""
    matrices = 2 * (draft.draft_vocab_size + draft.vocab_size) * draft.target_hidden_size
    return replay.capacity_bytes * 11 // 10 + matrices * (replay.max_policy_lag + 2)


def _choose(registry: Path, at_rest: Path, need_bytes: int) -> Path:
    name = hashlib.blake2b(str(registry.resolve()).encode(), digest_size=8).hexdigest()
    folder = SHARED_MEMORY / f"slipstream-{name}"
    try:
        room = os.statvfs(SHARED_MEMORY)
    except FileNotFoundError:
        return at_rest
    own = sum(p.stat().st_blocks * 512 for p in folder.rglob("*")) if folder.exists() else 0
    return folder if room.f_bavail * room.f_frsize + own >= need_bytes else at_rest


def _locked(folder: Path) -> int:
    """An open file whose lock says that this process has the folder, which is made if need be."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.geteuid():
        # /dev/shm is everybody's: who made it could read, and write, the samples.
        raise PermissionError(1, "the folder of another user", str(folder))
    number = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(number)
        raise RefusedError(
            "replay.directory",
            f"{folder}, which another draft-trainer uses",
            "a folder that no other process uses",
            "stop the other one, or give each its own draft.registry and replay.directory",
            StatusCode.FAILED_PRECONDITION,
        ) from error
    return number


def _ours(folder: Path) -> list[Path]:
    """What may be in the folder besides its lock. Nothing else is touched."""
    return [folder / name for name in (ARENA, POLICIES, _OWNER)] + list(folder.glob(f"{LEDGER}*"))


def _clear(folder: Path) -> None:
    for path in _ours(folder):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _remove(folder: Path) -> None:
    _clear(folder)
    (folder / _LOCK).unlink()
    if not any(folder.iterdir()):
        folder.rmdir()


def _copy(source: Path, target: Path, live: Iterable[tuple[int, int]] | None) -> None:
    for path in _ours(source):
        if path.name == ARENA and path.exists():
            _copy_parts(path, target / ARENA, live)
        elif path.is_dir():
            shutil.copytree(path, target / path.name)
        elif path.exists():
            shutil.copyfile(path, target / path.name)


def _copy_parts(source: Path, target: Path, parts: Iterable[tuple[int, int]] | None) -> None:
    """The same bytes at the same places; what is in no part becomes a hole."""
    with source.open("rb") as read, target.open("wb") as write:
        size = os.fstat(read.fileno()).st_size
        write.truncate(size)
        for start, length in _data(read.fileno(), size) if parts is None else parts:
            end = start + length
            os.lseek(write.fileno(), start, os.SEEK_SET)
            while start < end:
                start += os.sendfile(write.fileno(), read.fileno(), start, end - start)


def _data(number: int, size: int) -> Iterable[tuple[int, int]]:
    """(start, size) of every part of a sparse file that is no hole."""
    at = 0
    while at < size:
        try:
            start = os.lseek(number, at, os.SEEK_DATA)
        except OSError:
            # Its only name for "nothing but a hole from here on".
            return
        at = os.lseek(number, start, os.SEEK_HOLE)
        yield start, at - start


def _read(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    found = json.loads(path.read_text())
    return found if isinstance(found, dict) else {}


def _write(path: Path, content: dict[str, str]) -> None:
    path.write_text(json.dumps(content))
