"""EAGLE-3 drafts as vLLM serves them.

An out-of-range layer or a wrong vocabulary map vLLM does not find at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from rollout_server.checkpoint import (
    Layout,
    read_config,
    read_draft_layout,
    read_layout,
    text_config,
    weight_files,
)
from rollout_server.served.served import Served
from slipstream.errors import RefusedError
from slipstream.layers import default_aux_layers

_AUX_LAYERS = "eagle_aux_hidden_state_layer_ids"
_OTHER_DRAFT = "give the draft that was trained for this model"


class Eagle3(Served):
    """Has an lm_head of its own; its embeddings are the policy's as a rule."""

    name = "eagle3"
    follows_policy = ("embed_tokens",)

    def check(self, model_dir: Path, draft_dir: Path) -> None:
        """See ``Served.check``."""
        check_draft_fits(model_dir, draft_dir)


def check_draft_fits(model_dir: Path, draft_dir: Path) -> None:
    """Refuse a draft that cannot propose for this model.

    Raises:
        RefusedError: a directory or file is missing, or hidden size, auxiliary
            layers, vocabulary or vocabulary maps do not fit.
    """
    model = text_config(read_config(model_dir, "MODEL"))
    # Of any dtypes: a quantized model takes drafts, too.
    read_layout(model_dir, "MODEL")
    hidden, depth, vocab = (
        _size(model, name, model_dir) for name in ("hidden_size", "num_hidden_layers", "vocab_size")
    )
    config = read_config(draft_dir, "--draft")
    layout = read_draft_layout(draft_dir)
    # A speculators checkpoint nests the sizes.
    sizes: Mapping[str, Any] = config.get("transformer_layer_config") or config
    path = f"{draft_dir / 'config.json'}"
    found = int(config.get("target_hidden_size") or sizes.get("hidden_size", 0))
    if found != hidden:
        expected = f"{hidden} (hidden_size of {model_dir})"
        raise RefusedError(f"{path}: hidden_size", found, expected, _OTHER_DRAFT)
    if "fc.weight" not in layout and int(config.get("num_hidden_layers", 1)) > 1:
        found_kind = f"a policy ({config['num_hidden_layers']} layers, no fc.weight)"
        make = f"draft-trainer init --policy {draft_dir} --out DIR"
        step = f"give its draft, or make one: {make}"
        raise RefusedError(f"--draft {draft_dir}", found_kind, "an EAGLE-3 draft", step)
    layers = _aux_layers(config, depth, path)
    fc, width = layout.get("fc.weight"), len(layers) * hidden
    if fc is None or len(fc.shape) != 2 or fc.shape[1] != width:
        raise RefusedError(
            f"{draft_dir}: fc.weight",
            "absent" if fc is None else list(fc.shape),
            f"[draft hidden size, {width}] for auxiliary layers {list(layers)}",
            "give an EAGLE-3 draft for this model and these layers",
        )
    if int(sizes.get("vocab_size", 0)) != vocab:
        expected = f"{vocab} (the model's)"
        raise RefusedError(f"{path}: vocab_size", sizes.get("vocab_size"), expected, _OTHER_DRAFT)
    rows = int(config.get("draft_vocab_size") or vocab)
    _check_vocabulary(rows, vocab, layout, draft_dir)


def _size(model: Mapping[str, Any], name: str, directory: Path) -> int:
    value = model.get(name)
    if not isinstance(value, int) or value < 1:
        field, found = f"{directory / 'config.json'}: {name}", "absent" if value is None else value
        expected = "a positive integer, at top level or in text_config"
        raise RefusedError(field, found, expected, "give a language model's checkpoint")
    return value


def _aux_layers(config: Mapping[str, Any], num_layers: int, path: str) -> tuple[int, ...]:
    nested: Mapping[str, Any] = config.get("eagle_config") or {}
    ids = config.get(_AUX_LAYERS) or nested.get(_AUX_LAYERS)
    if ids is None:
        return default_aux_layers(num_layers)
    # A policy of fewer than 8 layers has no default that the nested list could mean.
    usual = num_layers >= 8 and tuple(ids) == default_aux_layers(num_layers)
    if not config.get(_AUX_LAYERS) and not usual:
        # Frameworks that write the list there count the outputs of layers from 0. vLLM reads it as
        # "after L layers" and serves states of one layer earlier; only acceptance drops.
        raise RefusedError(
            f"{path}: eagle_config.{_AUX_LAYERS}",
            list(ids),
            f"{_AUX_LAYERS} at top level, L meaning after L layers",
            "move it there, adding 1 to each where 0 means the output of the first layer; "
            "`draft-trainer releases import` does it where the meaning is certain",
        )
    layers = tuple(int(layer) for layer in ids)
    ascending = all(a < b for a, b in pairwise(layers))
    if not layers or not ascending or layers[0] < 0 or layers[-1] > num_layers:
        raise RefusedError(
            f"{path}: {_AUX_LAYERS}",
            list(layers),
            f"ascending, each from 0 to {num_layers} (the model has {num_layers} layers; "
            "L means after L layers)",
            _OTHER_DRAFT,
        )
    return layers


def _check_vocabulary(rows: int, vocab: int, layout: Layout, draft_dir: Path) -> None:
    head = layout.get("lm_head.weight")
    if head is None or head.shape[0] != rows:
        raise RefusedError(
            f"{draft_dir}: lm_head.weight",
            "absent" if head is None else list(head.shape),
            f"[{rows}, hidden size] (draft_vocab_size)",
            "save the draft with its own lm_head: vLLM would share the model's, and a draft "
            "commit would then overwrite the model",
        )
    if rows > vocab:
        field = f"{draft_dir / 'config.json'}: draft_vocab_size"
        raise RefusedError(field, rows, f"at most {vocab}", "fix the configuration")
    maps = {}
    for path in weight_files(draft_dir):
        with safe_open(path, framework="pt") as file:
            for name in {"d2t", "t2d"} & set(file.keys()):
                maps[name] = file.get_tensor(name)
    if rows < vocab:
        _check_maps(maps, rows, vocab, draft_dir)
    elif "d2t" in maps:
        found, next_step = "present with a full vocabulary", "save the draft without d2t and t2d"
        raise RefusedError(f"{draft_dir}: d2t", found, "absent (vLLM cannot load it)", next_step)


def _check_maps(maps: Mapping[str, torch.Tensor], rows: int, vocab: int, draft_dir: Path) -> None:
    d2t = maps.get("d2t")
    if d2t is None or d2t.shape != (rows,) or d2t.is_floating_point():
        found = "absent" if d2t is None else f"{d2t.dtype} {list(d2t.shape)}"
        expected = f"int64 [{rows}]: target id minus draft id"
        raise RefusedError(f"{draft_dir}: d2t", found, expected, "save the draft with this map")
    ids = torch.arange(rows) + d2t.long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or bool((ids.diff() <= 0).any()):
        found = f"target ids from {int(ids.min())} to {int(ids.max())}"
        expected = f"strictly ascending ids from 0 to {vocab - 1}"
        raise RefusedError(
            f"{draft_dir}: d2t", found, expected, "d2t holds offsets: write it again"
        )
    t2d = maps.get("t2d")
    if t2d is not None and (
        t2d.shape != (vocab,) or not torch.equal(t2d.bool().nonzero().flatten(), ids)
    ):
        found = f"{int(t2d.bool().sum())} ids that are not those of d2t"
        expected = f"bool [{vocab}], true at the {rows} ids of d2t"
        raise RefusedError(f"{draft_dir}: t2d", found, expected, "write both maps from one list")
