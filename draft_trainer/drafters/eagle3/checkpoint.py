"""EAGLE-3 checkpoints: read in every layout that trainers write, written in those vLLM serves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draft_trainer.checkpoints import read_embeddings, read_policy_config, size_of
from draft_trainer.drafters.draft import (
    Checkpoint,
    Draft,
    Drafter,
    check_fits,
    check_tensors,
    tensor_shapes,
)
from draft_trainer.drafters.eagle3.config import OWN_EMBEDDINGS, HeadConfig
from draft_trainer.drafters.eagle3.head import Eagle3Head
from draft_trainer.drafters.eagle3.layouts import (
    MODELOPT,
    PLAIN,
    SPECULATORS,
    Document,
    Layout,
    assumed,
)
from slipstream.checkpoints import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    check_maps,
    d2t_of,
    load_tensors,
    read_layout,
    reading_config,
    text_config,
    weight_files,
)
from slipstream.errors import RefusedError
from slipstream.hub import read_json
from slipstream.layers import AUX_LAYERS, check_layers

# In this order: the first that matches a config.json reads it.
_LAYOUTS = (SPECULATORS, MODELOPT, PLAIN)
_EMBEDDINGS = "embed_tokens.weight"
_ADVICE = (
    "give an EAGLE-3 draft checkpoint in the layout of vLLM, SpecForge, speculators or ModelOpt"
)


class Eagle3(Drafter):
    """EAGLE-3's checkpoints, in the layouts of vLLM, SpecForge, speculators and ModelOpt."""

    name = Eagle3Head.kind

    def build(self, document: Mapping[str, Any]) -> Eagle3Head:
        """See ``Drafter.build``."""
        return Eagle3Head(HeadConfig.from_dict(document))

    def read(self, directory: Path, policy: Path | None = None) -> Checkpoint:
        """See ``Drafter.read``.

        A copy of the policy's embeddings, which several trainers save, is left out: the head shares
        them, so that they follow the policy. Without ``policy`` a copy cannot be told from
        embeddings of the draft's own, and neither can vLLM's default layers be known.
        """
        weight_files(directory)  # refuses a pickle before anything that is missing
        config, layout, document, served = _read_config(directory, policy)
        # NeMo AutoModel's are below "model.".
        stored = {name.removeprefix("model."): t for name, t in load_tensors(directory).items()}
        where = str(directory)
        tensors = {name: t for name, t in stored.items() if name not in layout.leftovers}
        d2t, t2d = tensors.pop("d2t", None), tensors.pop("t2d", None)
        layer = _layer_prefix(tensors)
        tensors = {_swapped(name, layer, PLAIN.layer): tensor for name, tensor in tensors.items()}
        if policy is not None:
            _check_fits_policy(config, read_policy_config(policy))
        embeddings = tensors.get(_EMBEDDINGS)
        if not config.own_embeddings and embeddings is not None:
            if _is_copy_of_the_policys(embeddings, policy, where):
                del tensors[_EMBEDDINGS]
            else:
                config = replace(config, own_embeddings=True)
                served = {**served, OWN_EMBEDDINGS: True}
        with reading_config(directory, _ADVICE):
            wanted = tensor_shapes(lambda: Eagle3Head(config))
        check_tensors(tensors, wanted, where, _ADVICE)
        check_maps(d2t, t2d, config.draft_vocab_size, config.vocab_size, where)
        if config.full_vocabulary:
            # vLLM has no parameters for the maps, not even for maps that change nothing.
            d2t = t2d = None
        names = _names(tensors, PLAIN.layer if layout.write is None else layer)
        maps = {name for name, held in (("d2t", d2t), ("t2d", t2d)) if held is not None}
        return Checkpoint(
            module=Eagle3Head,
            config=config,
            tensors=tensors,
            d2t=None if d2t is None else d2t.long(),
            document=served,
            names=names,
            with_t2d=t2d is not None or layout.write is None,
            as_stored=served == document
            and {*names.values(), *maps} == read_layout(directory).keys()
            and weight_files(directory) == [directory / WEIGHTS_FILE],
            assumed=assumed(document, config),
        )

    def save(
        self,
        directory: Path,
        draft: Draft,
        dtype: torch.dtype = torch.bfloat16,
        *,
        layout: str = "plain",
        policy: Path | None = None,
        like: Path | None = None,
    ) -> None:
        """See ``Drafter.save``."""
        config = draft.config
        assert isinstance(config, HeadConfig), "a draft of another mechanism"
        d2t = None if config.full_vocabulary else d2t_of(draft.target_ids().cpu())
        check_maps(d2t, None, config.draft_vocab_size, config.vocab_size, "Drafter.save")
        dtype_name = str(dtype).removeprefix("torch.")
        if like is None:
            writers = {one.name: one for one in _LAYOUTS if one.write}
            if layout not in writers:
                raise _refused(
                    "layout", layout, f"one of {[*writers]}", "choose a layout that vLLM serves"
                )
            write, layer = writers[layout].write, writers[layout].layer
            assert write is not None
            document, with_t2d = write(config, dtype_name, policy), True
        else:
            theirs, _, _, document = _read_config(like, None)
            if theirs != config:
                raise _refused(like / CONFIG_FILE, theirs, config)
            stored = read_layout(like).keys()
            document, layer = _with_dtype(document, dtype_name), _layer_prefix(stored)
            with_t2d = "t2d" in stored
        tensors = {name: t.detach().to("cpu", dtype) for name, t in draft.state_dict().items()}
        names = _names(tensors, layer)
        Checkpoint(
            Eagle3Head, config, tensors, d2t, document, names, with_t2d, as_stored=True
        ).write(directory)


def _check_fits_policy(config: HeadConfig, policy: Mapping[str, Any]) -> None:
    """Refuse a draft whose vocabulary, width or layers are not those of this config.json."""
    depth = size_of(policy, "num_hidden_layers")
    width, next_step = size_of(policy, "hidden_size"), "give its draft"
    sizes = {"vocab_size": config.vocab_size, "target_hidden_size": config.target_hidden_size}
    check_fits(sizes, {**policy, "target_hidden_size": width}, next_step)
    check_layers(config.aux_layer_ids, f"the draft's {AUX_LAYERS}", next_step, last=depth)


def _is_copy_of_the_policys(embeddings: Tensor, policy: Path | None, where: str) -> bool:
    """Return whether embeddings [vocab, H] in a checkpoint are the policy's.

    They are compared as in vLLM, which on loading shares the policy's where the two are equal, and
    keeps the draft's own where they are not.
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


def _read_config(
    directory: Path, policy: Path | None
) -> tuple[HeadConfig, Layout, Document, Document]:
    """The configuration, the layout, and config.json as stored and as vLLM must read it."""
    path, document = directory / CONFIG_FILE, read_json(directory / CONFIG_FILE, _ADVICE)
    _refuse_policy(directory, document)
    layout = next((layout for layout in _LAYOUTS if layout.matches(document)), None)
    if layout is None:
        raise _refused(
            path, "neither architectures nor speculators_model_type", "a draft's config.json"
        )
    with reading_config(directory, _ADVICE):
        config, served = layout.read(document, policy)
    return config, layout, document, served


def _refuse_policy(directory: Path, document: Document) -> None:
    architectures = document.get("architectures")
    names = ", ".join(map(str, architectures if isinstance(architectures, list) else ()))
    text = text_config(document)
    layers = text.get("num_hidden_layers", text.get("n_layer"))
    if names and "eagle" not in names.lower() and isinstance(layers, int) and layers > 1:
        found = f"a language model ({names}, {layers} layers)"
        named = any(part in names.lower() for part in ("draft", "dspark"))
        if named or "draft_vocab_size" in document:
            found = f"a draft of another kind ({names}, {layers} layers)"
            next_step = "set draft.kind to its kind, one of docs/mechanisms.md (dflash, dspark)"
            raise RefusedError(str(directory), found, "an EAGLE-3 draft", next_step)
        make = f"draft-trainer init --policy {directory} --out DIR"
        small = 'draft.kind = "draft_model", if this small model is to draft'
        next_step = f"if this is the policy, give its draft or make one: {make}; or set {small}"
        raise RefusedError(str(directory), found, "an EAGLE-3 draft", next_step)


def _layer_prefix(names: Iterable[str]) -> str:
    """Return the prefix of the decoder layer's tensors on disk; ``PLAIN.layer`` in the head."""
    plain = any(name.startswith(PLAIN.layer) for name in names)
    return PLAIN.layer if plain else SPECULATORS.layer


def _swapped(name: str, old: str, new: str) -> str:
    return new + name.removeprefix(old) if name.startswith(old) else name


def _names(tensors: Iterable[str], layer: str) -> dict[str, str]:
    """Names on disk by the head's own names."""
    return {name: _swapped(name, PLAIN.layer, layer) for name in tensors}


def _with_dtype(document: Document, dtype_name: str) -> Document:
    """Return the document with this element type wherever it names one."""
    return {
        key: dtype_name
        if key in ("dtype", "torch_dtype") and value is not None
        else _with_dtype(value, dtype_name)
        if isinstance(value, dict)
        else value
        for key, value in document.items()
    }


def _refused(
    field: object,
    found: object,
    expected: object,
    next_step: str = _ADVICE,
) -> RefusedError:
    return RefusedError(str(field), found, expected, next_step)
