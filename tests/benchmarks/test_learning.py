"""The learning benchmark compares with its peers as they are served, and with the better one."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from benchmarks.learning.__main__ import (
    OURS,
    PEERS,
    Mark,
    at_seconds,
    targets_of,
)
from benchmarks.learning.mtp import depth_loss
from draft_trainer.drafters.batch import ahead
from tests.draft_trainer.synthetic import VOCAB, Policy, collate, logits_of, mtp_head


def test_peer_mtp_objective_matches_first_served_step() -> None:
    head, policy = mtp_head(), Policy()
    batch = collate(policy.samples(3), policy.heads(rows=torch.arange(VOCAB)))
    counted = ahead(batch.loss_mask, 2)
    [output, _] = head.unroll(batch, 2)
    logits = logits_of(head, output, batch.policy)[counted]
    expected = F.cross_entropy(logits, ahead(batch.token_ids, 2)[counted])
    torch.testing.assert_close(depth_loss(head, batch, [1.0]), expected)
    with torch.no_grad():
        first, both = depth_loss(head, batch, [0.5]), depth_loss(head, batch, [0.5, 0.5])
    assert both > first


def marks(*lengths: float, seconds: float) -> list[Mark]:
    return [
        Mark(tokens, seconds * number, length)
        for number, (tokens, length) in enumerate(
            zip((40_000, 70_000, 100_000), lengths, strict=True), 1
        )
    ]


def test_learning_compared_with_better_peer_of_each_seed() -> None:
    small, large = PEERS
    found = {
        OURS: [marks(2.0, 2.5, 3.0, seconds=2.0)],
        small: [marks(2.0, 2.0, 2.5, seconds=4.0)],
        large: [marks(1.6, 2.4, 2.6, seconds=1.0)],
    }
    values = [target.value for target in targets_of(found, "policy")]
    by_tokens, by_seconds = values[::2], values[1::2]
    assert by_tokens == [pytest.approx(x) for x in (2.0 / 2.0, 2.5 / 2.4, 3.0 / 2.6)]
    # The larger steps' marks come at 1, 2 and 3 s; after their last they have what they have.
    assert by_seconds == [pytest.approx(x) for x in (2.0 / 2.4, 2.5 / 2.6, 3.0 / 2.6)]
    assert at_seconds(found[small][0], 2.0) == pytest.approx(1.5)
