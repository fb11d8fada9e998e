"""The consensus loss of the training-time test, and what it says about acceptance.

Per step s: soft cross-entropy of the head's q against the policy's p over the draft vocabulary,
forward KL up to the teacher's entropy. p is NOT renormalised over the draft vocabulary: the mass
outside it is missing from p, as it is when vLLM verifies. Steps are averaged with the weights
decay^s, normalised by their sum.

q is taken at the rollout's temperature, because vLLM divides the draft's logits by the request's
temperature before it samples from them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draft_trainer.batch import Batch
from draft_trainer.head import Eagle3Head
from draft_trainer.unroll import ahead, ttt_unroll

METRICS = ("loss", "top1_agreement", "acceptance", "greedy_acceptance", "outside_mass")


@dataclass(frozen=True, eq=False)
class Objective:
    """Outcome of one pass over a batch.

    Attributes:
        loss: scalar, differentiable.
        sums: float64 [K, len(METRICS)], sums over the valid anchors of each step: cross-entropy;
            argmax q = argmax p; sum over x of min(p, q), the acceptance rate of probabilistic
            drafts; p(argmax q), that of greedy drafts; policy mass outside the draft vocabulary.
        counts: int64 [K], valid anchors of each step.
    """

    loss: Tensor
    sums: Tensor
    counts: Tensor


def valid_targets(batch: Batch, steps: int) -> Tensor:
    """Where an anchor's step has a target that serving could ask for.

    The target of (i, s) is x_{i+2+s} and its teacher y_{i+1+s}, whose log Z comes with x_{i+2+s}:
    the target must lie in the row, i + 2 + s <= T - 1. It and every token fed before it
    (x_{i+1} .. x_{i+2+s}) must be completion tokens, because vLLM first drafts after it sampled
    the first completion token: the first anchor of a completion is the last prompt position.

    Returns:
        bool [K, B, T].
    """
    valid = []
    chain = ahead(batch.loss_mask, 1)
    for step in range(steps):
        chain = chain & ahead(batch.loss_mask, step + 2)
        valid.append(chain & ahead(batch.teacher_known, step + 1))
    return torch.stack(valid)


def step_weights(steps: int, decay: float) -> list[float]:
    """decay^s for s = 0 .. steps - 1, normalised by the sum."""
    weights = [decay**step for step in range(steps)]
    return [weight / sum(weights) for weight in weights]


def ttt_objective(
    head: Eagle3Head,
    batch: Batch,
    valid: Tensor,
    *,
    weights: list[float],
    denominators: Tensor | None = None,
) -> Objective:
    """Loss and metrics of the head on a batch, in one pass.

    Args:
        head: the draft head.
        batch: rows; the teacher is a constant.
        valid: bool [K, B, T], from ``valid_targets``.
        weights: K step weights, see ``step_weights``.
        denominators: [K], what each step's sum is divided by; the number of valid anchors of the
            step in this batch if None (at least 1). Given when a batch is one part of many.
    """
    steps = valid.shape[0]
    counts = valid.flatten(1).sum(1)
    divisors = counts.clamp(min=1) if denominators is None else denominators
    temperature = batch.temperature[:, None].expand(batch.token_ids.shape)
    loss = torch.zeros((), device=valid.device)
    sums = torch.zeros(steps, len(METRICS), dtype=torch.float64, device=valid.device)
    for step, output in enumerate(ttt_unroll(head, batch, steps)):
        chosen = valid[step]
        logits = head.logits(output[chosen]) / temperature[chosen][:, None]
        log_p = ahead_rows(batch.teacher_log_probs, step + 1, chosen)
        cross_entropy, sums[step] = _score(logits, log_p)
        loss = loss + weights[step] * cross_entropy / divisors[step]
    return Objective(loss, sums, counts)


def ahead_rows(x: Tensor, count: int, chosen: Tensor) -> Tensor:
    """x[b, i + count] for every chosen (b, i): [B, T, V] and bool [B, T] to [N, V]."""
    row, index = chosen.nonzero(as_tuple=True)
    return x[row, index + count]


def _score(logits: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy (differentiable) and summed METRICS of [N, draft_vocab] rows."""
    log_q = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    p = log_p.exp()
    cross_entropy = -(p * log_q).sum()
    with torch.no_grad():
        q = log_q.exp()
        best = q.argmax(-1, keepdim=True)
        metrics = torch.stack(
            [
                cross_entropy.double(),
                (best[:, 0] == p.argmax(-1)).sum().double(),
                torch.minimum(p, q).sum().double(),
                p.gather(1, best).sum().double(),
                (1.0 - p.sum(-1)).sum().double(),
            ]
        )
    return cross_entropy, metrics
