"""Shape of a DFlash draft, from and to the ``config.json`` that vLLM reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draft_trainer.checkpoints.policy import size_of
from draft_trainer.drafters.block import BlockShape
from draft_trainer.drafters.draft import StoredShape
from draft_trainer.drafters.fields import Refuse
from draft_trainer.drafters.rope import Rope
from slipstream.layers import check_layers

ARCHITECTURE = "DFlashDraftModel"
NESTED = "dflash_config"
_FULL = "full_attention"
_FIXED_VALUES: dict[str, tuple[Any, ...]] = {
    # The speculators library nests the sizes, and gives the draft a vocabulary of its own.
    "speculators_model_type": (None,),
    "model_type": ("qwen3",),
    "architectures": ([ARCHITECTURE],),
    "hidden_act": ("silu", None),
    "attention_bias": (False, None),
    "use_sliding_window": (False, None),
    "is_causal": (False, None),
    "is_neox_style": (True, None),
    "logit_scale": (1.0, None),
    "quantization_config": (None,),
    # vLLM prefers it to target_layer_ids, and counts otherwise.
    "eagle_aux_hidden_state_layer_ids": (None,),
}
_FIXED_NESTED: dict[str, tuple[Any, ...]] = {
    "causal": (False, None),
    "use_swa": (False, None),
    "use_aux_hidden_state": (True, None),
    "attention_sink_bias": (False, None),
    "attention_value_scale": (1.0, None),
}
_refuse = Refuse(
    "the draft's config.json",
    "give a DFlash draft with full attention, of the policy's width and vocabulary",
)


@dataclass(frozen=True, kw_only=True)
class DflashConfig(StoredShape):
    """Everything that determines the draft's function besides its weights; see ``StoredShape``.

    Attributes:
        num_hidden_layers: how many.
        mask_token_id: the policy's token whose embedding stands at every place to be proposed.
    """

    num_hidden_layers: int
    mask_token_id: int

    @property
    def plain_logits(self) -> bool:
        """As vLLM's DFlash drafts, whatever the policy does."""
        return True

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> DflashConfig:
        """Read a ``config.json`` as vLLM reads it.

        ``target_layer_ids`` are outputs of layers, counted from 0; here they are 1 more.

        Raises:
            RefusedError: a field is missing, or asks for a function that is not represented: causal
                or windowed attention, another width or vocabulary than the policy's.
        """
        _refuse.other_values(document, _FIXED_VALUES)
        nested = document.get(NESTED)
        if not isinstance(nested, Mapping):
            _refuse(NESTED, nested, "an object with mask_token_id and target_layer_ids")
        _refuse.other_values(nested, _FIXED_NESTED, f"{NESTED}.")
        whose = "the draft's"
        hidden, heads, vocab, depth = (
            size_of(document, name, whose)
            for name in ("hidden_size", "num_attention_heads", "vocab_size", "num_hidden_layers")
        )
        for name, only in (("target_hidden_size", hidden), ("draft_vocab_size", vocab)):
            if document.get(name) not in (only, None):
                _refuse(name, document[name], f"{only}: embeddings and lm_head are the policy's")
        kinds = document.get("layer_types")
        if kinds is not None and any(kind != _FULL for kind in kinds):
            _refuse("layer_types", kinds, f"{_FULL} alone")
        field = f"{_refuse.file} {NESTED}.target_layer_ids"
        layers = check_layers(nested.get("target_layer_ids"), field, _refuse.next_step)
        mask = nested.get("mask_token_id")
        if not isinstance(mask, int) or not 0 <= mask < vocab:
            _refuse(f"{NESTED}.mask_token_id", mask, f"a token of the policy, 0 to {vocab - 1}")
        return cls(
            aux_layer_ids=tuple(layer + 1 for layer in layers),
            target_hidden_size=hidden,
            vocab_size=vocab,
            draft_vocab_size=vocab,
            block=BlockShape.of(
                *(document, whose, Rope.from_dict(document)),
                document.get("head_dim") or hidden // heads,
                qk_norm=True,
            ),
            num_hidden_layers=depth,
            mask_token_id=mask,
            document=dict(document),
        )
