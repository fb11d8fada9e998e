"""Draft checkpoints: read in every layout that trainers write, written in those that vLLM serves.

A layout is a file in ``layouts``; the config.json tells which one a checkpoint is in.

The tensors of a checkpoint folder: one safetensors file, or the shards that its index names.

The draft vocabulary: which of the policy's tokens the head can propose.

Checkpoints hold it as d2t, int64 [draft_vocab], target id = draft id + d2t[draft id], and, for
trainers, as its inverse t2d, bool [vocab], true at the target ids.

Whether a draft on disk is one for a given policy, and whose embeddings it carries.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from draft_trainer.checkpoints.layouts import MODELOPT, PLAIN, SPECULATORS, Document, Layout
from draft_trainer.checkpoints.policy import read_embeddings, read_policy_config, size_of
from draft_trainer.drafters.eagle3.config import LAYER_IDS, OWN_EMBEDDINGS
from draft_trainer.drafters.eagle3.head import Eagle3Head, HeadConfig
from slipstream.errors import RefusedError

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


def check_draft_vocabulary(ids: Tensor, config: HeadConfig, field: str) -> None:
    """Raise RefusedError unless the target ids ascend strictly within the vocabulary."""
    right_size = ids.shape == (config.draft_vocab_size,)
    if not right_size or ids[0] < 0 or ids[-1] >= config.vocab_size or (ids.diff() <= 0).any():
        raise _refused_draft_vocabulary(
            f"{field}: draft vocabulary",
            f"{list(ids.shape)} ids, {ids[:4].tolist()} ...",
            f"{config.draft_vocab_size} strictly ascending ids below {config.vocab_size}",
        )


def check_maps(d2t: Tensor | None, t2d: Tensor | None, config: HeadConfig, field: str) -> None:
    """Refuse maps that are not those of one draft vocabulary of ``config``.

    A full vocabulary needs none, and has either none or those that change nothing (which
    SpecForge writes).

    Raises:
        RefusedError: missing, misshapen, not integers, not ascending, or contradicting each other.
    """
    if d2t is None:
        if t2d is not None or not config.full_vocabulary:
            needed = "d2t: the draft vocabulary is a part of the vocabulary"
            raise _refused_draft_vocabulary(f"{field}: d2t", "nothing", needed)
        return
    if d2t.dtype not in (torch.int64, torch.int32) or d2t.ndim != 1 or not len(d2t):
        found = f"{d2t.dtype} {list(d2t.shape)}"
        raise _refused_draft_vocabulary(
            f"{field}: d2t", found, f"int64 [{config.draft_vocab_size}]"
        )
    check_draft_vocabulary(target_ids(d2t), config, f"{field}: d2t")
    if t2d is None:
        return
    if t2d.shape != (config.vocab_size,) or t2d.is_floating_point():
        found = f"{t2d.dtype} {list(t2d.shape)}"
        raise _refused_draft_vocabulary(f"{field}: t2d", found, f"bool [{config.vocab_size}]")
    differing = int((t2d.bool() != t2d_of(d2t, config.vocab_size)).sum())
    if differing:
        found = f"{differing} ids marked otherwise"
        raise _refused_draft_vocabulary(
            f"{field}: t2d", found, "true exactly at the target ids of d2t"
        )


def _refused_draft_vocabulary(field: str, found: object, expected: object) -> RefusedError:
    return RefusedError(
        field, found, expected, "give the maps that the draft was trained with; d2t holds offsets"
    )


def check_fits_policy(config: HeadConfig, policy: Mapping[str, Any]) -> None:
    """Refuse a draft that is not for this policy.

    Args:
        config: the draft's.
        policy: the policy's config.json (its ``text_config`` where it has one).

    Raises:
        RefusedError: the vocabulary or the width differs, or a layer is deeper than the policy.
    """
    vocab, width = size_of(policy, "vocab_size"), size_of(policy, "hidden_size")
    depth, deepest = size_of(policy, "num_hidden_layers"), config.aux_layer_ids[-1]
    for name, found, expected, fits in (
        ("vocab_size", config.vocab_size, vocab, config.vocab_size == vocab),
        (
            "target_hidden_size",
            config.target_hidden_size,
            width,
            config.target_hidden_size == width,
        ),
        (LAYER_IDS, deepest, f"at most {depth}", deepest <= depth),
    ):
        if not fits:
            raise RefusedError(
                f"the draft's {name}",
                found,
                f"{expected}, for this policy",
                "give the draft that was trained for this policy",
            )


def is_copy_of_the_policys(embeddings: Tensor, policy: Path | None, where: str) -> bool:
    """Whether embeddings in a checkpoint are the policy's, compared as vLLM compares them.

    vLLM shares the policy's where they are equal when it loads both, and keeps the draft's own
    where they are not.

    Args:
        embeddings: [vocab, H], of the draft's checkpoint.
        policy: its folder; None if it is not at hand.
        where: the checkpoint, for a refusal.

    Raises:
        RefusedError: there is no policy to compare with.
    """
    if policy is None:
        raise RefusedError(
            f"{where}: embed_tokens.weight",
            "embeddings that may be a copy of the policy's, or not",
            "none, or the policy's folder to compare them with",
            "name the policy's folder (draft.policy of a trainer); or remove the tensor, and vLLM "
            "uses the policy's; or, if they are the draft's own, add "
            f'"{OWN_EMBEDDINGS}": true to config.json',
        )
    theirs = read_embeddings(policy)
    return embeddings.shape == theirs.shape and torch.equal(embeddings, theirs.to(embeddings.dtype))


CONFIG_FILE = "config.json"
# In this order: the first that recognises a config.json has it.
LAYOUTS = (SPECULATORS, MODELOPT, PLAIN)
_LAYER, _EMBEDDINGS = "midlayer.", "embed_tokens.weight"
_WRONG_TYPES = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A draft, and how it is written.

    Attributes:
        config: the head's.
        tensors: the head's parameters by its own names, in the types that they are stored in.
        d2t: int64 [draft_vocab] (see ``draft_vocabulary``); None for a full vocabulary.
        document: the config.json in which vLLM reads ``config``.
        layer: what the decoder layer's tensors begin with on disk.
        with_t2d: whether t2d stands beside d2t.
        as_stored: whether the folder it was read from holds exactly this. False where the file
            left something to the policy, means other layers in vLLM than in its trainer, or holds
            what vLLM cannot load.
    """

    config: HeadConfig
    tensors: dict[str, Tensor]
    d2t: Tensor | None
    document: Document
    layer: str
    with_t2d: bool
    as_stored: bool


def read_checkpoint(directory: Path, policy: Path | None = None) -> Checkpoint:
    """Read a draft checkpoint of any known layout. Nothing is written.

    A copy of the policy's embeddings, which several trainers save, is left out: the head shares
    them, so that they follow the policy. Without ``policy`` a copy cannot be told from embeddings
    of the draft's own, and neither can vLLM's default layers be known.

    Args:
        directory: with config.json and model.safetensors (or shards and their index).
        policy: the folder of the policy that it drafts for, if it is at hand.

    Raises:
        RefusedError: a file is missing or unreadable; a field or tensor is missing, unknown,
            misshapen, not finite, or contradicts another; the vocabulary maps are not those of an
            ascending draft vocabulary; the draft does not fit the policy.
    """
    weight_files(directory)  # a pickle is the better reason than what else is missing
    config, layout, document, served = _read_config(directory, policy)
    stored = load_tensors(directory)
    where = str(directory)
    tensors = {name: t for name, t in stored.items() if name not in layout.leftovers}
    d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
    layer = _layer_prefix(tensors)
    tensors = {_head_name(name, layer): tensor for name, tensor in tensors.items()}
    if policy is not None:
        check_fits_policy(config, read_policy_config(policy))
    embeddings = tensors.get(_EMBEDDINGS)
    if not config.own_embeddings and embeddings is not None:
        if is_copy_of_the_policys(embeddings, policy, where):
            del tensors[_EMBEDDINGS]
        else:
            config = replace(config, own_embeddings=True)
            served = {**served, OWN_EMBEDDINGS: True}
    _check_tensors(tensors, config, where)
    check_maps(d2t, t2d, config, where)
    if config.full_vocabulary:
        # vLLM has no parameter to put the maps in, even those that change nothing.
        d2t = t2d = None
    maps = [name for name, held in (("d2t", d2t), ("t2d", t2d)) if held is not None]
    if layout.write is None:
        layer = PLAIN.layer
    return Checkpoint(
        config=config,
        tensors=tensors,
        d2t=None if d2t is None else d2t.long(),
        document=served,
        layer=layer,
        with_t2d=t2d is not None or layout.write is None,
        as_stored=served == document
        and {_stored_name(name, layer) for name in [*tensors, *maps]} == stored.keys()
        and (directory / WEIGHTS_FILE).is_file(),
    )


def load_draft(
    directory: Path, policy: Path | None = None
) -> tuple[HeadConfig, dict[str, Tensor], Tensor | None]:
    """``read_checkpoint``'s configuration, parameters by name, and d2t."""
    checkpoint = read_checkpoint(directory, policy)
    return checkpoint.config, checkpoint.tensors, checkpoint.d2t


def load_head(directory: Path, policy: Path | None = None) -> tuple[Eagle3Head, Tensor | None]:
    """The head of a checkpoint in float32, and its d2t. Raises as ``read_checkpoint``."""
    config, tensors, d2t = load_draft(directory, policy)
    head = Eagle3Head(config, None if d2t is None else target_ids(d2t))
    head.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return head, d2t


def save_draft(
    directory: Path,
    config: HeadConfig,
    head: Eagle3Head,
    d2t: Tensor | None,
    dtype: torch.dtype = torch.bfloat16,
    *,
    layout: str = "plain",
    policy: Path | None = None,
    like: Path | None = None,
) -> None:
    """Write a draft checkpoint into an existing directory. The same weights give the same bytes.

    Args:
        directory: where config.json and model.safetensors go.
        config: the head's.
        head: the weights, any floating dtype.
        d2t: int64 [draft_vocab]; None exactly when the vocabulary is full.
        dtype: element type to write.
        layout: "plain" or "speculators".
        policy: the folder of its policy, which speculators' layout names.
        like: a checkpoint to write it like, field by field and name by name; then ``layout`` and
            ``policy`` do not count.

    Raises:
        RefusedError: d2t does not fit the configuration, the layout cannot represent it, or
            ``like`` is a draft of another configuration.
    """
    if (d2t is None) != config.full_vocabulary:
        found = "nothing" if d2t is None else "a map"
        raise _refused_checkpoint(
            "d2t", found, f"a map exactly when part of {config.vocab_size} is drafted"
        )
    check_maps(d2t, None, config, "save_draft")
    dtype_name = str(dtype).removeprefix("torch.")
    if like is None:
        writer = next((one for one in LAYOUTS if one.name == layout and one.write), None)
        if writer is None or writer.write is None:
            written = [one.name for one in LAYOUTS if one.write]
            raise _refused_checkpoint(
                "layout", layout, f"one of {written}", "choose a layout that vLLM serves"
            )
        document = writer.write(config, dtype_name, policy)
        layer, with_t2d = writer.layer, True
    else:
        theirs, _, _, document = _read_config(like, None)
        if theirs != config:
            raise _refused_checkpoint(str(like / CONFIG_FILE), theirs, config)
        names = tensor_names(like)
        document, layer = _with_dtype(document, dtype_name), _layer_prefix(names)
        with_t2d = "t2d" in names
    tensors = {name: t.detach().to("cpu", dtype) for name, t in head.state_dict().items()}
    write_checkpoint(directory, Checkpoint(config, tensors, d2t, document, layer, with_t2d, True))


def write_checkpoint(directory: Path, checkpoint: Checkpoint) -> None:
    """Write config.json and model.safetensors into an existing directory, tensor by tensor."""
    stored = {
        _stored_name(name, checkpoint.layer): tensor.contiguous().clone()
        for name, tensor in checkpoint.tensors.items()
    }
    if checkpoint.d2t is not None:
        stored["d2t"] = checkpoint.d2t.long()
        if checkpoint.with_t2d:
            stored["t2d"] = t2d_of(checkpoint.d2t, checkpoint.config.vocab_size)
    text = json.dumps(checkpoint.document, indent=2)
    (directory / CONFIG_FILE).write_text(text + "\n")
    save_file(stored, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    # safetensors leaves 0600; a rollout server under another user must be able to read it.
    (directory / WEIGHTS_FILE).chmod(0o644)


def _read_config(
    directory: Path, policy: Path | None
) -> tuple[HeadConfig, Layout, Document, Document]:
    """The configuration, the layout, and config.json as it stands and as vLLM must read it."""
    path = directory / CONFIG_FILE
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise _refused_checkpoint(path, str(error), "a JSON object") from error
    if not isinstance(document, dict):
        raise _refused_checkpoint(path, type(document).__name__, "a JSON object")
    layout = next((layout for layout in LAYOUTS if layout.matches(document)), None)
    if layout is None:
        raise _refused_checkpoint(
            path, "neither architectures nor speculators_model_type", "a draft's config.json"
        )
    try:
        config, served = layout.read(document, policy)
    except _WRONG_TYPES as error:
        raise _refused_checkpoint(
            path, repr(error), "fields of the types that vLLM reads"
        ) from error
    return config, layout, document, served


def _check_tensors(tensors: Mapping[str, Tensor], config: HeadConfig, where: str) -> None:
    with torch.device("meta"):
        wanted = {name: p.shape for name, p in Eagle3Head(config).state_dict().items()}
    if tensors.keys() != wanted.keys():
        missing, extra = sorted(wanted.keys() - tensors.keys()), sorted(tensors.keys() - wanted)
        raise _refused_checkpoint(where, f"missing {missing}, unknown {extra}", sorted(wanted))
    for name, tensor in tensors.items():
        if tensor.shape != wanted[name]:
            raise _refused_checkpoint(f"{where}: {name}", list(tensor.shape), list(wanted[name]))
        if tensor.dtype not in _FLOATS:
            raise _refused_checkpoint(
                f"{where}: {name}", tensor.dtype, f"one of {[*map(str, _FLOATS)]}"
            )
        wrong = int((~torch.isfinite(tensor)).sum())
        if wrong:
            raise _refused_checkpoint(
                f"{where}: {name}", f"{wrong} values not finite", "finite numbers"
            )


def _layer_prefix(names: Mapping[str, Tensor] | set[str]) -> str:
    plain = any(name.startswith(_LAYER) for name in names)
    return _LAYER if plain else SPECULATORS.layer


def _head_name(name: str, layer: str) -> str:
    return _LAYER + name.removeprefix(layer) if name.startswith(layer) else name


def _stored_name(name: str, layer: str) -> str:
    return layer + name.removeprefix(_LAYER) if name.startswith(_LAYER) else name


def _with_dtype(document: Document, dtype_name: str) -> Document:
    """The element type wherever the document names one."""
    return {
        key: dtype_name
        if key in ("dtype", "torch_dtype") and value is not None
        else _with_dtype(value, dtype_name)
        if isinstance(value, dict)
        else value
        for key, value in document.items()
    }


def _refused_checkpoint(
    field: object,
    found: object,
    expected: object,
    next_step: str = "give an EAGLE-3 draft checkpoint in the layout of vLLM, SpecForge, "
    "speculators or ModelOpt",
) -> RefusedError:
    return RefusedError(str(field), found, expected, next_step)
