"""The live comparison's error rate and delay, by simulation; drafts of a sequence are alike."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from draft_trainer.config import TrialConfig
from draft_trainer.releases.confidence import TUNED_FOR, Arm, Batch, decide

pytestmark = pytest.mark.contract("trial")

K = 3
IN_FLIGHT = 32
LENGTH = 40
"""Drafts of a sequence, on average; all of it has one acceptance rate, drawn from a Beta."""


def batch_of(drafts: int, accepted: Sequence[int]) -> Batch:
    """Make a batch of drafts of ``K`` tokens."""
    return Batch((drafts,) * len(accepted), tuple(accepted))


def reports(
    rng: np.random.Generator, count: int, good: tuple[float, float] = (4.0, 2.0)
) -> Iterator[Batch]:
    """Simulate the reports of a server with ``IN_FLIGHT`` sequences: six steps at a time."""
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
    config: TrialConfig,
    candidate: tuple[float, float] = (4.0, 2.0),
    count: int = 40,
) -> tuple[bool | None, int]:
    """The first verdict of looking after every report, and the candidate's drafts until then."""
    mine, theirs = Arm(config.design_effect), Arm(config.design_effect)
    for new, old in zip(reports(rng, count, candidate), reports(rng, count), strict=True):
        mine.add(new)
        theirs.add(old)
        if mine.drafts < config.min_drafts:
            continue
        found = decide(
            mine.interval(config.alpha / 2, K),
            theirs.interval(config.alpha / 2, K),
            config.max_loss,
        )
        if found is not None:
            return found, mine.drafts
    return None, mine.drafts


def test_equal_draft_is_rarely_rolled_back() -> None:
    """The case is the worst of the null: a loss of exactly ``max_loss`` = 0, alpha = 0.05."""
    config = TrialConfig(max_loss=0.0, alpha=0.05)
    rng = np.random.default_rng(0)
    false_alarms = sum(first_decision(rng, config)[0] is False for _ in range(400))
    assert false_alarms <= 20


def test_equal_draft_fails_often_without_design_effect() -> None:
    config = TrialConfig(max_loss=0.0, alpha=0.05, design_effect=1.0, min_drafts=1)
    rng = np.random.default_rng(1)
    false_alarms = sum(first_decision(rng, config)[0] is False for _ in range(120))
    assert false_alarms > 6


def test_a_ruined_draft_is_found_within_2000_drafts() -> None:
    rng = np.random.default_rng(2)
    found = [first_decision(rng, TrialConfig(), (1.0, 60.0)) for _ in range(100)]
    assert all(kept is False for kept, _ in found)
    assert max(drafts for _, drafts in found) <= 1000


def test_a_draft_as_good_is_kept_in_the_end() -> None:
    rng = np.random.default_rng(3)
    found = [first_decision(rng, TrialConfig(), count=160)[0] for _ in range(40)]
    assert found.count(True) >= 36 and False not in found


def test_the_interval_is_of_the_steps_themselves() -> None:
    accepted = [0, 3, 1, 2, 3, 0, 0]
    arm = Arm(1.0)
    arm.add(batch_of(len(accepted), [sum(a > place for a in accepted) for place in range(K)]))
    found, padded = arm.interval(0.05, K), np.array([*accepted, 0, K])
    assert found.mean == pytest.approx(np.mean(accepted))
    # Of theorem 2.2, with the variance of the steps and of two more.
    rho2 = (-2 * math.log(0.05) + math.log(-2 * math.log(0.05) + 1)) / TUNED_FOR
    t, n = len(accepted) * rho2 + 1, len(accepted)
    radius = math.sqrt(padded.var() * 2 * t / (n * n * rho2) * math.log(math.sqrt(t) / 0.05))
    assert found.high == pytest.approx(min(K, found.mean + radius))


def lengths_vary(rng: np.random.Generator, count: int, by_time: bool) -> tuple[Arm, Arm]:
    """The same drafts, asked for three tokens always, and for one to three."""
    whole, cut = Arm(8.0), Arm(8.0)
    for number, batch in enumerate(reports(rng, count)):
        whole.add(batch)
        length = 1 + (number // 40 if by_time else number) % K
        cut.add(Batch(batch.tried[:length], batch.accepted[:length]))
    return whole, cut


@pytest.mark.parametrize("by_time", [False, True])
def test_a_draft_that_is_asked_for_fewer_tokens_is_not_worse(by_time: bool) -> None:
    rng = np.random.default_rng(5)
    outside = 0
    for _ in range(40):
        whole, cut = lengths_vary(rng, 120, by_time)
        assert cut.positions(100) == K
        full, found = whole.interval(0.025, K), cut.interval(0.025, K)
        assert found.mean == pytest.approx(full.mean, rel=0.05)
        assert found.high - found.low < 2.5 * (full.high - full.low)
        assert decide(found, full, 0.02) is not False
        outside += not found.low <= 1.5 <= found.high  # the true mean, from the Beta's moments
    assert outside <= 2


def test_positions_that_were_hardly_tried_are_not_compared() -> None:
    arm = Arm(8.0)
    arm.add(Batch((500, 300, 40), (400, 200, 20)))
    assert [arm.positions(least) for least in (600, 500, 300, 40)] == [0, 1, 2, 3]
    assert arm.interval(0.05, 1).mean == pytest.approx(0.8)
    assert arm.interval(0.05, 2).mean == pytest.approx(0.8 + 2 / 3)


def test_blocks_grow_and_their_variance_shows_what_is_alike() -> None:
    rng = np.random.default_rng(4)
    alike, independent = Arm(1.0), Arm(1.0)
    for batch in reports(rng, 300):
        alike.add(batch)
    for _ in range(300):
        accepted = rng.binomial(192, 0.5, K)
        independent.add(batch_of(192, sorted(accepted.tolist(), reverse=True)))
    assert alike.drafts == independent.drafts == 300 * 192
    widths = [a.interval(0.05, K).high - a.interval(0.05, K).low for a in (alike, independent)]
    assert widths[0] > 1.5 * widths[1]


def test_nothing_accepted_is_not_certainty() -> None:
    arm = Arm(8.0)
    arm.add(batch_of(8, [0, 0, 0]))
    assert arm.interval(0.01, K).high == pytest.approx(K)
