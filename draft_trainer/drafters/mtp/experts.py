"""A mixture of experts as in GLM-4.5, in place of a layer's SwiGLU.

A sigmoid router chooses experts from the best groups of them; every token has a shared one besides.
Source: ``Glm4MoeMoE`` of transformers; vLLM's ``glm4_moe.py`` computes the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draft_trainer.checkpoints.policy import size_of
from draft_trainer.drafters.block import MLP
from slipstream.errors import RefusedError

CORRECTION = "e_score_correction_bias"
_SIZES = ("n_routed_experts", "n_group", "topk_group", "num_experts_per_tok")


@dataclass(frozen=True)
class ExpertsShape:
    """Sizes of a mixture.

    Attributes:
        count: E, in ``groups`` groups of neighbours.
        chosen: K, the experts of a token, from its ``chosen_groups`` best groups.
        width: of one expert; the shared one has ``shared`` times of it.
        renormalize: the weights of a token's experts sum to 1 before they are scaled.
        scale: what they are multiplied with.
    """

    count: int
    groups: int
    chosen_groups: int
    chosen: int
    width: int
    shared: int
    renormalize: bool
    scale: float

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> ExpertsShape:
        """From a policy's config.json. Raises RefusedError: a number is missing or cannot be."""
        count, groups, best, chosen = sizes = [size_of(config, name) for name in _SIZES]
        in_group, rest = divmod(count, groups)
        if rest or in_group < 2 or best > groups or chosen > best * in_group:
            expected = "groups of two or more, and no more experts of a token than in its groups"
            next_step = "give a model that vLLM loads"
            raise RefusedError(f"config.json {', '.join(_SIZES)}", sizes, expected, next_step)
        width, shared = (size_of(config, n) for n in ("moe_intermediate_size", "n_shared_experts"))
        scale, renormalize = config["routed_scaling_factor"], config["norm_topk_prob"] is True
        return cls(count, groups, best, chosen, width, shared, renormalize, float(scale))


class Experts(nn.Module):
    """The MLP; its parameters have the names of checkpoints."""

    def __init__(self, hidden_size: int, shape: ExpertsShape) -> None:
        super().__init__()
        self.shape = shape
        self.gate = nn.Linear(hidden_size, shape.count, bias=False)
        # Balances the experts where the policy is trained; no gradient passes through a choice.
        self.gate.register_buffer(CORRECTION, torch.zeros(shape.count))
        self.experts = nn.ModuleList(MLP(hidden_size, shape.width) for _ in range(shape.count))
        self.shared_experts = MLP(hidden_size, shape.width * shape.shared)

    def forward(self, x: Tensor) -> Tensor:
        """[..., H] to [..., H], in the type of ``x``."""
        rows = x.flatten(0, -2)
        weights, chosen = self._routed(rows)
        out = self.shared_experts(rows)
        for number, expert in enumerate(self.experts):
            row, place = (chosen == number).nonzero(as_tuple=True)
            if len(row):
                weighted = expert(rows[row]) * weights[row, place, None]
                out = out.index_add(0, row, weighted.to(x.dtype))
        return out.view_as(x)

    def _routed(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers of the experts of each of [N, H], both [N, K]; at least float32."""
        shape, wide = self.shape, torch.promote_types(rows.dtype, torch.float32)
        scores = F.linear(rows.to(wide), self.gate.weight.to(wide)).sigmoid()
        grouped = (scores + self.gate.get_buffer(CORRECTION)).unflatten(1, (shape.groups, -1))
        best = grouped.topk(2)[0].sum(-1).topk(shape.chosen_groups)[1]
        closed = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(1, best, False)
        chosen = grouped.masked_fill(closed[..., None], -torch.inf).flatten(1).topk(shape.chosen)[1]
        weights = scores.gather(1, chosen)
        if shape.renormalize:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return weights * shape.scale, chosen
