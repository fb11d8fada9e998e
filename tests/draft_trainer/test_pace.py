"""A draft far from its best takes many small steps, one near it careful ones."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.learning.moving import considered, drawn
from draft_trainer.checkpoints import read_policy
from draft_trainer.config import TrainingConfig
from draft_trainer.drafters import DRAFTERS
from draft_trainer.drafters.acceptance import expected_acceptance
from draft_trainer.drafters.initial import init_draft
from draft_trainer.drafters.policy import PolicyHeads
from draft_trainer.offline.record import Recorder
from draft_trainer.recordings.recording import Recording
from draft_trainer.training.learner import Learner
from draft_trainer.training.pace import FAR, SLOWEST, Pace
from examples.arithmetic_grpo.sampling import solutions
from slipstream.sample import Sample
from tests.draft_trainer.synthetic import Policy, head

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "arithmetic_grpo"
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
    pace.begin((0.3, 0.4))
    assert pace.halvings == FAR and pace.rate == 1.0 and pace.shares == (1.0,)
    assert (pace.batch_tokens(NONE_SET, ARRIVES), pace.batch_tokens(NONE_SET, 64_000)) == (64, 250)
    # As many tokens between two candidates.
    assert pace.steps_per_candidate(NONE_SET) * pace.batch_tokens(NONE_SET, ARRIVES) == 50 * 256
    given = TrainingConfig(batch_tokens=512)
    assert (pace.batch_tokens(given, ARRIVES), pace.steps_per_candidate(given)) == (512, 50)
    pace.settle(1.0, 0.02, half_width=0.01)
    assert pace.halvings == FAR
    for share, gain in ((1.0, 0.005), (1.0, -0.02), (0.5, 1.0)):
        pace.halvings = FAR
        pace.settle(share, gain, half_width=0.01)
        assert (pace.halvings, pace.rate, pace.batch_tokens(NONE_SET, ARRIVES)) == (1, 0.5, 256)
    for rates in ((0.4, 0.5), (0.9, 0.8), (0.9, math.nan)):
        pace.restart()
        pace.begin(rates)
        assert pace.measured and pace.halvings == 1


def test_pace_changes_only_by_significant_gains() -> None:
    pace = Pace(halvings=2)
    for gain in (0.04, -0.04, 0.05, -0.05):
        pace.settle(1.0, gain, half_width=0.05)
        assert pace.halvings == 2
    for expected in (1, 0, 0):
        pace.settle(1.0, 0.06, half_width=0.05)
        assert pace.halvings == expected
    for share, gain in ((0.5, 0.06), (1.0, -0.06), (0.25, 0.01), (0.25, -0.06), (0.25, 0.06)):
        pace.settle(share, gain, half_width=0.05)
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
    # Not restarted: an offline fit has a schedule of its own.
    assert learner.step(policy.samples(8), policy.heads()).learning_rate < 3e-3
    learner.restart_optimizer()
    metrics = learner.step(policy.samples(8), policy.heads())
    assert metrics.step_acceptance[0] < 0.3
    assert learner.pace.halvings == FAR and metrics.learning_rate == pytest.approx(3e-3)
    resumed = Learner(head(1), config)
    resumed.load_state_dict(learner.state_dict())
    assert resumed.pace == learner.pace


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Sample], PolicyHeads]:
    """Rollouts of the arithmetic example's policy."""
    model = AutoModelForCausalLM.from_pretrained(EXAMPLE / "policy", dtype=torch.float32).eval()
    out = tmp_path_factory.mktemp("recorded") / "recording"
    with Recorder(model, out) as recorder:
        for part in solutions(model, 328, seed=0):
            recorder.add(part)
    recording = Recording(out)
    draft = DRAFTERS["eagle3"].read(EXAMPLE / "draft").draft()
    return [recording[i] for i in range(len(recording))], recording.policy_heads(draft.target_ids())


@pytest.mark.slow
def test_pace_of_random_draft_learns_faster(
    samples: tuple[list[Sample], PolicyHeads], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Than one that is treated as a good one is."""
    recorded, heads = samples
    held, training = recorded[:64], recorded[64:]
    ids = DRAFTERS["eagle3"].read(EXAMPLE / "draft").draft().target_ids()
    found = []
    for far in (True, False):
        if not far:
            monkeypatch.setattr(Pace, "begin", lambda self, rates: None)
        config = TrainingConfig(ttt_steps=3)
        served = init_draft(read_policy(EXAMPLE / "policy"), ids, seed=0)
        learner, steps = Learner(init_draft(read_policy(EXAMPLE / "policy"), ids), config), 0
        learner.restart_optimizer()
        for number in range(0, len(training), 88):
            for batch in drawn(training[number : number + 88], 2, learner, random.Random(number)):
                learner.step(batch, heads)
                steps += 1
                if steps >= learner.pace.steps_per_candidate(config):
                    served, steps = considered(learner, served, held, heads).served, 0
        estimate = expected_acceptance(learner.snapshot(), held, heads, 3, "probabilistic")
        found.append(estimate.acceptance_length)
    assert found[0] > found[1] + 0.15, found
