"""GRPO's numbers against a naive computation."""

from __future__ import annotations

import pytest
import torch

from examples.arithmetic_grpo.grpo import group_advantages, pad_batch, policy_loss


def test_advantages_are_normalised_within_each_group() -> None:
    rewards = torch.tensor([1.0, 3.0, 5.0, 5.0])
    advantages = group_advantages(rewards, group_size=2, epsilon=0.0)
    assert advantages[:2].tolist() == [-1.0, 1.0]
    # A group without a difference teaches nothing: with the default epsilon it is 0, not NaN.
    assert group_advantages(rewards, group_size=2)[2:].tolist() == [0.0, 0.0]


def test_the_clipped_loss_is_the_papers() -> None:
    generator = torch.Generator().manual_seed(0)
    log_probs = torch.randn(3, 4, generator=generator)
    old = log_probs + 0.3 * torch.randn(3, 4, generator=generator)
    advantages = torch.tensor([1.0, -2.0, 0.5])
    mask = torch.tensor([[0, 1, 1, 1], [0, 0, 1, 1], [0, 1, 0, 0]]).bool()
    loss, clipped = policy_loss(log_probs, old, advantages, mask, clip=0.2)
    expected, count = 0.0, 0
    for row in range(3):
        for column in range(4):
            if mask[row, column]:
                ratio = float((log_probs[row, column] - old[row, column]).exp())
                bounded = min(max(ratio, 0.8), 1.2)
                advantage = float(advantages[row])
                expected -= min(ratio * advantage, bounded * advantage)
                count += bounded * advantage < ratio * advantage
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert int(clipped) == count > 0


def test_rows_are_right_padded_and_masks_cover_the_completion() -> None:
    batch = pad_batch([[1, 2], [1, 2, 3]], [[4, 5, 6], [7]], torch.zeros(2), pad_id=0)
    assert batch.input_ids.tolist() == [[1, 2, 4, 5, 6], [1, 2, 3, 7, 0]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1, 1], [1, 1, 1, 1, 0]]
    assert batch.completion_mask.int().tolist() == [[0, 0, 1, 1, 1], [0, 0, 0, 1, 0]]
