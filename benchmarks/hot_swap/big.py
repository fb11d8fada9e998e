"""A draft head of an 8B policy's dimensions, and the smallest policy that it fits, both random."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 4096, 32, 8, 128, 12288
LAYERS = 3
"""One for each auxiliary state."""
POLICY_INTERMEDIATE = 512
"""The policy's own; its size does not matter here."""

Tensors = dict[str, torch.Tensor]


def write_policy(directory: Path, vocabulary: int, tokenizer: Path) -> Path:
    """A Llama of the head's hidden size with ``LAYERS`` thin layers.

    Args:
        directory: to write.
        vocabulary: token ids.
        tokenizer: folder with any tokenizer; prompts are token ids.
    """
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "model.embed_tokens.weight": _matrix(generator, vocabulary, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
    }
    for layer in range(LAYERS):
        block = _block(generator, HIDDEN, POLICY_INTERMEDIATE)
        tensors |= {f"model.layers.{layer}.{name}": tensor for name, tensor in block.items()}
    config = _config(vocabulary, POLICY_INTERMEDIATE, LAYERS) | {
        "architectures": ["LlamaForCausalLM"],
        "tie_word_embeddings": True,
    }
    _write(directory, config, tensors)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, directory / name)
    return directory


def write_draft(directory: Path, vocabulary: int) -> Path:
    """The head. The draft vocabulary is the policy's."""
    generator = torch.Generator().manual_seed(1)
    one = torch.ones(HIDDEN, dtype=torch.bfloat16)
    tensors = {
        "fc.weight": _matrix(generator, HIDDEN, LAYERS * HIDDEN),
        "midlayer.hidden_norm.weight": one,
        "norm.weight": one.clone(),
        "lm_head.weight": _matrix(generator, vocabulary, HIDDEN),
    }
    block = _block(generator, 2 * HIDDEN, INTERMEDIATE)
    tensors |= {f"midlayer.{name}": tensor for name, tensor in block.items()}
    config = _config(vocabulary, INTERMEDIATE, 1) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": vocabulary,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
        "tie_word_embeddings": False,
    }
    _write(directory, config, tensors)
    return directory


def another(directory: Path, number: int) -> Tensors:
    """A release that shares no matrix with the others; the first one is never held as well."""
    factor = 1.0 + number / 64
    tensors = {}
    with safe_open(directory / "model.safetensors", framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 (not a dict: it has no __iter__)
            tensor = file.get_tensor(name)
            tensors[name] = tensor.mul(factor) if tensor.ndim > 1 else tensor
    return tensors


def size_of(tensors: Mapping[str, torch.Tensor]) -> int:
    """Bytes."""
    return sum(tensor.nbytes for tensor in tensors.values())


def _block(generator: torch.Generator, inputs: int, intermediate: int) -> Tensors:
    """A decoder layer whose attention reads ``inputs`` features."""
    rows, kv_rows = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    return {
        "input_layernorm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
        "post_attention_layernorm.weight": torch.ones(HIDDEN, dtype=torch.bfloat16),
        "self_attn.q_proj.weight": _matrix(generator, rows, inputs),
        "self_attn.k_proj.weight": _matrix(generator, kv_rows, inputs),
        "self_attn.v_proj.weight": _matrix(generator, kv_rows, inputs),
        "self_attn.o_proj.weight": _matrix(generator, HIDDEN, rows),
        "mlp.gate_proj.weight": _matrix(generator, intermediate, HIDDEN),
        "mlp.up_proj.weight": _matrix(generator, intermediate, HIDDEN),
        "mlp.down_proj.weight": _matrix(generator, HIDDEN, intermediate),
    }


def _matrix(generator: torch.Generator, rows: int, columns: int) -> torch.Tensor:
    matrix = torch.empty(rows, columns, dtype=torch.bfloat16)
    return matrix.uniform_(-0.02, 0.02, generator=generator)


def _config(vocabulary: int, intermediate: int, layers: int) -> dict[str, object]:
    return {
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": vocabulary,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
    }


def _write(directory: Path, config: dict[str, object], tensors: Tensors) -> None:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
