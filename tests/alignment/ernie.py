"""A random ERNIE 4.5 policy: none of the example's is a model of this kind."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM

SIZES: dict[str, Any] = {
    **{"vocab_size": 128, "hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 3},
    **{"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512},
    **{"moe_intermediate_size": 96, "moe_k": 2, "moe_num_experts": 4, "moe_num_shared_experts": 1},
    **{"moe_layer_start_index": 1, "moe_layer_end_index": 2, "tie_word_embeddings": False},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "num_nextn_predict_layers": 1},
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def random_policy(tokenizer: Path, out: Path) -> Path:
    """Write a policy of three layers, two of them with experts; answers the new folder."""
    torch.manual_seed(0)
    shutil.copytree(tokenizer, out, ignore=shutil.ignore_patterns("*.safetensors"))
    model = Ernie4_5_MoeForCausalLM(Ernie4_5_MoeConfig(**SIZES)).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 0.2 if name == "lm_head.weight" else 0.05)
    model.save_pretrained(out)
    return out
