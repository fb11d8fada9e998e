"""Shape of an EAGLE-3 head, from and to the ``config.json`` that vLLM reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from slipstream.refusal import RefusedError

ARCHITECTURE = "LlamaForCausalLMEagle3"
_KNOWN_ARCHITECTURES = (ARCHITECTURE, "Eagle3LlamaForCausalLM")

# Fields that change what vLLM computes in a way this head cannot: only these values pass.
_FIXED_VALUES: dict[str, tuple[Any, ...]] = {
    "model_type": ("llama",),
    "hidden_act": ("silu",),
    "num_hidden_layers": (1,),
    "attention_bias": (False, None),
    "qkv_bias": (False, None),
    "bias": (False, None),
    "mlp_bias": (False, None),
    "fc_norm": (False, None),
    "norm_before_fc": (False, None),
    "logit_scale": (1, 1.0, None),
    "rope_scaling": (None,),
    "partial_rotary_factor": (1, 1.0, None),
    "quantization_config": (None,),
    "parallel_drafting": (False, None),
    "ptd_token_id": (None,),
    "pard_token": (None,),
    "use_sliding_window": (False, None),
    "sliding_window": (None,),
    "tie_word_embeddings": (False, None),
}
_FIXED_EAGLE_VALUES: dict[str, tuple[Any, ...]] = {
    "use_aux_hidden_state": (True,),
    "norm_before_fc": (False, None),
}
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


@dataclass(frozen=True)
class HeadConfig:
    """Everything that determines the head's function besides its weights.

    Attributes:
        hidden_size: width of the head, and of the policy's embeddings.
        intermediate_size: width of its MLP.
        num_attention_heads: query heads.
        num_key_value_heads: key and value heads; divides the query heads.
        head_dim: size of one head.
        vocab_size: the policy's vocabulary.
        draft_vocab_size: rows of the head's lm_head.
        aux_layer_ids: auxiliary layers, as "after L decoder layers" (vLLM's reading).
        target_hidden_size: width of one auxiliary state; equals ``hidden_size`` because the head
            shares the policy's embeddings.
        rms_norm_eps: epsilon of every RMSNorm.
        rope_theta: base of the rotary embedding.
        max_position_embeddings: longest sequence.
        norm_before_residual: the residual is the normed hidden state, not the un-normed one.
        norm_output: what feeds the next step is the output after ``norm``, not before it.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    aux_layer_ids: tuple[int, ...]
    target_hidden_size: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_position_embeddings: int = 2048
    norm_before_residual: bool = False
    norm_output: bool = False

    def __post_init__(self) -> None:
        for name in _SIZES:
            if getattr(self, name) < 1:
                _refuse(name, getattr(self, name), "at least 1")
        if self.num_attention_heads % self.num_key_value_heads:
            _refuse("num_key_value_heads", self.num_key_value_heads, "a divisor of the query heads")
        if self.head_dim % 2:
            _refuse("head_dim", self.head_dim, "an even number (rotary embedding)")
        if self.draft_vocab_size > self.vocab_size:
            _refuse("draft_vocab_size", self.draft_vocab_size, f"at most {self.vocab_size}")
        if self.target_hidden_size != self.hidden_size:
            _refuse(
                "target_hidden_size", self.target_hidden_size, f"hidden_size {self.hidden_size}"
            )
        if not self.aux_layer_ids:
            _refuse("eagle_aux_hidden_state_layer_ids", [], "at least one layer")

    @property
    def num_aux_layers(self) -> int:
        """A, the number of auxiliary layers."""
        return len(self.aux_layer_ids)

    @property
    def full_vocabulary(self) -> bool:
        """Whether draft ids are target ids."""
        return self.draft_vocab_size == self.vocab_size

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> HeadConfig:
        """Read a draft's ``config.json``.

        Reads the layer ids where vLLM reads them (top level, then ``eagle_config``), and the
        rotary base in both its forms (``rope_parameters`` of transformers 5, ``rope_theta``).

        Raises:
            RefusedError: a required field is missing, or a field asks for a function that this
                head does not have.
        """
        architectures = config.get("architectures")
        if not architectures or any(a not in _KNOWN_ARCHITECTURES for a in architectures):
            _refuse("architectures", architectures, f"[{ARCHITECTURE}]")
        _check_fixed(config, _FIXED_VALUES, "")
        eagle = config.get("eagle_config") or {}
        _check_fixed(eagle, _FIXED_EAGLE_VALUES, "eagle_config.")
        if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
            _refuse("layer_types", config["layer_types"], "full_attention")
        layer_ids = config.get("eagle_aux_hidden_state_layer_ids") or eagle.get(
            "eagle_aux_hidden_state_layer_ids"
        )
        if not layer_ids:
            _refuse("eagle_aux_hidden_state_layer_ids", layer_ids, "the auxiliary layers' numbers")
        count = config.get("num_aux_hidden_states")
        if count is not None and count != len(layer_ids):
            _refuse("num_aux_hidden_states", count, f"{len(layer_ids)}, as many as layer ids")
        hidden = _required(config, "hidden_size")
        heads = _required(config, "num_attention_heads")
        vocab = _required(config, "vocab_size")
        return cls(
            hidden_size=hidden,
            intermediate_size=_required(config, "intermediate_size"),
            num_attention_heads=heads,
            num_key_value_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or hidden // heads,
            vocab_size=vocab,
            draft_vocab_size=config.get("draft_vocab_size") or vocab,
            aux_layer_ids=tuple(int(layer) for layer in layer_ids),
            target_hidden_size=config.get("target_hidden_size") or hidden,
            rms_norm_eps=float(_required(config, "rms_norm_eps")),
            rope_theta=_rope_theta(config),
            max_position_embeddings=_required(config, "max_position_embeddings"),
            norm_before_residual=bool(config.get("norm_before_residual", False)),
            norm_output=bool(config.get("norm_output", False)),
        )

    def to_dict(self, dtype_name: str = "bfloat16") -> dict[str, Any]:
        """The ``config.json`` that vLLM loads.

        Args:
            dtype_name: element type of the weights beside it, for example "bfloat16".
        """
        return {
            "architectures": [ARCHITECTURE],
            "model_type": "llama",
            "dtype": dtype_name,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "target_hidden_size": self.target_hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "max_position_embeddings": self.max_position_embeddings,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "eagle_aux_hidden_state_layer_ids": list(self.aux_layer_ids),
            # Without it vLLM assumes three layers whatever the list above says.
            "num_aux_hidden_states": self.num_aux_layers,
            "norm_before_residual": self.norm_before_residual,
            "norm_output": self.norm_output,
        }


def _rope_theta(config: Mapping[str, Any]) -> float:
    parameters = config.get("rope_parameters") or {}
    kind = parameters.get("rope_type", "default")
    if kind != "default":
        _refuse("rope_parameters.rope_type", kind, "default")
    if parameters.get("partial_rotary_factor", 1.0) != 1.0:
        _refuse("rope_parameters.partial_rotary_factor", parameters["partial_rotary_factor"], "1.0")
    theta = parameters.get("rope_theta", config.get("rope_theta"))
    if theta is None:
        _refuse("rope_theta", "nothing", "the rotary base, in rope_parameters or at top level")
    return float(theta)


def _required(config: Mapping[str, Any], name: str) -> Any:
    value = config.get(name)
    if value is None:
        _refuse(name, "nothing", "a value")
    return value


def _check_fixed(
    config: Mapping[str, Any], fixed: Mapping[str, tuple[Any, ...]], prefix: str
) -> None:
    for name, allowed in fixed.items():
        if name in config and config[name] not in allowed:
            _refuse(f"{prefix}{name}", config[name], allowed[0])


def _refuse(name: str, found: object, expected: object) -> NoReturn:
    raise RefusedError(
        f"config.json {name}",
        found,
        expected,
        "use a draft whose config.json the trainer can represent, so that what it trains is what "
        "vLLM serves",
    )
