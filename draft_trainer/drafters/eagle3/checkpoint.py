"""EAGLE-3 checkpoints: read in every layout that trainers write, written in those vLLM serves."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from draft_trainer.checkpoints.draft import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    check_maps,
    d2t_of,
    load_tensors,
    t2d_of,
    target_ids,
    tensor_names,
    weight_files,
)
from draft_trainer.checkpoints.policy import read_embeddings, read_policy_config, size_of
from draft_trainer.drafters.draft import Draft, DraftCheckpoint
from draft_trainer.drafters.eagle3.config import LAYER_IDS, OWN_EMBEDDINGS
from draft_trainer.drafters.eagle3.head import Eagle3Head, HeadConfig
from draft_trainer.drafters.eagle3.layouts import MODELOPT, PLAIN, SPECULATORS, Document, Layout
from slipstream.errors import RefusedError, StatusCode


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
                f"the draft's {name}", found, f"{expected}, for this policy", "give its draft"
            )


def is_copy_of_the_policys(embeddings: Tensor, policy: Path | None, where: str) -> bool:
    """Whether embeddings in a checkpoint are the policy's, compared as vLLM compares them.

    vLLM shares the policy's where they are equal when it loads both, and keeps the draft's own
    where they are not.

    Args:
        embeddings: [vocab, H], of the draft's checkpoint.
        policy: its folder; None if unknown.
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


# In this order: the first that recognises a config.json has it.
LAYOUTS = (SPECULATORS, MODELOPT, PLAIN)
_LAYER, _EMBEDDINGS = "midlayer.", "embed_tokens.weight"
_WRONG_TYPES = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A draft, and how it is written. Also see ``drafters.draft.DraftCheckpoint``.

    Attributes:
        config: the head's.
        tensors: the head's parameters by its own names, in the types that they are stored in.
        d2t: int64 [draft_vocab]; None for a full vocabulary.
        document: the config.json in which vLLM reads ``config``.
        layer: what the decoder layer's tensors begin with on disk.
        with_t2d: whether t2d is stored beside d2t.
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

    def draft(self) -> Eagle3Head:
        """The head in float32."""
        head = Eagle3Head(self.config, None if self.d2t is None else target_ids(self.d2t))
        head.load_state_dict({name: tensor.float() for name, tensor in self.tensors.items()})
        return head

    def draft_like(self, other: DraftCheckpoint) -> Eagle3Head:
        """See ``DraftCheckpoint.draft_like``."""
        found, wanted = self.config, other.config
        assert isinstance(wanted, HeadConfig), "drafts of two mechanisms"
        if found.rope_scaling is None:
            # Only a bound on lengths then, of which the served draft keeps its own.
            found = replace(found, max_position_embeddings=wanted.max_position_embeddings)
        names = [
            f.name for f in fields(wanted) if getattr(found, f.name) != getattr(wanted, f.name)
        ]
        if names:
            raise _other_shape(
                ", ".join(names),
                ", ".join(f"{name} {getattr(found, name)}" for name in names),
                ", ".join(f"{name} {getattr(wanted, name)}" for name in names),
            )
        theirs = other.d2t
        if self.d2t is not None and theirs is not None and not torch.equal(self.d2t, theirs):
            differ = int((target_ids(self.d2t) != target_ids(theirs)).sum())
            raise _other_shape(
                "draft vocabulary", f"{differ} other tokens of {len(theirs)}", "the same ones"
            )
        return replace(self, config=wanted).draft().requires_grad_(False)

    def write(self, directory: Path) -> None:
        """Write config.json and model.safetensors into an existing directory."""
        stored = {
            _stored_name(name, self.layer): tensor.contiguous().clone()
            for name, tensor in self.tensors.items()
        }
        if self.d2t is not None:
            stored["d2t"] = self.d2t.long()
            if self.with_t2d:
                stored["t2d"] = t2d_of(self.d2t, self.config.vocab_size)
        (directory / CONFIG_FILE).write_text(json.dumps(self.document, indent=2) + "\n")
        save_file(stored, directory / WEIGHTS_FILE, metadata={"format": "pt"})
        # safetensors leaves 0600; a rollout server under another user must be able to read it.
        (directory / WEIGHTS_FILE).chmod(0o644)


def _other_shape(field: str, found: str, expected: str) -> RefusedError:
    return RefusedError(
        f"the draft's {field}",
        found,
        f"{expected}, as in this registry's drafts",
        "a fleet swaps drafts of one shape and vocabulary: train it like release 0, or begin a new "
        "registry with it (draft.initial) and start the servers with it",
        StatusCode.FAILED_PRECONDITION,
    )


def read_checkpoint(directory: Path, policy: Path | None = None) -> Checkpoint:
    """Read a draft checkpoint of any known layout. Nothing is written.

    A copy of the policy's embeddings, which several trainers save, is left out: the head shares
    them, so that they follow the policy. Without ``policy`` a copy cannot be told from embeddings
    of the draft's own, and neither can vLLM's default layers be known.

    Args:
        directory: with config.json and model.safetensors (or shards and their index).
        policy: the folder of the policy that it drafts for, if it is known.

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
    check_maps(d2t, t2d, config.draft_vocab_size, config.vocab_size, where)
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


def load_head(directory: Path, policy: Path | None = None) -> Eagle3Head:
    """The head of a checkpoint in float32. Raises as ``read_checkpoint``."""
    return read_checkpoint(directory, policy).draft()


def save_draft(
    directory: Path,
    draft: Draft,
    dtype: torch.dtype = torch.bfloat16,
    *,
    layout: str = "plain",
    policy: Path | None = None,
    like: Path | None = None,
) -> None:
    """Write a head as a checkpoint into an existing directory; see ``Drafter.save``.

    Raises:
        RefusedError: the head lacks its draft vocabulary, the layout cannot represent it, or
            ``like`` is a draft of another configuration.
    """
    assert isinstance(draft, Eagle3Head), "a draft of another mechanism"
    config = draft.config
    d2t = None if config.full_vocabulary else d2t_of(draft.target_ids().cpu())
    check_maps(d2t, None, config.draft_vocab_size, config.vocab_size, "save_draft")
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
    tensors = {name: t.detach().to("cpu", dtype) for name, t in draft.state_dict().items()}
    Checkpoint(config, tensors, d2t, document, layer, with_t2d, True).write(directory)


def _read_config(
    directory: Path, policy: Path | None
) -> tuple[HeadConfig, Layout, Document, Document]:
    """The configuration, the layout, and config.json as stored and as vLLM must read it."""
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
