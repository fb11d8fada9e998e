"""The layouts in which trainers write EAGLE-3 checkpoints.

plain        what vLLM reads at the top level of config.json, as SpecForge's exporter writes it
speculators  0.9.0: the decoder layer's sizes nested, the rest around them. Source: speculators
             ``models/eagle3/config.py`` writes it; vLLM 0.32
             ``transformers_utils/configs/speculators/algos.py`` flattens it as ``_flat`` does here
modelopt     0.47.0, ``export/plugins/hf_spec_export.py``; only read. vLLM takes its layer
             numbers, which count layer outputs from 0, for "after L layers" (V1 runner) or
             ignores them (V2), so it would not serve what such a file names

ModelOpt's Hugging Face trainer also puts hidden states through ``input_layernorm`` before
``hidden_norm``. vLLM does not, and training here follows vLLM, so such a draft starts with slightly
lower acceptance than it was trained to.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draft_trainer.checkpoints import Refuse, read_policy_config, size_of
from draft_trainer.drafters.eagle3.config import ARCHITECTURES, OWN_EMBEDDINGS, HeadConfig
from slipstream.layers import AUX_LAYERS, ambiguous_layers, default_aux_layers

_AUTOMODEL = "LlamaEagle3DraftModel"
"""The class in the config.json of NeMo AutoModel 0.7 (``speculative/eagle/draft_llama.py``)."""

Document = dict[str, Any]
"""A config.json."""

_refuse = Refuse("config.json", "give a draft that vLLM's EAGLE-3 classes serve")


@dataclass(frozen=True)
class Layout:
    """One way to write a draft.

    Attributes:
        name: "plain", "speculators" or "modelopt".
        layer: prefix of the decoder layer's tensors, "midlayer." in the head.
        leftovers: tensors that its trainer may leave in a file; copies of the policy's, which
            vLLM cannot load.
        matches: whether a config.json is in this layout.
        read: the head's configuration, and the config.json in which vLLM 0.32 reads the same; the
            policy's folder, if it is known, settles what the file leaves open.
        write: the config.json of a new checkpoint, from the configuration, the element type's name
            and the policy's folder; None for a layout that is only read.
    """

    name: str
    layer: str
    leftovers: tuple[str, ...]
    matches: Callable[[Mapping[str, Any]], bool]
    read: Callable[[Document, Path | None], tuple[HeadConfig, Document]]
    write: Callable[[HeadConfig, str, Path | None], Document] | None


def default_layer_ids(document: Mapping[str, Any], policy: Path | None) -> list[int]:
    """vLLM's default layers, for a config.json that names none.

    Raises:
        RefusedError: the policy is unknown, or too shallow.
    """
    if policy is None:
        _refuse(
            AUX_LAYERS,
            document.get(AUX_LAYERS),
            "the auxiliary layers, at top level, L meaning after L decoder layers",
            "add them, or name the policy's folder (draft.policy of a trainer), on whose depth "
            "vLLM's default depends",
        )
    depth = size_of(read_policy_config(policy), "num_hidden_layers")
    return list(default_aux_layers(depth))


def assumed(document: Mapping[str, Any], config: HeadConfig) -> tuple[str, ...]:
    """Return what neither a config.json nor the shapes of its tensors say, "name = value" each.

    A wrong value raises no error and loses acceptance, up to nearly all of it.
    """
    said = {*_named(document)}
    taken = {
        # vLLM's default for the policy's depth. It reads layer_ids, too.
        AUX_LAYERS: None if "layer_ids" in said else config.aux_layer_ids,
        # SafeAILab's trainer leaves it out.
        "rope_theta": config.rope.theta,
        "hidden_act": "silu",
        # SpecForge's trainer has no other; speculators' has both.
        "norm_before_residual": config.norm_before_residual,
    }
    unsaid = ((name, value) for name, value in taken.items() if name not in said)
    return tuple(f"{name} = {json.dumps(value)}" for name, value in unsaid if value is not None)


def _named(document: Mapping[str, Any]) -> Iterator[str]:
    """The fields that have a value, however deep they are nested."""
    for name, value in document.items():
        if isinstance(value, Mapping):
            yield from _named(value)
        elif value not in (None, []):
            yield name


def counted(document: Document, ids: list[int]) -> Document:
    """Add ``num_aux_hidden_states``, for which vLLM's Llama class would assume three."""
    if len(ids) == 3 or "num_aux_hidden_states" in document:
        return document
    return {**document, "num_aux_hidden_states": len(ids)}


def _matches(document: Mapping[str, Any]) -> bool:
    return "architectures" in document and "speculators_model_type" not in document


def _read(document: Document, policy: Path | None) -> tuple[HeadConfig, Document]:
    eagle = dict(document.get("eagle_config") or {})
    nested = eagle.pop(AUX_LAYERS, None) or eagle.pop("layer_ids", None)
    ids = document.get(AUX_LAYERS)
    if ids and nested and list(nested) != list(ids):
        _refuse(f"eagle_config.{AUX_LAYERS}", nested, f"{ids}, as at top level")
    if not ids:
        document = {**document, AUX_LAYERS: _nested_ids(nested, document, policy)}
        if "eagle_config" in document:
            document["eagle_config"] = eagle
    document = _explicit(counted(document, document[AUX_LAYERS]))
    return HeadConfig.from_dict(document), document


def _explicit(document: Document) -> Document:
    """Write out what vLLM makes of a class's name, a missing rotary base and tied embeddings.

    SafeAILab's trainer names the policy's class and leaves the base out, NeMo AutoModel names its
    own. vLLM loads a draft's lm_head whatever the file says of tying, and would tie it where it
    equals the embeddings.
    """
    names = [name for known in ARCHITECTURES.values() for name in known]
    given = document["architectures"] or ()
    if [*given] == [_AUTOMODEL]:
        # All else in it is the policy's own config.json; the draft has one layer without a window.
        others = ("layer_types", "sliding_window", "use_sliding_window")
        document = {name: value for name, value in document.items() if name not in others}
        document |= {"model_type": "llama", "num_hidden_layers": 1}
        given = ARCHITECTURES["llama"][:1]
    renamed = [f"Eagle3{name}" if f"Eagle3{name}" in names else name for name in given]
    document = {**document, "architectures": renamed}
    ropes = [document.get(field) or () for field in ("rope_scaling", "rope_parameters")]
    if not any("rope_theta" in part for part in (document, *ropes)):
        document["rope_theta"] = 10000.0
    if document.get("tie_word_embeddings") is True:
        document["tie_word_embeddings"] = False
    return document


def _nested_ids(nested: object, document: Document, policy: Path | None) -> list[int]:
    """Return the layers that ``eagle_config`` means, which only the policy's depth can tell.

    Only the two defaults, vLLM's and that of SpecForge and SGLang, are taken: they differ at every
    depth.
    """
    if not nested:
        return default_layer_ids(document, policy)
    if policy is None or not isinstance(nested, list):
        raise ambiguous_layers(_refuse.file, nested)
    default = list(default_aux_layers(size_of(read_policy_config(policy), "num_hidden_layers")))
    if nested not in (default, [layer - 1 for layer in default]):
        raise ambiguous_layers(_refuse.file, nested)
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


LAYER = "transformer_layer_config"
_VERSION = "0.9.0"
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
# The defaults that speculators and vLLM share for flags that files of older speculators lack. For
# norm_before_residual theirs differ: false in speculators' config, true in vLLM's.
_AGREED = {
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "draft_vocab_size": None,
}
_AROUND = (*_FLAGS, "draft_vocab_size", "target_hidden_size", AUX_LAYERS, OWN_EMBEDDINGS)
_DRAFT_LENGTH = 3


def _matches_speculators(document: Mapping[str, Any]) -> bool:
    return "speculators_model_type" in document


def _read_speculators(document: Document, policy: Path | None) -> tuple[HeadConfig, Document]:
    kind = document["speculators_model_type"]
    if kind != "eagle3":
        _refuse("speculators_model_type", kind, "eagle3")
    layer = nested_layer(document)
    if not document.get(AUX_LAYERS):
        document = {**document, AUX_LAYERS: default_layer_ids(document, policy)}
    # vLLM passes every field of the nested object on to the draft's class.
    document = {**document, LAYER: counted(layer, document[AUX_LAYERS])}
    return HeadConfig.from_dict(_flat(document)), document


def nested_layer(document: Mapping[str, Any], refuse: Refuse = _refuse) -> Document:
    """Return the layers' sizes in speculators' config.json. Raises RefusedError: not readable."""
    layer = document.get(LAYER)
    if not isinstance(layer, dict):
        refuse(LAYER, layer, "an object")
    if layer.get("rope_parameters") and layer.get("rope_scaling", {}) is None:
        refuse(f"{LAYER}.rope_scaling", "null", "no such field: vLLM drops rope_parameters for it")
    return {**layer}


def _flat(document: Document) -> Document:
    """Flatten it as vLLM does: the nested fields, overridden by those around them."""
    flat = {**document[LAYER]}
    model_type = flat.setdefault("model_type", "llama")
    if model_type not in ARCHITECTURES:
        _refuse(f"{LAYER}.model_type", model_type, f"one of {list(ARCHITECTURES)}")
    flat["architectures"] = [ARCHITECTURES[model_type][0]]
    for name in _AROUND:
        if document.get(name) is not None:
            flat[name] = document[name]
        elif name == "norm_before_residual":
            _refuse(name, "nothing", "true or false: speculators and vLLM differ in the default")
        elif name in _AGREED:
            flat[name] = _AGREED[name]
    if document.get("embed_requires_grad"):
        flat[OWN_EMBEDDINGS] = True
    return flat


def _write_speculators(config: HeadConfig, dtype_name: str, policy: Path | None) -> Document:
    if config.norm_before_fc and config.fc_norm:
        _refuse("fc_norm", True, "false: speculators has it or norm_before_fc, not both")
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
    matches=_matches_speculators,
    read=_read_speculators,
    write=_write_speculators,
)


# Fields of eagle_config that no other exporter writes, with the values that EAGLE-3 has. Heads of
# parallel drafting are refused as unknown tensors, and how many there are is not read.
_EAGLE_3 = {
    "use_input_layernorm_in_first_layer": (True, None),
    "use_last_layernorm": (True,),
    "use_mtp_layernorm": (False, None),
    "next_layer_regular": (True, None),
    "parallel_draft_step": (1, None),
}


def _matches_modelopt(document: Mapping[str, Any]) -> bool:
    eagle = document.get("eagle_config")
    return isinstance(eagle, Mapping) and "next_layer_regular" in eagle


def _read_modelopt(document: Document, policy: Path | None) -> tuple[HeadConfig, Document]:
    eagle = document["eagle_config"]
    if eagle.get("use_aux_hidden_state") is not True:
        _refuse("eagle_config.use_aux_hidden_state", eagle.get("use_aux_hidden_state"), True)
    _refuse.other_values(eagle, _EAGLE_3, "eagle_config.")
    outputs = eagle.get(AUX_LAYERS)
    if not outputs:
        _refuse(f"eagle_config.{AUX_LAYERS}", outputs, "the auxiliary layers, the first being 0")
    ids = [layer + 1 for layer in outputs]
    if document.get(AUX_LAYERS) not in (None, ids):
        _refuse(AUX_LAYERS, document[AUX_LAYERS], f"{ids}, one above eagle_config's")
    flat = {name: value for name, value in document.items() if name != "eagle_config"}
    flat = counted({**flat, AUX_LAYERS: ids}, ids)
    return HeadConfig.from_dict(flat), flat


MODELOPT = Layout(
    name="modelopt",
    layer="layers.0.",
    leftovers=(),
    matches=_matches_modelopt,
    read=_read_modelopt,
    write=None,
)
