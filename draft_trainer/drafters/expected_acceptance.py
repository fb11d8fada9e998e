"""Predicts the acceptance that vLLM would measure, from recorded states.

**Why a recorded rollout is enough.** Speculative sampling emits tokens distributed as p. Given
that a token x was emitted at a verified position whose draft came from q, the draft was accepted
with probability min(p(x), q(x)) / p(x) = min(1, q(x) / p(x)) (probabilistic drafts), or exactly
when x = argmax q (greedy drafts). While a chain is accepted its drafts ARE the recorded tokens, so
teacher forcing on the recording is exact. With r_s that probability at step s of anchor i, the
chain survives to step s with probability prod_{j<s} r_j, and

    E[accepted at s] = E_data[ prod_{j<s} r_j * a_s ],

where the last factor may be replaced by its mean over the next token, a_s = sum_x min(p, q) or
p(argmax q), which lowers the variance and changes no mean. A plain product of a_s would be wrong:
a_j and a_s of one chain are correlated through the tokens in between.

**Sampling parameters.** vLLM verifies against the policy's distribution after temperature, top-k
and top-p, and takes its drafts' q at the temperature alone. So is p here (``truncated``); it is
exact with a full draft vocabulary, and with a part of it as far as the tokens outside are the least
likely ones. Penalties and logit bias depend on the tokens before and are not replayed: the figure
is then one of the distribution without them, and says so.

**Which anchors.** vLLM drafts where a verification ended and nowhere else: from the last prompt
position, then a + 1 further when a drafts were accepted. Hard tokens end chains, so the visited
anchors are not a uniform sample: each recording is walked with the exact probabilities of being at
every anchor (a renewal recursion).

**The end of a recording.** A draft behind the last recorded token counts as drafted and not
accepted. vLLM counts such drafts too (its counters run before the stop check), and measured on vLLM
0.32 next to nothing is accepted behind an end-of-sequence token. For a window that was cut out of a
longer completion this is too low, by less than one chain per window and for all heads alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import pad

from draft_trainer.drafters.batch import Batch, ahead, batches, moved
from draft_trainer.drafters.draft import Draft
from draft_trainer.drafters.loss import chunks, valid_targets
from draft_trainer.drafters.ops import linear
from draft_trainer.drafters.policy import PolicyHeads
from slipstream.errors import RefusedError
from slipstream.sample import Sample
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import release_pb2

Method = Literal["probabilistic", "greedy"]

SPANS = (0, 256, 1024, 4096, 16384)
"""First position of each span of ``AcceptanceEstimate.by_position``. Positions count the prompt:
how far back a draft attends decides how well it drafts, and a window does not say where its
completion began."""

_MOST_WALKED = 1 << 20
"""Most positions, padding included, whose visits are computed at once."""


@dataclass(frozen=True, eq=False)
class AcceptanceEstimate:
    """Expected acceptance at draft length k.

    Attributes:
        acceptance_length: mean tokens per verification step, bonus token included; in [1, k + 1].
        accepted_per_position: k probabilities that the draft at a position is accepted (together
            with all before it), as vLLM's per-position counters over its number of drafts.
        drafts: expected number of verification steps.
        sequences: sequences with at least one anchor.
        per_sequence: float64 [sequences], pseudo-values: their mean is ``acceptance_length``, and
            their standard deviation over sqrt(sequences) is its standard error (linearised ratio).
            Pair them between two heads on the same samples.
        groups: what each sequence belongs to (``Sample.group``); sequences of one prompt are not
            independent.
        completions: the completion of each (``Sample.completion``).
        ignored: sampling parameters of the rollouts that the figure leaves out, by name.
        by_position: drafts and acceptance length of those that begin in a span of positions in
            their sequence, by its first one (``SPANS``); without spans that have none.
    """

    acceptance_length: float
    accepted_per_position: tuple[float, ...]
    drafts: float
    sequences: int
    per_sequence: Tensor
    groups: tuple[str, ...]
    completions: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    by_position: Mapping[int, tuple[float, float]] = field(default_factory=dict)


def expected_acceptance(
    head: Draft,
    samples: Sequence[Sample],
    policy_heads: PolicyHeads,
    k: int,
    method: Method,
    max_batch_tokens: int = 8192,
) -> AcceptanceEstimate:
    """Predict the acceptance of ``head`` at draft length ``k`` on the samples' policy.

    Args:
        head: with its draft vocabulary.
        samples: rollouts of the policy (whole completions, to start where vLLM does).
        policy_heads: must hold the samples' policy versions.
        k: served draft length, at least 1.
        method: how vLLM drafts.
        max_batch_tokens: tokens of one forward pass, padding included.

    Raises:
        RefusedError: no sample has an anchor (there is no acceptance length, not even 1.0), a
            policy version is not held, or the head has no draft vocabulary.
    """
    device = head.device
    return acceptance_on(batches(samples, policy_heads, max_batch_tokens, device), head, k, method)


def acceptance_on(
    collated: Iterable[Batch],
    head: Draft,
    k: int,
    method: Method,
    compute_dtype: torch.dtype | None = None,
) -> AcceptanceEstimate:
    """Predict as ``expected_acceptance``, on what ``batches`` made of samples, for any device.

    Several heads may be measured on the same batches; the order of the rows is then the same, so
    that pairs stay pairs.

    Args:
        compute_dtype: what the draft's matrices are multiplied in on a CPU; None: the type of its
            weights. On a GPU it is bfloat16, as flash attention takes 16-bit types only.
    """
    if k < 1:
        raise RefusedError("k", k, "at least 1", "ask for the served draft length")
    walked: list[tuple[Tensor, ...]] = []
    waiting: list[tuple[Tensor, ...]] = []
    names: list[tuple[str, str]] = []
    ignored: set[str] = set()
    dtype = compute_dtype or next(head.parameters()).dtype
    if head.device.type != "cpu":
        dtype = torch.bfloat16
    with torch.inference_mode():
        for batch in collated:
            names.extend(zip(batch.groups, batch.completions, strict=True))
            ignored.update(name for sampling in batch.sampling for name in _ignored(sampling))
            known = valid_targets(batch, k)
            rates = step_acceptance(head, batch, known, method, dtype)
            part = (*rates, known, batch.positions, batch.loss_mask)
            rows, longest = zip(*(one[-1].shape for one in (*waiting, part)), strict=True)
            if waiting and sum(rows) * max(longest) > _MOST_WALKED:
                walked.append(_walk(waiting))
                waiting = []
            waiting.append(part)
        if not names:
            raise _no_anchor()
        walked.append(_walk(waiting))
    accepted, drafts, spans = (torch.cat(each, dim=-1) for each in zip(*walked, strict=True))
    return replace(_estimate(accepted, drafts, spans, names), ignored=tuple(sorted(ignored)))


def _walk(parts: Sequence[tuple[Tensor, ...]]) -> tuple[Tensor, Tensor, Tensor]:
    """Walk the rows of batches at once: every position costs Python's time, for one row or many.

    Args:
        parts: of each batch what ``step_acceptance`` returned, where it was computed, the positions
            and the loss mask.

    Returns:
        Sums per row: accepted tokens by step, float64 [K, rows]; drafts, float64 [rows]; drafts and
        accepted tokens by span of positions, float64 [2, spans, rows].
    """
    longest = max(part[0].shape[-1] for part in parts)
    rate, survival, known, positions, loss_mask = (
        torch.cat([pad(x, (0, longest - x.shape[-1])) for x in each], dim=-2)
        for each in zip(*parts, strict=True)
    )
    alive = drafts = visit_probabilities(survival, known, loss_mask) * known[0]
    accepted = torch.empty_like(rate)
    for step in range(len(known)):
        alive = alive * known[step]
        accepted[step] = alive * rate[step]
        alive = alive * survival[step]
    span = torch.bucketize(positions, torch.tensor(SPANS[1:]), right=True)
    spans = drafts.new_zeros(2, len(drafts), len(SPANS))
    spans.scatter_add_(2, span.expand(2, -1, -1), torch.stack([drafts, accepted.sum(0)]))
    return accepted.sum(-1), drafts.sum(1), spans.transpose(1, 2)


def step_acceptance(
    head: Draft, batch: Batch, known: Tensor, method: Method, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Acceptance of every anchor's step, before and after its token is seen.

    Args:
        head: the draft head.
        batch: rows, on the CPU.
        known: bool [K, B, T], where to compute; on the CPU.
        method: how vLLM drafts.
        dtype: type in which the draft computes.

    Returns:
        a and r, float64 [K, B, T] on the CPU, 0 where not known: the acceptance rate given the
        tokens up to x_{i+1+s}, and given x_{i+2+s} as well.
    """
    rate = torch.zeros(known.shape, dtype=torch.float64)
    survival = rate.clone()
    device = head.device
    first_anchor = int(known.flatten(0, 1).any(0).int().argmax())
    cut = any(_top_p(one) < 1.0 or one.top_k or one.min_p for one in batch.sampling)
    of_rows, batch = batch.sampling, batch.to(device)
    draft_ids = head.draft_ids_of(batch.token_ids)
    parameters = {name: p.to(dtype) for name, p in head.named_parameters()}
    outputs, lm_head = functional_call(head, parameters, (batch, known.shape[0], first_anchor))
    for step, output in enumerate(outputs):
        places = known[step].nonzero()
        # Bytes per logit, over all tensors of a row's size that are alive at one time.
        for rows in chunks(len(places), len(lm_head) * (64 if cut else 16), lm_head):
            b, i = places[rows].unbind(1)
            row, anchor = moved(b, device), moved(i, device)
            z = linear(output[row, anchor - first_anchor], lm_head)
            wide = torch.promote_types(z.dtype, torch.float32)
            q = (z.to(wide) / batch.temperature[row, None]).softmax(-1)
            p = batch.teacher_log_probs(row, anchor + step + 1).exp()
            p, kept = truncated(p, [of_rows[number] for number in b.tolist()] if cut else ())
            x = draft_ids[row, anchor + step + 2]
            if method == "greedy":
                best = q.argmax(-1)
                accepted = p.gather(1, best[:, None])[:, 0].clamp(max=1.0)
                survived = (best == x).double()
            else:
                p_x = batch.sampled_logprobs[row, anchor + step + 2].double().exp() / kept
                q_x = q.gather(1, x.clamp(min=0)[:, None])[:, 0] * (x >= 0)
                accepted = torch.minimum(p, q).sum(-1, dtype=torch.float64)
                survived = (q_x / p_x).clamp(max=1.0)
            rate[step, b, i], survival[step, b, i] = accepted.double().cpu(), survived.cpu()
    return rate, survival


def truncated(p: Tensor, sampling: Sequence[pb.SamplingParameters]) -> tuple[Tensor, Tensor]:
    """The distribution after min-p, top-k and top-p, in vLLM's order and with its rounding of ties.

    Args:
        p: [N, V], over the draft vocabulary; what is missing to 1 lies outside, on tokens
            that are taken for less likely than those inside.
        sampling: of every row; none: nothing is cut.

    Returns:
        The probabilities, [N, V], and the mass that was kept of ``p`` and outside, float64 [N].
    """
    if not sampling:
        return p, p.new_ones(len(p), dtype=torch.float64)
    # In float64: the last digits decide where a sum reaches its bound.
    p = p.double()

    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=p.dtype, device=p.device)[:, None]

    least = column([one.min_p for one in sampling]) * p.amax(-1, keepdim=True)
    ordered, order = p.sort(-1, descending=True)
    top_k = column([one.top_k or p.shape[1] for one in sampling]).long().clamp(max=p.shape[1])
    least = torch.maximum(least, ordered.gather(1, top_k - 1))
    keeps = ordered >= least
    # The mass outside the draft vocabulary is cut first.
    whole = keeps.all(-1, keepdim=True)
    mass = torch.where(whole, 1.0, (ordered * keeps).sum(-1, keepdim=True))
    top_p = column([_top_p(one) for one in sampling]) * mass
    before = ordered.cumsum(-1) - ordered
    # A bound of 1 cuts nothing, however the sum was rounded.
    keeps &= (before < top_p) | (top_p >= mass)
    keeps[:, 0] = True
    inside = (ordered * keeps).sum(-1, keepdim=True)
    kept = torch.where(whole & keeps.all(-1, keepdim=True), torch.maximum(inside, top_p), inside)
    return p * torch.zeros_like(keeps).scatter(1, order, keeps) / kept, kept[:, 0]


def _top_p(sampling: pb.SamplingParameters) -> float:
    return sampling.top_p if sampling.HasField("top_p") else 1.0


def _ignored(sampling: pb.SamplingParameters) -> list[str]:
    found = {
        "repetition_penalty": sampling.repetition_penalty not in (0.0, 1.0),  # 0: absent
        "presence_penalty": sampling.presence_penalty != 0.0,
        "frequency_penalty": sampling.frequency_penalty != 0.0,
        "logit_bias": any(sampling.logit_bias.values()),
    }
    return [name for name, given in found.items() if given]


def visit_probabilities(survival: Tensor, known: Tensor, loss_mask: Tensor) -> Tensor:
    """Probability that vLLM drafts at each anchor of the recorded sequences.

    Args:
        survival: float64 [K, B, T], r: acceptance of step s of anchor i given the recording.
        known: bool [K, B, T].
        loss_mask: bool [B, T].

    Returns:
        float64 [B, T]; 1 at the first anchor of every completion.
    """
    k, rows, length = survival.shape
    following = ahead(loss_mask, 1)
    starts = following & ~loss_mask
    starts[:, 0] |= following[:, 0]  # a window that begins inside a completion
    visits = torch.zeros(rows, length + k + 1, dtype=torch.float64, device=survival.device)
    visits[:, :length] = starts.double()
    for i in range(length):
        alive = visits[:, i] * known[0, :, i]
        for step in range(k):
            # Past the last recorded token there is no next anchor: the request has ended.
            alive = alive * known[step, :, i]
            rejected = alive * (1.0 - survival[step, :, i])
            visits[:, i + step + 1] += rejected
            alive = alive - rejected
        visits[:, i + k + 1] += alive
    return visits[:, :length]


def _estimate(
    accepted: Tensor, drafts: Tensor, spans: Tensor, names: Sequence[tuple[str, str]]
) -> AcceptanceEstimate:
    """Estimate from the sums per sequence of ``_walk``, and the group and completion of each."""
    present = drafts > 0
    of_spans = zip(SPANS, *spans[..., present].sum(-1).tolist(), strict=True)
    accepted, drafts = accepted[:, present], drafts[present]
    count = len(drafts)
    if count == 0:
        raise _no_anchor()
    total = drafts.sum()
    positions = accepted.sum(1) / total
    ratio = float(positions.sum())
    # Linearised ratio estimator: how much each sequence moves sum(accepted) / sum(drafts).
    influence = (accepted.sum(0) - ratio * drafts) / total
    kept = [pair for pair, here in zip(names, present.tolist(), strict=True) if here]
    return AcceptanceEstimate(
        acceptance_length=1.0 + ratio,
        accepted_per_position=tuple(positions.tolist()),
        drafts=float(total),
        sequences=count,
        per_sequence=1.0 + ratio + count * influence,
        groups=tuple(group for group, _ in kept),
        completions=tuple(completion for _, completion in kept),
        by_position={first: (n, 1.0 + tokens / n) for first, n, tokens in of_spans if n > 0.0},
    )


def _no_anchor() -> RefusedError:
    return RefusedError(
        "samples",
        "no anchor",
        "two completion tokens in a row",
        "wait for completions",
        reason=release_pb2.REFUSAL_REASON_NO_ANCHOR,
    )
