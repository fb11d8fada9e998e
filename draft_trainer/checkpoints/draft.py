"""Reads draft checkpoints of any mechanism: safetensors files and vocabulary maps.

A folder holds one safetensors file, or the shards that its index names. The maps say which of the
policy's tokens a head can propose: d2t, int64 [draft_vocab], target id = draft id + d2t[draft id],
and, for trainers, its inverse t2d, bool [vocab], true at the target ids.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slipstream.errors import RefusedError
from slipstream.hub import indexed_files

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_ADVICE = "write the checkpoint again, as safetensors"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


def weight_files(directory: Path) -> list[Path]:
    """Where the tensors are. Raises RefusedError: only pickles are there, or a broken index."""
    indexed = indexed_files(directory, _ADVICE)
    if indexed is not None:
        return indexed
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


def load_tensors(directory: Path, prefix: str = "") -> dict[str, Tensor]:
    """Every tensor whose name on disk begins with ``prefix``, by that name.

    Raises:
        RefusedError: a file is missing, unreadable or pickled, or two hold the same name.
    """
    tensors: dict[str, Tensor] = {}
    for path in weight_files(directory):
        try:
            with safe_open(path, "pt") as file:
                names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118
                held = {name: file.get_tensor(name) for name in names}
        except (OSError, SafetensorError, struct.error) as error:
            raise _refused(path, error, "a safetensors file") from error
        twice = sorted(tensors.keys() & held)
        if twice:
            raise _refused(path, f"{twice[0]} again", "each tensor in one file")
        tensors |= held
    return tensors


def check_tensors(
    tensors: Mapping[str, Tensor], wanted: Mapping[str, torch.Size], where: str, next_step: str
) -> None:
    """Raise RefusedError unless these are the wanted ones: names, shapes, finite floats."""
    if tensors.keys() != wanted.keys():
        missing, extra = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted)
        raise RefusedError(where, f"missing {missing}, unknown {extra}", sorted(wanted), next_step)
    for name, tensor in tensors.items():
        found: object
        expected: object
        if tensor.shape != wanted[name]:
            found, expected = list(tensor.shape), list(wanted[name])
        elif tensor.dtype not in _FLOATS:
            found, expected = tensor.dtype, f"one of {[*map(str, _FLOATS)]}"
        elif wrong := int((~torch.isfinite(tensor)).sum()):
            found, expected = f"{wrong} values not finite", "finite numbers"
        else:
            continue
        raise RefusedError(f"{where}: {name}", found, expected, next_step)


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
    return RefusedError(str(path), str(found), expected, _ADVICE)


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
            f"{draft_vocab_size} strictly ascending ids below {vocab_size}",
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
