"""A draft far from its best takes many small steps, one near it careful ones."""

from __future__ import annotations

import math

import pytest

from draft_trainer.config import TrainingConfig
from draft_trainer.training.learner import Learner
from draft_trainer.training.pace import FAR, SLOWEST, Pace
from tests.draft_trainer.synthetic import Policy, head

ARRIVES = 8192
NONE_SET = TrainingConfig()


def test_pace_follows_measured_acceptance() -> None:
    pace = Pace()
    pace.restart()
    assert (pace.halvings, pace.rate, pace.shares) == (1, 0.5, (1.0, 0.5, 0.25))
    assert (pace.batch_tokens(NONE_SET, ARRIVES), pace.batch_tokens(NONE_SET, 64_000)) == (
        256,
        1000,
    )
    # A step is at most 4,096 tokens, or a pass.
    assert pace.batch_tokens(NONE_SET, 1 << 20) == 4096
    assert pace.batch_tokens(TrainingConfig(device="cuda"), 1 << 20) == 8192
    pace.begin((0.3, 0.4))
    assert pace.halvings == FAR and pace.rate == 1.0 and pace.shares == (1.0,)
    assert (pace.batch_tokens(NONE_SET, ARRIVES), pace.batch_tokens(NONE_SET, 64_000)) == (64, 250)
    # As many tokens between two candidates.
    assert pace.steps_per_candidate(NONE_SET) * pace.batch_tokens(NONE_SET, ARRIVES) == 50 * 256
    given = TrainingConfig(batch_tokens=512)
    assert (pace.batch_tokens(given, ARRIVES), pace.steps_per_candidate(given)) == (512, 50)
    pace.settle(0.02, 0.01, 200, NONE_SET)
    assert pace.halvings == FAR
    for gain, steps in ((0.005, 200), (-0.02, 200)):
        pace.halvings, pace.steps_since_gain = FAR, 0
        pace.settle(gain, 0.01, steps, NONE_SET)
        assert (pace.halvings, pace.rate, pace.batch_tokens(NONE_SET, ARRIVES)) == (0, 1.0, 256)
        assert pace.shares == (1.0, 0.5, 0.25)
    for rates in ((0.4, 0.5), (0.9, 0.8), (0.9, math.nan)):
        pace.restart()
        pace.begin(rates)
        assert pace.measured and pace.halvings == 1


def test_pace_far_from_best_outlasts_gates_after_few_steps() -> None:
    # By time, a gate is due after 40 steps here; a candidate has 200.
    pace = Pace(halvings=FAR)
    for gain in (0.005, -0.005, 0.02, 0.005, -0.005, 0.005, 0.005):
        pace.settle(gain, 0.01, 40, NONE_SET)
        assert pace.halvings == FAR
    pace.settle(0.005, 0.01, 40, NONE_SET)
    assert pace.halvings == 0
    pace.halvings = FAR
    pace.settle(-0.02, 0.01, 1, NONE_SET)
    assert pace.halvings == 1


def test_pace_changes_only_by_significant_gains() -> None:
    pace = Pace(halvings=2)
    for gain in (0.04, -0.04, 0.05, -0.05):
        pace.settle(gain, 0.05, 50, NONE_SET)
        assert pace.halvings == 2
    for expected in (1, 0, 0):
        pace.settle(0.06, 0.05, 50, NONE_SET)
        assert pace.halvings == expected
    for _ in range(5):
        pace.settle(-0.06, 0.05, 50, NONE_SET)
    assert pace.halvings == SLOWEST


def test_pace_finds_random_draft_in_short_completions() -> None:
    pace = Pace()
    pace.restart()
    pace.begin((0.1, math.nan, math.nan))
    assert pace.halvings == FAR


def test_pace_is_measured_at_first_step_and_saved() -> None:
    policy = Policy(0, 4.0)
    config = TrainingConfig(ttt_steps=2, learning_rate=3e-3)
    learner = Learner(head(0), config)
    # Before a run begins: as the configuration says.
    assert learner.step(policy.samples(8), policy.heads()).learning_rate < 3e-3
    learner.restart_optimizer()
    metrics = learner.step(policy.samples(8), policy.heads())
    assert metrics.step_acceptance[0] < 0.3
    assert learner.pace.halvings == FAR and metrics.learning_rate == pytest.approx(3e-3)
    resumed = Learner(head(1), config)
    resumed.load_state_dict(learner.state_dict())
    assert resumed.pace == learner.pace
