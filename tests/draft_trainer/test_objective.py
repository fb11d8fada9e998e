"""The objective against a loop over anchors, and its gradient against finite differences."""

from __future__ import annotations

import pytest
import torch

from draft_trainer.drafters.batch import batches
from draft_trainer.drafters.dspark import DsparkHead
from draft_trainer.drafters.loss import METRICS, step_weights, ttt_objective, valid_targets
from tests.draft_trainer.synthetic import Policy, collate, draft_vocab_ids, head, logits_of
from tests.draft_trainer.training_process import HEADS

pytestmark = pytest.mark.contract("alignment")


def test_teacher_is_the_policy_itself() -> None:
    """p over the draft rows equals the policy's own full softmax there, at T = 0.7."""
    policy = Policy()
    samples = policy.samples(3, temperature=0.7)
    batch = collate(samples, policy.heads())
    for row, sample in enumerate(samples):
        exact = policy.log_probs(sample.token_ids, 0.7)[:, draft_vocab_ids()]
        known = batch.teacher_known[row]
        assert int(known.sum()) == sample.tokens - 1
        index = known.nonzero()[:, 0]
        log_p = batch.teacher_log_probs(torch.full_like(index, row), index)
        assert (log_p - exact[:-1]).abs().max() < 1e-5


def test_valid_targets_start_at_the_last_prompt_position() -> None:
    """Prompt 4, length 10: anchors 3 .. 7 at step 0, one fewer with every step."""
    policy = Policy()
    tokens = policy.rolls(torch.Generator().manual_seed(0), 1, 10)[0]
    valid = valid_targets(collate([policy.sample(tokens)], policy.heads()), 3)
    assert [v[0].nonzero().flatten().tolist() for v in valid] == [
        [3, 4, 5, 6, 7],
        [3, 4, 5, 6],
        [3, 4, 5],
    ]


def test_tool_answer_between_completions_is_no_target() -> None:
    policy = Policy()
    sample = policy.sample(policy.rolls(torch.Generator().manual_seed(0), 1, 12)[0])
    sample.loss_mask[6:9] = False
    valid = valid_targets(collate([sample], policy.heads()), 2)
    assert valid[0, 0].nonzero().flatten().tolist() == [3, 8, 9]
    assert valid[1, 0].nonzero().flatten().tolist() == [8]


@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_loss_and_metrics_equal_a_plain_loop(temperature: float) -> None:
    policy, model, steps = Policy(), head(2), 3
    samples = policy.samples(4, temperature=temperature)
    batch = collate(samples, policy.heads())
    valid = valid_targets(batch, steps)
    weights = step_weights(steps, 0.8)
    with torch.no_grad():
        outcome = ttt_objective(model, batch, valid, weights=weights)
        outputs = list(model.unroll(batch, steps))
        loss = 0.0
        for step in range(steps):
            rows = []
            for b, sample in enumerate(samples):
                p_all = policy.log_probs(sample.token_ids, temperature).exp()
                for i in range(3, sample.tokens - 2 - step):
                    p = p_all[i + 1 + step, draft_vocab_ids()]
                    q = (logits_of(model, outputs[step][b, i]) / temperature).softmax(-1)
                    best = int(q.argmax())
                    rows.append(
                        [
                            -float((p * q.log()).sum()),
                            float(best == int(p.argmax())),
                            float(torch.minimum(p, q).sum()),
                            1.0 - float(p.sum()),
                        ]
                    )
            table = torch.tensor(rows, dtype=torch.float64)
            assert len(rows) == int(outcome.counts[step])
            assert (outcome.sums[step] / len(rows) - table.mean(0)).abs().max() < 1e-5
            loss += weights[step] * float(table[:, 0].mean())
    assert float(outcome.loss) == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("kind", HEADS)
def test_gradient_equals_finite_differences(kind: str) -> None:
    """Directional derivatives in float64 along one random direction per parameter."""
    policy, model = Policy(), HEADS[kind](4).double()
    # Its loss takes as a constant what it predicts: test_dspark.py has its gradient.
    if isinstance(model, DsparkHead):
        model.confidence_head.clear()
    batch = collate(policy.samples(2), policy.heads(rows=model.target_ids()))
    valid = valid_targets(batch, 3)

    def loss() -> torch.Tensor:
        weights = step_weights(3, 0.8)
        return ttt_objective(model, batch, valid, weights=weights, compute_dtype=torch.float64).loss

    loss().backward()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        slope = float((parameter.grad * direction).sum())
        values = []
        for sign in (1.0, -1.0):
            with torch.no_grad():
                parameter.add_(direction, alpha=sign * 1e-5)
                values.append(float(loss()))
                parameter.add_(direction, alpha=-sign * 1e-5)
        assert (values[0] - values[1]) / 2e-5 == pytest.approx(slope, rel=1e-5, abs=1e-8), name


def test_batches_keep_states_dtypes_apart() -> None:
    """Float16 has no room for what bfloat16 holds, and bfloat16 none for float32's digits."""
    policy = Policy()
    short, *others = policy.samples(3)
    samples = [short.repacked(dtype=torch.float16)]
    samples += [sample.repacked(dtype=torch.bfloat16) for sample in others]
    parts = list(batches(samples, policy.heads(), 1000))
    assert [(len(p.token_ids), p.aux.dtype, p.final_hidden.dtype) for p in parts] == [
        (2, torch.bfloat16, torch.bfloat16),
        (1, torch.float16, torch.float16),
    ]


def test_gradients_of_windows_add_up_to_whole_sequence() -> None:
    """Anchors, metrics and gradients of windows of 4 anchors equal those of the whole rows."""
    policy, steps = Policy(), 3
    samples, heads = policy.samples(3), policy.heads()
    weights, gradients, sums, counts = step_weights(steps, 0.8), [], [], []
    for size in (4, 1000):
        model = head(5)
        parts = list(batches(samples, heads, size, window_steps=steps))
        valid = [valid_targets(batch, steps) for batch in parts]
        counts.append(sum(v.flatten(1).sum(1) for v in valid))
        total = torch.zeros(steps, len(METRICS), dtype=torch.float64)
        for batch, v in zip(parts, valid, strict=True):
            outcome = ttt_objective(model, batch, v, weights=weights, denominators=counts[-1])
            outcome.loss.backward()
            total += outcome.sums
        sums.append(total)
        gradients.append([p.grad for p in model.parameters()])
    assert torch.equal(*counts)
    assert (sums[0] - sums[1]).abs().max() < 1e-4
    for window, whole in zip(*gradients, strict=True):
        assert (window - whole).abs().max() < 1e-5 * whole.abs().max() + 1e-9
