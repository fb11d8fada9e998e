"""Loss, metrics and gradient of the head's logits against the policy, chunk by chunk in one pass.

The logits of a training step are its largest tensors by far: [K, tokens, draft vocabulary]. Here
a chunk of them is made, scored, turned into its own gradient in place, multiplied into the
gradients of the hidden states and of lm_head, and forgotten. The loss is a sum over rows, so its
gradient is known up to a factor before the backward pass starts; that pass only applies the
factor. The teacher's rows are made once per chunk and serve all K steps: at the teacher's
position j the step s is scored for the anchor j - 1 - s.

Notation of a row: logits z, q = softmax(z), p the policy's probabilities over the draft
vocabulary (not renormalised), S = sum(p) <= 1, A = sum(min(p, q)), the acceptance rate.

    kl  -sum(p log q)   dz = S q - p         forward KL up to the teacher's entropy
    tv  1 - A           dz = q (a - 1[q<p])  a = sum of q where q < p
    lk  -log A          dz = the one of tv / A

Sources: EAGLE-3 (arXiv 2503.01840) for kl; arXiv 2602.23881 ("LK losses") for tv and lk; the
gradient computed in the forward pass is Liger Kernel's idea (arXiv 2410.10989).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from draft_trainer.eagle3.matmul import product
from draft_trainer.kernels.library import kernels_for
from draft_trainer.kernels.score_rows import score_rows

Target = Literal["kl", "tv", "lk"]
METRICS = ("loss", "top1_agreement", "acceptance", "outside_mass")

_CHUNK_BYTES = 16 << 20
# Elements of one tensor in the innermost loop, so that the few it reads stay in a core's cache.
_BLOCK_ELEMENTS = 1 << 17
_LOG2E = 1.4426950408889634
_SMALLEST_ACCEPTANCE = 1e-8


@dataclass(frozen=True, eq=False)
class TeacherRows:
    """What the policy's probabilities at N positions are made of.

    Attributes:
        final_hidden: [N, H], input of the policy's lm_head.
        lm_head_rows: [V, H], rows of the draft vocabulary, in the type of ``final_hidden``.
        log_z: float32 [N], log of the whole vocabulary's sum of exp(logit / temperature).
        temperature: float32 [N].
    """

    final_hidden: Tensor
    lm_head_rows: Tensor
    log_z: Tensor
    temperature: Tensor


def soft_target_loss(
    hidden: Tensor,
    lm_head: Tensor,
    teacher: TeacherRows,
    valid: Tensor,
    row_weights: Tensor,
    target: Target,
) -> tuple[Tensor, Tensor]:
    """Weighted loss of K * N rows and the sums of their metrics.

    Args:
        hidden: [K, N, H], input of the head's lm_head; row n of every step has row n's teacher.
        lm_head: [V, H], in the type of ``hidden``.
        teacher: of the N rows.
        valid: bool [K, N], rows that count.
        row_weights: float32 [K, N], factor of each valid row's loss.
        target: which loss.

    Returns:
        The loss, a float32 scalar differentiable in ``hidden`` and ``lm_head``; float64
        [K, len(METRICS)], unweighted sums over the valid rows: the loss; argmax q = argmax p;
        A; the policy's mass outside the draft vocabulary.
    """
    loss, sums = _SoftTargetLoss.apply(
        hidden,
        lm_head,
        teacher.final_hidden,
        teacher.lm_head_rows,
        teacher.log_z,
        teacher.temperature,
        valid,
        row_weights * valid,
        target,
    )
    return loss, sums


class _SoftTargetLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        lm_head: Tensor,
        final_hidden: Tensor,
        lm_head_rows: Tensor,
        log_z: Tensor,
        temperature: Tensor,
        valid: Tensor,
        row_weights: Tensor,
        target: Target,
    ) -> tuple[Tensor, Tensor]:
        steps, count, _ = hidden.shape
        learns = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        sums = torch.zeros(steps, len(METRICS), dtype=torch.float64, device=hidden.device)
        loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
        grad_hidden = torch.empty_like(hidden) if learns else None
        wide = torch.promote_types(hidden.dtype, torch.float32)
        grad_lm_head = torch.zeros_like(lm_head, dtype=wide) if learns else None
        for rows in _chunks(count, (steps + 1) * len(lm_head) * hidden.element_size()):
            states = hidden[:, rows].flatten(0, 1)
            # Holds the logits first, then, block by block, their gradient.
            logits = product(states, lm_head.T).unflatten(0, (steps, -1))
            policy = product(final_hidden[rows], lm_head_rows.T)
            scores = _score_blocks(
                logits, policy, log_z[rows], 1.0 / temperature[rows], target, learns
            )
            sums += (scores * valid[:, rows, None]).sum(1)
            loss += (scores[..., 0] * row_weights[:, rows]).sum()
            if grad_hidden is None or grad_lm_head is None:
                continue
            gradient = logits.flatten(0, 1)
            # The factor of a row is applied to its H states and not to its V logits.
            factor = (row_weights[:, rows] / temperature[rows]).reshape(-1, 1).to(wide)
            flowing = product(gradient, lm_head).to(wide).mul_(factor)
            grad_hidden[:, rows] = flowing.to(hidden.dtype).unflatten(0, (steps, -1))
            grad_lm_head += product(gradient.T, (states * factor).to(states.dtype))
        ctx.save_for_backward(grad_hidden, grad_lm_head)
        ctx.mark_non_differentiable(sums)
        return loss.to(wide), sums

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_lm_head = ctx.saved_tensors
        if not grad_loss.is_cuda and grad_loss == 1.0:
            # The loss was where the backward pass began: a pass over the largest gradient less.
            return grad_hidden, grad_lm_head.to(grad_hidden.dtype), *[None] * 7
        for_lm_head = (grad_lm_head * grad_loss).to(grad_hidden.dtype)
        return grad_hidden * grad_loss.to(grad_hidden.dtype), for_lm_head, *[None] * 7


def _score_blocks(
    logits: Tensor, policy: Tensor, log_z: Tensor, inverse_t: Tensor, target: Target, learns: bool
) -> Tensor:
    """The metrics of every row, and every row's gradient in place of its logits.

    Args:
        logits: [K, R, V] of the head, before temperature; overwritten when ``learns``.
        policy: [R, V], the policy's logits, before temperature.
        log_z: float32 [R].
        inverse_t: float32 [R].

    Returns:
        float64 [K, R, len(METRICS)].
    """
    kernels = kernels_for(logits)
    if kernels is not None:
        return score_rows(kernels, logits, policy, log_z, inverse_t, target, learns)
    steps, count, vocab = logits.shape
    wide = torch.promote_types(logits.dtype, torch.float32)
    scores = torch.zeros(steps, count, len(METRICS), dtype=torch.float64, device=logits.device)
    cool = bool((inverse_t != 1.0).any())
    block = count if logits.is_cuda else max(1, _BLOCK_ELEMENTS // vocab)
    p, z, q, scratch = (
        torch.empty(min(block, count), vocab, dtype=wide, device=logits.device) for _ in range(4)
    )
    for start in range(0, count, block):
        rows = slice(start, min(start + block, count))
        size = rows.stop - rows.start
        if size < len(p):
            p, z, q, scratch = p[:size], z[:size], q[:size], scratch[:size]
        # exp2, because torch's exp is four times slower on a CPU.
        p.copy_(policy[rows]).mul_(inverse_t[rows, None] * _LOG2E)
        p.sub_(log_z[rows, None] * _LOG2E).exp2_()
        likeliest = p.argmax(-1, keepdim=True)
        mass = p.sum(-1)
        for step in range(steps):
            z.copy_(logits[step, rows])
            if cool:
                z.mul_(inverse_t[rows, None])
            torch.softmax(z, -1, out=q)
            highest = z.amax(-1)
            row = scores[step, rows]
            row[:, 1] = z.gather(1, likeliest)[:, 0] == highest
            row[:, 2] = torch.minimum(p, q, out=scratch).sum(-1)
            row[:, 3] = 1.0 - mass
            if target == "kl":
                # log q = z - log sum exp(z), and the latter is what the highest entry says.
                log_sum = highest - q.amax(-1).log()
                row[:, 0] = mass * log_sum - torch.linalg.vecdot(p, z)
                if learns:
                    q.mul_(mass[:, None]).sub_(p)
            else:
                rate = row[:, 2].clamp(min=_SMALLEST_ACCEPTANCE)
                row[:, 0] = 1.0 - rate if target == "tv" else -rate.log()
                if learns:
                    _toward_overlap(q, p, scratch)
                    if target == "lk":
                        q.div_(rate[:, None].to(wide))
            if learns:
                logits[step, rows] = q
    return scores


def _toward_overlap(q: Tensor, p: Tensor, scratch: Tensor) -> None:
    """Put the gradient of 1 - sum(min(p, q)) with respect to the logits in place of ``q``."""
    below = torch.lt(q, p, out=scratch)
    share = torch.linalg.vecdot(q, below)
    q.mul_(share[:, None] - below)


def _chunks(count: int, row_bytes: int) -> Iterator[slice]:
    """Slices of at most ``_CHUNK_BYTES``, all but the last of one size."""
    size = max(1, _CHUNK_BYTES // row_bytes)
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))
