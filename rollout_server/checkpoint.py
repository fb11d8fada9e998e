"""What a checkpoint directory holds, read without loading a tensor.

Whether staged tensors can replace a model: names, shapes, dtypes, vocabulary, values.

The yardstick is the checkpoint that the server was started with: whatever has
its names and shapes loads through the same weight loaders, sharded or not.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import torch
from google.protobuf import json_format

from slipstream.errors import RefusedError
from slipstream.tensors import dtype_from_wire
from slipstream.v1 import release_pb2, tensor_pb2

_SAFETENSORS_DTYPES = {
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "I64": "int64",
    "I32": "int32",
    "BOOL": "bool",
}
_HEADER_LIMIT = 100 << 20  # safetensors' own bound on its header


@dataclass(frozen=True)
class TensorLayout:
    """Name-less description of a tensor.

    Attributes:
        dtype: torch's name, for example "bfloat16".
        shape: sizes, outermost first.
    """

    dtype: str
    shape: tuple[int, ...]


Layout = Mapping[str, TensorLayout]
"""Every tensor of a checkpoint, by name."""


def read_config(directory: Path, option: str) -> dict[str, Any]:
    """``config.json`` of a checkpoint.

    Args:
        directory: the checkpoint.
        option: how a refusal names it, for example "--draft".

    Raises:
        RefusedError: no directory, no such file, or not a JSON object.
    """
    if not directory.is_dir():
        raise RefusedError(
            option,
            f"{directory}: {'a file' if directory.exists() else 'nothing there'}",
            "a checkpoint directory",
            "give the path of a directory with config.json and model.safetensors "
            "(download a hub model first)",
        )
    path = directory / "config.json"
    if not path.is_file():
        raise RefusedError(
            option, f"{directory} without config.json", "config.json", "complete the checkpoint"
        )
    try:
        config = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RefusedError(
            str(path), f"not JSON ({error})", "a JSON object", "write the file again"
        ) from error
    if not isinstance(config, dict):
        raise RefusedError(
            str(path), type(config).__name__, "a JSON object", "write the file again"
        )
    return config


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of a checkpoint: those its index names, else all of them.

    Raises:
        RefusedError: the index is broken, or names a file that is not beside it.
    """
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise RefusedError(
                str(index), repr(error), "an object with a weight_map", "write the file again"
            ) from error
        for name in names:
            if not isinstance(name, str) or Path(name).name != name:
                raise RefusedError(
                    str(index), repr(name), "names of files beside it", "write the file again"
                )
        return [directory / name for name in names]
    return sorted(directory.glob("*.safetensors"))


def read_layout(directory: Path, option: str) -> dict[str, TensorLayout]:
    """Names, dtypes and shapes of every tensor of a checkpoint.

    Raises:
        RefusedError: no safetensors file, a damaged one, or a dtype that cannot be staged.
    """
    files = weight_files(directory)
    if not files:
        raise RefusedError(
            option,
            f"{directory} without model.safetensors",
            "at least one safetensors file",
            "save the weights as safetensors (pickled weights are not read)",
        )
    layout: dict[str, TensorLayout] = {}
    for path in files:
        for name, entry in _read_header(path).items():
            if name == "__metadata__":
                continue
            if entry["dtype"] not in _SAFETENSORS_DTYPES:
                raise RefusedError(
                    f"{path}: {name}",
                    entry["dtype"],
                    f"one of {sorted(_SAFETENSORS_DTYPES)}",
                    "quantized checkpoints cannot be swapped live; serve the unquantized one",
                )
            layout[name] = TensorLayout(
                _SAFETENSORS_DTYPES[entry["dtype"]], tuple(int(n) for n in entry["shape"])
            )
    return layout


def _read_header(path: Path) -> dict[str, Any]:
    """The JSON header: 8 bytes length, then the header (safetensors format)."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _HEADER_LIMIT:
                raise ValueError(f"header of {length} bytes")
            header = json.loads(file.read(length))
    except (OSError, struct.error, ValueError) as error:
        raise RefusedError(
            str(path), f"unreadable ({error})", "a safetensors file", "write the file again"
        ) from error
    if not isinstance(header, dict):
        raise RefusedError(str(path), "no header", "a safetensors file", "write the file again")
    return header


def read_manifest(directory: Path) -> release_pb2.ReleaseManifest | None:
    """``manifest.json`` of a release, or None for a checkpoint from elsewhere.

    Raises:
        RefusedError: there is one and it cannot be read.
    """
    path = directory / "manifest.json"
    if not path.exists():
        return None
    try:
        return json_format.Parse(
            path.read_text(), release_pb2.ReleaseManifest(), ignore_unknown_fields=True
        )
    except (json_format.ParseError, UnicodeDecodeError) as error:
        raise RefusedError(
            str(path),
            f"unreadable ({error})",
            "a slipstream.v1.ReleaseManifest as protobuf JSON",
            "write the release again, or delete manifest.json to serve it as version 0",
        ) from error


VOCABULARY_MAPS = ("d2t", "t2d")
_FLOATS = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Expected:
    """What a stage of one kind must look like.

    Attributes:
        kind: "draft" or "policy".
        layout: required tensors.
        optional: tensors that may come as well and are not loaded.
        served_dtype: of the model in vLLM; staged values may also be float32, which vLLM
            casts as it casts a float32 checkpoint.
        fixed: SHA-256 (32 bytes) of tensors that must not change, by name.
        forbidden: why a tensor must not come, by name.
    """

    kind: str
    layout: Layout
    served_dtype: str
    optional: Layout = field(default_factory=dict)
    fixed: dict[str, bytes] = field(default_factory=dict)
    forbidden: dict[str, str] = field(default_factory=dict)


def check(specs: Iterable[tensor_pb2.TensorSpec], expected: Expected) -> None:
    """Refuse what cannot replace the model.

    Raises:
        RefusedError: naming the first tensor at fault.
    """
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            raise RefusedError("tensors", f"{spec.name} twice", "each name once", "send it once")
        seen.add(spec.name)
        if spec.name in expected.forbidden:
            raise RefusedError(
                f"tensors[{spec.name}]",
                "present",
                "absent",
                expected.forbidden[spec.name],
                grpc.StatusCode.FAILED_PRECONDITION,
            )
        wanted = expected.layout.get(spec.name) or expected.optional.get(spec.name)
        if wanted is None:
            raise RefusedError(
                f"tensors[{spec.name}]",
                "a name that the served checkpoint does not have",
                f"one of {_some(sorted(expected.layout))}",
                f"stage the {expected.kind} that this server was started with, by the names "
                "of its checkpoint",
            )
        _check_one(spec, wanted, expected)
    missing = sorted(set(expected.layout) - seen)
    if missing:
        raise RefusedError(
            "tensors",
            f"{len(missing)} missing: {_some(missing)}",
            f"all {len(expected.layout)} of the served {expected.kind}",
            "name every tensor of the checkpoint (those that the server holds are not sent again)",
        )


def _check_one(spec: tensor_pb2.TensorSpec, wanted: TensorLayout, expected: Expected) -> None:
    if tuple(spec.shape) != wanted.shape:
        raise RefusedError(
            f"tensors[{spec.name}].shape",
            list(spec.shape),
            list(wanted.shape),
            f"stage weights of the served {expected.kind}'s architecture",
        )
    dtype = str(dtype_from_wire(spec.dtype, f"tensors[{spec.name}]")).removeprefix("torch.")
    allowed = {wanted.dtype}
    if wanted.dtype in _FLOATS:
        allowed |= {expected.served_dtype, "float32"}
        if expected.served_dtype == "float32":
            # Every value of the narrow types is a float32: nothing is lost.
            allowed |= set(_FLOATS)
    if dtype not in allowed:
        raise RefusedError(
            f"tensors[{spec.name}].dtype",
            dtype,
            f"one of {sorted(allowed)}",
            "cast it before staging",
        )
    fixed = expected.fixed.get(spec.name)
    if fixed is not None and spec.sha256 != fixed:
        raise RefusedError(
            f"tensors[{spec.name}].sha256",
            spec.sha256.hex(),
            f"{fixed.hex()} (the draft vocabulary that is served)",
            "a draft vocabulary cannot change live; restart the server with the new draft",
            grpc.StatusCode.FAILED_PRECONDITION,
        )


def check_finite(name: str, tensor: torch.Tensor) -> None:
    """Refuse NaN and infinities. Raises RefusedError naming the tensor and how many."""
    if not tensor.is_floating_point():
        return
    # torch has no isfinite for the 8-bit floats, and all of them are float16s.
    narrow = tensor.dtype.itemsize == 1
    finite = torch.isfinite(tensor.half() if narrow else tensor)
    if not bool(finite.all()):
        raise RefusedError(
            f"tensors[{name}]",
            f"{int((~finite).sum())} of {tensor.numel()} values are NaN or infinite",
            "finite values",
            "look at the training step that wrote them",
        )


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:8])
    return shown if len(names) <= 8 else f"{shown}, ... ({len(names)} in all)"
