"""Whether staged tensors can replace a model: names, shapes, dtypes, vocabulary, values.

The yardstick is the checkpoint that the server was started with: whatever has
its names and shapes loads through the same weight loaders, sharded or not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import grpc
import torch

from rollout_server.checkpoint import Layout, TensorLayout
from slipstream.refusal import RefusedError
from slipstream.tensors import dtype_from_wire
from slipstream.v1 import tensor_pb2

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
