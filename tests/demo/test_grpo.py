"""GRPO's numbers against a naive computation."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.arithmetic_grpo.grpo import (
    group_advantages,
    log_prob_forward,
    old_log_probs,
    pad_batch,
    policy_loss,
)


def test_advantages_normalised_in_each_group() -> None:
    rewards = torch.tensor([1.0, 3.0, 5.0, 5.0])
    advantages = group_advantages(rewards, group_size=2, epsilon=0.0)
    assert advantages[:2].tolist() == [-1.0, 1.0]
    # A group without a difference teaches nothing: with the default epsilon it is 0, not NaN.
    assert group_advantages(rewards, group_size=2)[2:].tolist() == [0.0, 0.0]


def test_clipped_loss_matches_formula() -> None:
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.randn(3, 4, generator=generator)
    old = log_probs + 0.3 * torch.randn(3, 4, generator=generator)
    advantages = torch.tensor([1.0, -2.0, 0.5])
    mask = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1], [0, 1, 0, 0]]).bool()
    loss = policy_loss(log_probs, old, advantages, mask, clip=0.2)
    expected, clipped = 0.0, 0
    for row in range(3):
        for column in range(4):
            if mask[row, column]:
                ratio = float((log_probs[row, column] - old[row, column]).exp())
                bounded = min(max(ratio, 0.8), 1.2)
                advantage = float(advantages[row])
                expected -= min(ratio * advantage, bounded * advantage)
                clipped += bounded * advantage < ratio * advantage
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert clipped > 0


def test_pad_batch_masks_cover_completions() -> None:
    batch = pad_batch([[1, 2], [1, 2, 3]], [[4, 5, 6], [7]], torch.zeros(2), pad_id=0)
    assert batch.input_ids.tolist() == [[1, 2, 4, 5, 6], [1, 2, 3, 7, 0]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]
    assert batch.completion_mask.int().tolist() == [[0, 0, 1, 1, 1], [0, 0, 0, 1, 0]]


def test_micro_batched_log_probs_match_and_are_shipped(policy_dir: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(policy_dir, dtype=torch.float32)
    batch = pad_batch([[1, 20, 21]] * 5, [[22, 23], [24]] * 2 + [[25]], torch.zeros(5), pad_id=0)
    shipped: list[tuple[torch.Tensor, dict[str, Any]]] = []
    captured = SimpleNamespace(ship=lambda ids, **named: shipped.append((ids, named)))
    found = old_log_probs(model, batch, 2, captured)
    whole = log_prob_forward(model, batch.input_ids, batch.attention_mask)
    assert torch.allclose(found, whole.detach(), atol=1e-5) and not found.requires_grad
    assert [len(ids) for ids, _ in shipped] == [2, 2, 1]
    assert torch.equal(
        torch.cat([named["loss_mask"] for _, named in shipped]), batch.completion_mask
    )
    assert torch.equal(torch.cat([named["sampled_logprobs"] for _, named in shipped]), found)
    assert torch.equal(old_log_probs(model, batch, 2), found)
