"""What the bridge is built on where no process holds the whole policy:

    policy = StagedPolicy(last_stage, num_layers, lm_head, embed_tokens)
    bridge = PolicyBridge(policy, BridgeConfig(..., modules=StagedPolicy.PATHS))
    with bridge.capture(temperature=1.0) as capture:
        for batch, aux, final in gathered:
            policy(aux, final)  # to the bridge, a forward pass
            capture.ship(batch.input_ids, loss_mask=batch.mask)

Pipeline stages are such a case (``pipeline.PipelineCapture`` gathers their states).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from policy_bridge.config import ModulePaths


class Matrix(nn.Module):
    """A weight under the name where the bridge looks for it, sharing its memory."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight.detach()


class StagedPolicy(nn.Module):
    """A policy without layers of its own: states that others captured are replayed through it.

    Args:
        stage: the part of the policy that is here; its parameters tell of an optimizer step.
        num_layers: decoder layers of the whole policy.
        lm_head: the whole output matrix [V, H], gathered if it is sharded; assign
            ``lm_head.weight`` anew before a sync where it is a copy.
        embed_tokens: the whole embeddings [V, H], which may come from the first stage.
    """

    PATHS = ModulePaths("layers", "lm_head", "embed_tokens", "norm")

    def __init__(
        self,
        stage: nn.Module,
        num_layers: int,
        lm_head: torch.Tensor,
        embed_tokens: torch.Tensor,
    ) -> None:
        super().__init__()
        self.stage, self.config = stage, getattr(stage, "config", None)
        self.layers = nn.ModuleList(nn.Identity() for _ in range(num_layers))
        self.norm = nn.Identity()
        self.lm_head, self.embed_tokens = Matrix(lm_head), Matrix(embed_tokens)

    def forward(self, aux: Mapping[int, torch.Tensor], final: torch.Tensor) -> None:
        """Replay: ``aux`` by "after L layers" and ``final``, the input of lm_head, [B, S, H]."""
        for layer in sorted(aux):
            self.layers[layer](aux[layer])
        self.norm(final)
