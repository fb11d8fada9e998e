"""Shape of an EAGLE-3 head, from and to the ``config.json`` that vLLM reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from draft_trainer.checkpoints import Refuse, size_of
from draft_trainer.drafters.block import BlockShape
from draft_trainer.drafters.draft import DraftShape
from draft_trainer.drafters.rope import Rope
from slipstream.layers import AUX_LAYERS, check_layers

OWN_EMBEDDINGS = "has_own_embed_tokens"
"""vLLM's field, and ours: the checkpoint has embeddings that are not a copy of the policy's."""

# vLLM 0.32's names (model_executor/models/registry.py) for the two classes it has, by the
# model_type that is written with the first of each. vLLM chooses the class by its name alone.
ARCHITECTURES = {
    "llama": (
        "LlamaForCausalLMEagle3",
        "Eagle3LlamaForCausalLM",
        "Eagle3MiniMaxM2ForCausalLM",
        "Eagle3Qwen2_5vlForCausalLM",
        "Eagle3Qwen3vlForCausalLM",
    ),
    "qwen3": ("Eagle3Qwen3ForCausalLM",),
}

# Fields that change what vLLM computes in a way this head cannot follow, and the values it can.
# Others that are unknown change nothing there: vLLM's classes read these, and those of HeadConfig.
_FIXED_VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),  # the MLP's, of which vLLM has no other
    "num_hidden_layers": (1,),  # further layers take no embeddings
    "qkv_bias": (False, None),  # overrides attention_bias, but for the output
    "bias": (False, None),  # another name for attention_bias
    "logit_scale": (1, 1.0, None),  # a factor of the draft's logits
    "is_causal": (True, None),  # attention in both directions
    "quantization_config": (None,),  # the weights are no plain numbers
    "parallel_drafting": (False, None),  # P-EAGLE: all tokens in one pass
    "ptd_token_id": (None,),  # the same
    "pard_token": (None,),  # the same
    "tie_word_embeddings": (False, None),  # vLLM would take the embeddings for lm_head
}
# Values of fields that a file may lack.
_DEFAULTS = {"hidden_act": "silu", "num_hidden_layers": 1}
_SIZES = (
    "hidden_size",
    "target_hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
    "max_position_embeddings",
)

_MOST_LAYERS = 64

_OTHERS = {
    "PEagle": "; P-EAGLE's mask_hidden is projected when vLLM starts, where no swap reaches it",
    "EagleLlama": "; EAGLE-1 takes the final state alone, and accepts less than EAGLE-3",
}
"""The reasons why other EAGLE heads are not trained, by a part of their architecture's name."""

_refuse = Refuse("config.json", "use a draft that the trainer can represent")


@dataclass(frozen=True, kw_only=True)
class HeadConfig(DraftShape, BlockShape):
    """Everything that determines the head's function besides its weights.

    ``hidden_size`` is also the width of the embeddings that it takes. With ``qk_norm`` it is vLLM's
    Qwen3 class, otherwise its Llama class, whose o has a bias where q, k and v have one. Besides
    the fields of both bases:

    Attributes:
        max_position_embeddings: longest sequence.
        norm_before_residual: the residual is the normed hidden state, not the un-normed one.
        norm_output: the next step takes the output after ``norm``, not before it.
        norm_before_fc: one RMSNorm over the concatenated auxiliary states, before ``fc``.
        fc_norm: an RMSNorm for each auxiliary state, before ``fc`` (after norm_before_fc's).
        mlp_bias: gate, up and down have a bias.
        sliding_window: keys that a query attends to, its own included; None for all before it.
        own_embeddings: the head has its own embeddings instead of the policy's.
    """

    max_position_embeddings: int = 2048
    norm_before_residual: bool = False
    norm_output: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    own_embeddings: bool = False

    def __post_init__(self) -> None:
        for name in _SIZES:
            size_of(vars(self), name, "the draft's")
        if self.num_attention_heads % self.num_key_value_heads:
            _refuse("num_key_value_heads", self.num_key_value_heads, "a divisor of the query heads")
        if not self.qk_norm and self.hidden_size % self.num_attention_heads:
            # transformers 5 refuses such a LlamaConfig, and vLLM with it, whatever head_dim is.
            _refuse("num_attention_heads", self.num_attention_heads, "a divisor of hidden_size")
        if self.rope.rotary_dim(self.head_dim) % 2 or not self.rope.rotary_dim(self.head_dim):
            _refuse("head_dim", self.head_dim, "an even number of rotated elements")
        if self.draft_vocab_size > self.vocab_size:
            _refuse("draft_vocab_size", self.draft_vocab_size, f"at most {self.vocab_size}")
        if self.sliding_window is not None and self.sliding_window < 1:
            _refuse("sliding_window", self.sliding_window, "at least 1")
        if self.target_hidden_size != self.hidden_size and not self.own_embeddings:
            _refuse(OWN_EMBEDDINGS, False, "true: the policy's embeddings have another width")
        ids = self.aux_layer_ids
        # vLLM sorts them and drops repetitions, whatever the order in fc.
        check_layers(ids, f"{_refuse.file} {AUX_LAYERS}", _refuse.next_step)
        if len(ids) > _MOST_LAYERS:
            _refuse(AUX_LAYERS, f"{len(ids)} layers", f"at most {_MOST_LAYERS}")
        if self.qk_norm and self.mlp_bias:
            _refuse("mlp_bias", True, "false: vLLM's Qwen3 drafts have no MLP bias")

    @property
    def max_row_tokens(self) -> int | None:
        """The longest row whose queries stay within the sliding window; None without one."""
        return self.sliding_window

    @property
    def bounds(self) -> frozenset[str]:
        """The longest sequence, unless scaled rotary frequencies make it part of the function."""
        return frozenset(() if self.rope.kind != "default" else ("max_position_embeddings",))

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> HeadConfig:
        """Read a ``config.json`` whose top level says everything, as vLLM reads it.

        Raises:
            RefusedError: a required field is missing, or a field asks for a function that this
                head does not have.
        """
        model_type, architectures = config.get("model_type"), config.get("architectures")
        if model_type not in ARCHITECTURES:
            _refuse("model_type", model_type, f"one of {list(ARCHITECTURES)}")
        known = [names for names in ARCHITECTURES.values() if {*(architectures or "?")} <= {*names}]
        if not known:
            why = next((w for name, w in _OTHERS.items() if name in str(architectures)), "")
            _refuse("architectures", architectures, f"[{ARCHITECTURES[model_type][0]}]{why}")
        _refuse.other_values({**_DEFAULTS, **config}, _FIXED_VALUES)
        eagle = config.get("eagle_config") or {}
        if eagle.get("use_aux_hidden_state", True) is not True:
            _refuse("eagle_config.use_aux_hidden_state", eagle["use_aux_hidden_state"], True)
        layer_ids = config.get(AUX_LAYERS)
        if not layer_ids:
            _refuse(AUX_LAYERS, layer_ids, "the auxiliary layers' numbers, at top level")
        for name in ("num_aux_hidden_states", "num_aux_layers"):
            if config.get(name) not in (None, len(layer_ids)):
                _refuse(name, config[name], f"{len(layer_ids)}, as many as layer ids")
        hidden = _required(config, "hidden_size")
        heads = _required(config, "num_attention_heads")
        vocab = _required(config, "vocab_size")
        target = config.get("target_hidden_size") or hidden
        return cls(
            hidden_size=hidden,
            intermediate_size=_required(config, "intermediate_size"),
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            vocab_size=vocab,
            draft_vocab_size=config.get("draft_vocab_size") or vocab,
            aux_layer_ids=tuple(int(layer) for layer in layer_ids),
            target_hidden_size=target,
            rms_norm_eps=float(_required(config, "rms_norm_eps")),
            rope=Rope.from_dict(config),
            max_position_embeddings=_required(config, "max_position_embeddings"),
            norm_before_residual=_flag(config, "norm_before_residual"),
            norm_output=_flag(config, "norm_output"),
            norm_before_fc=_flag({**config, **eagle}, "norm_before_fc"),
            fc_norm=_flag(config, "fc_norm"),
            qkv_bias=_flag(config, "attention_bias"),
            mlp_bias=_flag(config, "mlp_bias"),
            qk_norm=known == [ARCHITECTURES["qwen3"]],
            sliding_window=_sliding_window(config),
            own_embeddings=_flag(config, OWN_EMBEDDINGS) or target != hidden,
        )

    def to_dict(self, dtype_name: str = "bfloat16") -> dict[str, Any]:
        """The ``config.json`` that vLLM loads.

        Args:
            dtype_name: element type of the weights beside it, for example "bfloat16".
        """
        model_type = "qwen3" if self.qk_norm else "llama"
        written: dict[str, Any] = {
            "architectures": [ARCHITECTURES[model_type][0]],
            "model_type": model_type,
            "dtype": dtype_name,
            "hidden_act": "silu",
            "num_hidden_layers": 1,
            **{name: getattr(self, name) for name in _SIZES},
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope.theta,
            "rope_parameters": self.rope.to_dict(),
            "attention_bias": self.qkv_bias,
            "mlp_bias": self.mlp_bias,
            "tie_word_embeddings": False,
            AUX_LAYERS: list(self.aux_layer_ids),
            # Without it vLLM assumes three layers whatever the list above says.
            "num_aux_hidden_states": len(self.aux_layer_ids),
            "norm_before_residual": self.norm_before_residual,
            "norm_output": self.norm_output,
            "norm_before_fc": self.norm_before_fc,
            "fc_norm": self.fc_norm,
        }
        if self.sliding_window is not None:
            written["layer_types"] = ["sliding_attention"]
            written |= {"sliding_window": self.sliding_window, "use_sliding_window": True}
        if self.own_embeddings:
            written[OWN_EMBEDDINGS] = True
        return written


def _sliding_window(config: Mapping[str, Any]) -> int | None:
    """Return the window that vLLM applies: that of a layer which ``layer_types`` calls sliding."""
    kinds = config.get("layer_types")
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if kinds is not None and kinds not in (["full_attention"], ["sliding_attention"]):
        _refuse("layer_types", kinds, "[full_attention] or [sliding_attention]")
    if kinds is None and window is not None:
        _refuse("sliding_window", window, "null, or layer_types beside it: vLLM ignores it alone")
    if kinds == ["sliding_attention"] and window is None:
        _refuse("sliding_window", window, "a whole number, for layer_types [sliding_attention]")
    return window if kinds == ["sliding_attention"] else None


def _flag(config: Mapping[str, Any], name: str) -> bool:
    value = config.get(name, False)
    if value not in (True, False, None):
        _refuse(name, value, "true or false")
    return bool(value)


def _required(config: Mapping[str, Any], name: str) -> Any:
    value = config.get(name)
    if value is None:
        _refuse(name, "nothing", "a value")
    return value
