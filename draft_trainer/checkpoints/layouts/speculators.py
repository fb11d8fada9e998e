"""speculators' layout (0.9.0): the decoder layer's sizes nested, the rest around them.

Source: speculators ``models/eagle3/config.py`` writes it; vLLM 0.32
``transformers_utils/configs/speculators/algos.py`` flattens it as ``_flat`` does here.
"""

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
from draft_trainer.checkpoints.policy_checkpoint import read_policy_config
from draft_trainer.eagle3.head_config import ARCHITECTURES, LAYER_IDS, OWN_EMBEDDINGS, HeadConfig

LAYER = "transformer_layer_config"
_VERSION = "0.9.0"
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# What speculators and vLLM both take for a flag that a file of an older speculators lacks. For
# norm_before_residual they differ: false in speculators' config, true in vLLM's.
_AGREED = {
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "draft_vocab_size": None,
}
_AROUND = (*_FLAGS, "draft_vocab_size", "target_hidden_size", LAYER_IDS, OWN_EMBEDDINGS)
_DRAFT_LENGTH = 3


def _matches(document: Mapping[str, Any]) -> bool:
    return "speculators_model_type" in document


def _read(document: Document, policy: Path | None) -> tuple[HeadConfig, Document]:
    kind = document["speculators_model_type"]
    if kind != "eagle3":
        refuse("speculators_model_type", kind, "eagle3")
    if not isinstance(document.get(LAYER), dict):
        refuse(LAYER, document.get(LAYER), "an object")
    if not document.get(LAYER_IDS):
        document = {**document, LAYER_IDS: default_layer_ids(document, policy)}
    # vLLM passes every field of the nested object on to the draft's class.
    document = {**document, LAYER: counted(document[LAYER], document[LAYER_IDS])}
    return HeadConfig.from_dict(_flat(document)), document


def _flat(document: Document) -> Document:
    """What vLLM makes of it: the nested fields, overridden by those around them."""
    flat = {**document[LAYER]}
    model_type = flat.setdefault("model_type", "llama")
    if model_type not in ARCHITECTURES:
        refuse(f"{LAYER}.model_type", model_type, f"one of {list(ARCHITECTURES)}")
    flat["architectures"] = [ARCHITECTURES[model_type][0]]
    for name in _AROUND:
        if document.get(name) is not None:
            flat[name] = document[name]
        elif name == "norm_before_residual":
            refuse(name, "nothing", "true or false: speculators and vLLM differ in the default")
        elif name in _AGREED:
            flat[name] = _AGREED[name]
    if document.get("embed_requires_grad"):
        flat[OWN_EMBEDDINGS] = True
    return flat


def _write(config: HeadConfig, dtype_name: str, policy: Path | None) -> Document:
    if config.norm_before_fc and config.fc_norm:
        refuse("fc_norm", True, "false: speculators has it or norm_before_fc, not both")
    flat = config.to_dict(dtype_name)
    around = {name: flat.pop(name) for name in _AROUND if name in flat}
    del flat["architectures"], flat["rope_theta"]
    verifier: Document = {"name_or_path": None, "architectures": []}
    if policy is not None:
        architectures = read_policy_config(policy).get("architectures") or []
        verifier = {"name_or_path": str(policy), "architectures": architectures}
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": _DRAFT_LENGTH,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_version": _VERSION,
        "dtype": dtype_name,
        "tie_word_embeddings": False,
        **around,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
        LAYER: flat,
    }


SPECULATORS = Layout(
    name="speculators",
    layer="layers.0.",
    leftovers=("verifier_lm_head.weight", "verifier_norm.weight"),
    matches=_matches,
    read=_read,
    write=_write,
)
