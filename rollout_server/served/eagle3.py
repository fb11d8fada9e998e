"""EAGLE-3 drafts as vLLM serves them.

An out-of-range layer or a wrong vocabulary map vLLM does not find at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rollout_server.checkpoint import read_config, read_draft_layout
from rollout_server.served.served import Served
from slipstream.checkpoints import (
    VOCABULARY_MAPS,
    Layout,
    check_maps,
    load_tensors,
    read_layout,
    text_config,
)
from slipstream.errors import RefusedError
from slipstream.layers import AUX_LAYERS, ambiguous_layers, check_layers, default_aux_layers

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
    read_layout(model_dir)
    hidden, depth, vocab = (
        _size(model, name, model_dir) for name in ("hidden_size", "num_hidden_layers", "vocab_size")
    )
    config = read_config(draft_dir, "--draft")
    layout = read_draft_layout(draft_dir)
    # A speculators checkpoint nests the sizes.
    sizes: Mapping[str, Any] = config.get("transformer_layer_config") or config
    path = f"{draft_dir / 'config.json'}"
    if "fc.weight" not in layout and int(config.get("num_hidden_layers", 1)) > 1:
        found_kind = f"a language model ({config['num_hidden_layers']} layers, no fc.weight)"
        make = f"draft-trainer init --policy {model_dir} --out DIR"
        step = f"make one ({make}), or let this model draft: --draft-kind draft_model"
        raise RefusedError(f"--draft {draft_dir}", found_kind, "an EAGLE-3 draft", step)
    found = int(config.get("target_hidden_size") or sizes.get("hidden_size", 0))
    if found != hidden:
        expected = f"{hidden} (hidden_size of {model_dir})"
        raise RefusedError(f"{path}: hidden_size", found, expected, _OTHER_DRAFT)
    layers = _aux_layers(config, depth, f"{path}:")
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


def _aux_layers(config: Mapping[str, Any], depth: int, where: str) -> tuple[int, ...]:
    nested = (config.get("eagle_config") or {}).get(AUX_LAYERS)
    ids = config.get(AUX_LAYERS) or nested
    if ids is None:
        return default_aux_layers(depth)
    # A policy of fewer than 8 layers has no default that the nested list could mean.
    usual = depth >= 8 and tuple(ids) == default_aux_layers(depth)
    if not config.get(AUX_LAYERS) and not usual:
        raise ambiguous_layers(where, nested)
    next_step = f"{_OTHER_DRAFT}; L means after L of its {depth} layers"
    return check_layers(ids, f"{where} {AUX_LAYERS}", next_step, last=depth)


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
    maps = load_tensors(draft_dir, VOCABULARY_MAPS)
    if rows < vocab:
        check_maps(maps.get("d2t"), maps.get("t2d"), rows, vocab, str(draft_dir))
    elif "d2t" in maps:
        found, next_step = "present with a full vocabulary", "save the draft without d2t and t2d"
        raise RefusedError(f"{draft_dir}: d2t", found, "absent (vLLM cannot load it)", next_step)
