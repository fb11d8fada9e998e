"""Trained tiny policies of several architectures.

Two are the examples'. Others are these in another architecture that computes the same function, or
nearly: nothing is trained for them. What has no such form is pretrained once.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GraniteConfig,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from benchmarks.harness import say
from examples.arithmetic_grpo import task as arithmetic
from examples.local_services import ARITHMETIC, ROOT
from examples.sorting_grpo import pretrain
from examples.sorting_grpo import task as sorting
from examples.task import Task

SORTING = ROOT / "examples" / "sorting_grpo"
EXPERTS = 8
EXPERT_NOISE = 0.2
"""Standard deviation of what distinguishes the experts, in that of the matrix they are made of."""

_SHAPE = (
    *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim"),
    *("num_key_value_heads", "max_position_embeddings", "rms_norm_eps", "rope_parameters"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "intermediate_size"),
)


def as_phi3(llama: PreTrainedModel) -> PreTrainedModel:
    """The same function: query, key and value are one matrix, gate and up another."""
    shape = _shape(llama)
    config = Phi3Config(**shape, original_max_position_embeddings=shape["max_position_embeddings"])
    weights = dict(llama.state_dict())
    for layer in range(config.num_hidden_layers):
        at = f"model.layers.{layer}"
        for joined, parts in (
            ("self_attn.qkv_proj", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
            ("mlp.gate_up_proj", ("mlp.gate_proj", "mlp.up_proj")),
        ):
            matrices = [weights.pop(f"{at}.{part}.weight") for part in parts]
            weights[f"{at}.{joined}.weight"] = torch.cat(matrices)
    return _model(config, weights)


def as_granite(llama: PreTrainedModel) -> PreTrainedModel:
    """The same function: factors on embeddings, residuals and logits, undone in the weights."""
    config = GraniteConfig(
        **_shape(llama),
        embedding_multiplier=8.0,
        residual_multiplier=0.5,
        logits_scaling=4.0,
        attention_multiplier=llama.config.head_dim**-0.5,
        tie_word_embeddings=False,
    )
    factors = {"embed_tokens": 1 / 8, "lm_head": 4.0, "o_proj": 2.0, "down_proj": 2.0}
    weights = {
        name: tensor * factors.get(name.split(".")[-2], 1.0)
        for name, tensor in llama.state_dict().items()
    }
    return _model(config, weights)


def as_qwen3_moe(qwen3: PreTrainedModel, noise: float = EXPERT_NOISE) -> PreTrainedModel:
    """Experts that are the MLP with some noise each, and a random router."""
    config = Qwen3MoeConfig(
        **_shape(qwen3),
        moe_intermediate_size=qwen3.config.intermediate_size,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=False,
    )
    generator = torch.Generator().manual_seed(0)

    def experts(matrix: Tensor) -> Tensor:
        drawn = torch.randn(EXPERTS, *matrix.shape, generator=generator)
        return matrix + noise * matrix.std() * drawn

    weights = {name: t for name, t in qwen3.state_dict().items() if ".mlp." not in name}
    for layer in range(config.num_hidden_layers):
        at, own = f"model.layers.{layer}.mlp", qwen3.get_submodule(f"model.layers.{layer}.mlp")
        gate, up, down = (
            own.get_parameter(f"{name}_proj.weight").detach() for name in ("gate", "up", "down")
        )
        weights[f"{at}.experts.gate_up_proj"] = experts(torch.cat([gate, up]))
        weights[f"{at}.experts.down_proj"] = experts(down)
        hidden = config.hidden_size
        weights[f"{at}.gate.weight"] = torch.randn(EXPERTS, hidden, generator=generator)
    return _model(config, weights)


def _shape(model: PreTrainedModel) -> dict[str, Any]:
    return {name: getattr(model.config, name) for name in _SHAPE}


def _model(config: PretrainedConfig, weights: dict[str, Tensor]) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_config(config).eval()
    model.load_state_dict(weights)
    return model  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Source:
    """The source of a policy.

    Attributes:
        task: that it solves.
        trained: a trained policy; None for one that is pretrained on the sorting task.
        convert: into the architecture; None leaves it as it is.
    """

    task: Task[Any]
    trained: Path | None
    convert: Callable[[PreTrainedModel], PreTrainedModel] | None = None


_LLAMA = partial(Source, sorting, SORTING / "policy")
_QWEN3 = partial(Source, arithmetic, ARITHMETIC / "policy")
POLICIES = {
    "llama": _LLAMA(),
    "qwen3": _QWEN3(),
    "qwen3-tied": Source(sorting, None),
    "qwen3-moe": _QWEN3(as_qwen3_moe),
    "phi3": _LLAMA(as_phi3),
    "granite": _LLAMA(as_granite),
}


def policy_of(name: str, folder: Path, minutes: float) -> Path:
    """The checkpoint of a policy: the example's, or made in ``folder`` if it is not there."""
    source, policy = POLICIES[name], folder / name
    if source.trained is not None and source.convert is None:
        return source.trained
    if (policy / "config.json").exists():
        return policy
    if source.trained is None or source.convert is None:
        say(f"{name}: pretraining for {minutes:g} minutes, into {policy}")
        pretrain.main(["--policy", name, "--out", str(policy), "--minutes", str(minutes)])
        return policy
    model = AutoModelForCausalLM.from_pretrained(source.trained, dtype=torch.float32)
    source.convert(model).to(torch.bfloat16).save_pretrained(policy)
    for path in source.trained.glob("*.json"):
        if "token" in path.name or path.name == "generation_config.json":
            shutil.copy(path, policy)
    return policy
