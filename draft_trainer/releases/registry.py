"""Immutable draft releases on disk: directories that vLLM loads as they are."""

from __future__ import annotations

import shutil
import threading
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from draft_trainer.checkpoints.checkpoint import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    read_checkpoint,
    save_draft,
    write_checkpoint,
)
from draft_trainer.durable import folder_written_whole
from draft_trainer.eagle3.head import Eagle3Head, HeadConfig
from draft_trainer.releases.pins import read_pins, write_pins
from draft_trainer.releases.release_folder import (
    check_names,
    folder_name,
    read_manifest,
    read_tensors,
    same_content,
    size_on_disk,
    verify,
    version_of,
    write_manifest,
)
from draft_trainer.releases.removal import beyond_bounds, remove_folder, remove_leftovers
from draft_trainer.releases.writer_lock import WriterLock
from slipstream.refusal import RefusedError, StatusCode
from slipstream.v1 import release_pb2


class Registry:
    """The releases under one directory. Thread-safe; one process writes, any number read.

    A release is written to a temporary name, fsynced and renamed: it is there whole or not at all.

    Args:
        root: the directory; made if it is missing.
    """

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.root = root.resolve(strict=True)
        self._lock = threading.RLock()
        self._writer = WriterLock(self.root)
        self._held = False
        self._busy: Counter[int] = Counter()

    def hold(self) -> None:
        """Keep every other process from writing until ``close``; else each write takes the lock.

        Raises:
            RefusedError: FAILED_PRECONDITION, another one writes it.
        """
        with self._lock:
            self._writer.__enter__()
            self._held = True

    def close(self) -> None:
        """Let go of what ``hold`` took, if it did."""
        with self._lock:
            if self._held:
                self._held = False
                self._writer.__exit__()

    def create(
        self,
        head: Eagle3Head,
        config: HeadConfig,
        d2t: Tensor | None,
        *,
        parent: int | None,
        trained_against: int | None,
        run_id: str,
        ttt_steps: int,
        gate: release_pb2.GateFigures | None,
        dtype: torch.dtype = torch.bfloat16,
        source: release_pb2.ReleaseSource = release_pb2.RELEASE_SOURCE_TRAINED,
        draft_sample_method: str = "",
        num_speculative_tokens: int = 0,
        origin: str = "",
    ) -> release_pb2.ReleaseManifest:
        """Write a new release, numbered one above the newest and written like the oldest.

        A server takes releases whose tensors have the names of the draft it was started with, so
        layout, fields and names stay those of the imported draft; without one they are plain.

        Args:
            head: the weights.
            config: its configuration.
            d2t: int64 [draft_vocab] offsets (see ``checkpoint``); None for the full vocabulary.
            parent: draft version that training started from, if any.
            trained_against: newest policy version whose states were trained on, if any.
            run_id, ttt_steps, source, draft_sample_method, num_speculative_tokens, origin: see
                ``ReleaseManifest``; 0 and empty where nobody knows.
            gate: the gate's figures, if it was gated.
            dtype: element type of the weights.

        Raises:
            RefusedError: the head is not of the releases' configuration, the oldest release is
                damaged, or another process writes the registry.
        """
        manifest = release_pb2.ReleaseManifest(
            parent_version=parent,
            trained_against_policy_version=trained_against,
            run_id=run_id,
            ttt_steps=ttt_steps,
            gate=gate,
            source=source,
            draft_sample_method=draft_sample_method,
            num_speculative_tokens=num_speculative_tokens,
            origin=origin,
        )
        with self._lock, self._writer:
            versions = self.versions()
            manifest.draft_version = max(versions, default=-1) + 1
            like = self.path(versions[0]) if versions else None
            with self._new(manifest) as staging:
                save_draft(staging, config, head, d2t, dtype, like=like)
        return manifest

    def import_initial(
        self, directory: Path, policy: Path | None = None
    ) -> release_pb2.ReleaseManifest:
        """Make a draft checkpoint release 0.

        Byte for byte, where vLLM reads exactly the head that is in it. Otherwise it is written so
        that vLLM does: without what it cannot load, without a copy of the policy's embeddings,
        and with the layer numbers in vLLM's place and meaning. Importing the same checkpoint
        again returns release 0 as it is.

        Args:
            directory: the checkpoint, in any layout (see ``checkpoint``).
            policy: the folder of its policy, where the checkpoint does not say everything.

        Raises:
            RefusedError: not a draft checkpoint that the trainer can represent, or release 0
                exists and is another one.
        """
        checkpoint = read_checkpoint(directory, policy)

        def write(folder: Path) -> None:
            if not checkpoint.as_stored:
                return write_checkpoint(folder, checkpoint)
            for name in (CONFIG_FILE, WEIGHTS_FILE):
                shutil.copyfile(directory / name, folder / name)

        with self._lock, self._writer:
            if not self.versions():
                manifest = release_pb2.ReleaseManifest(
                    source=release_pb2.RELEASE_SOURCE_INITIAL, origin=str(directory)
                )
                with self._new(manifest) as staging:
                    write(staging)
                return manifest
            with TemporaryDirectory(prefix=".staging-", dir=self.root) as temporary:
                write(Path(temporary))
                if self.versions()[0] == 0 and same_content(self.path(0), Path(temporary)):
                    return self.get(0)
            raise RefusedError(
                str(directory),
                "another checkpoint than release 0 of this registry",
                f"an empty registry, or the checkpoint that release 0 in {self.root} is",
                "point the registry at a new directory, or give the original draft; a draft that "
                "somebody else trained is imported: draft-trainer releases import DIR",
                StatusCode.FAILED_PRECONDITION,
            )

    def versions(self) -> tuple[int, ...]:
        """Every release that is there, oldest first; their content is not looked at."""
        found = (version_of(p.name) for p in self.root.iterdir() if p.is_dir())
        return tuple(sorted(version for version in found if version is not None))

    def list(self) -> list[release_pb2.ReleaseManifest]:
        """The manifests of all releases, oldest first. Raises RefusedError where one is damaged."""
        with self._lock:
            return [self.get(version) for version in self.versions()]

    def get(self, version: int) -> release_pb2.ReleaseManifest:
        """One manifest. Raises RefusedError: no such release, or it is not what was released."""
        with self._lock:
            return read_manifest(self.path(version), version)

    def path(self, version: int) -> Path:
        """The directory of a release. Raises RefusedError: none, or a link or pickle is in it."""
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
        """The weights of a release by name, each verified against the manifest's SHA-256.

        Raises:
            RefusedError: no such release, or a file is missing or differs from the manifest.
        """
        with self.using(version):
            return read_tensors(self.path(version), self.get(version))

    def verify(self, version: int) -> None:
        """Check every byte of a release. Raises RefusedError with what differs."""
        with self.using(version):
            verify(self.path(version), self.get(version))

    def nbytes(self, version: int) -> int:
        """Bytes of a release on disk; 0 where it was removed meanwhile."""
        try:
            return size_on_disk(self.root / folder_name(version))
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
        """Releases that are being used right now."""
        with self._lock:
            return frozenset(self._busy)

    def pin(self, version: int, pinned: bool) -> None:
        """Spare a release from ``prune``, or no longer; survives restarts.

        Raises:
            RefusedError: no such release, or another process writes the registry.
            OSError: the pins cannot be written.
        """
        with self._lock, self._writer:
            self.path(version)
            # Pins of releases that somebody removed by hand go with the next change.
            pins = self.pins() & set(self.versions())
            write_pins(self.root, pins | {version} if pinned else pins - {version})

    def pins(self) -> frozenset[int]:
        """The pinned releases."""
        return read_pins(self.root)

    def prune(
        self, keep: int, protect: Collection[int], keep_bytes: int | None = None
    ) -> tuple[int, ...]:
        """Remove old releases (``beyond_bounds``); never the newest, a pinned or busy one.

        Args:
            keep: at least 1.
            protect: draft versions that stay.
            keep_bytes: None: no bound.

        Returns: the versions removed, oldest first.
        """
        if keep < 1:
            raise RefusedError("keep", keep, "at least 1", "keep at least the newest release")
        with self._lock, self._writer:
            sizes = {version: self.nbytes(version) for version in self.versions()}
            spared = {*protect, *self.pins(), *self.busy(), max(sizes, default=0)}
            # A link is refused wherever it is met, and never followed into a removal.
            spared |= {v for v in sizes if (self.root / folder_name(v)).is_symlink()}
            removed = beyond_bounds(sizes, keep, keep_bytes, spared)
            for version in removed:
                remove_folder(self.root / folder_name(version))
        return tuple(removed)

    def remove_leftovers(self) -> int:
        """Remove what killed processes left half-written; returns how many files and folders."""
        with self._lock, self._writer:
            return remove_leftovers(self.root)

    @contextmanager
    def _new(self, manifest: release_pb2.ReleaseManifest) -> Iterator[Path]:
        """Yield a folder for config.json and weights; it becomes the release ``manifest``."""
        path = self.root / folder_name(manifest.draft_version)
        with folder_written_whole(path) as staging:
            yield staging
            write_manifest(staging, manifest)
