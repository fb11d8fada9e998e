"""A run's policy: its shape is checked, and the tensors of its versions are received and kept."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from google.protobuf import json_format
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from draft_trainer.drafters import DraftShape
from draft_trainer.files import SAFETENSORS_PART
from slipstream.errors import RefusedError, StatusCode
from slipstream.sample import STATE_DTYPES
from slipstream.sampling import LogitForm
from slipstream.tensors import (
    CHUNK_BYTES,
    ChunkAssembler,
    bytes_of,
    digest,
    dtype_from_wire,
    patched,
)
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import release_pb2, tensor_pb2

LM_HEAD = "lm_head.weight"
EMBED_TOKENS = "embed_tokens.weight"
LM_HEAD_BIAS = "lm_head.bias"

POLICIES = "policies"
OURS = re.compile(rf"[0-9a-f]{{64}}\.(safetensors|part)|{SAFETENSORS_PART}")
"""The names of the files in that folder that a trainer writes and removes."""

_NAME = "matrix"
_SUFFIX = ".safetensors"


def policy_of(spec: pb.PolicySpec) -> pb.PolicySpec:
    """Return what must not change within a run: all but the policy's name, a scale of 0 as 1.

    Raises RefusedError: the scale or the cap is negative or not finite.
    """
    for name in ("logit_scale", "logit_soft_cap"):
        value = getattr(spec, name)
        if not (math.isfinite(value) and value >= 0.0):
            advice = "send the policy's, or leave it out"
            raise RefusedError(f"policy.{name}", value, "a finite number >= 0", advice)
    policy = pb.PolicySpec()
    policy.CopyFrom(spec)
    policy.DiscardUnknownFields()
    policy.ClearField("model_name")
    policy.logit_scale = LogitForm.of(spec).scale
    return policy


def policy_fields(policy: pb.PolicySpec) -> dict[str, Any]:
    """Return a policy's fields as the store keeps them and refusals show them."""
    return json_format.MessageToDict(policy, preserving_proto_field_name=True)


def check_fit(policy: pb.PolicySpec, draft: DraftShape) -> None:
    """Raise RefusedError unless such a policy can be captured for this draft."""
    width, vocab, deepest = (
        draft.target_hidden_size,
        draft.vocab_size,
        max(draft.aux_layer_ids, default=0),
    )
    for name, fits, expected in (
        ("hidden_size", policy.hidden_size == width, f"{width}, the draft's target_hidden_size"),
        ("vocab_size", policy.vocab_size == vocab, f"{vocab}, the draft's"),
        ("num_hidden_layers", policy.num_hidden_layers >= deepest, f"at least {deepest}"),
    ):
        if not fits:
            advice = "start the trainer with a draft made for this policy"
            raise RefusedError(f"policy.{name}", getattr(policy, name), expected, advice)
    plain = {"logit_scale": 1.0, "logit_soft_cap": 0.0, "lm_head_bias": False}
    for name, value in plain.items() if draft.plain_logits else ():
        if getattr(policy, name) != value:
            advice = 'adapt an EAGLE-3 draft for this policy (draft.kind = "eagle3")'
            raise RefusedError(f"policy.{name}", getattr(policy, name), value, advice)


def checked_specs(
    specs: Sequence[tensor_pb2.TensorSpec], draft: DraftShape, bias: bool
) -> dict[str, tensor_pb2.TensorSpec]:
    """Check the specs and return them by name, in the order of ``PolicyHead.tensors``.

    Raises:
        RefusedError: other names, shapes or dtypes.
    """
    shapes = {
        LM_HEAD: [draft.draft_vocab_size, draft.target_hidden_size],
        EMBED_TOKENS: [draft.vocab_size, draft.target_hidden_size],
    }
    if bias:
        shapes[LM_HEAD_BIAS] = [draft.draft_vocab_size]
    # Not all of them: a header of a few megabytes can have millions.
    names = [spec.name for spec in specs[:8]]
    if sorted(names) != sorted(shapes):
        advice = "announce each of these tensors once (lm_head.bias where OpenRun said so)"
        raise RefusedError("tensors", names, sorted(shapes), advice)
    by_name = {spec.name: spec for spec in specs}
    for name, shape in shapes.items():
        found = by_name[name]
        if list(found.shape) != shape:
            raise RefusedError(f"{name}.shape", [*found.shape], shape, "send what OpenRun asks for")
        dtype = dtype_from_wire(found.dtype, name)
        if dtype not in STATE_DTYPES:
            raise RefusedError(
                f"{name}.dtype", dtype, f"one of {STATE_DTYPES}", "send the policy's weights"
            )
    return {name: by_name[name] for name in shapes}


def receive_matrices(
    specs: dict[str, tensor_pb2.TensorSpec],
    bases: Mapping[str, bytes],
    chunks: Iterable[tensor_pb2.TensorChunk],
    held: Callable[[bytes], torch.Tensor | None],
) -> dict[str, torch.Tensor]:
    """Return the tensors: those that are held by their hash, the others from chunks.

    Args:
        specs: from ``checked_specs``.
        bases: SHA-256, by name, of the tensors whose differences come.
        chunks: chunks of the tensors that the trainer may not hold.
        held: returns the tensor of a SHA-256, or None.

    Raises:
        RefusedError: a tensor that is neither sent nor held, or whose base is not
            (FAILED_PRECONDITION), a difference of over ``CHUNK_BYTES`` of a tensor, another hash
            than declared, or a value that is not finite.
    """

    def fitting(hashes: Mapping[str, bytes]) -> dict[str, torch.Tensor]:
        found = {name: held(sha256) for name, sha256 in hashes.items() if name in specs}
        return {
            name: tensor
            for name, tensor in found.items()
            if tensor is not None
            and tensor.dtype == dtype_from_wire(specs[name].dtype, name)
            and list(tensor.shape) == list(specs[name].shape)
        }

    tensors = fitting({name: spec.sha256 for name, spec in specs.items()})
    missing = {name: spec for name, spec in specs.items() if name not in tensors}
    before = fitting(bases)
    for name in sorted(missing.keys() & bases.keys() - before.keys()):
        advice, code = "send the whole tensor", StatusCode.FAILED_PRECONDITION
        raise RefusedError(f"bases.{name}", bases[name].hex(), "a tensor held", advice, code)
    # The shapes were checked against the draft: their size is the bound.
    assembler = ChunkAssembler(missing.values(), max_bytes=1 << 62)
    sent = set()
    for chunk in chunks:
        if chunk.name not in tensors:
            if chunk.name in before:
                # Bounded: eight bytes may stand for a block of any length.
                end = chunk.offset + CHUNK_BYTES
                block = bytes_of(before[chunk.name])[chunk.offset : end]
                chunk.data = patched(chunk.data, block)
            assembler.feed(chunk)
            sent.add(chunk.name)
    absent = sorted(missing.keys() - sent)
    if absent:
        lacks, expected = f"no chunks of {', '.join(absent)}", "those of every tensor not held"
        advice = "send it: the trainer restarted, or the versions that held it were forgotten"
        raise RefusedError("tensors", lacks, expected, advice, StatusCode.FAILED_PRECONDITION)
    tensors |= assembler.finish()
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise RefusedError(
                name, "values that are not finite", "finite values", "do not sync a diverged policy"
            )
    return tensors


class MatrixFiles:
    """One safetensors file per matrix, named by its SHA-256 and not fsynced.

    Args:
        folder: a folder of its own; made if it is missing.

    Raises:
        RefusedError: the folder cannot be made, or is a link (RESOURCE_EXHAUSTED).
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            if folder.is_symlink():
                raise NotADirectoryError("a symbolic link")
            folder.mkdir(mode=0o700, exist_ok=True)
            self._remove(lambda path: path.suffix != _SUFFIX)
        except OSError as error:
            raise self._refused(folder, error, "a folder for policy matrices") from error

    def keep(self, matrix: torch.Tensor, sha256: bytes) -> torch.Tensor:
        """Write a matrix unless its file exists.

        Returns:
            The same matrix, mapped from the file, so that it is in memory once.

        Raises:
            RefusedError: no space (RESOURCE_EXHAUSTED).
        """
        path = self._path(sha256.hex())
        try:
            if not path.exists():
                temporary = path.with_suffix(".part")
                save_file({_NAME: matrix.contiguous()}, temporary)
                temporary.replace(path)
            return self._mapped(path)
        except (OSError, SafetensorError) as error:
            path.with_suffix(".part").unlink(missing_ok=True)
            expected = f"space for a matrix of {matrix.nbytes} bytes"
            raise self._refused(path, error, expected) from error

    def read(self, name: str) -> torch.Tensor:
        """Read and check the matrix whose SHA-256 is ``name``, in hexadecimal digits.

        Raises:
            RefusedError: it is missing or damaged (DATA_LOSS).
        """
        path, expected = self._path(name), "the matrix of this SHA-256"
        try:
            matrix = self._mapped(path)
        except (OSError, SafetensorError) as error:
            code = StatusCode.DATA_LOSS
            raise RefusedError(str(path), error, expected, "send it", code) from error
        found = digest(matrix).hex()
        if found != name:
            raise RefusedError(str(path), found, expected, "send it", StatusCode.DATA_LOSS)
        return matrix

    def keep_only(self, names: Set[str]) -> None:
        """Remove all other matrices. Mapped ones stay valid."""
        self._remove(lambda path: path.suffix == _SUFFIX and path.stem not in names)

    def _remove(self, unwanted: Callable[[Path], bool]) -> None:
        for path in self._folder.iterdir():
            if OURS.fullmatch(path.name) and unwanted(path):
                path.unlink()

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}{_SUFFIX}"

    def _mapped(self, path: Path) -> torch.Tensor:
        with safe_open(path, framework="pt") as file:
            matrix: torch.Tensor = file.get_tensor(_NAME)
            return matrix

    def _refused(self, path: Path, error: Exception, expected: str) -> RefusedError:
        advice, code = "free space there, or set another folder", StatusCode.RESOURCE_EXHAUSTED
        found, reason = f"{path}: {error}", release_pb2.REFUSAL_REASON_DISK
        return RefusedError("replay.directory", found, expected, advice, code, reason)
