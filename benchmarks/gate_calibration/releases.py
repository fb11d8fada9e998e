"""Releases of different quality: a trained draft, and the same with more and more noise."""

from __future__ import annotations

from pathlib import Path

import torch

from draft_trainer.checkpoints.checkpoint import load_head
from draft_trainer.releases.registry import Registry


def make_releases(draft: Path, registry: Registry, noise: list[float], seed: int) -> list[int]:
    """Write the draft as release 0, then one release for each share of noise in its matrices.

    A share a makes of a matrix W the matrix (1 - a) W + a N, with N normal and of W's own spread:
    at 1 it is a random head.

    Args:
        draft: a trained draft.
        registry: an empty one.
        noise: shares in [0, 1].
        seed: of the noise.

    Returns:
        The draft versions, release 0 first.
    """
    registry.import_initial(draft)
    versions = [0]
    generator = torch.Generator().manual_seed(seed)
    for share in noise:
        head, d2t = load_head(registry.path(0))
        with torch.no_grad():
            for weight in head.parameters():
                if weight.dim() > 1:
                    drawn = torch.randn(weight.shape, generator=generator) * weight.std()
                    weight.mul_(1 - share).add_(drawn, alpha=share)
        manifest = registry.create(
            head,
            head.config,
            d2t,
            parent=0,
            trained_against=None,
            run_id=f"noise {share:g}",
            ttt_steps=0,
            gate=None,
        )
        versions.append(manifest.draft_version)
    return versions
