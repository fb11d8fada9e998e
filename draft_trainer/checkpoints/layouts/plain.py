"""The plain layout: what vLLM reads at the top level, as SpecForge's exporter writes it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draft_trainer.checkpoints.layouts.layout import (
    Document,
    Layout,
    counted,
    default_layer_ids,
    refuse,
)
from draft_trainer.checkpoints.policy_checkpoint import read_policy_config, size_of
from draft_trainer.eagle3.head_config import LAYER_IDS, HeadConfig
from slipstream.layers import default_aux_layers


def _matches(document: Mapping[str, Any]) -> bool:
    return "architectures" in document and "speculators_model_type" not in document


def _read(document: Document, policy: Path | None) -> tuple[HeadConfig, Document]:
    eagle = dict(document.get("eagle_config") or {})
    nested = eagle.pop(LAYER_IDS, None) or eagle.pop("layer_ids", None)
    ids = document.get(LAYER_IDS)
    if ids and nested and list(nested) != list(ids):
        refuse(f"eagle_config.{LAYER_IDS}", nested, f"{ids}, as at top level")
    if not ids:
        document = {**document, LAYER_IDS: _nested_ids(nested, document, policy)}
        if "eagle_config" in document:
            document["eagle_config"] = eagle
    document = counted(document, document[LAYER_IDS])
    return HeadConfig.from_dict(document), document


def _nested_ids(nested: object, document: Document, policy: Path | None) -> list[int]:
    """The layers that ``eagle_config`` means, which only the policy's depth can tell.

    SpecForge and SGLang count the outputs of layers from 0. vLLM's V1 runner reads the same list
    as "after L layers", and its V2 runner does not read it. An off-by-one here trains without an
    error, so only the two defaults, which differ at every depth, are taken.
    """
    if not nested:
        return default_layer_ids(document, policy)
    expected = f"{LAYER_IDS} at top level, L meaning after L decoder layers"
    advice = "move it there: add 1 to each where 0 means the output of the first layer"
    if policy is None or not isinstance(nested, list):
        refuse(f"eagle_config.{LAYER_IDS}", nested, expected, advice)
    default = list(default_aux_layers(size_of(read_policy_config(policy), "num_hidden_layers")))
    if nested not in (default, [layer - 1 for layer in default]):
        refuse(f"eagle_config.{LAYER_IDS}", nested, expected, advice)
    return default


def _write(config: HeadConfig, dtype_name: str, policy: Path | None) -> Document:
    return config.to_dict(dtype_name)


PLAIN = Layout(
    name="plain",
    layer="midlayer.",
    leftovers=(),
    matches=_matches,
    read=_read,
    write=_write,
)
