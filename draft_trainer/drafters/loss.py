"""The objective of the training-time test: a draft's K steps against the policy's distribution.

Every valid row (anchor i, step s) has a loss against the policy's p at j = i + 1 + s. Rows are
averaged within a step, steps with the weights decay^s, normalised by their sum. In a row, z are
the logits, q = softmax(z), p the policy's probabilities over the draft vocabulary, S = sum(p) and
A = sum(min(p, q)), the acceptance rate:

    kl  -sum(p log q)   dz = S q - p         forward KL up to the teacher's entropy
    tv  1 - A           dz = q (a - 1[q<p])  a = sum of q where q < p
    lk  -log A          dz = the one of tv / A
    dspark              0.1 kl + 1.8 tv: 0.9 times the L1 distance (``drafters.dspark``)

p is NOT renormalised: S < 1 where the policy has mass outside the draft vocabulary, which is then
missing from p, as it is when vLLM verifies. q is taken at the rollout's temperature, because vLLM
divides the draft's logits by the request's temperature before it samples from them.

The logits of a training step, [K, tokens, draft vocabulary], are its largest tensors by far. Here a
chunk of them is computed, scored, replaced by its own gradient, multiplied into the gradients of
the hidden states and of lm_head, and dropped. The loss is a sum over rows, so its gradient is known
up to a factor in the forward pass; the backward pass only applies that factor. The teacher's rows
are computed once per chunk for all K steps: at the teacher's position j, step s is scored for the
anchor j - 1 - s.

Sources: EAGLE-3 (arXiv 2503.01840) for kl; arXiv 2602.23881 ("LK losses") for tv and lk; the
gradient computed in the forward pass is Liger Kernel's idea (arXiv 2410.10989).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import pad

from draft_trainer.drafters.batch import Batch, ahead, moved
from draft_trainer.drafters.draft import Draft
from draft_trainer.drafters.ops import add_product, product, rate_prediction
from draft_trainer.drafters.policy import PolicyHead, policy_logits
from draft_trainer.kernels import library
from draft_trainer.kernels.rows import score_rows

Target = Literal["kl", "tv", "lk", "dspark"]
MIXED: dict[Target, dict[Target, float]] = {"dspark": {"kl": 0.1, "tv": 1.8}}
"""The targets that are sums of others, with the factor of each."""
METRICS = ("loss", "top1_agreement", "acceptance", "outside_mass")

# Bytes of one chunk's logits: on a CPU few enough that products and scores find them in its caches,
# on a GPU, if there is room, enough that launches do not count.
_CHUNK_BYTES = 16 << 20
_GPU_CHUNK_BYTES = 512 << 20
# Rows of a chunk below which, on a GPU that is nearly full, a shorter pass is faster: every chunk
# reads and writes the whole gradient of lm_head.
_LEAST_ROWS = 256
# Elements of each tensor in the innermost loop: the few that it reads stay in a core's cache.
_BLOCK_ELEMENTS = 1 << 17
_SMALLEST_ACCEPTANCE = 1e-8

compiled_score: Callable[..., Tensor] | None = None
"""``score`` as ``compile_score`` made it, for training on a GPU; None: ``score`` itself."""


@dataclass(frozen=True, eq=False)
class TeacherRows:
    """The inputs of the policy's probabilities at N positions.

    Attributes:
        final_hidden: [N, H], input of the policy's lm_head.
        policy: how the policy makes its logits of them.
        logits_dtype: type of these logits; see ``policy_logits``.
        log_z: float32 [N], log of the whole vocabulary's sum of exp(logit / temperature).
        temperature: float32 [N].
        scaled: whether any temperature is not 1; to read that from a GPU the host would wait.
    """

    final_hidden: Tensor
    policy: PolicyHead
    logits_dtype: torch.dtype
    log_z: Tensor
    temperature: Tensor
    scaled: bool = True


def soft_target_loss(
    hidden: Tensor,
    lm_head: Tensor,
    teacher: TeacherRows,
    valid: Tensor,
    row_weights: Tensor,
    target: Target,
    frozen: int = 0,
    confidence: nn.Linear | None = None,
) -> tuple[Tensor, Tensor]:
    """Weighted loss of K * N rows and the sums of their metrics.

    Args:
        hidden: [K, N, H], input of the head's lm_head; row n of every step has row n's teacher.
            Overwritten by its gradient, where that is wanted.
        lm_head: [V, H], in the type of ``hidden``.
        teacher: of the N rows.
        valid: bool [K, N], rows that count.
        row_weights: float32 [K, N], factor of each valid row's loss.
        target: which loss.
        frozen: columns of ``lm_head``, the first ones, whose gradient nobody wants: it is 0.
        confidence: ``Draft.confidence``; a row's loss then also has the binary cross-entropy of
            its sigmoid to A, which is a constant there.

    Returns:
        The loss, a float32 scalar differentiable in ``hidden``, ``lm_head`` and ``confidence``;
        float64 [K, len(METRICS)], unweighted sums over the valid rows: the loss;
        argmax q = argmax p; A; the policy's mass outside the draft vocabulary.
    """
    predictor = () if confidence is None else (confidence.weight, confidence.bias)
    loss, sums = _SoftTargetLoss.apply(
        hidden,
        lm_head,
        teacher,
        valid,
        row_weights * valid,
        target,
        frozen,
        *predictor,
    )
    return loss, sums


class _SoftTargetLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        lm_head: Tensor,
        teacher: TeacherRows,
        valid: Tensor,
        row_weights: Tensor,
        target: Target,
        frozen: int,
        *predictor: Tensor,
    ) -> tuple[Tensor, Tensor]:
        steps, count, _ = hidden.shape
        learns = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        scores = torch.empty(
            *(steps, count, len(METRICS)), dtype=torch.float64, device=hidden.device
        )
        # Overwrites the states, chunk by chunk.
        grad_hidden = hidden.detach() if learns else None
        wide = torch.promote_types(hidden.dtype, torch.float32)
        # A draft that shares the policy's lm_head does not train it.
        grad_lm_head = None
        if ctx.needs_input_grad[1]:
            grad_lm_head = torch.zeros_like(lm_head[:, frozen:], dtype=wide)
        grad_predictor = [torch.zeros_like(parameter) for parameter in predictor]
        inverse_t = 1.0 / teacher.temperature
        # A row's factor is applied to its H states and not to its V logits.
        factors = (row_weights * inverse_t)[..., None].to(wide)
        row_bytes = (steps + 1) * len(lm_head) * hidden.element_size()
        for rows in chunks(count, row_bytes, hidden, _LEAST_ROWS):
            states = hidden[:, rows].flatten(0, 1)
            # The logits, replaced block by block by their gradient.
            logits = product(states, lm_head.T).unflatten(0, (steps, -1))
            policy = policy_logits(teacher.final_hidden[rows], teacher.policy, teacher.logits_dtype)
            scores[:, rows] = _score_blocks(
                *(logits, policy, teacher.log_z[rows], inverse_t[rows]),
                *(target, learns, teacher.scaled),
            )
            del policy
            to_states = None
            if predictor:
                rates = scores[:, rows, METRICS.index("acceptance")].flatten()
                weights = row_weights[:, rows].flatten()
                losses, to_states, *parts = rate_prediction(states, rates, weights, *predictor)
                scores[:, rows, 0] += losses.view(steps, -1)
                for total, part in zip(grad_predictor, parts, strict=True):
                    total += part
            if grad_hidden is None:
                continue
            gradient = logits.flatten(0, 1)
            factor = factors[:, rows]
            if grad_lm_head is not None:
                learned = states[:, frozen:].unflatten(0, (steps, -1))
                weighted = (learned * factor).to(states.dtype)
                add_product(grad_lm_head, gradient.T, weighted.flatten(0, 1))
            flowing = product(gradient, lm_head).unflatten(0, (steps, -1))
            torch.mul(flowing, factor, out=grad_hidden[:, rows])
            if to_states is not None:
                grad_hidden[:, rows, : to_states.shape[-1]] += to_states.unflatten(0, (steps, -1))
        sums = (scores * valid[..., None]).sum(1)
        loss = (scores[..., 0] * row_weights).sum()
        ctx.save_for_backward(grad_hidden, grad_lm_head, *grad_predictor)
        ctx.frozen = frozen
        ctx.mark_non_differentiable(sums)
        return loss.to(wide), sums

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_lm_head, *grad_predictor = ctx.saved_tensors
        if grad_loss.is_cpu and grad_loss == 1.0:
            # The loss is the root of the backward pass: saves a pass over the largest gradient.
            for_lm_head = grad_lm_head
        else:
            for_lm_head = None if grad_lm_head is None else grad_lm_head * grad_loss
            grad_hidden = grad_hidden * grad_loss.to(grad_hidden.dtype)
        if for_lm_head is not None:
            for_lm_head = for_lm_head.to(grad_hidden.dtype)
            if ctx.frozen:
                for_lm_head = pad(for_lm_head, (ctx.frozen, 0))
        return grad_hidden, for_lm_head, *[None] * 5, *(g * grad_loss for g in grad_predictor)


def _score_blocks(
    logits: Tensor,
    policy: Tensor,
    log_z: Tensor,
    inverse_t: Tensor,
    target: Target,
    learns: bool,
    scaled: bool = True,
) -> Tensor:
    """The metrics of every row, and every row's gradient in place of its logits.

    Args:
        logits: [K, R, V] of the head, before temperature; overwritten when ``learns``.
        policy: [R, V], the policy's logits, before temperature, in their own type.
        log_z: float32 [R].
        inverse_t: float32 [R].
        target: which loss.
        learns: whether gradients are wanted.
        scaled: whether any of ``inverse_t`` is not 1.

    Returns:
        float64 [K, R, len(METRICS)].
    """
    if target in MIXED:
        gradient, losses = torch.zeros_like(logits), []
        for one, factor in MIXED[target].items():
            part = logits.clone()
            scores = _score_blocks(part, policy, log_z, inverse_t, one, learns, scaled)
            gradient.add_(part, alpha=factor)
            losses.append(factor * scores[..., 0])
        if learns:
            logits.copy_(gradient)
        scores[..., 0] = torch.stack(losses).sum(0)
        return scores
    if library.runs_on(logits) and library.runs_on(policy):
        return score_rows(logits, policy, log_z, inverse_t, target, learns)
    steps, count, vocab = logits.shape
    scores = torch.empty(steps, count, len(METRICS), dtype=torch.float64, device=logits.device)
    function = compiled_score if learns and compiled_score is not None else score
    # A compiled function takes whole tensors.
    blocks = logits.is_cpu and function is score
    block = max(1, _BLOCK_ELEMENTS // (steps * vocab)) if blocks else count
    for start in range(0, count, block):
        rows = slice(start, start + block)
        scores[:, rows] = function(
            *(logits[:, rows], policy[rows], log_z[rows, None], inverse_t[rows, None]),
            *(target, learns, scaled),
        )
    return scores


def score(
    logits: Tensor,
    policy: Tensor,
    log_z: Tensor,
    inverse_t: Tensor,
    target: Target,
    learns: bool,
    scaled: bool,
) -> Tensor:
    """Score one block as ``_score_blocks``; ``log_z`` and ``inverse_t`` are [R, 1]."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    p = (policy * inverse_t).to(wide).sub_(log_z).exp_()
    mass, likeliest = p.sum(-1), p.argmax(-1, keepdim=True)
    z = logits * inverse_t if scaled else logits
    highest, where = z.max(-1)
    # Not aten's _softmax(half_to_float=True): on a GPU it takes float16 alone.
    q = torch.softmax(z, -1, dtype=wide)
    top1 = z.gather(-1, likeliest.expand(len(z), -1, -1))[..., 0] == highest
    scratch = torch.minimum(p, q)
    rate = scratch.sum(-1)
    if target == "kl":
        # log q = z - log sum exp(z); the highest entry of q gives that sum.
        log_sum = highest - q.gather(-1, where[..., None])[..., 0].log()
        loss = mass * log_sum - torch.mul(p, z, out=scratch).sum(-1)
        if learns:
            torch.addcmul(p.neg_(), q, mass[:, None], out=logits)
    else:
        bounded = rate.clamp(min=_SMALLEST_ACCEPTANCE)
        loss = 1.0 - bounded if target == "tv" else -bounded.log()
        if learns:
            # d (1 - sum min(p, q)): q where it is above p, less its share of what is below.
            below = torch.lt(q, p, out=scratch)
            share = (q * below).sum(-1, keepdim=True)
            if target == "lk":
                q.div_(bounded[..., None])
            torch.mul(q, share - below, out=logits)
    return torch.stack([loss, top1.to(wide), rate, (1.0 - mass).expand_as(rate)], -1)


def chunks(count: int, row_bytes: int, like: Tensor, least: int = 1) -> Iterator[slice]:
    """Split ``count`` rows into slices, all but the last of one size.

    Args:
        count: number of rows.
        row_bytes: bytes of one row's logits.
        like: a tensor on their device.
        least: rows that a GPU must have room for at a time, or for as many as it would take if it
            were empty.

    Raises:
        torch.OutOfMemoryError: it has not.
    """
    most = _CHUNK_BYTES
    if not like.is_cpu:
        most = _GPU_CHUNK_BYTES
        if like.is_cuda:
            free, total = torch.cuda.mem_get_info(like.device)
            reserved = torch.cuda.memory_reserved(like.device)
            share = torch.cuda.get_per_process_memory_fraction(like.device)
            free = min(free, int(share * total) - reserved)
            unused = reserved - torch.cuda.memory_allocated(like.device)
            # The rest is for what is computed from the logits, in float32.
            room = (free + unused) // 8
            if room < min(most, min(count, least) * row_bytes):
                found = f"room for {room // row_bytes} rows of logits at a time"
                raise torch.OutOfMemoryError(f"{found}, expected {least}")
            most = min(most, room)
    size = max(1, most // row_bytes)
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


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
    """Mark the steps of anchors that have a target which serving could ask for.

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
    head: Draft,
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
        batch: rows, on the CPU or on the head's device; the teacher is a constant.
        valid: bool [K, B, T], from ``valid_targets`` or any part of it; on the CPU, so that a GPU
            is never waited for.
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
    # Index of step 0's anchor. A row without an anchor for a step takes any other, not valid there.
    flat = row * anchors_a_row + index - 1 - first_anchor
    # For each step, how many rows have their anchor before the first one.
    before = [int((flat < step).sum()) for step in range(steps)]
    per_step = (torch.tensor(weights, dtype=torch.float32) / divisors.cpu()).float()
    scaled = bool((batch.temperature != 1.0).any())

    device = head.device
    batch = batch.to(device)
    used, flat, row, index, per_step = (
        moved(x, device) for x in (at_teacher[:, row, index], flat, row, index, per_step)
    )
    teacher = TeacherRows(
        final_hidden=batch.final_hidden[row, index],
        policy=batch.policy,
        logits_dtype=batch.logits_dtype,
        log_z=batch.log_z[row, index],
        temperature=batch.temperature[row],
        scaled=scaled,
    )

    # Cast once, differentiably, however often a parameter is used; autocast would not.
    parameters = {name: p.to(compute_dtype) for name, p in head.named_parameters()}
    outputs, lm_head = functional_call(head, parameters, (batch, steps, first_anchor))
    hidden = _AtTeachers.apply(flat, before, *(output.flatten(0, 1) for output in outputs))
    del outputs
    loss, sums = soft_target_loss(
        hidden,
        lm_head,
        teacher,
        used,
        per_step[:, None].expand(-1, len(row)),
        target,
        head.frozen,
        head.confidence,
    )
    return Objective(loss, sums, counts)


class _AtTeachers(torch.autograd.Function):
    """Gathers each step's outputs: row n of step s is that of the anchor ``flat[n] - s``.

    K tensors [M, H] become one [K, N, H]. ``flat`` ascends, so no row of a step is taken twice
    except those before the start, which have no gradient. So the backward pass may copy rows, where
    that of indexing has to add them up.
    """

    @staticmethod
    def forward(ctx: Any, flat: Tensor, before: list[int], *outputs: Tensor) -> Tensor:
        ctx.save_for_backward(flat)
        ctx.before = before
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
            before = ctx.before[step]
            rows = of_step.new_zeros(ctx.rows, of_step.shape[1])
            grads.append(rows.index_copy_(0, flat[before:] - step, of_step[before:]))
        return None, None, *grads


def _behind(x: Tensor, count: int) -> Tensor:
    """x[:, j - count] at index j, zeros before the start; [B, T] to the same shape."""
    shifted = torch.zeros_like(x)
    if count < x.shape[1]:
        shifted[:, count:] = x[:, : x.shape[1] - count]
    return shifted
