"""The learning benchmark trains its peer's MTP head on the objective of the peer."""

from __future__ import annotations

import torch
from torch.nn import functional as F

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
