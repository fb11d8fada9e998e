"""The live comparison's error rate and delay, by simulation; drafts of a sequence are alike."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from draft_trainer.config import CanaryConfig
from draft_trainer.releases.canary import Arm, Batch, batch_of, decide

K = 3
IN_FLIGHT = 32
LENGTH = 40
"""Drafts of a sequence, on average; all of it has one acceptance rate, drawn from a Beta."""


def reports(
    rng: np.random.Generator, count: int, good: tuple[float, float] = (4.0, 2.0)
) -> Iterator[Batch]:
    """What a server with ``IN_FLIGHT`` sequences reports: six steps at a time."""
    rate = rng.beta(*good, IN_FLIGHT)
    for _ in range(count):
        accepted = np.zeros(K, int)
        for _ in range(6):
            accepted += np.cumprod(rng.random((IN_FLIGHT, K)) < rate[:, None], 1).sum(0)
            ended = rng.random(IN_FLIGHT) < 1 / LENGTH
            rate = np.where(ended, rng.beta(*good, IN_FLIGHT), rate)
        yield batch_of(6 * IN_FLIGHT, accepted.tolist())


def first_decision(
    rng: np.random.Generator,
    config: CanaryConfig,
    candidate: tuple[float, float] = (4.0, 2.0),
    count: int = 40,
) -> tuple[bool | None, int]:
    """The first verdict of looking after every report, and the candidate's drafts until then."""
    mine, theirs = Arm(K, config.design_effect), Arm(K, config.design_effect)
    for new, old in zip(reports(rng, count, candidate), reports(rng, count), strict=True):
        mine.add(new)
        theirs.add(old)
        if mine.drafts < config.min_drafts:
            continue
        found = decide(
            mine.interval(config.alpha / 2), theirs.interval(config.alpha / 2), config.max_loss
        )
        if found is not None:
            return found, mine.drafts
    return None, mine.drafts


def test_an_equal_draft_is_hardly_ever_rolled_back() -> None:
    """At the worst place of the null, a loss of exactly ``max_loss`` = 0, alpha = 0.05."""
    config = CanaryConfig(max_loss=0.0, alpha=0.05)
    rng = np.random.default_rng(0)
    false_alarms = sum(first_decision(rng, config)[0] is False for _ in range(400))
    assert false_alarms <= 20


def test_without_the_design_effect_it_would_be_rolled_back_too_often() -> None:
    config = CanaryConfig(max_loss=0.0, alpha=0.05, design_effect=1.0, min_drafts=1)
    rng = np.random.default_rng(1)
    false_alarms = sum(first_decision(rng, config)[0] is False for _ in range(120))
    assert false_alarms > 6


def test_a_ruined_draft_is_found_within_2000_drafts() -> None:
    rng = np.random.default_rng(2)
    found = [first_decision(rng, CanaryConfig(), (1.0, 60.0)) for _ in range(100)]
    assert all(kept is False for kept, _ in found)
    assert max(drafts for _, drafts in found) <= 1000


def test_a_draft_as_good_is_kept_in_the_end() -> None:
    rng = np.random.default_rng(3)
    found = [first_decision(rng, CanaryConfig(), count=160)[0] for _ in range(40)]
    assert found.count(True) >= 36 and False not in found


def test_squares_come_from_the_positions() -> None:
    accepted = [0, 3, 1, 2, 3, 0, 0]
    per_position = [sum(a > place for a in accepted) for place in range(3)]
    batch = batch_of(len(accepted), per_position)
    assert batch == Batch(7, sum(accepted), sum(a * a for a in accepted))


def test_blocks_grow_and_their_variance_shows_what_is_alike() -> None:
    rng = np.random.default_rng(4)
    alike, independent = Arm(K, 1.0), Arm(K, 1.0)
    for batch in reports(rng, 300):
        alike.add(batch)
    for _ in range(300):
        accepted = rng.binomial(192, 0.5, K)
        independent.add(batch_of(192, sorted(accepted.tolist(), reverse=True)))
    assert alike.drafts == independent.drafts == 300 * 192
    widths = [a.interval(0.05).high - a.interval(0.05).low for a in (alike, independent)]
    assert widths[0] > 1.5 * widths[1]


def test_nothing_accepted_is_not_certainty() -> None:
    arm = Arm(K, 8.0)
    arm.add(batch_of(8, [0, 0, 0]))
    assert arm.interval(0.01).high == pytest.approx(K)
