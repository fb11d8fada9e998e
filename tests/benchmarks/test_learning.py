"""What benchmarks.learning makes of its runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from benchmarks.learning.__main__ import (
    OURS,
    PEERS,
    Mark,
    at_seconds,
    interval_text,
    online_targets,
    targets_of,
)
from benchmarks.learning.moving import Candidate, Course
from benchmarks.learning.mtp import depth_loss, formulation_targets
from draft_trainer.drafters.batch import ahead
from tests.draft_trainer.synthetic import VOCAB, Policy, collate, logits_of, mtp_head

SERVED: Any = SimpleNamespace()


def test_the_first_depth_of_the_peers_mtp_objective_is_the_first_step_that_is_served() -> None:
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


def test_an_mtp_head_is_compared_with_the_better_formulation_at_the_best_rates() -> None:
    rates = {1e-3: [2.0, 3.0], 2e-3: [3.0, 2.8]}
    lower = {1e-3: [2.5, 2.4], 2e-3: [2.0, 2.0]}
    [target] = formulation_targets({OURS: rates, "speculators": lower, "Megatron": lower})
    assert target.value == pytest.approx(3.0 / 2.5) and target.ok


def marks(*lengths: float, seconds: float) -> list[Mark]:
    return [
        Mark(tokens, seconds * number, length)
        for number, (tokens, length) in enumerate(
            zip((40_000, 70_000, 100_000), lengths, strict=True), 1
        )
    ]


def test_a_seed_is_compared_with_its_better_peer_by_tokens_and_by_seconds() -> None:
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


def test_candidates_are_worse_where_their_whole_interval_is() -> None:
    gains = [(0.1, 0.05), (-0.05, 0.1), (-0.2, 0.1), (None, 0.0)]
    candidates = [Candidate(SERVED, gain, half) for gain, half in gains]
    assert [one.worse for one in candidates] == [False, False, True, False]
    course = Course([4.0, 3.5, 3.5], [4.0, 3.0, 2.0], candidates, 1.0)
    assert course.kept == pytest.approx((3.5 - 2.5) / (4.0 - 2.5))
    assert course.figures["candidate_gains"] == [[0.1, 0.05], [-0.05, 0.1], [-0.2, 0.1]]
    worse, kept = online_targets([course, course], "policy")
    assert (worse.value, worse.ok) == (0.25, False)
    assert kept.value == pytest.approx(course.kept) and kept.ok
    assert interval_text([2.0]) == "2.00" and interval_text([1.0, 2.0, 3.0]) == "2.00 ± 2.48"
