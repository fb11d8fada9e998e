"""The folder of a trainer's samples: locked, marked as ours, and never cleared if it is not.

Beside the registry, or where ``replay.directory`` says. It stays where it is when the trainer stops
or is killed, and the next start finds it. Kill -9 loses nothing, because what was written is in the
page cache; files from before the machine started may not have reached the disk and are removed.
"""

from __future__ import annotations

import json
import logging
import os
import re
import stat
import uuid
from contextlib import suppress
from pathlib import Path

from draft_trainer.files import fsync, lock_file, unlock_file, written_whole
from draft_trainer.ingest import policies
from draft_trainer.ingest.database import FILE
from draft_trainer.ingest.store import ARENA
from slipstream.errors import RefusedError, StatusCode

logger = logging.getLogger(__name__)

FORMAT = 3
MARKER = "slipstream-samples.json"

_DEFAULT = "samples"
_IDENTITY = "samples.json"
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MOUNTS = Path("/proc/self/mounts")
_NETWORK = re.compile(r"nfs4?|cifs|smb3|ceph|lustre|gpfs|beegfs|wekafs|fuse\.(?!fuse-overlayfs).*")
_OURS = re.compile(rf"{ARENA}|{re.escape(FILE)}(-rebuilt)?(-wal|-shm|-journal)?")


class SampleFolder:
    """Opens the folder for this process: takes over its samples, or begins with none.

    The marker file says whose the folder is, and a lock on it says that a process uses it.

    Args:
        configured: replay.directory; None for ``samples`` in the registry.
        registry: folder of the releases that the samples train.

    Raises:
        RefusedError: the folder is a link, not empty and not ours, another registry's, of another
            format, in use (FAILED_PRECONDITION), or cannot be written (RESOURCE_EXHAUSTED).
            Nothing in it was changed.
    """

    def __init__(self, configured: Path | None, registry: Path) -> None:
        self.path = configured or registry / _DEFAULT
        self._marker = self.path / MARKER
        try:
            self._claim()
            self._lock_file = self._lock_marker()
            try:
                registry_id, boot_id = _registry_id(registry), _boot_id()
                self._adopt({"format": FORMAT, "registry": registry_id, "boot": boot_id})
            except BaseException:
                unlock_file(self._lock_file)
                raise
        except OSError as error:
            found = f"{error.filename or self.path} ({error.strerror})"
            expected = "a folder of its own that can be made and written"
            advice = "check its owner, its mode and the free space, or set another replay.directory"
            code = StatusCode.RESOURCE_EXHAUSTED
            raise RefusedError("replay.directory", found, expected, advice, code) from error
        logger.info("samples are kept in %s", self.path)
        if _NETWORK.fullmatch(system := _file_system(self.path)):
            text = (
                "%s is on a network (%s), to which every sample is written: set replay.directory "
                "to a folder in memory or on a local disk that outlives the trainer's process"
            )
            logger.warning(text, self.path, system)

    def close(self, keep: bool) -> None:
        """Unlock the folder, after removing the trainer's files in it unless they are kept.

        Args:
            keep: whether there is a run to continue.
        """
        if not keep:
            self._clear()
            self._marker.unlink(missing_ok=True)
            with suppress(OSError):
                self.path.rmdir()
        unlock_file(self._lock_file)

    def _claim(self) -> None:
        """Make the folder, or refuse one that is there and cannot be ours."""
        with suppress(FileExistsError):
            self.path.mkdir(mode=0o700, parents=True)
        found = self.path.lstat()
        if stat.S_ISLNK(found.st_mode):
            raise self._refused("a symbolic link", "name the folder itself")
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(20, "Not a directory", str(self.path))
        if found.st_uid != os.geteuid():
            # Its owner could read and write the samples.
            raise PermissionError(1, "the folder of another user", str(self.path))
        names = {path.name for path in self.path.iterdir()}
        if names and MARKER not in names:
            raise self._refused(
                f"{len(names)} other files ({', '.join(sorted(names)[:3])}) and no {MARKER}",
                "set replay.directory to a folder of its own; nothing was removed",
            )

    def _adopt(self, owner: dict[str, object]) -> None:
        text = self._marker.read_text()
        if not text:
            # It was just created, by this process or by one that was killed right after.
            others = [path.name for path in self.path.iterdir() if path != self._marker]
            if others:
                raise self._refused(f"an empty {MARKER} beside {others[0]}", self._advice)
            self._mark(owner)
            return
        try:
            found = json.loads(text)
            known = {name: found[name] for name in owner}
        except (ValueError, KeyError, TypeError):
            raise self._refused(f"a {MARKER} that cannot be read", self._advice) from None
        if known["format"] != FORMAT:
            raise self._refused(f"format {known['format']}, not {FORMAT}", self._advice)
        if known["registry"] != owner["registry"]:
            raise self._refused("the samples of another registry", self._advice)
        if known["boot"] != owner["boot"]:
            logger.warning(
                "%s comes from another machine, or from before this one's last boot: its samples "
                "are removed",
                self.path,
            )
            self._clear()
            self._mark(owner)

    def _mark(self, owner: dict[str, object]) -> None:
        """Write the owner to the marker file: a folder of samples without one is refused."""
        text = json.dumps(owner).encode()
        # In place, because the lock is on this file; and never empty in between.
        os.pwrite(self._lock_file, text, 0)
        os.ftruncate(self._lock_file, len(text))
        fsync(self._marker)
        fsync(self.path)

    @property
    def _advice(self) -> str:
        return f"set another replay.directory, or remove {self.path} if nothing needs it"

    def _refused(self, found: str, advice: str) -> RefusedError:
        return RefusedError(
            "replay.directory",
            f"{self.path}: {found}",
            "an empty folder, or one of this registry's samples",
            advice,
            StatusCode.FAILED_PRECONDITION,
        )

    def _lock_marker(self) -> int:
        advice = "stop that one, or set another replay.directory"
        refused = self._refused("a folder that another draft-trainer uses", advice)
        try:
            descriptor = lock_file(self._marker)
        except BlockingIOError as error:
            raise refused from error
        # A trainer that ended meanwhile removed the file that was locked here.
        if os.fstat(descriptor).st_nlink == 0:
            os.close(descriptor)
            raise refused
        return descriptor

    def _clear(self) -> None:
        """Remove the files that a trainer writes here, by their names; nothing else."""
        matrices = self.path / policies.POLICIES
        for folder, names in ((self.path, _OURS), (matrices, policies.OURS)):
            if folder.is_dir() and not folder.is_symlink():
                for path in folder.iterdir():
                    if names.fullmatch(path.name) and not path.is_dir():
                        path.unlink()
        with suppress(OSError):
            matrices.rmdir()


def _registry_id(registry: Path) -> str:
    """Return the id that distinguishes this registry from any other, before at its path or not."""
    path = registry / _IDENTITY
    if path.exists():
        try:
            return str(json.loads(path.read_text())["id"])
        except (ValueError, KeyError, TypeError):
            logger.warning("%s cannot be read and is replaced", path)
    found = uuid.uuid4().hex
    with written_whole(path) as temporary:
        temporary.write_text(json.dumps({"id": found}))
    return found


def _file_system(folder: Path) -> str:
    """Return the kernel's name of the file system that a folder is on; empty where unknown."""
    found = {Path("/"): ""}
    for line in _MOUNTS.read_text().splitlines() if _MOUNTS.exists() else ():
        _, place, name, *_ = line.split(" ")
        # A space in it is written as \040.
        found[Path(place.encode().decode("unicode_escape"))] = name
    folder = folder.resolve()
    return found[next(one for one in (folder, *folder.parents) if one in found)]


def _boot_id() -> str:
    return _BOOT_ID.read_text().strip() if _BOOT_ID.exists() else ""
