"""The example's policy with a native MTP head, and as a smaller draft model.

A Qwen3 policy is a Qwen3-Next policy whose layers all have full attention and a dense MLP: its
norms are centred on 0, and its attention's gate is a constant one half, made up for in o_proj. The
conversion therefore changes no output. ``policy_with_mtp`` makes it of the example's policy where a
run needs it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draft_trainer.drafters import DRAFTERS, Draft
from draft_trainer.drafters.draft_model import PARALLEL_TOKEN
from slipstream.checkpoints import CONFIG_FILE, WEIGHTS_FILE


def policy_with_mtp(policy: Path, out: Path) -> Path:
    """Write a Qwen3 checkpoint as a Qwen3-Next one into a new folder; answers the folder."""
    config = json.loads((policy / CONFIG_FILE).read_text())
    shutil.copytree(policy, out)
    (out / CONFIG_FILE).write_text(json.dumps(_config(config), indent=2) + "\n")
    tensors = load_file(policy / WEIGHTS_FILE)
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):
            tensors[name] = (tensor.float() - 1.0).to(tensor.dtype)
        elif name.endswith("q_proj.weight"):
            queries = tensor.unflatten(0, (config["num_attention_heads"], 1, -1))
            gated = torch.cat([queries, torch.zeros_like(queries)], dim=1)
            tensors[name] = gated.flatten(0, 2).contiguous()
        elif name.endswith("o_proj.weight"):
            # The sigmoid of a gate of 0 is one half; twice of it is exact in every type.
            tensors[name] = 2 * tensor
    save_file(tensors, out / WEIGHTS_FILE, metadata={"format": "pt"})
    return out


def first_layers(policy: Path, out: Path, layers: int = 5, parallel: int | None = None) -> Path:
    """Write a Qwen3 checkpoint without its last layers, a draft model; answers the new folder.

    Args:
        policy: of the policy.
        out: the new folder.
        layers: that it keeps.
        parallel: token of the places that PARD drafts in parallel; None: one after the other.
    """
    config = json.loads((policy / CONFIG_FILE).read_text())
    shutil.copytree(policy, out)
    config |= {"num_hidden_layers": layers, "layer_types": config["layer_types"][:layers]}
    if parallel is not None:
        config[PARALLEL_TOKEN] = parallel
    (out / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n")
    kept = {
        name: tensor
        for name, tensor in load_file(policy / WEIGHTS_FILE).items()
        if not name.startswith("model.layers.") or int(name.split(".")[2]) < layers
    }
    save_file(kept, out / WEIGHTS_FILE, metadata={"format": "pt"})
    return out


def _config(policy: dict[str, Any]) -> dict[str, Any]:
    left = ("max_window_layers", "sliding_window", "use_sliding_window", "architectures")
    rope = policy["rope_parameters"] | {"partial_rotary_factor": 1.0}
    return {
        "architectures": ["Qwen3NextForCausalLM"],
        **{name: value for name, value in policy.items() if name not in left},
        "model_type": "qwen3_next",
        "num_experts": 0,
        "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 1.0,
        "rope_parameters": rope,
    }


def new_head(policy: Path, seed: int) -> Draft:
    """An untrained head: random matrices, and a fused state that begins as the policy's final one.

    Args:
        policy: with the config.json of a policy that has an MTP head.
        seed: of the weights.
    """
    head = DRAFTERS["mtp"].build(json.loads((policy / CONFIG_FILE).read_text()))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
        fused: Tensor = head.get_parameter("fc.weight")
        size = len(fused)
        fused.mul_(0.5)
        fused[:, size:] += torch.eye(size)
    return head
