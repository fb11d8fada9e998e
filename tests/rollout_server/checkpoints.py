"""Small EAGLE-3 checkpoints with random weights, for tests that do not need a trained draft."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from google.protobuf import json_format
from safetensors.torch import load_file, save_file

from slipstream.tensors import spec_of
from slipstream.v1 import release_pb2

HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE = 6, 2, 32, 384
AUX_LAYERS = (2, 5, 7)


def draft_vocabulary(vocab_size: int, draft_vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``d2t`` (int64 offsets, [draft_vocab]) and ``t2d`` (bool, [vocab]), evenly spread."""
    kept = torch.arange(draft_vocab_size) * vocab_size // draft_vocab_size
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[kept] = True
    return kept - torch.arange(draft_vocab_size), t2d


def write_draft(
    directory: Path,
    policy_dir: Path,
    *,
    draft_vocab_size: int | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    lm_head: torch.Tensor | None = None,
    version: int = 0,
) -> Path:
    """A head that fits the policy in ``policy_dir``; reduced vocabulary if asked for."""
    policy = json.loads((policy_dir / "config.json").read_text())
    hidden, vocab = policy["hidden_size"], policy["vocab_size"]
    rows = draft_vocab_size or vocab
    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * 0.05).to(dtype)

    one = torch.ones(hidden, dtype=dtype)
    tensors = {
        "fc.weight": weight(hidden, len(AUX_LAYERS) * hidden),
        "midlayer.hidden_norm.weight": one.clone(),
        "midlayer.input_layernorm.weight": one.clone(),
        "midlayer.post_attention_layernorm.weight": one.clone(),
        "midlayer.self_attn.q_proj.weight": weight(HEADS * HEAD_DIM, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": weight(KV_HEADS * HEAD_DIM, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": weight(KV_HEADS * HEAD_DIM, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": weight(hidden, HEADS * HEAD_DIM),
        "midlayer.mlp.gate_proj.weight": weight(INTERMEDIATE, hidden),
        "midlayer.mlp.up_proj.weight": weight(INTERMEDIATE, hidden),
        "midlayer.mlp.down_proj.weight": weight(hidden, INTERMEDIATE),
        "norm.weight": one.clone(),
        "lm_head.weight": weight(rows, hidden) if lm_head is None else lm_head.clone().to(dtype),
    }
    if rows != vocab:
        tensors["d2t"], tensors["t2d"] = draft_vocabulary(vocab, rows)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": vocab,
        "draft_vocab_size": rows,
        "max_position_embeddings": policy["max_position_embeddings"],
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "eagle_aux_hidden_state_layer_ids": list(AUX_LAYERS),
    }
    write_checkpoint(directory, config, tensors, version=version)
    return directory


def write_checkpoint(
    directory: Path,
    config: Mapping[str, object],
    tensors: Mapping[str, torch.Tensor],
    *,
    version: int,
    trained_against: int | None = None,
) -> None:
    """config.json, model.safetensors and manifest.json of a release."""
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config, indent=1)
    (directory / "config.json").write_text(text)
    save_file(dict(tensors), directory / "model.safetensors", metadata={"format": "pt"})
    manifest = release_pb2.ReleaseManifest(
        draft_version=version,
        trained_against_policy_version=trained_against,
        tensors=[spec_of(name, tensor) for name, tensor in tensors.items()],
        config_json=text,
    )
    (directory / "manifest.json").write_text(
        json_format.MessageToJson(manifest, preserving_proto_field_name=True)
    )


def load(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of ``model.safetensors``, by name."""
    return load_file(directory / "model.safetensors")


def perturbed(
    tensors: Mapping[str, torch.Tensor], *, scale: float, seed: int
) -> dict[str, torch.Tensor]:
    """Another release: every matrix moved by ``scale`` times its standard deviation."""
    generator = torch.Generator().manual_seed(seed)
    moved = {}
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or tensor.ndim < 2:
            moved[name] = tensor.clone()
            continue
        noise = torch.randn(tensor.shape, generator=generator)
        moved[name] = (tensor.float() + scale * tensor.float().std() * noise).to(tensor.dtype)
    return moved
