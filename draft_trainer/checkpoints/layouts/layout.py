"""What a layout of draft checkpoints is, to those who read and write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from draft_trainer.checkpoints.policy_checkpoint import read_policy_config, size_of
from draft_trainer.eagle3.head_config import LAYER_IDS, HeadConfig
from slipstream.layers import default_aux_layers
from slipstream.refusal import RefusedError

Document = dict[str, Any]
"""A config.json."""


@dataclass(frozen=True)
class Layout:
    """One way to write a draft.

    Attributes:
        name: "plain", "speculators" or "modelopt".
        layer: what the decoder layer's tensors begin with, "midlayer." in the head.
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
        refuse(
            LAYER_IDS,
            document.get(LAYER_IDS),
            "the auxiliary layers, at top level, L meaning after L decoder layers",
            "add them, or name the policy's folder (draft.policy of a trainer), on whose depth "
            "vLLM's default depends",
        )
    depth = size_of(read_policy_config(policy), "num_hidden_layers")
    return list(default_aux_layers(depth))


def counted(document: Document, ids: list[int]) -> Document:
    """With ``num_aux_hidden_states``, where vLLM's Llama class would take three for granted."""
    if len(ids) == 3 or "num_aux_hidden_states" in document:
        return document
    return {**document, "num_aux_hidden_states": len(ids)}


def refuse(
    field: str,
    found: object,
    expected: object,
    next_step: str = "give a draft that vLLM's EAGLE-3 classes serve",
) -> NoReturn:
    """Raise RefusedError for a field of config.json."""
    raise RefusedError(f"config.json {field}", found, expected, next_step)
