"""The learner on a synthetic policy that moves."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from draft_trainer.config import TrainingConfig
from draft_trainer.drafters.eagle3.head import Eagle3Head
from draft_trainer.drafters.expected_acceptance import expected_acceptance
from draft_trainer.drafters.policy import PolicyHeads
from draft_trainer.training.learner import Learner
from slipstream.errors import RefusedError
from tests.draft_trainer.synthetic import Policy, head, learned
from tests.draft_trainer.training_process import HEADS

CONFIG = TrainingConfig(learning_rate=3e-3, warmup_steps=5, weight_averaging=0.0, ttt_steps=3)


def _trained(policy: Policy, start: Eagle3Head, steps: int) -> Learner:
    learner = Learner(start, CONFIG.model_copy(update={"learning_rate": 5e-3}))
    for seed in range(steps):
        learner.step(policy.samples(40, seed=100 + seed), policy.heads())
    return learner


def test_learner_recovers_acceptance_after_the_policy_moved() -> None:
    """Trained on one policy, stale on another, trained on that: acceptance comes back."""
    before, after = Policy(0, 4.0), Policy(0, 4.0)
    after.lm_head = after.lm_head.roll(5, dims=0)
    learner = _trained(before, head(0), 40)
    held_before = before.samples(60, seed=9)
    held_after = after.samples(60, seed=9)
    fresh = expected_acceptance(learner.head, held_before, before.heads(), 3, "probabilistic")
    stale = expected_acceptance(learner.head, held_after, after.heads(), 3, "probabilistic")
    learner = _trained(after, learner.head, 40)
    adapted = expected_acceptance(learner.head, held_after, after.heads(), 3, "probabilistic")
    assert fresh.acceptance_length - stale.acceptance_length > 0.3
    assert adapted.acceptance_length - stale.acceptance_length > 0.3


@pytest.mark.parametrize("kind", HEADS)
def test_training_raises_acceptance(kind: str) -> None:
    draft, policy = HEADS[kind](0), Policy(sharpness=4.0)
    samples, heads = policy.samples(24), policy.heads(rows=draft.target_ids())
    learner = Learner(draft, TrainingConfig(ttt_steps=3, learning_rate=5e-3, warmup_steps=0))
    assert learned(learner, samples, heads, 3) > 0.5


@pytest.mark.parametrize("kind", HEADS)
def test_step_in_bfloat16(kind: str) -> None:
    draft, policy = HEADS[kind](0), Policy()
    learner = Learner(draft, TrainingConfig(ttt_steps=2, compute_dtype="bfloat16"))
    metrics = learner.step(policy.samples(2), policy.heads(rows=draft.target_ids()))
    assert not metrics.skipped and 0.0 < metrics.loss < 10.0


def test_gradient_accumulation_equals_one_batch() -> None:
    policy = Policy()
    samples = policy.samples(12)
    heads = [head(3), head(3)]
    for model, tokens in zip(heads, (10_000, 40), strict=True):
        config = CONFIG.model_copy(update={"forward_tokens": tokens})
        Learner(model, config).step(samples, policy.heads())
    # Adam's first step has size lr whatever the gradient, and the sign where it is above noise.
    for a, b in zip(heads[0].parameters(), heads[1].parameters(), strict=True):
        assert (a - b).abs().max() < 1e-4


def test_refused_batch_is_freed_at_once() -> None:
    """Not with the next run of the cyclic collector."""
    policy = Policy()
    learner, batch = Learner(head(0), CONFIG), policy.samples(2)
    sample = weakref.ref(batch[0])
    gc.disable()
    try:
        with pytest.raises(RefusedError, match="policy_version"):
            learner.step(batch, PolicyHeads(1))
        del batch
        assert sample() is None and learner.steps == 0
    finally:
        gc.enable()


def test_non_finite_step_is_skipped_and_counted() -> None:
    policy = Policy()
    learner, samples = Learner(head(0), CONFIG), policy.samples(6)
    learner.step(samples, policy.heads())
    before = learner.state_dict()
    bad = samples[0].repacked(aux=torch.full_like(samples[0].aux, torch.nan))
    metrics = learner.step([bad, *samples[1:]], policy.heads())
    after = learner.state_dict()
    assert metrics.skipped and learner.steps_skipped == 1 and learner.steps == 1
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed == ["counter.steps_skipped"]
    assert not learner.step(samples, policy.heads()).skipped


def test_bfloat16_trains_as_well() -> None:
    with pytest.raises(RefusedError, match=r"compute_dtype: found float32, expected bfloat16"):
        TrainingConfig(device="cuda", compute_dtype="float32")
    policy = Policy(0, 4.0)
    samples = policy.samples(40)
    losses = []
    for dtype in ("float32", "bfloat16"):
        learner = Learner(head(0), CONFIG.model_copy(update={"compute_dtype": dtype}))
        losses.append([learner.step(samples, policy.heads()).loss for _ in range(20)][-1])
        assert learner.head.fc.weight.dtype == torch.float32
    assert losses[1] == pytest.approx(losses[0], rel=0.02)


def test_released_weights_are_the_exponential_average() -> None:
    policy = Policy(0, 4.0)
    config = CONFIG.model_copy(update={"warmup_steps": 0, "weight_averaging": 0.75})
    learner = Learner(head(0), config)
    expected = {k: v.clone() for k, v in learner.head.state_dict().items()}
    for seed in range(3):
        learner.step(policy.samples(8, seed=seed), policy.heads())
        for name, value in learner.head.state_dict().items():
            expected[name] = 0.75 * expected[name] + 0.25 * value
    resumed = Learner(head(1), config)
    resumed.load_state_dict(learner.state_dict())
    for name, value in learner.snapshot(torch.float32).state_dict().items():
        torch.testing.assert_close(value, expected[name])
        torch.testing.assert_close(resumed.snapshot(torch.float32).state_dict()[name], value)
    assert not torch.equal(expected["fc.weight"], learner.head.state_dict()["fc.weight"])


def test_candidates_lie_on_the_line_and_training_leaves_it() -> None:
    """An average that passes is served; training goes on from its own weights at its own rate."""
    policy, served = Policy(0, 4.0), head(0)
    config = CONFIG.model_copy(update={"weight_averaging": 0.9, "warmup_steps": 0})
    learner = Learner(head(0), config)
    learner.restart_optimizer()
    learner.pace.begin((0.9, 0.9))
    samples, heads = policy.samples(20), policy.heads()
    assert learner.step(samples, heads).learning_rate == pytest.approx(1.5e-3)
    assert learner.pace.shares == (1.0, 0.5, 0.25)
    before = learner.state_dict()
    far = learner.snapshot(torch.float32)
    near = learner.snapshot(torch.float32, served, 0.25)
    begin, end = served.fc.weight.detach(), far.get_parameter("fc.weight")
    assert torch.equal(near.get_parameter("fc.weight"), begin.lerp(end, 0.25))
    assert all(torch.equal(before[name], value) for name, value in learner.state_dict().items())
    for gain, halvings, rate in ((0.1, 0, 3e-3), (-0.1, 1, 1.5e-3), (-0.1, 2, 0.75e-3)):
        learner.pace.settle(gain, 0.05, 9, config)
        assert learner.pace.halvings == halvings
        assert learner.step(samples, heads).learning_rate == pytest.approx(rate)
    again = Learner(head(1), config)
    again.load_state_dict(learner.state_dict())
    assert again.pace == learner.pace
