"""Shape of a policy's MTP head, from the policy's own ``config.json``.

vLLM has no configuration for a head alone: it reads the policy's, so a release carries that one.
The families are represented in the names and with the function of vLLM 0.32's
``models/*_mtp.py``: one module, whose block is dense but for GLM's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draft_trainer.checkpoints.policy import size_of
from draft_trainer.drafters.block import BlockShape
from draft_trainer.drafters.draft import StoredShape
from draft_trainer.drafters.fields import Refuse
from draft_trainer.drafters.mtp.experts import ExpertsShape
from draft_trainer.drafters.rope import Rope
from slipstream.checkpoints import MIMO, text_config, without_code

PARTS = ("fc.", "embed_norm.", "hidden_norm.", "layer.", "norm.")
"""What the names of parameters begin with in ``MtpHead``."""


@dataclass(frozen=True)
class Family:
    """What MTP heads differ in.

    Attributes:
        modules: names of the checkpoint's config.json that say how many modules there are.
        prefix: begins every tensor's name in the checkpoint; config.json's fields are in braces.
        names: what follows there for ``PARTS``; None: the head has no such part.
        block: whose decoder layer it has: "llama", "qwen2", "qwen3_next" or "glm4_moe".
        embedding_first: the fused vector begins with the embedding, not with the hidden state.
        blind_start: the embedding at position 0 counts as zeros.
        norm_fed: the next step takes the output after the norm, as lm_head does, not before it.
        copies: names after the prefix of copies of the policy's tensors, which are not read.
    """

    modules: tuple[str, ...]
    prefix: str
    names: tuple[str | None, ...]
    block: str
    embedding_first: bool
    blind_start: bool
    norm_fed: bool = True
    copies: tuple[str, ...] = ()


_QWEN = Family(
    ("num_nextn_predict_layers", "mtp_num_hidden_layers"),
    "mtp.",
    ("fc.", "pre_fc_norm_embedding.", "pre_fc_norm_hidden.", "layers.0.", "norm."),
    block="qwen3_next",
    embedding_first=True,
    blind_start=False,
)
FAMILIES = {
    **dict.fromkeys(("qwen3_next", "qwen3_5", "qwen3_5_text"), _QWEN),
    "mimo": Family(
        ("num_nextn_predict_layers",),
        "model.mtp_layers.",
        ("0.input_proj.", "0.token_layernorm.", "0.hidden_layernorm.", "0.", "0.final_layernorm."),
        block="qwen2",
        embedding_first=False,
        blind_start=True,
    ),
    # Its block rotates halves of a head in vLLM, although the policy's layers rotate neighbours.
    "ernie4_5_moe": Family(
        ("num_nextn_predict_layers",),
        "model.mtp_",
        ("linear_proj.0.", "emb_norm.0.", "hidden_norm.0.", "block.0.", None),
        block="llama",
        embedding_first=True,
        blind_start=True,
    ),
    "glm4_moe": Family(
        ("num_nextn_predict_layers", "num_mtp_layers"),
        "model.layers.{num_hidden_layers}.",
        ("eh_proj.", "enorm.", "hnorm.", "", "shared_head.norm."),
        block="glm4_moe",
        embedding_first=True,
        blind_start=True,
        norm_fed=False,
        copies=("embed_tokens.weight", "shared_head.head.weight"),
    ),
}
"""By the language model's ``model_type``."""

_FIXED_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "layer_scale": (False, None),
    "qkv_bias": (False, None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "mtp_use_dedicated_embeddings": (False, None),
    "dual_chunk_attention_config": (None,),
}
_NO_BIAS = dict.fromkeys(("attention_bias", "bias", "use_bias"), (False, None))
_refuse = Refuse(
    "the policy's config.json",
    f"MTP heads of {', '.join(FAMILIES)} are supported; for this policy, adapt an EAGLE-3 "
    'draft (draft.kind = "eagle3")',
)


@dataclass(frozen=True, kw_only=True)
class MtpConfig(StoredShape):
    """Everything that determines the head's function besides its weights; also see ``StoredShape``.

    Attributes:
        family: one of ``FAMILIES``.
        block: its decoder layer; its norms are of the same kind.
        experts: what is in place of its SwiGLU, or None.
        document: the policy's config.json, ``without_code``.
    """

    family: str
    experts: ExpertsShape | None

    @property
    def plain_logits(self) -> bool:
        """As vLLM's MTP heads, whatever the policy does."""
        return True

    @property
    def prefix(self) -> str:
        """What every tensor's name begins with in the checkpoint."""
        return FAMILIES[self.family].prefix.format(**text_config(self.document))

    def stored(self, name: str) -> str:
        """The name in the checkpoint of a tensor of ``MtpHead``."""
        at, part = next((at, part) for at, part in enumerate(PARTS) if name.startswith(part))
        return f"{self.prefix}{FAMILIES[self.family].names[at]}{name.removeprefix(part)}"

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> MtpConfig:
        """Read the policy's ``config.json`` as vLLM reads it for the head.

        Raises:
            RefusedError: a field is missing, or the policy's head is one that is not represented:
                with latent attention, with experts, with several modules.
        """
        text = text_config(document)
        family = FAMILIES[name := _family(document, text)]
        qwen2, qwen3_next, glm = (family.block == b for b in ("qwen2", "qwen3_next", "glm4_moe"))
        # vLLM's Qwen2 has biases whatever the config.json says, and GLM's block as it says.
        _refuse.other_values(text, _FIXED_VALUES if qwen2 or glm else _FIXED_VALUES | _NO_BIAS)
        for field in family.modules:
            if text.get(field, 1) != 1:
                _refuse(field, text[field], "1: vLLM's V1 runner runs the first module alone")
        if document.get("quantization_config") is not None:
            _refuse("quantization_config", "one", "none: give the policy as it was trained")
        hidden, heads = size_of(text, "hidden_size"), size_of(text, "num_attention_heads")
        vocab, layers = size_of(text, "vocab_size"), size_of(text, "num_hidden_layers")
        if glm and text["first_k_dense_replace"] > layers:
            _refuse("first_k_dense_replace", text["first_k_dense_replace"], f"at most {layers}")
        return cls(
            aux_layer_ids=(),
            target_hidden_size=hidden,
            vocab_size=vocab,
            draft_vocab_size=vocab,
            family=name,
            block=BlockShape.of(
                *(text, "the policy's", _rope(text, family)),
                # For Qwen3-Next, 3.5 and GLM the default is not hidden / heads.
                size_of(text, "head_dim")
                if qwen3_next or glm or text.get("head_dim") is not None
                else hidden // heads,
                qk_norm=qwen3_next or (glm and text.get("use_qk_norm") is True),
                qkv_bias=qwen2 or (glm and text.get("attention_bias") is True),
                output_gate=qwen3_next and text.get("attn_output_gate", True) is True,
                zero_centred=qwen3_next,
            ),
            experts=ExpertsShape.of(text) if glm else None,
            document=without_code(document),
        )


def _family(document: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """The head's family, or why it is not represented."""
    kind = "mimo" if document.get("architectures") == [MIMO] else text.get("model_type")
    if text.get("kv_lora_rank") is not None:
        _refuse("kv_lora_rank", text["kv_lora_rank"], "none: latent attention is not represented")
    experts = next((n for n in ("num_experts", "n_routed_experts") if text.get(n)), None)
    dense = 0 in (text.get("mlp_only_layers") or ()) or text.get("decoder_sparse_step", 1) != 1
    taken = kind in ("ernie4_5_moe", "glm4_moe") or (kind == "qwen3_next" and dense)
    if experts is not None and not taken:
        _refuse(experts, text[experts], "0, or a dense MTP block, or GLM-4.5's: no other experts")
    if kind not in FAMILIES:
        _refuse("model_type", kind, f"one of {[*FAMILIES]}")
    return str(kind)


def _rope(text: Mapping[str, Any], family: Family) -> Rope:
    rope = Rope.of_policy(text)
    named = {**text, **(text.get("rope_parameters") or {})}
    partly = family.block in ("qwen3_next", "glm4_moe")
    if partly and named.get("partial_rotary_factor") is None:
        # transformers' default for these is a quarter or half, and not the whole.
        _refuse("partial_rotary_factor", "nothing", "a number")
    return rope
