"""One release on disk: an immutable folder that vLLM loads unchanged, and its manifest.

Looking at a release checks its names, its manifest, its config.json and the size of its weights,
without reading the weights; ``read_tensors`` checks every tensor's SHA-256.
"""

from __future__ import annotations

import filecmp
import re
import time
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from slipstream import checkpoints
from slipstream.checkpoints import CONFIG_FILE, MANIFEST_FILE, WEIGHTS_FILE, pickles
from slipstream.errors import RefusedError, StatusCode
from slipstream.metrics import code_version
from slipstream.tensors import spec_of
from slipstream.v1 import release_pb2

FILES = (CONFIG_FILE, WEIGHTS_FILE, MANIFEST_FILE)
_NAME = re.compile(r"release-([0-9]{6,19})")
_NEXT = (
    "restore the release from a copy, or serve another one: draft-trainer releases promote N "
    "(with --registry DIR while no trainer runs)"
)


def folder_name(version: int) -> str:
    """Return the name of a release's folder in its registry."""
    return f"release-{version:06d}"


def kind_of(manifest: release_pb2.ReleaseManifest) -> str:
    """Return a release's ``Drafter.name``; releases from before it was recorded are EAGLE-3's."""
    return manifest.draft_kind or "eagle3"


def version_of(name: str) -> int | None:
    """Invert ``folder_name``; None for any other name, as for the same number spelled otherwise."""
    match = _NAME.fullmatch(name)
    version = int(match.group(1)) if match else None
    return version if version is not None and folder_name(version) == name else None


def check_names(path: Path) -> None:
    """Raise RefusedError where a release is, or contains, a link or a pickle, or is unreadable."""
    try:
        parts, found = sorted(path.iterdir()), pickles(path)
    except OSError as error:
        raise damaged(path, str(error)) from error
    for part in (path, *parts):
        if part.is_symlink():
            raise damaged(part, "a symbolic link", "a plain folder of plain files")
    for name in found:
        raise damaged(path / name, "a pickle, which runs code", f"only {', '.join(FILES)}")


def write_manifest(path: Path, manifest: release_pb2.ReleaseManifest) -> None:
    """Complete ``manifest`` from the config.json and weights in a folder, and write it there.

    Raises:
        OSError: the folder cannot be written, or the disk is full.
    """
    weights = path / WEIGHTS_FILE
    tensors = load_file(weights)
    manifest.tensors.extend(spec_of(name, tensors[name]) for name in sorted(tensors))
    manifest.config_json = (path / CONFIG_FILE).read_text()
    manifest.weights_bytes = weights.stat().st_size
    manifest.created_at = time.time()
    manifest.code_version = code_version()
    checkpoints.write_manifest(path, manifest)


def read_manifest(path: Path, version: int) -> release_pb2.ReleaseManifest:
    """Read a release's manifest; folder, config.json and size of the weights have to agree with it.

    Raises:
        RefusedError: DATA_LOSS, with the file and what differs.
    """
    check_names(path)
    manifest = checkpoints.read_manifest(path, _NEXT, StatusCode.DATA_LOSS, of_newer=False)
    if manifest.draft_version != version:
        found = f"draft_version {manifest.draft_version}"
        raise damaged(path / MANIFEST_FILE, found, f"{version}, as the folder")
    try:
        config_json = (path / CONFIG_FILE).read_text()
        size = (path / WEIGHTS_FILE).stat().st_size
    except (OSError, UnicodeDecodeError) as error:
        raise damaged(path, str(error)) from error
    if config_json != manifest.config_json:
        raise damaged(path / CONFIG_FILE, "not the text in the manifest")
    if not manifest.HasField("weights_bytes") or size != manifest.weights_bytes:
        stated = manifest.weights_bytes if manifest.HasField("weights_bytes") else "no size"
        raise damaged(path / WEIGHTS_FILE, f"{size} bytes", f"{stated}, as in the manifest")
    return manifest


def read_tensors(path: Path, manifest: release_pb2.ReleaseManifest) -> dict[str, Tensor]:
    """Read the weights by name, each verified against the manifest's SHA-256.

    Raises:
        RefusedError: DATA_LOSS, a tensor is missing, unknown or not the one released.
    """
    file = path / WEIGHTS_FILE
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise damaged(file, str(error)) from error
    wanted = {spec.name: spec for spec in manifest.tensors}
    if tensors.keys() != wanted.keys():
        raise damaged(file, f"tensors {sorted(tensors)}", f"{sorted(wanted)}")
    for name, tensor in tensors.items():
        if spec_of(name, tensor) != wanted[name]:
            raise damaged(file, f"tensor {name} is not the one released")
    return tensors


def same_content(path: Path, other: Path) -> bool:
    """Return whether two folders hold the same checkpoint, byte for byte.

    Raises:
        RefusedError: DATA_LOSS, a file is missing in ``path``.
    """
    try:
        return all(
            filecmp.cmp(path / name, other / name, shallow=False)
            for name in (CONFIG_FILE, WEIGHTS_FILE)
        )
    except FileNotFoundError as error:
        raise damaged(path, str(error)) from error


def damaged(path: Path, found: str, expected: str = "the bytes that were released") -> RefusedError:
    """Return the error for a release that is not what was released."""
    return RefusedError(str(path), found, expected, _NEXT, StatusCode.DATA_LOSS)
