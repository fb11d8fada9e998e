"""Policy families, tiny and random, and what becomes of each: captured, checked, trained on."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from draft_trainer.checkpoints import read_policy
from draft_trainer.config import TrainingConfig
from draft_trainer.drafters.eagle3.config import HeadConfig
from draft_trainer.drafters.eagle3.head import Eagle3Head
from draft_trainer.drafters.initial import init_draft
from draft_trainer.drafters.policy import PolicyHead, PolicyHeads, policy_logits
from draft_trainer.ingest.teacher import TeacherCheck
from draft_trainer.training.learner import Learner
from slipstream.errors import RefusedError
from slipstream.sample import Sample
from slipstream.sampling import LogitForm

from .conftest import VOCAB, batch
from .windows import LAYERS, Windows

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SMALL_EXPERTS = {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 32, "num_shared_experts": 1}
GPT = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 2, "n_positions": 64}
ROTARY = {**GPT, "rotary_dim": 16, "initializer_range": 0.3}

SIGHT = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
SIGHT |= {"num_attention_heads": 2, "image_size": 16, "patch_size": 8}
SOFT_CAP = {**SIZES, "final_logit_softcapping": 4.0}
RECURRENT = {"logits_soft_cap": 4.0, "lru_width": 32, "attention_window_size": 16}
LINEAR: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR |= {"layer_types": ["linear_attention", "linear_attention", "full_attention"]}
LINEAR |= {"linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 16}
LINEAR |= {"linear_value_head_dim": 16, "shared_expert_intermediate_size": 8}
LATENT = {"num_key_value_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1}
LATENT |= {"moe_intermediate_size": 32, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16}
LATENT |= {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16, "n_shared_experts": 1}
LATENT |= {"first_k_dense_replace": 1, "head_dim": 8, "topk_method": "noaux_tc"}
MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1, "ssm_state_size": 16}
MAMBA |= {"chunk_size": 8, "moe_shared_expert_intermediate_size": 8}
MIXERS = {"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1}
MIXERS |= {"mamba_d_state": 16, "mamba_chunk_size": 16}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", SIZES),
    "Llama, tied": ("LlamaForCausalLM", {**SIZES, "tie_word_embeddings": True}),
    "Mistral": ("MistralForCausalLM", SIZES),
    "Mixtral": ("MixtralForCausalLM", {**SIZES, **EXPERTS}),
    "Qwen2": ("Qwen2ForCausalLM", SIZES),
    "Qwen3": ("Qwen3ForCausalLM", SIZES),
    "Qwen3, tied": ("Qwen3ForCausalLM", {**SIZES, "tie_word_embeddings": True}),
    "Qwen3-MoE": (
        "Qwen3MoeForCausalLM",
        {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "GPT-OSS": ("GptOssForCausalLM", {**SIZES, **EXPERTS}),
    "Qwen3-Next": ("Qwen3NextForCausalLM", {**SIZES, **LINEAR}),
    "Llama 4": (
        "Llama4ForCausalLM",
        {**SIZES, "intermediate_size_mlp": 64, "num_local_experts": 2, "attention_chunk_size": 32},
    ),
    "DeepSeek-V3": ("DeepseekV3ForCausalLM", {**SIZES, **LATENT}),
    "Qwen3.5": ("Qwen3_5ForCausalLM", {**SIZES, **LINEAR}),
    "Qwen3.5-MoE": ("Qwen3_5MoeForCausalLM", {**SIZES, **LINEAR}),
    "Ministral 3": ("Ministral3ForCausalLM", SIZES),
    "Apertus": ("ApertusForCausalLM", SIZES),
    "Arcee": ("ArceeForCausalLM", SIZES),
    "AFMoE": (
        "AfmoeForCausalLM",
        # The last two are fields of published checkpoints, which transformers does not read.
        {
            **SIZES,
            **SMALL_EXPERTS,
            "num_dense_layers": 1,
            "score_func": "sigmoid",
            "route_norm": True,
            "n_group": 1,
            "topk_group": 1,
        },
    ),
    "EXAONE 4": ("Exaone4ForCausalLM", SIZES),
    "Laguna": ("LagunaForCausalLM", {**SIZES, **SMALL_EXPERTS}),
    "MiniMax-M2": (
        "MiniMaxM2ForCausalLM",
        {
            **SIZES,
            **SMALL_EXPERTS,
            "rotary_dim": 8,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
        },
    ),
    "Seed-OSS": ("SeedOssForCausalLM", SIZES),
    "Nemotron-H": (
        "NemotronHForCausalLM",
        {**SIZES, **SMALL_EXPERTS, **MAMBA, "layers_block_type": ["mamba", "attention", "moe"]},
    ),
    "Nemotron-H, dense": (
        "NemotronHForCausalLM",
        {**SIZES, **MAMBA, "layers_block_type": ["mamba", "attention", "mlp"]},
    ),
    "OLMo 2": ("Olmo2ForCausalLM", SIZES),
    "OLMo 3": ("Olmo3ForCausalLM", SIZES),
    "SmolLM3": ("SmolLM3ForCausalLM", SIZES),
    "GLM-4": ("Glm4ForCausalLM", SIZES),
    "Phi-3": ("Phi3ForCausalLM", SIZES),
    "GPT-2": ("GPT2LMHeadModel", {**GPT, "initializer_range": 0.3}),
    "GPT-NeoX": ("GPTNeoXForCausalLM", {k: v for k, v in SIZES.items() if k != "head_dim"}),
    "Bloom": (
        "BloomForCausalLM",
        {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 3, "n_head": 2},
    ),
    "Phi (1, 1.5, 2)": ("PhiForCausalLM", SIZES),
    "Phi-MoE": ("PhimoeForCausalLM", {**SIZES, **EXPERTS, "lm_head_bias": True}),
    "GPT-J": ("GPTJForCausalLM", ROTARY),
    "CodeGen": ("CodeGenForCausalLM", {**ROTARY, "n_head": 4, "n_embd": 64}),
    "Gemma": ("GemmaForCausalLM", SIZES),
    "Gemma 2": ("Gemma2ForCausalLM", SOFT_CAP),
    "Gemma 3": ("Gemma3ForCausalLM", SOFT_CAP),
    "Gemma 3, with images": (
        "Gemma3ForConditionalGeneration",
        {"text_config": SIZES, "vision_config": SIGHT},
    ),
    "Gemma 3, with images and a cap": (
        "Gemma3ForConditionalGeneration",
        {"text_config": SOFT_CAP, "vision_config": SIGHT},
    ),
    "Gemma 4, nested": (
        "Gemma4ForConditionalGeneration",
        {
            "text_config": {**SOFT_CAP, "vocab_size_per_layer_input": VOCAB},
            **{"vision_config": None, "audio_config": None},
        },
    ),
    "RecurrentGemma": ("RecurrentGemmaForCausalLM", {**SOFT_CAP, **RECURRENT}),
    "Qwen3-VL": (
        "Qwen3VLForConditionalGeneration",
        {
            "text_config": {
                **SIZES,
                "rope_scaling": {"mrope_section": [4, 2, 2], "rope_type": "default"},
            },
            "vision_config": {"depth": 1, "hidden_size": 16, "num_heads": 2, "out_hidden_size": 32},
        },
    ),
    "Granite": ("GraniteForCausalLM", {**SIZES, "logits_scaling": 8.0}),
    "Granite-MoE": ("GraniteMoeForCausalLM", {**SIZES, **EXPERTS, "logits_scaling": 8.0}),
    "Cohere": ("CohereForCausalLM", {**SIZES, "logit_scale": 0.0625}),
    "Falcon-H1": ("FalconH1ForCausalLM", {**SIZES, **MIXERS, "lm_head_multiplier": 0.5}),
    "HyperCLOVA X": ("HyperCLOVAXForCausalLM", {**SIZES, "logits_scaling": 8.0}),
    "OPT, projected": (
        "OPTForCausalLM",
        {
            **{"vocab_size": VOCAB, "hidden_size": 32, "word_embed_proj_dim": 16, "ffn_dim": 48},
            **{"num_hidden_layers": 3, "num_attention_heads": 2, "max_position_embeddings": 64},
        },
    ),
    "Mamba": ("MambaForCausalLM", {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3}),
}
"""The transformers classes and their configurations, by the names that people use. Caps and factors
are far from 1, so that a teacher without them is far from a distribution."""

_UNTRIED = "not tried"
NOT_PUSHED = {
    "GPT-OSS": "refused",
    "Laguna": "all but routers' biases, which vLLM never loads",
    "Nemotron-H": "not tried: such experts need a GPU",
    **dict.fromkeys(("Qwen3.5", "Qwen3.5-MoE", "Qwen3-VL", "Gemma 4, nested"), _UNTRIED),
    **dict.fromkeys(("Gemma 3, with images", "Gemma 3, with images and a cap"), _UNTRIED),
    **dict.fromkeys(("CodeGen", "RecurrentGemma"), "vLLM cannot serve it"),
}
"""The families of which a push into vLLM on a CPU does not bring every parameter, and why."""


def make(family: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A random model of a family; its lm_head bias, if it has one, is not small."""
    name, sizes = FAMILIES[family]
    kind = getattr(transformers, name)
    torch.manual_seed(0)
    model = kind(kind.config_class(**sizes)).eval()
    bias = getattr(model.get_output_embeddings(), "bias", None)
    if bias is not None:
        torch.nn.init.normal_(bias, std=2.0)
    return model.to(dtype)  # type: ignore[no-any-return]


def masses(model: PreTrainedModel, samples: list[Sample], form: LogitForm) -> torch.Tensor:
    """Sum p = exp(y / T - log Z) over the whole vocabulary, for every token of the loss masks."""
    head = model.get_output_embeddings()
    found = []
    for sample in samples:
        policy = PolicyHead(1, head.weight, head.weight, getattr(head, "bias", None), form=form)
        logits = policy_logits(sample.final_hidden[:-1], policy, sample.logits_dtype).float()
        log_z = sample.sampled_logits / sample.temperature - sample.sampled_logprobs
        mass = (logits / sample.temperature - log_z[1:, None]).exp().sum(-1)
        found.append(mass[sample.loss_mask[1:]])
    return torch.cat(found).detach()


@dataclass(frozen=True)
class Outcome:
    """The outcome of a family.

    Attributes:
        lm_head: "plain", or what makes its logits more than h @ W.T; "tied" where it is tied.
        least: least mass of the teacher over the vocabulary, at any token.
        most: the greatest.
        loss: of one training step on it; NaN if it is refused.
        refused: the refusal; empty if it is trained on.
        init: whether ``draft-trainer init`` makes a draft of its checkpoint; empty if not tried.
    """

    lm_head: str
    least: float = float("nan")
    most: float = float("nan")
    loss: float = float("nan")
    refused: str = ""
    init: str = ""


def initial(model: PreTrainedModel) -> Eagle3Head:
    """Make the draft that ``draft-trainer init --intermediate-size 48`` makes of its checkpoint.

    Raises RefusedError: as the command does.
    """
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return init_draft(read_policy(Path(folder)), None, intermediate_size=48)


def outcome(family: str, dtype: torch.dtype = torch.float32, train: bool = True) -> Outcome:
    """Capture two sequences of a family at temperature 0.7, check their teacher, train a step."""
    model, data, init = make(family, dtype), batch((12, 9)), ""
    if train:
        try:
            initial(model)
            init = "yes"
        except RefusedError:
            init = "no"
    try:
        windows = Windows(model)
        form, head = windows.modules.form, windows.modules
        with torch.no_grad(), windows.open(temperature=0.7) as capture:
            model(data["input_ids"], attention_mask=data["attention_mask"])
            capture.ship(**data)
        weight, bias = head.head_weight.detach(), head.head_bias
        policy = PolicyHead(
            1,
            weight,
            head.embed_weight.detach(),
            None if bias is None else bias.detach(),
            form=form,
        )
        check = TeacherCheck(torch.arange(VOCAB))
        for mass in check.check(windows.samples, policy):
            if mass.refusal is not None:
                raise mass.refusal
    except RefusedError as error:
        return Outcome("", refused=str(error), init=init)
    parts = [
        "tied" if weight.data_ptr() == head.embed_weight.data_ptr() else "",
        "bias" if head.head_bias is not None else "",
        f"factor {form.scale:g}" if form.scale != 1.0 else "",
        f"soft cap {form.soft_cap:g}" if form.soft_cap else "",
    ]
    found = masses(model, windows.samples, form)
    lm_head = ", ".join(part for part in parts if part) or "plain"
    seen = Outcome(lm_head, float(found.min()), float(found.max()), init=init)
    if not train:
        return seen
    heads = PolicyHeads(keep=1)
    heads.add(policy)
    draft = Eagle3Head(_draft_of(head.hidden_size), None)
    step = Learner(draft, TrainingConfig(ttt_steps=3)).step(windows.samples, heads)
    return replace(seen, loss=step.loss)


def _draft_of(hidden: int) -> HeadConfig:
    return HeadConfig(
        hidden_size=hidden,
        target_hidden_size=hidden,
        intermediate_size=48,
        vocab_size=VOCAB,
        draft_vocab_size=VOCAB,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=64,
        aux_layer_ids=tuple(LAYERS),
    )
