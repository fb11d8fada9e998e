"""Predicted acceptance against a simulation of speculative sampling on the same policy.

The simulation drafts, verifies and jumps as vLLM does and knows nothing of the recordings that
the prediction is made from. Behind the last token it accepts nothing.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draft_trainer.config import TrainingConfig
from draft_trainer.drafters.batch import Batch
from draft_trainer.drafters.eagle3.head import Eagle3Head
from draft_trainer.drafters.expected_acceptance import (
    AcceptanceEstimate,
    Method,
    expected_acceptance,
    step_acceptance,
    truncated,
    visit_probabilities,
)
from draft_trainer.drafters.loss import valid_targets
from draft_trainer.training.learner import Learner
from slipstream.errors import RefusedError
from slipstream.sample import Sample
from slipstream.v1.draft_trainer_pb2 import SamplingParameters
from tests.draft_trainer.synthetic import VOCAB, Policy, collate, head, logits_of

K = 3
TEMPERATURE = 0.6


def _simulate(
    policy: Policy,
    model: Eagle3Head,
    method: Method,
    count: int,
    length: int,
    prompt: int,
    table: Tensor,
) -> tuple[Tensor, Tensor]:
    """Run speculative decoding ``count`` times side by side at T = 0.6.

    Returns:
        [count, K] drafts that were verified, and accepted, at each position.
    """
    ids = model.target_ids()
    heads = policy.heads(rows=ids)
    generator = torch.Generator().manual_seed(11)
    reached, accepted = torch.zeros(count, K), torch.zeros(count, K)

    def draw(p: Tensor) -> int:
        return int(torch.multinomial(p, 1, generator=generator))

    def p_of(tokens: list[int]) -> Tensor:
        return table[tokens[-2], tokens[-1]]

    def q_of(chains: list[list[int]], anchors: list[int], step: int) -> Tensor:
        """q over the whole vocabulary at ``step`` of each chain, fed its own drafts."""
        batch = collate(
            [policy.sample(torch.tensor(t), str(i)) for i, t in enumerate(chains)], heads
        )
        with torch.no_grad():
            *_, output = model.unroll(batch, step + 1)
            of_anchors = output[torch.arange(len(chains)), torch.tensor(anchors)]
            logits = logits_of(model, of_anchors, batch.policy)
        q = torch.zeros(len(chains), VOCAB)
        q[:, ids] = (logits / TEMPERATURE).softmax(-1)
        return q

    runs = torch.randint(VOCAB, (count, prompt), generator=generator).tolist()
    for tokens in runs:
        tokens.append(draw(p_of(tokens)))
    while drafting := [r for r in range(count) if len(runs[r]) < length]:
        anchors = {r: len(runs[r]) - 2 for r in drafting}
        for step in range(K):
            drafting = [r for r in drafting if len(runs[r]) < length]
            if not drafting:
                break
            q_all = q_of([runs[r] for r in drafting], [anchors[r] for r in drafting], step)
            surviving = []
            for r, q in zip(drafting, q_all, strict=True):
                p = p_of(runs[r])
                draft = int(q.argmax()) if method == "greedy" else draw(q)
                if method == "greedy":
                    q = torch.nn.functional.one_hot(torch.tensor(draft), VOCAB).float()
                reached[r, step] += 1
                if float(torch.rand((), generator=generator)) * q[draft] <= p[draft]:
                    accepted[r, step] += 1
                    runs[r].append(draft)
                    surviving.append(r)
                else:
                    runs[r].append(draw((p - q).clamp(min=0)))
            drafting = surviving
        for r in drafting:
            if len(runs[r]) < length:
                runs[r].append(draw(p_of(runs[r])))
    return reached, accepted


@pytest.mark.slow
@pytest.mark.parametrize("method", ["probabilistic", "greedy"])
@pytest.mark.parametrize("limits", [{"top_p": 0.6}, {"top_k": 2}])
def test_replay_predicts_simulated_acceptance(limits: dict[str, float], method: Method) -> None:
    """Every position's rate within four joint standard errors; the untruncated one is far off.

    Null: equal rates. Three comparisons a case at four standard errors: false alarms below 0.0008
    in all four together. The variance is the simulation's binomial one, plus as much of the
    recordings, which are twice as many (their own is lower: expectations instead of draws).
    """
    policy = Policy(sharpness=2.0)
    ids = torch.arange(VOCAB)
    config = TrainingConfig(learning_rate=5e-3, warmup_steps=5, ttt_steps=K)
    learner = Learner(head(5, draft_vocab=VOCAB), config)
    for seed in range(15):
        learner.step(policy.samples(40, seed=100 + seed), policy.heads(rows=ids))
    table = _truncated(policy.transitions(TEMPERATURE), **limits)
    length = 16
    reached, accepted = _simulate(policy, learner.head, method, 250, length, 4, table)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(VOCAB, (500, 4), generator=generator)
    while tokens.shape[1] < length:
        p = table[tokens[:, -2], tokens[:, -1]]
        tokens = torch.cat([tokens, torch.multinomial(p, 1, generator=generator)], 1)
    samples = [policy.sample(row, str(i), temperature=TEMPERATURE) for i, row in enumerate(tokens)]
    heads = policy.heads(rows=ids)
    plain = expected_acceptance(learner.head, samples, heads, K, method)
    for sample in samples:
        sample.header.sampling.MergeFrom(SamplingParameters(**limits))
    samples[0].header.sampling.presence_penalty = 0.5
    estimate = expected_acceptance(learner.head, samples, heads, K, method)
    assert plain.ignored == () and estimate.ignored == ("presence_penalty",)
    trials = float(reached[:, 0].sum())
    measured = (accepted.sum(0) / trials).double()
    assert measured[K - 1] > 0.05  # the head accepts enough to tell chains apart
    for rate, predicted in zip(measured.tolist(), estimate.accepted_per_position, strict=True):
        error = (1.5 * rate * (1 - rate) / trials) ** 0.5
        assert abs(rate - predicted) < 4 * error, (measured, estimate.accepted_per_position)
    assert estimate.drafts / 500 == pytest.approx(float(reached[:, 0].mean()), rel=0.05)
    if method == "probabilistic":
        first = float(measured[0])
        error = (first * (1 - first) / trials) ** 0.5
        assert abs(first - plain.accepted_per_position[0]) > 6 * error


def test_parameters_that_change_nothing_are_as_absent() -> None:
    """A framework's defaults arrive so, and lie in stores and recordings."""
    policy = Policy()
    samples = policy.samples(4)
    plain = expected_acceptance(head(5), samples, policy.heads(), K, "probabilistic")
    neutral = SamplingParameters(top_p=1.0, repetition_penalty=1.0, logit_bias={3: 0.0})
    for sample in samples:
        sample.header.sampling.CopyFrom(neutral)
    given = expected_acceptance(head(5), samples, policy.heads(), K, "probabilistic")
    assert given.ignored == ()
    assert given.acceptance_length == plain.acceptance_length
    samples[0].header.sampling.MergeFrom(SamplingParameters(top_p=0.5, repetition_penalty=1.1))
    given = expected_acceptance(head(5), samples, policy.heads(), K, "probabilistic")
    assert given.ignored == ("repetition_penalty",)


def _truncated(table: Tensor, top_p: float = 1.0, top_k: int = VOCAB) -> Tensor:
    """Row by row, by the definition."""
    cut = torch.zeros_like(table).view(-1, VOCAB)
    for row, p in zip(cut, table.view(-1, VOCAB), strict=True):
        mass = 0.0
        for token in p.argsort(descending=True)[:top_k].tolist():
            if mass >= top_p:
                break
            row[token] = p[token]
            mass += float(p[token])
    return (cut / cut.sum(-1, keepdim=True)).view_as(table)


def test_tokens_outside_the_draft_vocabulary_are_cut_first() -> None:
    """A tenth of the mass outside: gone with top-k 2 and top-p 0.75, kept in part with 0.95."""
    p = torch.tensor([[0.3, 0.5, 0.1]], dtype=torch.float64)
    for limits, wanted, mass in (
        ({"top_k": 2}, [0.375, 0.625, 0.0], 0.8),
        ({"top_p": 0.75}, [0.375, 0.625, 0.0], 0.8),
        ({"min_p": 0.5}, [0.375, 0.625, 0.0], 0.8),
        ({"top_k": 2, "top_p": 0.5}, [0.0, 1.0, 0.0], 0.5),
        ({"top_p": 0.95}, [0.3 / 0.95, 0.5 / 0.95, 0.1 / 0.95], 0.95),
        ({"top_k": 3}, [0.3, 0.5, 0.1], 1.0),
        ({}, [0.3, 0.5, 0.1], 1.0),
    ):
        found, kept = truncated(p, [SamplingParameters(**limits)])
        assert found[0].tolist() == pytest.approx(wanted) and float(kept) == pytest.approx(mass)


def test_visits_of_a_known_chain() -> None:
    """Always accept one and reject the second: anchors 3, 5, 7; the others are never visited."""
    mask = (torch.arange(10) >= 4)[None]
    known = torch.zeros(2, 1, 10, dtype=torch.bool)
    known[0, 0, 3:8], known[1, 0, 3:7] = True, True
    survival = torch.zeros(2, 1, 10, dtype=torch.float64)
    survival[0] = 1.0
    visits = visit_probabilities(survival, known, mask)
    assert visits[0].tolist() == [0, 0, 0, 1, 0, 1, 0, 1, 0, 0]
    half = visit_probabilities(survival * 0.5, known, mask)[0]
    assert half[3:6].tolist() == [1.0, 0.5, 0.5 + 0.25]


def test_a_perfect_head_accepts_everything() -> None:
    policy, model = Policy(), head(0, draft_vocab=VOCAB)
    heads = policy.heads(rows=torch.arange(VOCAB))
    samples = policy.samples(8)
    model.forward = exact_head  # type: ignore[method-assign]
    estimate = expected_acceptance(model, samples, heads, K, "probabilistic")
    # K + 1 tokens per verification: a visit at every fourth anchor, all accepted up to the end.
    anchors = [s.tokens - 5 for s in samples]
    accepted = [min(K, n - i) for n in anchors for i in range(0, n, K + 1)]
    assert estimate.drafts == pytest.approx(len(accepted), abs=1e-3)
    assert estimate.acceptance_length == pytest.approx(1 + sum(accepted) / len(accepted), abs=1e-4)


def exact_head(batch: Batch, steps: int, first_anchor: int) -> tuple[list[Tensor], Tensor]:
    """The teacher's own log-probs at every step's valid anchors, behind an lm_head of ones."""
    rows, tokens = batch.token_ids.shape
    outputs = []
    for step, known in enumerate(valid_targets(batch, steps)):
        row, anchor = known.nonzero(as_tuple=True)
        output = torch.zeros(rows, tokens - first_anchor, VOCAB)
        output[row, anchor - first_anchor] = batch.teacher_log_probs(row, anchor + step + 1)
        outputs.append(output)
    return outputs, torch.eye(VOCAB)


def test_jackknife_mean_is_estimate_in_any_batching() -> None:
    policy = Policy()
    samples = policy.samples(20)
    whole = expected_acceptance(head(5), samples, policy.heads(), K, "probabilistic")
    parts = expected_acceptance(
        head(5), samples, policy.heads(), K, "probabilistic", max_batch_tokens=50
    )
    assert float(whole.per_sequence.mean()) == pytest.approx(whole.acceptance_length, abs=1e-9)
    assert (whole.per_sequence - parts.per_sequence).abs().max() < 1e-4
    assert whole.sequences == 20


def test_acceptance_by_position_in_the_sequence() -> None:
    policy, model = Policy(), head(5)
    early = policy.samples(6)
    # Of these the first anchor, behind a prompt of four, is at 1023 and all others are beyond.
    late = [s.repacked(positions=s.positions + 1020) for s in policy.samples(6, seed=7)]

    def estimate(samples: list[Sample]) -> AcceptanceEstimate:
        return expected_acceptance(model, samples, policy.heads(), K, "probabilistic")

    alone, both = estimate(early), estimate(early + late)
    spans = both.by_position
    assert [*spans] == [0, 256, 1024]
    assert spans[0] == pytest.approx((alone.drafts, alone.acceptance_length))
    assert spans[256][0] == pytest.approx(6)
    assert spans[256][1] != pytest.approx(spans[1024][1], abs=0.01)
    assert sum(drafts for drafts, _ in spans.values()) == pytest.approx(both.drafts)
    tokens = sum(drafts * length for drafts, length in spans.values())
    assert tokens / both.drafts == pytest.approx(both.acceptance_length)


def test_no_anchor_is_no_acceptance_length() -> None:
    policy = Policy()
    sample = policy.samples(1)[0]
    silent = sample.repacked(loss_mask=torch.zeros_like(sample.loss_mask))
    with pytest.raises(RefusedError, match="no anchor"):
        expected_acceptance(head(), [silent], policy.heads(), K, "greedy")


@pytest.mark.parametrize("limits", [{"top_p": 0.6}, {"top_k": 2}])
def test_survival_averages_to_rate_under_truncation(limits: dict[str, float]) -> None:
    """Over every token that may come next, with the probability that it is sampled."""
    policy, ids = Policy(), torch.arange(VOCAB)
    rollouts = [torch.tensor([1, 2, token]) for token in range(VOCAB)]
    samples = [policy.sample(row, prompt=1, temperature=TEMPERATURE) for row in rollouts]
    for sample in samples:
        sample.header.sampling.MergeFrom(SamplingParameters(**limits))
    batch = collate(samples, policy.heads(rows=ids))
    known = valid_targets(batch, 1)
    model = head(5, draft_vocab=VOCAB)
    with torch.no_grad():
        rate, survival = step_acceptance(model, batch, known, "probabilistic", torch.float32)
    p = _truncated(policy.transitions(TEMPERATURE), **limits)[1, 2]
    mean = float((p * survival[0, :, 0]).sum())
    assert mean == pytest.approx(float(rate[0, 0, 0]), rel=1e-4)
