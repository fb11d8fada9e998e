"""Checks that the server's checkpoints can be replaced, and that a stage fits one.

A stage is compared with the checkpoint that the server was started with: whatever has its names
and shapes goes through the same weight loaders, sharded or not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from slipstream import checkpoints
from slipstream.checkpoints import (
    CONFIG_FILE,
    MANIFEST_FILE,
    Layout,
    TensorLayout,
    read_layout,
    text_config,
)
from slipstream.errors import RefusedError, StatusCode
from slipstream.hub import read_json
from slipstream.tensors import dtype_from_wire
from slipstream.v1 import release_pb2, tensor_pb2

_FLOATS = ("float32", "bfloat16", "float16")


def read_config(directory: Path, option: str) -> dict[str, Any]:
    """``config.json`` of a checkpoint.

    Raises RefusedError: no directory, no such file, or not a JSON object.
    """
    path = directory / CONFIG_FILE
    if not path.is_file():
        found = "nothing there" if not directory.exists() else "without config.json"
        next_step = "give a checkpoint directory, or the name of a model on the hub"
        raise RefusedError(option, f"{directory}: {found}", "config.json", next_step)
    return read_json(path, "write the file again")


def quantization(config: Mapping[str, Any], layout: Layout) -> str:
    """Say how a checkpoint is quantized; empty if it is not.

    A stage of such a model is refused: vLLM's loaders need its scales and packed matrices, which a
    training job does not have.
    """
    given = config.get("quantization_config") or text_config(config).get("quantization_config")
    if given:
        method = given.get("quant_method") if isinstance(given, Mapping) else None
        return f"quantization_config ({method or 'of an unnamed method'})"
    found = (checkpoints.quantized(name, tensor.dtype) for name, tensor in layout.items())
    return next(filter(None, found), "")


def read_draft_layout(directory: Path) -> dict[str, TensorLayout]:
    """Every tensor of a draft, by name.

    Raises RefusedError: unreadable, or it is quantized, so that no stage could replace it.
    """
    layout = read_layout(directory)
    quantized = quantization(read_config(directory, "--draft"), layout)
    if quantized:
        expected, next_step = "unquantized weights", "save the draft in bfloat16"
        raise RefusedError(f"--draft {directory}", quantized, expected, next_step)
    return {name: one for name, one in layout.items() if not name.endswith(checkpoints.NOT_LOADED)}


def read_manifest(directory: Path) -> release_pb2.ReleaseManifest | None:
    """Read a release's manifest; None for another checkpoint. Raises RefusedError: unreadable."""
    if not (directory / MANIFEST_FILE).exists():
        return None
    return checkpoints.read_manifest(directory, "write the release again", of_newer=True)


@dataclass(frozen=True)
class Expected:
    """The shape that a stage of one kind must have.

    Attributes:
        kind: "draft" or "policy".
        layout: required tensors.
        served_dtype: of the model in vLLM; staged values may also be float32, which vLLM
            casts as it casts a float32 checkpoint.
        optional: tensors that may come as well and are not loaded.
        fixed: SHA-256 (32 bytes) of tensors that must not change, by name.
        forbidden: why a tensor must not come, by name.
        tied: the embeddings' name where lm_head is the same matrix; empty if it is one of its own.
        quantized: how the served model is, so that no stage can replace it; empty if it is not.
    """

    kind: str
    layout: Layout
    served_dtype: str
    optional: Layout = field(default_factory=dict)
    fixed: Mapping[str, bytes] = field(default_factory=dict)
    forbidden: Mapping[str, str] = field(default_factory=dict)
    tied: str = ""
    quantized: str = ""

    def check(self, specs: Iterable[tensor_pb2.TensorSpec]) -> list[tensor_pb2.TensorSpec]:
        """Refuse tensors that cannot replace the model.

        Returns those to be staged: without a tied lm_head, which comes with the embeddings.

        Raises RefusedError: naming the first tensor at fault.
        """
        if not self.layout:
            raise RefusedError(
                "kind",
                f"a {self.kind}",
                "a policy alone: this server drafts without weights",
                "start it with --draft",
                StatusCode.FAILED_PRECONDITION,
            )
        if self.quantized:
            raise RefusedError(
                "kind",
                f"a {self.kind} for a quantized one: {self.quantized}",
                "drafts only",
                "serve the unquantized checkpoint, or push through vLLM's weight-transfer engine "
                "if no layer is padded (vllm-project/vllm#50523)",
                StatusCode.FAILED_PRECONDITION,
            )
        seen: dict[str, tensor_pb2.TensorSpec] = {}
        for spec in specs:
            if spec.name in seen:
                raise RefusedError(
                    "tensors", f"{spec.name} twice", "each name once", "send it once"
                )
            seen[spec.name] = spec
            self._check_one(spec)
        missing = sorted(self.layout.keys() - seen)
        if missing:
            next_step = "name every tensor of the checkpoint"
            if any(map(_is_tower, missing)) and not any(map(_is_tower, seen)):
                next_step = (
                    f"load the {self.kind} with the class of the served checkpoint, which has "
                    "more than text: AutoModelForImageTextToText, not AutoModelForCausalLM"
                )
            raise RefusedError(
                "tensors",
                f"{len(missing)} missing: {_some(missing)}",
                f"all {len(self.layout)} of the served {self.kind}",
                next_step,
            )
        for name in [name for name in seen if self.tied and is_lm_head(name)]:
            # State dictionaries have the matrix under both names, checkpoints under one or both.
            head, embeddings = seen.pop(name).sha256, seen[self.tied].sha256
            if head != embeddings:
                raise RefusedError(
                    f"tensors[{name}].sha256",
                    head.hex(),
                    f"{embeddings.hex()} ({self.tied}: one matrix is served as both)",
                    "stage tied weights, or serve a checkpoint whose two matrices differ",
                    StatusCode.FAILED_PRECONDITION,
                )
        return list(seen.values())

    def _check_one(self, spec: tensor_pb2.TensorSpec) -> None:
        field_name = f"tensors[{spec.name}]"
        if spec.name in self.forbidden:
            next_step = self.forbidden[spec.name]
            code = StatusCode.FAILED_PRECONDITION
            raise RefusedError(field_name, "present", "absent", next_step, code)
        name = self.tied if self.tied and is_lm_head(spec.name) else spec.name
        wanted = self.layout.get(name) or self.optional.get(name)
        if wanted is None:
            raise RefusedError(
                field_name,
                "an unknown name",
                f"one of {_some(sorted(self.layout))}",
                f"stage the {self.kind} that this server was started with",
            )
        if tuple(spec.shape) != wanted.shape:
            next_step = f"stage weights of the served {self.kind}'s architecture"
            found, shape = list(spec.shape), list(wanted.shape)
            raise RefusedError(f"{field_name}.shape", found, shape, next_step)
        dtype = str(dtype_from_wire(spec.dtype, field_name)).removeprefix("torch.")
        allowed = {wanted.dtype}
        if wanted.dtype in _FLOATS:
            allowed |= {self.served_dtype, "float32"}
            if self.served_dtype == "float32":
                # Every value of the narrow types is a float32: nothing is lost.
                allowed |= set(_FLOATS)
        if dtype not in allowed:
            expected = f"one of {sorted(allowed)}"
            raise RefusedError(f"{field_name}.dtype", dtype, expected, "cast it before staging")
        fixed = self.fixed.get(spec.name)
        if fixed is not None and spec.sha256 != fixed:
            raise RefusedError(
                f"{field_name}.sha256",
                spec.sha256.hex(),
                f"{fixed.hex()} (the draft vocabulary that is served)",
                "a draft vocabulary cannot change live; restart the server with the new draft",
                StatusCode.FAILED_PRECONDITION,
            )


def is_lm_head(name: str) -> bool:
    """Return whether a tensor is the language model's lm_head, in multimodal models too."""
    return name.split(".")[-2:] == ["lm_head", "weight"]


def _is_tower(name: str) -> bool:
    """Return whether a tensor is of a multimodal model's part for images or sound."""
    return any(part in name for part in ("visual", "vision", "audio"))


def check_finite(name: str, tensor: torch.Tensor) -> None:
    """Refuse NaN and infinities. Raises RefusedError naming the tensor and how many."""
    if not tensor.is_floating_point():
        return
    # torch has no isfinite for the 8-bit floats; float16 holds all their values.
    finite = torch.isfinite(tensor.half() if tensor.dtype.itemsize == 1 else tensor)
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
