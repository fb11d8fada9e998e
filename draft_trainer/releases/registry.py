"""The registry: immutable releases under one directory, and their removal by retention.

A release is written to a temporary name, fsynced and renamed; it is removed by a rename first. At
no instant is there half of one. ``state.db`` beside them says which release is served; its lock is
the registry's.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from draft_trainer.config import DraftConfig
from draft_trainer.drafters import DRAFTERS, Checkpoint, Draft, Drafter
from draft_trainer.files import folder_written_whole
from draft_trainer.releases.pointer import PointerStore, read_pointer
from draft_trainer.releases.release import (
    FILES,
    check_names,
    damaged,
    folder_name,
    kind_of,
    read_manifest,
    read_tensors,
    same_content,
    version_of,
    write_manifest,
)
from draft_trainer.state import State
from slipstream.checkpoints import CONFIG_FILE, WEIGHTS_FILE
from slipstream.errors import RefusedError, StatusCode
from slipstream.tensors import spec_of
from slipstream.v1 import release_pb2

logger = logging.getLogger(__name__)

Listing = tuple[list[release_pb2.ReleaseManifest], list[release_pb2.ReleaseUse]]
"""The manifests that can be read, and the use of every release; oldest first."""

# What a killed process leaves: folders that were being written or removed.
_LEFTOVER = re.compile(r"\.(staging|removed|release)-.*")
_IMPORTED = release_pb2.RELEASE_SOURCE_IMPORTED


class Registry:
    """The releases under one directory. Thread-safe; one process writes, any number read."""

    def __init__(self, root: Path, drafter: Drafter | None = None) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.root = root.resolve(strict=True)
        # Lock order: _writers, the state's own lock, _lock. The last two are held only for moments:
        # publishes wait for them.
        self._writers = threading.RLock()
        self._lock = threading.Lock()
        self._state: State | None = None
        self._busy: Counter[int] = Counter()
        self._drafter = drafter
        self._manifest = lru_cache(64)(self.get)

    @cached_property
    def drafter(self) -> Drafter:
        """The mechanism of its releases, or what it was opened for while it has none.

        Raises:
            RefusedError: the releases are another mechanism's, an unknown one's, or damaged.
        """
        versions = self.versions()
        if not versions:
            return self._drafter or DRAFTERS["eagle3"]
        kind = kind_of(self.get(versions[0]))
        if kind not in DRAFTERS or (self._drafter or DRAFTERS[kind]).name != kind:
            raise RefusedError(
                "draft.kind",
                self._drafter.name if self._drafter else kind,
                f"{kind}, as the releases in {self.root} are"
                if self._drafter
                else f"one of {[*DRAFTERS]}",
                "set draft.kind to it, or point draft.registry at a new directory",
                StatusCode.FAILED_PRECONDITION,
            )
        return DRAFTERS[kind]

    def hold(self) -> State:
        """Open state.db, so that no other process writes until ``close``; without it every write
        takes and drops the lock by itself. Raises RefusedError as ``State``."""
        with self._writers:
            if self._state is None:
                self._state = State(self.root)
            return self._state

    def close(self) -> None:
        """Let go of what ``hold`` took, if it did."""
        with self._writers:
            if self._state is not None:
                self._state.close()
                self._state = None

    @contextmanager
    def writing(self) -> Iterator[State]:
        """Yield the state, to change it and the files. Raises RefusedError as ``State``."""
        with self._writers:
            state = self._state or State(self.root)
            try:
                yield state
            finally:
                if state is not self._state:
                    state.close()

    @contextmanager
    def reading(self) -> Iterator[State]:
        """Yield the state for queries alone, beside any writer. Raises RefusedError: damaged."""
        held = self._state
        state = held or State(self.root, write=False)
        try:
            yield state
        finally:
            if state is not held:
                state.close()

    def create(
        self,
        head: Draft,
        manifest: release_pb2.ReleaseManifest,
        dtype: torch.dtype = torch.bfloat16,
    ) -> release_pb2.ReleaseManifest:
        """Write a new release, numbered one above the newest and written like the oldest.

        A server takes releases whose tensors have the names of the draft it was started with, so
        layout, fields and names stay those of the imported draft; without one they are plain.

        Raises:
            RefusedError: the head is not of the releases' configuration, the oldest release is
                damaged, or another process writes the registry.
            OSError: the folder cannot be written, or the disk is full.
        """
        if not manifest.source:
            manifest.source = release_pb2.RELEASE_SOURCE_TRAINED
        with self.writing():
            versions = self.versions()
            manifest.draft_version = max(versions, default=-1) + 1
            manifest.draft_kind = self.drafter.name
            like = self.path(versions[0]) if versions else None
            with self._new(manifest) as staging:
                self.drafter.save(staging, head, dtype, like=like)
        return manifest

    def import_initial(
        self, directory: Path, policy: Path | None = None
    ) -> release_pb2.ReleaseManifest:
        """Make a draft checkpoint release 0.

        Byte for byte, where vLLM reads exactly the head that is in it. Otherwise it is written so
        that vLLM does: without what it cannot load, without a copy of the policy's embeddings,
        and with the layer numbers in vLLM's place and meaning. Importing the same checkpoint
        again returns release 0 as it is.

        Raises:
            RefusedError: not a draft checkpoint that the trainer can represent, or release 0
                exists and is another one.
        """
        checkpoint = self.drafter.read(directory, policy)
        if checkpoint.told:
            logger.warning("%s: %s", directory, checkpoint.told)
        with self.writing():
            versions = self.versions()
            if not versions:
                manifest = release_pb2.ReleaseManifest(
                    source=release_pb2.RELEASE_SOURCE_INITIAL,
                    origin=str(directory),
                    draft_kind=self.drafter.name,
                    assumed=checkpoint.assumed,
                )
                with self._new(manifest) as staging:
                    if checkpoint.as_stored:
                        for name in (CONFIG_FILE, WEIGHTS_FILE):
                            shutil.copyfile(directory / name, staging / name)
                    else:
                        checkpoint.write(staging)
                return manifest
            # Compared without writing: on a full disk, it is the start that makes space.
            if versions[0] == 0 and self._is_initial(checkpoint, directory):
                return self.get(0)
            raise RefusedError(
                str(directory),
                "another checkpoint than release 0 of this registry",
                f"an empty registry, or the checkpoint that release 0 in {self.root} is",
                "point the registry at a new directory, or give the original draft; a draft that "
                "was trained elsewhere is imported: draft-trainer releases import DIR",
                StatusCode.FAILED_PRECONDITION,
            )

    def _is_initial(self, checkpoint: Checkpoint, directory: Path) -> bool:
        """Return whether release 0 is this checkpoint, read from ``directory``, once imported."""
        if checkpoint.as_stored and same_content(self.path(0), directory):
            return True
        self.tensors(0)  # Damage does not make it another checkpoint.
        if checkpoint.as_stored:
            return False
        manifest, (text, tensors) = self.get(0), checkpoint.written()
        specs = [spec_of(name, tensors[name]) for name in sorted(tensors)]
        return text == manifest.config_json and specs == [*manifest.tensors]

    def versions(self) -> tuple[int, ...]:
        """List the releases, oldest first, without a look at their content."""
        found = (version_of(p.name) for p in self.root.iterdir() if p.is_dir())
        return tuple(sorted(version for version in found if version is not None))

    def get(self, version: int) -> release_pb2.ReleaseManifest:
        """Read a manifest. Raises RefusedError: no such release, or it is not what was released."""
        return read_manifest(self.path(version), version)

    def trained_against(self, version: int, run_id: str) -> int | None:
        """Return the newest policy version of a run that a release was trained on; None: on none.

        A manifest that was read once is not read again.

        Args:
            version: the release.
            run_id: versions of any other run say nothing; empty: no run is known.

        Raises:
            RefusedError: as ``get``.
        """
        manifest = self._manifest(version)
        ours = not run_id or manifest.run_id in ("", run_id)
        known = ours and manifest.HasField("trained_against_policy_version")
        return manifest.trained_against_policy_version if known else None

    def path(self, version: int) -> Path:
        """Find a release's directory. Raises RefusedError: none, or a link or pickle is in it."""
        path = self.root / folder_name(version)
        if version < 0 or not path.is_dir():
            raise RefusedError(
                "draft_version",
                version,
                f"one of {list(self.versions())}",
                "list the releases; old ones are pruned",
                StatusCode.NOT_FOUND,
            )
        check_names(path)
        return path

    def tensors(self, version: int) -> dict[str, Tensor]:
        """Read a release's weights by name, each verified against the manifest's SHA-256.

        Raises:
            RefusedError: no such release, or a file is missing or differs from the manifest.
        """
        with self.using(version):
            return read_tensors(self.path(version), self.get(version))

    def verify(self, version: int) -> None:
        """Check every byte that the manifest answers for, and that nothing else is there.

        Raises:
            RefusedError: no such release, or what differs.
        """
        with self.using(version):
            path = self.path(version)
            read_tensors(path, self.get(version))
            for extra in sorted({part.name for part in path.iterdir()} - set(FILES)):
                raise damaged(path / extra, "a file that was not released", "nothing")

    def nbytes(self, version: int) -> int:
        """Return the bytes of a release on disk; 0 if it was removed meanwhile."""
        try:
            folder = self.root / folder_name(version)
            return sum(part.lstat().st_size for part in folder.iterdir())
        except FileNotFoundError:
            return 0

    @contextmanager
    def using(self, version: int) -> Iterator[None]:
        """Spare a release from ``prune`` of this process for the length of a ``with`` block."""
        with self._lock:
            self._busy[version] += 1
        try:
            yield
        finally:
            with self._lock:
                self._busy.subtract((version,))
                self._busy = +self._busy

    def busy(self) -> frozenset[int]:
        """Return the releases that are being used right now."""
        with self._lock:
            return frozenset(self._busy)

    def uses(self) -> Listing:
        """List every release, with its damage and why retention spares it.

        Raises:
            RefusedError: the pointer, which says which release is served, is damaged.
        """
        with self.reading() as state:
            now = read_pointer(state)
        manifests, uses = [], []
        for version in self.versions():
            use = release_pb2.ReleaseUse(draft_version=version, bytes=self.nbytes(version))
            try:
                manifests.append(self.get(version))
            except RefusedError as error:
                if version not in self.versions():  # Retention removed it meanwhile.
                    continue
                use.damage = str(error)
            uses.append(use)
        reasons: dict[str, Collection[int | None]] = {}
        if now is not None:
            reasons = {
                "promoted": {now.promoted},
                "served": {now.live},
                "previous": {*now.good_versions} - {now.live},
                "staged": {now.intent},
            }
        reasons |= {
            "parent": [m.draft_version for m in manifests if m.source != _IMPORTED][-1:],
            "initial": {0},
            "newest": [use.draft_version for use in uses[-1:]],
            "busy": self.busy(),
        }
        for use in uses:
            version = use.draft_version
            use.kept_as.extend(word for word, known in reasons.items() if version in known)
        return manifests, uses

    def retain(self, config: DraftConfig) -> None:
        """Remove what is beyond the bounds, but neither release 0, which a restart compares the
        initial draft with, nor what training goes on from. What cannot be removed is logged and
        tried again the next time."""
        try:
            spared = {0, newest_own(self).draft_version}
            self.prune(config.keep_releases, config.keep_bytes, spared)
        except (OSError, RefusedError) as error:
            logger.error("old releases were not removed: %s", error)

    def prune(
        self, keep: int, keep_bytes: float = math.inf, spared: Collection[int] = ()
    ) -> tuple[int, ...]:
        """Remove the oldest releases; never one that is in use, busy or the newest.

        Args:
            keep: number of the newest releases that stay.
            keep_bytes: bound on the bytes of all that stay; further ones go while it is exceeded.
            spared: further draft versions that stay.

        Returns: the versions removed, oldest first.
        """
        removed: list[int] = []
        with self.writing() as state:
            # Meanwhile the pointer does not move, and no release comes into use.
            with state.lock, self._lock:
                pointer = read_pointer(state)
                sizes = {version: self.nbytes(version) for version in self.versions()}
                in_use = frozenset() if pointer is None else pointer.in_use
                spared = {*spared, *in_use, *self._busy, max(sizes, default=0)}
                total = sum(sizes.values())
                for number, (version, size) in enumerate(sizes.items()):
                    path = self.root / folder_name(version)
                    too_many = number < len(sizes) - keep
                    too_large = total > keep_bytes
                    # A link is refused wherever it is met, and never followed into a removal.
                    if version in spared or path.is_symlink() or not (too_many or too_large):
                        continue
                    name = f".removed-{path.name}-{os.getpid()}-{time.time_ns()}"
                    path.rename(self.root / name)
                    removed.append(version)
                    total -= size
            # Those that could not be removed before, too.
            _remove(self.root.glob(".removed-*"))
        return tuple(removed)

    def remove_leftovers(self) -> int:
        """Remove what killed processes left half-written, as far as that is possible now; returns
        how many files and folders there were."""
        with self.writing():
            leftovers = [p for p in self.root.iterdir() if _LEFTOVER.fullmatch(p.name)]
            try:
                _remove(leftovers)
            except OSError as error:
                # A process may have a file of it open, on NFS. The next start tries again.
                logger.warning("not removed: %s", error)
            return len(leftovers)

    @contextmanager
    def _new(self, manifest: release_pb2.ReleaseManifest) -> Iterator[Path]:
        """Yield a folder for config.json and weights; it becomes the release ``manifest``."""
        path = self.root / folder_name(manifest.draft_version)
        with folder_written_whole(path) as staging:
            yield staging
            write_manifest(staging, manifest)


def _remove(leftovers: Iterable[Path]) -> None:
    """Remove as many as possible. Raises OSError: the first of those that cannot be."""
    errors = []
    for path in leftovers:
        try:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()
        except OSError as error:
            errors.append(error)
    if errors:
        raise errors[0]


def open_registry(draft: DraftConfig) -> Registry:
    """Open the registry, held against other writers, with the initial draft as release 0.

    Raises:
        RefusedError: the folder cannot be written, is another process's, or was started from
            another draft.
    """
    try:
        registry = Registry(draft.registry, DRAFTERS[draft.kind])
        registry.hold()
        try:
            registry.remove_leftovers()
            registry.import_initial(draft.initial, draft.policy)
        except BaseException:
            registry.close()
            raise
    except OSError as error:
        raise RefusedError(
            "draft.registry",
            f"{error.filename or draft.registry} ({error.strerror})",
            "a folder that can be made and written",
            "check its owner, its mode and the free space, or set another draft.registry",
        ) from error
    return registry


def newest_own(registry: Registry) -> release_pb2.ReleaseManifest:
    """Find the newest release that was trained here, or release 0: training continues from it.

    Never an imported one: training state and the optimizer's moments belong to those made here. A
    damaged one is skipped with a log line: ``open_pointer`` checks what is served.

    Raises:
        RefusedError: release 0 is damaged, and no later one can be used.
    """
    for version in reversed(registry.versions()):
        try:
            manifest = registry.get(version)
        except RefusedError as error:
            if version == 0:
                raise
            logger.error("training does not continue from draft %d: %s", version, error)
            continue
        if manifest.source != _IMPORTED:
            return manifest
    raise AssertionError("open_registry has made release 0")


def open_pointer(registry: Registry, run_id: Callable[[], str] = lambda: "") -> PointerStore:
    """Open the pointer of a registry that is held.

    Raises:
        RefusedError: what it points at is damaged or not there; or state.db is new, while releases
            were trained here: the fleet would go back to the initial draft.
    """
    state = registry.hold()
    if read_pointer(state) is None and newest_own(registry).draft_version > 0:
        raise state.damaged("no pointer, beside releases that were trained here")
    pointer = PointerStore(state, registry.get, run_id=run_id)
    try:
        for version in {pointer.now.promoted, pointer.now.live}:
            registry.get(version)
    except RefusedError as error:
        raise RefusedError(
            error.field,
            error.found,
            error.expected,
            f"restore draft {version} from a copy, or have another release served: draft-trainer "
            f"releases promote N --registry {registry.root} (or rollback)",
            error.code,
            error.reason,
        ) from error
    return pointer
