"""The determinants of a step: its rate, its data, its clipping, its target, and no chance."""

from __future__ import annotations

import math

import pytest
import torch

from draft_trainer.config import TrainingConfig
from draft_trainer.drafters.loss import step_weights
from draft_trainer.training.learner import Learner
from draft_trainer.training.optimizer import DraftOptimizer, Schedule
from slipstream.errors import RefusedError
from tests.draft_trainer.synthetic import Policy, head

CONFIG = TrainingConfig(learning_rate=3e-3, warmup_steps=2, weight_averaging=0.0, ttt_steps=3)


def test_schedule_warm_up_then_constant() -> None:
    constant = Schedule(2e-3, warmup_steps=3)
    assert [constant.rate(i) for i in (0, 1, 2, 3, 1000)] == pytest.approx(
        [5e-4, 1e-3, 1.5e-3, 2e-3, 2e-3]
    )


def test_gradient_clipping_only_above_the_bound() -> None:
    policy = Policy()
    samples = policy.samples(6)
    norms = {}
    for bound in (1e-2, 1e3):
        learner = Learner(head(0), CONFIG.model_copy(update={"grad_clip": bound}))
        metrics = learner.step(samples, policy.heads())
        state = learner.state_dict()
        # After one step the first moment is (1 - beta_1) times the gradient that was applied.
        moments = [v.flatten() for name, v in state.items() if name.endswith(".exp_avg")]
        norms[bound] = float(torch.cat(moments).norm()) / (1 - 0.9)
        assert metrics.grad_norm > 1e-2
    assert norms[1e-2] == pytest.approx(1e-2, rel=1e-4)
    assert norms[1e3] == pytest.approx(metrics.grad_norm, rel=1e-4)


def test_tv_and_lk_targets_are_minimised() -> None:
    policy = Policy(0, 4.0)
    samples = policy.samples(20)
    weights = step_weights(3, CONFIG.step_weight_decay)
    for target in ("tv", "lk"):
        learner = Learner(head(0), CONFIG.model_copy(update={"target": target}))
        metrics = [learner.step(samples, policy.heads()) for _ in range(20)]
        first = metrics[0]
        missed = sum(w * (1 - a) for w, a in zip(weights, first.step_acceptance, strict=True))
        if target == "tv":
            assert first.loss == pytest.approx(missed, rel=1e-5)
        else:
            # -log of the mean is at most the mean of -log (Jensen).
            bound = [-math.log(acceptance) for acceptance in first.step_acceptance]
            assert first.loss > sum(w * b for w, b in zip(weights, bound, strict=True))
        assert metrics[-1].step_acceptance[0] > first.step_acceptance[0] + 0.05


def test_restart_optimizer_resets_moments_and_warm_up() -> None:
    policy = Policy()
    samples = policy.samples(6)
    learner = Learner(head(0), CONFIG.model_copy(update={"weight_averaging": 0.5}))
    for _ in range(4):
        learner.step(samples, policy.heads())
    before = learner.state_dict()
    learner.restart_optimizer()
    after = learner.state_dict()
    for name, tensor in after.items():
        if name.startswith("optimizer."):
            assert not tensor.any()
        elif name not in ("counter.steps_since_restart", "pace"):
            assert torch.equal(tensor, before[name])
    learner.pace.begin((0.9, 0.9))
    # A third of 3e-3 by the warm-up, and half of it until a candidate was measured.
    assert learner.step(samples, policy.heads()).learning_rate == pytest.approx(0.5e-3)


def test_muon_updates_matrices_between_layers_alone() -> None:
    """Orthogonal updates of AdamW's size there; lm_head and norms move as with AdamW."""
    policy = Policy()
    samples = policy.samples(6)
    before = {name: p.detach().clone() for name, p in head(0).named_parameters()}
    moved = {}
    for optimizer in ("adamw", "muon"):
        changed = {"optimizer": optimizer, "warmup_steps": 0, "learning_rate": 1e-3}
        learner = Learner(head(0), CONFIG.model_copy(update=changed))
        learner.pace.begin((0.9, 0.9))
        learner.step(samples, policy.heads())
        moved[optimizer] = {n: p.detach() - before[n] for n, p in learner.head.named_parameters()}
        names = {name.split(".", 1)[1] for name in learner.state_dict() if "momentum" in name}
    matrices = {name for name, p in before.items() if p.ndim == 2 and name != "lm_head.weight"}
    assert names == {f"{name}.momentum_buffer" for name in matrices} and len(names) == 8
    for name, update in moved["muon"].items():
        if name not in matrices:
            assert torch.equal(update, moved["adamw"][name])
            continue
        # Newton-Schulz leaves singular values between 0.7 and 1.2; all are alike.
        values = torch.linalg.svdvals(update) / (1e-3 * 0.2 * max(update.shape) ** 0.5)
        assert 0.5 < float(values.median()) < 1.3 and float(values.max()) < 1.3, name


def test_muon_leaves_a_matrix_without_gradient_as_it_is() -> None:
    """Such as an expert's, which no token of a step went to."""
    model = head(0)
    optimizer = DraftOptimizer(model, CONFIG.model_copy(update={"optimizer": "muon"}))
    for reached in (True, False):
        optimizer.clear_gradients()
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        if not reached:
            model.fc.weight.grad = model.norm.weight.grad = None
        before = [p.detach().clone() for p in (model.fc.weight, model.norm.weight)]
        optimizer.step(1e-2, optimizer.gradient_norm())
        moved = [
            float((p - b).abs().max())
            for p, b in zip((model.fc.weight, model.norm.weight), before, strict=True)
        ]
        assert (moved[0] > 0.0) == reached and moved[1] > 0.0


def test_state_of_another_optimizer_is_refused() -> None:
    policy = Policy()
    adamw, muon = (
        Learner(head(0), CONFIG.model_copy(update={"optimizer": optimizer}))
        for optimizer in ("adamw", "muon")
    )
    muon.step(policy.samples(6), policy.heads())
    for one, other in ((adamw, muon), (muon, adamw)):
        with pytest.raises(RefusedError, match=r"optimizer\.fc\.weight"):
            one.load_state_dict(other.state_dict())


def test_step_without_valid_anchor_changes_nothing() -> None:
    policy = Policy()
    learner = Learner(head(0), CONFIG)
    sample = policy.samples(1)[0]
    empty = sample.repacked(loss_mask=torch.zeros_like(sample.loss_mask))
    before = learner.state_dict()
    metrics = learner.step([empty], policy.heads())
    after = learner.state_dict()
    assert metrics.skipped and metrics.anchors == 0 and math.isnan(metrics.step_loss[0])
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_step_leaves_out_samples_past_sliding_window(caplog: pytest.LogCaptureFixture) -> None:
    """Samples may have been stored before ``ttt_steps`` was raised."""
    policy = Policy()
    samples, heads = policy.samples(9), policy.heads()
    longest = max(sample.tokens for sample in samples)
    learner = Learner(head(0, sliding_window=longest + 1), CONFIG)
    short = [sample for sample in samples if sample.tokens < longest]
    metrics = learner.step(samples, heads)
    assert len(short) == 8 and metrics.tokens == sum(sample.tokens for sample in short)
    assert not metrics.skipped and metrics.memory_retries == 0
    assert "1 of 9 samples are left out: too long for sliding_window 25 with ttt" in caplog.text
    metrics = learner.step([sample for sample in samples if sample.tokens == longest], heads)
    assert metrics.skipped and metrics.anchors == 0 and learner.steps == 1


def test_load_state_of_another_shape_is_refused() -> None:
    learner, other = Learner(head(0), CONFIG), Learner(head(0, intermediate_size=64), CONFIG)
    before = learner.state_dict()
    with pytest.raises(RefusedError, match=r"head\.midlayer\.mlp\.down_proj\.weight"):
        learner.load_state_dict(other.state_dict())
    for change in ({"more": torch.zeros(1)}, {"head.fc.weight": before["head.fc.weight"].half()}):
        with pytest.raises(RefusedError, match=next(iter(change))):
            learner.load_state_dict(before | change)
    after = learner.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_weight_averaging_may_change_between_runs() -> None:
    policy = Policy()
    plain, averaging = (
        Learner(head(seed), CONFIG.model_copy(update={"weight_averaging": decay}))
        for seed, decay in ((0, 0.0), (1, 0.5))
    )
    plain.step(policy.samples(6), policy.heads())
    averaging.load_state_dict(plain.state_dict())
    for name, tensor in plain.head.state_dict().items():
        assert torch.equal(averaging.snapshot(torch.float32).state_dict()[name], tensor)
    averaging.step(policy.samples(6), policy.heads())
    plain.load_state_dict(averaging.state_dict())
    for name, tensor in averaging.head.state_dict().items():
        assert torch.equal(plain.snapshot(torch.float32).state_dict()[name], tensor)
