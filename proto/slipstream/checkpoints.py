"""Checkpoint folders, as trainer and rollout servers read them: safetensors, maps, manifest.

A folder's tensors are in the files that its index names, or else in all of its safetensors files.
The maps say which of the policy's tokens an EAGLE-3 draft can propose: d2t, int64 [draft_vocab],
target id = draft id + d2t[draft id], and, for trainers, its inverse t2d, bool [vocab], true at the
target ids.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from google.protobuf import json_format
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from slipstream.errors import RefusedError, StatusCode
from slipstream.hub import check_folder, read_json
from slipstream.v1 import release_pb2

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
MANIFEST_FILE = "manifest.json"
VOCABULARY_MAPS = ("d2t", "t2d")
MIMO = "MiMoForCausalLM"
"""An entry of ``architectures``: a model whose configuration transformers does not have."""

DTYPES = {
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "I64": "int64",
    "I32": "int32",
    "BOOL": "bool",
}
"""torch's names of the types that a draft or a stage may have, by those of safetensors."""

_ADVICE = "write the checkpoint again, as safetensors"
_INDEX_FILE = f"{WEIGHTS_FILE}.index.json"
NOT_LOADED = (
    "rotary_emb.inv_freq",
    "rotary_pos_emb.inv_freq",
    "rotary_emb.cos_cached",
    "rotary_emb.sin_cached",
)
"""The suffixes of buffers in older checkpoints that vLLM's loaders drop, as transformers does: both
compute them from config.json."""

# What compressed-tensors, ModelOpt, DeepSeek, GPTQ, AWQ and bitsandbytes store of a weight.
_PACKED = re.compile(
    r"(^|\.)(weight_(scale\w*|packed|zero_point|shape|g_idx)|scale_inv|qweight|qzeros|scales|g_idx|"
    r"SCB|weight\.(absmax|quant_map|nested_\w+|quant_state\..+))$"
)
_NESTED_CONFIGS = ("text_config", "llm_config", "language_config")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


@dataclass(frozen=True)
class TensorLayout:
    """A tensor without its values.

    Attributes:
        dtype: torch's name without "torch."; the file's own ("F8_E4M3") if it is not in ``DTYPES``.
        shape: sizes, outermost first.
    """

    dtype: str
    shape: tuple[int, ...]


Layout = Mapping[str, TensorLayout]
"""Every tensor of a checkpoint, by name."""


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part of a config.json, which multimodal models nest."""
    nested = (config.get(name) for name in _NESTED_CONFIGS)
    found = next((part for part in nested if isinstance(part, Mapping) and part), config)
    kinds = found.get("layers_block_type")
    if isinstance(kinds, list) and "num_hidden_layers" not in found:
        # transformers 5 saves Nemotron-H's depth so.
        return {**found, "num_hidden_layers": len(kinds)}
    return found


_WRONG_VALUES = (
    *(ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError),
)


@contextmanager
def reading_config(directory: Path, next_step: str) -> Iterator[None]:
    """Turn Python's own errors on a config.json's values (wrong type, too large) into a refusal."""
    try:
        yield
    except _WRONG_VALUES as error:
        expected = "fields of the types that vLLM reads"
        path = directory / CONFIG_FILE
        raise RefusedError(str(path), repr(error), expected, next_step) from error


def without_code(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json that transformers reads with its own classes, for a folder without code.

    MiMo's becomes Qwen2's, which has the same fields; vLLM knows MiMo by ``architectures``.
    """
    found = {name: value for name, value in config.items() if name != "auto_map"}
    if found.get("architectures") == [MIMO]:
        found["model_type"] = "qwen2"
    return found


def pickles(directory: Path) -> list[str]:
    """Names of the files in a folder that are pickles by their suffix, sorted."""
    if not directory.is_dir():
        return []
    return sorted(file.name for file in directory.iterdir() if file.suffix.lower() in _PICKLED)


def weight_files(directory: Path) -> list[Path]:
    """The files that hold a folder's tensors.

    Raises:
        RefusedError: no safetensors file is there; or the index is damaged, or names a file that is
            not beside it.
    """
    if (directory / _INDEX_FILE).is_file():
        return _indexed_files(directory)
    # Hidden ones are not weights: archives from macOS have ``._model.safetensors``.
    found = sorted(f for f in directory.glob("*.safetensors") if not f.name.startswith("."))
    if not found:
        check_folder(directory)
        pickled = pickles(directory)
        raise RefusedError(
            str(directory / (pickled or [WEIGHTS_FILE])[0]),
            "a pickle" if pickled else "No such file, nor other safetensors",
            WEIGHTS_FILE,
            "give a folder with safetensors; pickles (.bin, .pt) run code, and are neither fetched "
            "from the hub nor read: export a training checkpoint with its trainer (specforge "
            "export --to hf), or convert one (torch.load(..., weights_only=True), then "
            "safetensors.torch.save_file)",
        )
    return found


def _indexed_files(directory: Path) -> list[Path]:
    path, expected = directory / _INDEX_FILE, "an object with a weight_map"
    document = read_json(path, _ADVICE, expected)
    try:
        names = sorted(set(document["weight_map"].values()))
    except (KeyError, AttributeError, TypeError) as error:
        raise RefusedError(str(path), repr(error), expected, _ADVICE) from error
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise RefusedError(str(path), repr(name), "names of files beside it", _ADVICE)
    return [directory / name for name in names]


@contextmanager
def _open_safetensors(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, "pt") as file:
            yield file
    except (OSError, SafetensorError, struct.error) as error:
        raise RefusedError(str(path), error, "a safetensors file", _ADVICE) from error


def read_layout(directory: Path) -> dict[str, TensorLayout]:
    """Names, dtypes and shapes of every tensor, from the files' headers.

    Raises:
        RefusedError: a file is missing, unreadable or pickled.
    """
    layout: dict[str, TensorLayout] = {}
    for path in weight_files(directory):
        with _open_safetensors(path) as file:
            for name in file.keys():  # noqa: SIM118 (not a dict: it has no __iter__)
                tensor = file.get_slice(name)
                dtype = DTYPES.get(tensor.get_dtype(), tensor.get_dtype())
                layout[name] = TensorLayout(dtype, tuple(tensor.get_shape()))
    return layout


def quantized(name: str, dtype: str) -> str:
    """Say why a tensor of a checkpoint is not a plain number for each weight; empty if it is.

    Args:
        name: its own; a scale has the name of its weight, and stands beside it.
        dtype: see ``TensorLayout``.
    """
    if dtype not in DTYPES.values() and name not in VOCABULARY_MAPS:
        return f"{name} is {dtype}"
    return f"{name} is a part of a quantized weight" if _PACKED.search(name) else ""


def load_tensors(directory: Path, prefix: str | tuple[str, ...] = "") -> dict[str, Tensor]:
    """Every tensor whose name on disk begins with ``prefix``, or one of these, memory-mapped.

    Those that are ``NOT_LOADED`` are left out. Whatever reads weights reads them here, so that none
    is taken without its scale.

    Raises:
        RefusedError: a file is missing, unreadable or pickled, two hold the same name, or a tensor
            is ``quantized``.
    """
    tensors: dict[str, Tensor] = {}
    for path in weight_files(directory):
        with _open_safetensors(path) as file:
            names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
            held = {n: file.get_tensor(n) for n in names if not n.endswith(NOT_LOADED)}
        for name, tensor in held.items():
            if found := quantized(name, str(tensor.dtype).removeprefix("torch.")):
                step = "give the checkpoint from before it was quantized, in bfloat16"
                raise RefusedError(f"{path}: {name}", found, "weights as plain numbers", step)
        twice = sorted(tensors.keys() & held)
        if twice:
            found, expected = f"{twice[0]} again", "each tensor in one file"
            raise RefusedError(str(path), found, expected, _ADVICE)
        tensors |= held
    return tensors


def write_checkpoint(directory: Path, config_json: str, tensors: dict[str, Tensor]) -> None:
    """Write config.json and model.safetensors into an existing directory, for any user to read."""
    (directory / CONFIG_FILE).write_text(config_json)
    save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    # safetensors leaves 0600; a rollout server under another user must be able to read it.
    (directory / WEIGHTS_FILE).chmod(0o644)


def target_ids(d2t: Tensor) -> Tensor:
    """int64 [draft_vocab]: the target id of every draft id."""
    return torch.arange(len(d2t), device=d2t.device) + d2t.long()


def d2t_of(draft_vocab_ids: Tensor) -> Tensor:
    """int64 [draft_vocab]: the inverse of ``target_ids``."""
    return draft_vocab_ids.long() - torch.arange(len(draft_vocab_ids))


def t2d_of(d2t: Tensor, vocab_size: int) -> Tensor:
    """bool [vocab]: true at every target id that the draft vocabulary has."""
    present = torch.zeros(vocab_size, dtype=torch.bool)
    present[target_ids(d2t)] = True
    return present


def check_draft_vocabulary(ids: Tensor, draft_vocab_size: int, vocab_size: int, field: str) -> None:
    """Raise RefusedError unless the target ids ascend strictly within the vocabulary."""
    right_size = ids.shape == (draft_vocab_size,)
    if not right_size or ids[0] < 0 or ids[-1] >= vocab_size or (ids.diff() <= 0).any():
        raise _refused_map(
            f"{field}: draft vocabulary",
            f"{list(ids.shape)} ids, {ids[:4].tolist()} ...",
            f"{draft_vocab_size} strictly ascending target ids below {vocab_size}",
        )


def check_maps(
    d2t: Tensor | None, t2d: Tensor | None, draft_vocab_size: int, vocab_size: int, field: str
) -> None:
    """Refuse maps that are not those of one draft vocabulary.

    A full vocabulary has either no maps or identity maps, which SpecForge writes.

    Raises:
        RefusedError: missing, misshapen, not integers, not ascending, or contradicting each other.
    """
    if d2t is None:
        if t2d is not None or draft_vocab_size != vocab_size:
            needed = "d2t: the draft vocabulary is a part of the vocabulary"
            raise _refused_map(f"{field}: d2t", "nothing", needed)
        return
    if d2t.dtype not in (torch.int64, torch.int32) or d2t.ndim != 1 or not len(d2t):
        found = f"{d2t.dtype} {list(d2t.shape)}"
        raise _refused_map(f"{field}: d2t", found, f"int64 [{draft_vocab_size}]")
    check_draft_vocabulary(target_ids(d2t), draft_vocab_size, vocab_size, f"{field}: d2t")
    if t2d is None:
        return
    if t2d.shape != (vocab_size,) or t2d.is_floating_point():
        found = f"{t2d.dtype} {list(t2d.shape)}"
        raise _refused_map(f"{field}: t2d", found, f"bool [{vocab_size}]")
    differing = int((t2d.bool() != t2d_of(d2t, vocab_size)).sum())
    if differing:
        found = f"{differing} ids marked otherwise"
        raise _refused_map(f"{field}: t2d", found, "true exactly at the target ids of d2t")


def _refused_map(field: str, found: object, expected: object) -> RefusedError:
    return RefusedError(
        field, found, expected, "give the maps that the draft was trained with; d2t holds offsets"
    )


def read_manifest(
    directory: Path,
    next_step: str,
    code: StatusCode = StatusCode.INVALID_ARGUMENT,
    *,
    of_newer: bool,
) -> release_pb2.ReleaseManifest:
    """Read ``manifest.json`` of a release.

    Args:
        directory: the release.
        next_step: of a refusal.
        code: of a refusal.
        of_newer: also read one of a newer Slipstream, and leave out fields that are unknown here.

    Raises:
        RefusedError: missing or unreadable.
    """
    path = directory / MANIFEST_FILE
    try:
        return json_format.Parse(
            path.read_text(), release_pb2.ReleaseManifest(), ignore_unknown_fields=of_newer
        )
    except (OSError, UnicodeDecodeError, json_format.ParseError, RecursionError) as error:
        expected = "a ReleaseManifest as JSON"
        raise RefusedError(str(path), f"unreadable ({error})", expected, next_step, code) from error


def write_manifest(directory: Path, manifest: release_pb2.ReleaseManifest) -> None:
    """Write what ``read_manifest`` reads. Raises OSError: the folder cannot be written."""
    text = json_format.MessageToJson(manifest, preserving_proto_field_name=True)
    (directory / MANIFEST_FILE).write_text(text + "\n")
