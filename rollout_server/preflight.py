"""Checks that need no engine: does the draft fit the model, are the ports free.

vLLM finds most of these too, half a minute later and as a stack trace; an
out-of-range layer or a wrong vocabulary map it does not find at all.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from rollout_server.checkpoint import Layout, read_config, read_layout, weight_files
from slipstream.errors import RefusedError
from slipstream.layers import default_aux_layers


def check_draft_fits(model_dir: Path, draft_dir: Path) -> None:
    """Refuse a draft that cannot propose for this model.

    Raises:
        RefusedError: a directory or file is missing, or hidden size, auxiliary
            layers, vocabulary or vocabulary maps do not fit.
    """
    model = read_config(model_dir, "MODEL")
    read_layout(model_dir, "MODEL")
    config = read_config(draft_dir, "--draft")
    layout = read_layout(draft_dir, "--draft")
    # A speculators checkpoint nests the sizes.
    sizes: Mapping[str, Any] = config.get("transformer_layer_config") or config
    path = f"{draft_dir / 'config.json'}"
    hidden = int(model["hidden_size"])
    found = int(config.get("target_hidden_size") or sizes.get("hidden_size", 0))
    if found != hidden:
        raise RefusedError(
            f"{path}: hidden_size",
            found,
            f"{hidden} (hidden_size of {model_dir})",
            "give the draft that was trained for this model",
        )
    layers = _aux_layers(config, int(model["num_hidden_layers"]), path)
    _check_fc(layout, len(layers) * hidden, layers, draft_dir)
    _check_vocabulary(config, sizes, int(model["vocab_size"]), layout, draft_dir)


def _aux_layers(config: Mapping[str, Any], num_layers: int, path: str) -> tuple[int, ...]:
    nested: Mapping[str, Any] = config.get("eagle_config") or {}
    key = "eagle_aux_hidden_state_layer_ids"
    within = nested.get(key)
    ids = config.get(key) or within
    if ids is None:
        return default_aux_layers(num_layers)
    # A policy of so few layers has no default, and so none that the nested list could mean.
    usual = num_layers >= 8 and tuple(ids) == default_aux_layers(num_layers)
    if not config.get(key) and not usual:
        # Whoever writes the list there counts the outputs of layers from 0; vLLM reads it as
        # "after L layers", serves states of one layer earlier, and nothing fails but acceptance.
        raise RefusedError(
            f"{path}: eagle_config.{key}",
            list(ids),
            f"{key} at top level, L meaning after L layers",
            "move it there, adding 1 to each where 0 means the output of the first layer; "
            "`draft-trainer releases import` does it where the meaning is certain",
        )
    layers = tuple(int(layer) for layer in ids)
    ascending = all(a < b for a, b in pairwise(layers))
    if not layers or not ascending or layers[0] < 0 or layers[-1] > num_layers:
        raise RefusedError(
            f"{path}: {key}",
            list(layers),
            f"ascending, each from 0 to {num_layers} (the model has {num_layers} layers; "
            "L means after L layers)",
            "give the draft that was trained for this model",
        )
    return layers


def _check_fc(layout: Layout, width: int, layers: tuple[int, ...], draft_dir: Path) -> None:
    fc = layout.get("fc.weight")
    if fc is None or len(fc.shape) != 2 or fc.shape[1] != width:
        raise RefusedError(
            f"{draft_dir}: fc.weight",
            "absent" if fc is None else list(fc.shape),
            f"[draft hidden size, {width}] for auxiliary layers {list(layers)}",
            "give an EAGLE-3 draft for this model and these layers",
        )


def _check_vocabulary(
    config: Mapping[str, Any],
    sizes: Mapping[str, Any],
    vocab: int,
    layout: Layout,
    draft_dir: Path,
) -> None:
    path = f"{draft_dir / 'config.json'}"
    if int(sizes.get("vocab_size", 0)) != vocab:
        raise RefusedError(
            f"{path}: vocab_size",
            sizes.get("vocab_size"),
            f"{vocab} (the model's)",
            "give the draft that was trained for this model",
        )
    rows = int(config.get("draft_vocab_size") or vocab)
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
        raise RefusedError(
            f"{path}: draft_vocab_size", rows, f"at most {vocab}", "fix the configuration"
        )
    maps = _read_maps(draft_dir)
    if rows == vocab and "d2t" in maps:
        raise RefusedError(
            f"{draft_dir}: d2t",
            "present with a full vocabulary",
            "absent",
            "save the draft without d2t and t2d (vLLM cannot load them here)",
        )
    if rows < vocab:
        _check_maps(maps, rows, vocab, draft_dir)


def _read_maps(draft_dir: Path) -> dict[str, torch.Tensor]:
    maps = {}
    for path in weight_files(draft_dir):
        with safe_open(path, framework="pt") as file:
            for name in {"d2t", "t2d"} & set(file.keys()):
                maps[name] = file.get_tensor(name)
    return maps


def _check_maps(maps: Mapping[str, torch.Tensor], rows: int, vocab: int, draft_dir: Path) -> None:
    d2t = maps.get("d2t")
    if d2t is None or d2t.shape != (rows,) or d2t.is_floating_point():
        raise RefusedError(
            f"{draft_dir}: d2t",
            "absent" if d2t is None else f"{d2t.dtype} {list(d2t.shape)}",
            f"int64 [{rows}]: target id minus draft id",
            "save the draft with the map of its reduced vocabulary",
        )
    ids = torch.arange(rows) + d2t.long()
    if int(ids.min()) < 0 or int(ids.max()) >= vocab or bool((ids.diff() <= 0).any()):
        raise RefusedError(
            f"{draft_dir}: d2t",
            f"target ids from {int(ids.min())} to {int(ids.max())}",
            f"strictly ascending ids from 0 to {vocab - 1} (draft id + d2t[draft id])",
            "d2t holds offsets, not target ids; write it again",
        )
    t2d = maps.get("t2d")
    if t2d is not None and (
        t2d.shape != (vocab,) or not torch.equal(t2d.bool().nonzero().flatten(), ids)
    ):
        raise RefusedError(
            f"{draft_dir}: t2d",
            f"{int(t2d.bool().sum())} ids that are not those of d2t",
            f"bool [{vocab}], true at the {rows} ids of d2t",
            "write both maps from the same list of ids",
        )


def check_port_free(option: str, host: str, port: int) -> None:
    """Refuse a port that cannot be bound now. 0 (any) always passes."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise RefusedError(
                option,
                f"{host}:{port} ({error.strerror})",
                "an address that is free",
                "stop what listens there, or choose another port",
            ) from error
