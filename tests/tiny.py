"""A tiny random Qwen3, for tests that need a policy and do not care what it says."""

from __future__ import annotations

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
}


def tiny_qwen3(**changes: object) -> Qwen3ForCausalLM:
    """Make a float32 model, the same every time, with ``changes`` to its configuration."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(Qwen3Config(**{**SIZES, **changes}))
