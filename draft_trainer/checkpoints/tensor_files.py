"""The tensors of a checkpoint folder: one safetensors file, or the shards that its index names."""

from __future__ import annotations

import json
import struct
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from slipstream.refusal import RefusedError

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def weight_files(directory: Path) -> list[Path]:
    """Where the tensors are. Raises RefusedError: only pickles are there, or a broken index."""
    index = directory / INDEX_FILE
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise _refused(index, repr(error), "an object with a weight_map") from error
        for name in names:
            if not isinstance(name, str) or Path(name).name != name:
                raise _refused(index, repr(name), "names of files in its own folder")
        return [directory / name for name in names]
    path = directory / WEIGHTS_FILE
    pickled = [] if path.is_file() else pickles(directory)
    if pickled:
        raise RefusedError(
            str(directory / pickled[0]),
            "a pickle",
            WEIGHTS_FILE,
            "pickles run code and are never read: export a training checkpoint with its trainer "
            "(specforge export --to hf), or save the weights as safetensors",
        )
    return [path]


def pickles(directory: Path) -> list[str]:
    """Names of the files in a folder that are pickles by their suffix, sorted."""
    if not directory.is_dir():
        return []
    return sorted(file.name for file in directory.iterdir() if file.suffix.lower() in _PICKLED)


def load_tensors(directory: Path) -> dict[str, Tensor]:
    """Every tensor by the name that it has on disk.

    Raises:
        RefusedError: a file is missing, unreadable or pickled, or two hold the same name.
    """
    tensors: dict[str, Tensor] = {}
    for path in weight_files(directory):
        try:
            held = load_file(path)
        except (OSError, SafetensorError, struct.error) as error:
            raise _refused(path, error, "a safetensors file") from error
        twice = sorted(tensors.keys() & held)
        if twice:
            raise _refused(path, f"{twice[0]} again", "each tensor in one file")
        tensors |= held
    return tensors


def tensor_names(directory: Path) -> set[str]:
    """The names alone; raises as ``load_tensors``."""
    names: set[str] = set()
    for path in weight_files(directory):
        try:
            with safe_open(path, "pt") as file:
                names |= set(file.keys())
        except (OSError, SafetensorError) as error:
            raise _refused(path, error, "a safetensors file") from error
    return names


def _refused(path: Path, found: object, expected: str) -> RefusedError:
    return RefusedError(
        str(path), str(found), expected, "write the checkpoint again, as safetensors"
    )
