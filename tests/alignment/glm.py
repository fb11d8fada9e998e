"""The example's policy as the GLM-4.5 model that it is, and its MTP head as GLM's.

The experts of the policy's last layer are copies of that layer's MLP.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from draft_trainer.drafters import DRAFTERS, Draft
from draft_trainer.drafters.mtp import CORRECTION
from examples.arithmetic_grpo.make_mtp import new_head
from examples.local_services import ARITHMETIC

EXPERTS = 4


def as_glm(policy: Path, out: Path) -> Path:
    """Write the example's Qwen3 checkpoint as GLM's into a new folder; answers the folder."""
    config = json.loads((policy / "config.json").read_text())
    layers, width = config["num_hidden_layers"], config["intermediate_size"]
    left = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
    config = {name: value for name, value in config.items() if name not in left} | {
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "use_qk_norm": True,
        "partial_rotary_factor": 1.0,
        "rope_parameters": config["rope_parameters"] | {"partial_rotary_factor": 1.0},
        "first_k_dense_replace": layers - 1,
        "n_routed_experts": EXPERTS,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": width,
        "n_group": 2,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 1,
    }
    shutil.copytree(policy, out)
    torch.manual_seed(0)
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = load_file(policy / "model.safetensors")
    at = f"model.layers.{layers - 1}.mlp."
    for part in ("gate", "up", "down"):
        matrix = tensors.pop(f"{at}{part}_proj.weight")
        for number in range(EXPERTS):
            tensors[f"{at}experts.{number}.{part}_proj.weight"] = matrix.clone()
        shared = torch.zeros_like(matrix) if part == "down" else matrix.clone()
        tensors[f"{at}shared_experts.{part}_proj.weight"] = shared
    tensors[f"{at}gate.weight"] = torch.randn(EXPERTS, config["hidden_size"])
    tensors[f"{at}gate.e_score_correction_bias"] = torch.zeros(EXPERTS)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def glm_head(policy: Path) -> Draft:
    """The example's MTP head as GLM's, with experts that differ; nothing is trained.

    GLM's attention has no gate: a half stands for it. Three quarters of the MLP's output come from
    the experts, each with more noise than the one before, and a quarter from the shared expert.
    """
    given = DRAFTERS["mtp"].read(ARITHMETIC / "mtp").draft().state_dict()
    head = new_head(policy, seed=0)
    torch.manual_seed(0)
    tensors = head.state_dict()
    for name, tensor in tensors.items():
        if "experts" in name:
            *_, number, part, _ = name.split(".")
            matrix, share = given[f"layer.mlp.{part}.weight"].float(), 0.25
            if number != "shared_experts":
                share = 0.75
                matrix = matrix + int(number) * matrix.std() * torch.randn(matrix.shape)
            tensors[name] = share * matrix if part == "down_proj" else matrix
        elif name.endswith(CORRECTION):
            tensors[name] = 0.2 * torch.randn(tensor.shape)
        elif name.endswith("q_proj.weight"):
            # The queries of each head, then their gate.
            size = len(given["layer.self_attn.q_norm.weight"])
            tensors[name] = given[name].unflatten(0, (-1, 2, size))[:, 0].flatten(0, 1)
        elif name.endswith("o_proj.weight"):
            tensors[name] = 0.5 * given[name]
        elif ".mlp." not in name:
            # Qwen3-Next's norms are centred on 0.
            tensors[name] = given[name] + (tensor.ndim == 1)
    head.load_state_dict(tensors)
    return head
