"""The objective of the training-time test: the head's K steps against the policy.

Every valid row (anchor i, step s) has a loss against the policy's p at j = i + 1 + s
(``soft_targets``). p is NOT renormalised over the draft vocabulary: the mass outside it is missing
from p, as it is when vLLM verifies. Rows are averaged within a step, steps with the weights
decay^s, normalised by their sum.

q is taken at the rollout's temperature, because vLLM divides the draft's logits by the request's
temperature before it samples from them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draft_trainer.eagle3.batch import Batch
from draft_trainer.eagle3.computing import computing_in
from draft_trainer.eagle3.head import Eagle3Head
from draft_trainer.eagle3.rms_norm import rms_norm
from draft_trainer.eagle3.soft_targets import METRICS, Target, TeacherRows, soft_target_loss
from draft_trainer.eagle3.unroll import ahead, ttt_unroll

__all__ = ["METRICS", "Objective", "Target", "step_weights", "ttt_objective", "valid_targets"]


@dataclass(frozen=True, eq=False)
class Objective:
    """Outcome of one pass over a batch.

    Attributes:
        loss: scalar, differentiable in the head's parameters.
        sums: float64 [K, len(METRICS)], sums over the valid anchors of each step, see
            ``soft_target_loss``.
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
    chain = batch.anchors & ahead(batch.loss_mask, 1)
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
    compute_dtype: torch.dtype = torch.float32,
    target: Target = "kl",
) -> Objective:
    """Loss and metrics of the head on a batch, in one pass.

    Args:
        head: the draft head; its parameters are the float32 masters.
        batch: rows; the teacher is a constant.
        valid: bool [K, B, T], from ``valid_targets`` or any part of it.
        weights: K step weights, see ``step_weights``.
        denominators: [K], what each step's sum is divided by; the number of valid anchors of the
            step in this batch if None (at least 1). Given when a batch is one part of many.
        compute_dtype: what matrices are multiplied in. Soft-max, norms and sums are at least
            float32, gradients arrive in the parameters' own type.
        target: the loss of a row.
    """
    steps = valid.shape[0]
    counts = valid.flatten(1).sum(1)
    divisors = counts.clamp(min=1) if denominators is None else denominators
    # Step s of the anchor i has its teacher at j = i + 1 + s. Rows are the js that any step uses.
    at_teacher = torch.stack([_behind(valid[step], step + 1) for step in range(steps)])
    row, index = at_teacher.any(0).nonzero(as_tuple=True)
    first_anchor = int(valid.flatten(0, 1).any(0).int().argmax())
    anchors_a_row = valid.shape[2] - first_anchor
    # Of the anchor of step 0; where a row has no anchor for a step, some other one stands in.
    flat = row * anchors_a_row + index - 1 - first_anchor
    teacher = TeacherRows(
        final_hidden=batch.final_hidden[row, index].to(compute_dtype),
        lm_head_rows=batch.lm_head_rows.to(compute_dtype),
        log_z=batch.log_z[row, index],
        temperature=batch.temperature[row],
    )
    per_step = (torch.tensor(weights, device=valid.device) / divisors).float()

    def score(computing: Eagle3Head) -> tuple[Tensor, Tensor]:
        outputs = ttt_unroll(computing, batch, steps, first_anchor)
        norm = computing.norm
        normed = [rms_norm(output.flatten(0, 1), norm.weight, norm.eps) for output in outputs]
        return soft_target_loss(
            _AtTeachers.apply(flat, *normed),
            computing.lm_head.weight,
            teacher,
            at_teacher[:, row, index],
            per_step[:, None].expand(-1, len(row)),
            target,
        )

    loss, sums = computing_in(head, compute_dtype, score)
    return Objective(loss, sums, counts)


class _AtTeachers(torch.autograd.Function):
    """Row n of step s is what step s has for the anchor ``flat[n] - s``: [M, H] to [K, N, H].

    ``flat`` ascends, so no row of a step is taken twice but for those before the start, which have
    no gradient. The backward pass may copy rows then, where indexing's own has to add them up.
    """

    @staticmethod
    def forward(ctx: Any, flat: Tensor, *outputs: Tensor) -> Tensor:
        ctx.save_for_backward(flat)
        ctx.rows = len(outputs[0])
        taken = outputs[0].new_empty(len(outputs), len(flat), outputs[0].shape[1])
        for step, output in enumerate(outputs):
            torch.index_select(output, 0, (flat - step).clamp(min=0), out=taken[step])
        return taken

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (flat,) = ctx.saved_tensors
        grads = []
        for step, of_step in enumerate(grad):
            before = int((flat < step).sum())
            rows = of_step.new_zeros(ctx.rows, of_step.shape[1])
            grads.append(rows.index_copy_(0, flat[before:] - step, of_step[before:]))
        return None, *grads


def _behind(x: Tensor, count: int) -> Tensor:
    """x[:, j - count] at index j, zeros before the start; [B, T] to the same shape."""
    shifted = torch.zeros_like(x)
    if count < x.shape[1]:
        shifted[:, count:] = x[:, : x.shape[1] - count]
    return shifted
