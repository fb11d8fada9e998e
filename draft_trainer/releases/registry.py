"""Immutable draft releases on disk: directories that vLLM loads as they are."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
import time
from pathlib import Path

import torch
from google.protobuf import json_format
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

import slipstream
from draft_trainer.checkpoints.checkpoint import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    read_checkpoint,
    save_draft,
    write_checkpoint,
)
from draft_trainer.eagle3.head import Eagle3Head, HeadConfig
from slipstream.refusal import RefusedError, StatusCode
from slipstream.tensors import spec_of
from slipstream.v1 import release_pb2

MANIFEST_FILE = "manifest.json"
_NAME = re.compile(r"release-(\d{6,})")
_FILES = (CONFIG_FILE, WEIGHTS_FILE, MANIFEST_FILE)


class Registry:
    """The releases under one directory. Thread-safe; one process writes.

    A release is written to a temporary name, fsynced and renamed: it is there whole or not at
    all, and a directory that a killed process left half-written is never listed.

    Args:
        root: the directory; made if it is missing.
    """

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self._root = root.resolve(strict=True)
        self._lock = threading.Lock()

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
    ) -> release_pb2.ReleaseManifest:
        """Write a new release, numbered one above the newest and written like it.

        A server takes releases whose tensors have the names of the draft it was started with, so
        layout, fields and names stay those of the imported draft; without one they are plain.

        Args:
            head: the weights.
            config: its configuration.
            d2t: int64 [draft_vocab] offsets (see ``checkpoint``); None for the full vocabulary.
            parent: draft version that training started from, if any.
            trained_against: newest policy version whose states were trained on, if any.
            run_id: the run that made it.
            ttt_steps: depth of the training-time test.
            gate: the gate's figures, if it was gated.
            dtype: element type of the weights.

        Raises:
            RefusedError: the head is not of the newest release's configuration.
        """
        manifest = release_pb2.ReleaseManifest(run_id=run_id, ttt_steps=ttt_steps)
        if parent is not None:
            manifest.parent_version = parent
        if trained_against is not None:
            manifest.trained_against_policy_version = trained_against
        if gate is not None:
            manifest.gate.CopyFrom(gate)
        with self._lock:
            newest = max(self._versions(), default=-1)
            manifest.draft_version = newest + 1
            staging = self._staging()
            try:
                like = None if newest < 0 else self.path(newest)
                save_draft(staging, config, head, d2t, dtype, like=like)
                return self._publish(staging, manifest)
            finally:
                shutil.rmtree(staging, ignore_errors=True)

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
        with self._lock:
            staging, source = self._staging(), directory
            try:
                if not checkpoint.as_stored:
                    write_checkpoint(staging, checkpoint)
                    source = staging
                if versions := self._versions():
                    if 0 in versions and self._same_content(source):
                        return self._manifest(0)
                    raise RefusedError(
                        str(directory),
                        "another checkpoint than release 0 of this registry",
                        f"an empty registry, or the checkpoint that release 0 in {self._root} is",
                        "point the registry at a new directory, or give the original draft",
                        StatusCode.FAILED_PRECONDITION,
                    )
                if checkpoint.as_stored:
                    for name in (CONFIG_FILE, WEIGHTS_FILE):
                        shutil.copyfile(directory / name, staging / name)
                return self._publish(staging, release_pb2.ReleaseManifest(draft_version=0))
            finally:
                shutil.rmtree(staging, ignore_errors=True)

    def list(self) -> list[release_pb2.ReleaseManifest]:
        """The manifests of all releases, oldest first."""
        with self._lock:
            return [self._manifest(version) for version in self._versions()]

    def get(self, version: int) -> release_pb2.ReleaseManifest:
        """One manifest. Raises RefusedError when there is no such release."""
        with self._lock:
            return self._manifest(version)

    def path(self, version: int) -> Path:
        """The directory of a release. Raises RefusedError: none, or it is (or holds) a link."""
        path = self._root / f"release-{version:06d}"
        if version < 0 or not path.is_dir():
            raise RefusedError(
                "draft_version",
                version,
                f"one of {self._versions()}",
                "list the releases; old ones are pruned",
                StatusCode.NOT_FOUND,
            )
        for part in (path, *(path / name for name in _FILES)):
            if part.is_symlink():
                raise RefusedError(
                    str(part),
                    "a symbolic link",
                    "a plain directory with plain files, as it was written",
                    "restore the release from a copy; releases are never links",
                    StatusCode.DATA_LOSS,
                )
        return path

    def tensors(self, version: int) -> dict[str, Tensor]:
        """The weights of a release by name, each verified against the manifest's SHA-256.

        Raises:
            RefusedError: no such release, or a file is missing or differs from the manifest.
        """
        manifest = self.get(version)
        path = self.path(version)
        try:
            config_json = (path / CONFIG_FILE).read_text()
            tensors = load_file(path / WEIGHTS_FILE)
        except (OSError, UnicodeDecodeError, SafetensorError) as error:
            raise _damaged(path, str(error)) from error
        if config_json != manifest.config_json:
            raise _damaged(path / CONFIG_FILE, "not the text in the manifest")
        wanted = {spec.name: spec for spec in manifest.tensors}
        if tensors.keys() != wanted.keys():
            raise _damaged(path / WEIGHTS_FILE, f"tensors {sorted(tensors)}")
        for name, tensor in tensors.items():
            if spec_of(name, tensor) != wanted[name]:
                raise _damaged(path / WEIGHTS_FILE, f"tensor {name} is not the one released")
        return tensors

    def prune(self, keep: int, protect: set[int]) -> tuple[int, ...]:
        """Remove all but the newest ``keep`` (at least 1) releases and the protected ones.

        Returns:
            The versions removed, oldest first.
        """
        if keep < 1:
            raise RefusedError("keep", keep, "at least 1", "keep at least the newest release")
        with self._lock:
            removed = [v for v in self._versions()[:-keep] if v not in protect]
            for version in removed:
                path = self.path(version)
                # Renamed first: a kill in between leaves no half-removed release behind.
                doomed = self._root / f".removed-{path.name}-{os.getpid()}-{time.time_ns()}"
                path.rename(doomed)
                shutil.rmtree(doomed)
        return tuple(removed)

    def remove_leftovers(self) -> int:
        """Remove what killed processes left half-written; only while nothing is written.

        Returns:
            How many directories were removed.
        """
        leftovers = [p for p in self._root.iterdir() if re.match(r"\.(staging|removed)-", p.name)]
        for path in leftovers:
            shutil.rmtree(path)
        return len(leftovers)

    def _versions(self) -> tuple[int, ...]:
        found = (_NAME.fullmatch(p.name) for p in self._root.iterdir() if p.is_dir())
        return tuple(sorted(int(match.group(1)) for match in found if match))

    def _staging(self) -> Path:
        return Path(tempfile.mkdtemp(prefix=".staging-", dir=self._root))

    def _publish(
        self, staging: Path, manifest: release_pb2.ReleaseManifest
    ) -> release_pb2.ReleaseManifest:
        tensors = load_file(staging / WEIGHTS_FILE)
        manifest.tensors.extend(spec_of(name, tensors[name]) for name in sorted(tensors))
        manifest.config_json = (staging / CONFIG_FILE).read_text()
        manifest.created_at = time.time()
        manifest.code_version = slipstream.__version__
        text = json_format.MessageToJson(manifest, preserving_proto_field_name=True)
        (staging / MANIFEST_FILE).write_text(text + "\n")
        staging.chmod(0o755)
        for path in (*(staging / name for name in _FILES), staging):
            _fsync(path)
        staging.rename(self._root / f"release-{manifest.draft_version:06d}")
        _fsync(self._root)
        return manifest

    def _manifest(self, version: int) -> release_pb2.ReleaseManifest:
        path = self.path(version) / MANIFEST_FILE
        try:
            manifest = json_format.Parse(path.read_text(), release_pb2.ReleaseManifest())
        except (OSError, UnicodeDecodeError, json_format.ParseError) as error:
            raise _damaged(path, str(error)) from error
        if manifest.draft_version != version:
            raise _damaged(path, f"draft_version {manifest.draft_version}")
        return manifest

    def _same_content(self, directory: Path) -> bool:
        held = self._root / "release-000000"
        return all(
            (held / name).read_bytes() == (directory / name).read_bytes()
            for name in (CONFIG_FILE, WEIGHTS_FILE)
        )


def _damaged(path: Path, found: str) -> RefusedError:
    return RefusedError(
        str(path),
        found,
        "the bytes that were released",
        "restore the release from a copy, or roll back to another one",
        StatusCode.DATA_LOSS,
    )


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
