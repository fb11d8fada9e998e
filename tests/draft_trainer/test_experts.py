"""The mixture of experts of an MTP head against transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import Glm4MoeConfig
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE

from draft_trainer.drafters.mtp import Experts, ExpertsShape
from slipstream.errors import RefusedError

HIDDEN = 16
CONFIG: dict[str, Any] = {
    "n_routed_experts": 8,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 12,
    "n_shared_experts": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"norm_topk_prob": False, "n_shared_experts": 1},
        {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 8},
    ],
)
def test_experts_match_transformers(changes: dict[str, Any]) -> None:
    torch.manual_seed(0)
    config = CONFIG | changes
    theirs = Glm4MoeMoE(Glm4MoeConfig(hidden_size=HIDDEN, **config))
    ours = Experts(HIDDEN, ExpertsShape.of(config))
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.normal_(0.0, 0.5)
        # Large enough to decide for many tokens.
        ours.gate.get_buffer("e_score_correction_bias").normal_(0.0, 0.5)
        theirs.gate.weight.copy_(ours.gate.weight)
        theirs.gate.e_score_correction_bias.copy_(ours.gate.e_score_correction_bias)
        theirs.shared_experts.load_state_dict(ours.shared_experts.state_dict())
        for number, expert in enumerate(ours.experts):
            both = torch.cat([expert.gate_proj.weight, expert.up_proj.weight])
            theirs.experts.gate_up_proj[number] = both
            theirs.experts.down_proj[number] = expert.down_proj.weight
    x = torch.randn(2, 9, HIDDEN)
    mine, other = (x.clone().requires_grad_() for _ in range(2))
    found, expected = ours(mine), theirs(other)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    weight = torch.randn_like(found)
    (found * weight).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(mine.grad, other.grad, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours.gate.weight.grad, theirs.gate.weight.grad, atol=1e-4, rtol=1e-4)
    fused, down = theirs.experts.gate_up_proj.grad, theirs.experts.down_proj.grad
    for number, expert in enumerate(ours.experts):
        parts = (expert.gate_proj, expert.up_proj, expert.down_proj)
        grads = [
            torch.zeros_like(p.weight) if p.weight.grad is None else p.weight.grad for p in parts
        ]
        torch.testing.assert_close(torch.cat(grads[:2]), fused[number], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(grads[2], down[number], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "changes",
    [{"n_group": 3}, {"n_group": 8}, {"topk_group": 5}, {"num_experts_per_tok": 5}],
)
def test_experts_inconsistent_config_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(RefusedError, match=r"n_routed_experts, n_group.*groups of two or more"):
        ExpertsShape.of(CONFIG | changes)
