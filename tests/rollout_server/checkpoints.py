"""EAGLE-3 checkpoints for tests that do not need a trained draft."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file

from draft_trainer.checkpoints import read_policy
from draft_trainer.drafters import DRAFTERS
from draft_trainer.drafters.initial import init_draft


def write_draft(
    directory: Path, policy_dir: Path, *, draft_vocab_size: int | None = None, seed: int = 0
) -> Path:
    """A new head for the policy; a reduced vocabulary is evenly spread.

    Seeds differ in every matrix. The lm_head of seed 0 is the policy's.
    """
    policy, ids = read_policy(policy_dir), None
    if draft_vocab_size is not None:
        ids = torch.arange(draft_vocab_size) * policy.config["vocab_size"] // draft_vocab_size
    directory.mkdir(parents=True)
    draft = init_draft(policy, ids, seed=seed)
    draft.lm_head.weight.data.mul_(1.0 + 0.1 * seed)
    DRAFTERS["eagle3"].save(directory, draft, torch.float32)
    return directory


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
