"""Shape of a draft model, from and to the ``config.json`` of a causal language model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draft_trainer.checkpoints.policy import size_of
from draft_trainer.drafters.block import BlockShape
from draft_trainer.drafters.draft import StoredShape
from draft_trainer.drafters.fields import Refuse
from draft_trainer.drafters.rope import Rope

POLICY_WIDTH = "target_hidden_size"
"""Our field: the policy's hidden size, which nothing else in a draft model says."""

TIED = "tie_word_embeddings"

PARALLEL_TOKEN = "pard_token"
"""PARD's field, and the one by which vLLM knows the token: the input of places that are drafted in
parallel."""

# By model_type: whether q and k are normed, and whether q, k and v have a bias.
_LAYERS = {"llama": (False, False), "qwen2": (False, True), "qwen3": (True, False)}
_FIXED_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "quantization_config": (None,),
}
_refuse = Refuse(
    "the draft's config.json",
    "give a small Llama, Qwen2 or Qwen3 model with the policy's vocabulary",
)


@dataclass(frozen=True, kw_only=True)
class LmConfig(StoredShape):
    """Everything that determines the model's function besides its weights; see ``StoredShape``.

    Attributes:
        num_hidden_layers: how many.
        tied: the embeddings are its lm_head as well.
        parallel_token: see ``PARALLEL_TOKEN``; None where tokens are drafted one after the other.
    """

    num_hidden_layers: int
    tied: bool
    parallel_token: int | None = None

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> LmConfig:
        """Read a ``config.json`` that has ``POLICY_WIDTH``.

        Raises:
            RefusedError: a field is missing, or asks for a function that is not represented.
        """
        kind = document.get("model_type")
        if kind not in _LAYERS:
            _refuse("model_type", kind, f"one of {[*_LAYERS]}")
        _refuse.other_values(document, _FIXED_VALUES)
        whose = "the draft's"
        hidden, heads, vocab, depth, width = (
            size_of(document, name, whose)
            for name in (
                *("hidden_size", "num_attention_heads", "vocab_size", "num_hidden_layers"),
                POLICY_WIDTH,
            )
        )
        token = document.get(PARALLEL_TOKEN)
        if token is not None and not (type(token) is int and 0 <= token < vocab):
            _refuse(PARALLEL_TOKEN, token, f"a token of the vocabulary, 0 to {vocab - 1}")
        if token is not None and document.get("mask_token_id") is not None:
            # vLLM would take that one.
            _refuse("mask_token_id", document["mask_token_id"], f"none beside {PARALLEL_TOKEN}")
        qk_norm, qkv_bias = _LAYERS[kind]
        return cls(
            aux_layer_ids=(),
            target_hidden_size=width,
            vocab_size=vocab,
            draft_vocab_size=vocab,
            block=BlockShape.of(
                *(document, whose, Rope.from_dict(document)),
                document.get("head_dim") or hidden // heads,
                qk_norm=qk_norm,
                qkv_bias=qkv_bias,
            ),
            num_hidden_layers=depth,
            tied=document.get(TIED, False) is True,
            parallel_token=token,
            document=dict(document),
        )
