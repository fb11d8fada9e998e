"""The folder where the samples lie, and whose they are.

Beside the registry, or where ``replay.directory`` says. It stays where it is when the trainer
stops or is killed, and the next start finds it. On a disk too kill -9 loses nothing, because what
was written is in the page cache; a crash or restart of the machine does: files whose pages may not
have reached the disk are not trusted.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import shutil
import uuid
from pathlib import Path

from draft_trainer.durable import written_whole
from draft_trainer.feed.store import ARENA, LEDGER, POLICIES
from slipstream.refusal import RefusedError, StatusCode

logger = logging.getLogger(__name__)

_AT_REST = "samples"
_IDENTITY = "samples.json"
_OWNER = "owner.json"
_LOCK = "lock"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class SampleFolder:
    """The folder of a trainer's samples, locked. What was in it is adopted, or removed if foreign.

    Args:
        configured: replay.directory; None for ``samples`` in the registry.
        registry: folder of the releases that the samples train.

    Raises:
        RefusedError: another process has it (FAILED_PRECONDITION), or it cannot be written.
    """

    def __init__(self, configured: Path | None, registry: Path) -> None:
        self.path = configured or registry / _AT_REST
        try:
            self._lock = _locked(self.path)
            try:
                owner = {"id": _identity(registry), "boot": _boot()}
                if _read(self.path / _OWNER) != owner:
                    # Of a registry that was removed, or from before the machine started.
                    _clear(self.path)
                    (self.path / _OWNER).write_text(json.dumps(owner))
            except BaseException:
                os.close(self._lock)
                raise
        except OSError as error:
            raise RefusedError(
                "replay.directory",
                f"{error.filename or self.path} ({error.strerror})",
                "a folder of its own that can be made and written",
                "check its owner, its mode and the free space, or set another replay.directory",
                StatusCode.RESOURCE_EXHAUSTED,
            ) from error
        logger.info("samples are kept in %s", self.path)

    def close(self, keep: bool) -> None:
        """Release the folder, with what is in it; or remove it where there is no run to continue.

        Args:
            keep: whether there is one.
        """
        if not keep:
            _clear(self.path)
            (self.path / _LOCK).unlink()
            if not any(self.path.iterdir()):
                self.path.rmdir()
        os.close(self._lock)


def _identity(registry: Path) -> str:
    """What tells this registry from another that was at the same path, or uses the same folder."""
    path = registry / _IDENTITY
    found = _read(path).get("id")
    if found is None:
        found = uuid.uuid4().hex
        with written_whole(path) as temporary:
            temporary.write_text(json.dumps({"id": found}))
    return found


def _boot() -> str:
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""


def _locked(folder: Path) -> int:
    """An open file whose lock says that this process has the folder, which is made if need be."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.geteuid():
        # In a directory that is everybody's: who made it could read, and write, the samples.
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


def _clear(folder: Path) -> None:
    """Remove what is ours there, but for the lock. Nothing else is touched."""
    ours = [folder / name for name in (ARENA, POLICIES, _OWNER)] + list(folder.glob(f"{LEDGER}*"))
    for path in ours:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def _read(path: Path) -> dict[str, str]:
    if not path.exists():
        return {}
    found = json.loads(path.read_text())
    return found if isinstance(found, dict) else {}
