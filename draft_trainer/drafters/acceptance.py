"""Acceptance that vLLM would measure, predicted from recorded states.

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

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from draft_trainer.drafters.batch import Batch, ahead, batches
from draft_trainer.drafters.draft import Draft
from draft_trainer.drafters.loss import valid_targets
from draft_trainer.drafters.policy import PolicyHeads
from slipstream.errors import RefusedError
from slipstream.sample import Sample

Method = Literal["probabilistic", "greedy"]


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
    """

    acceptance_length: float
    accepted_per_position: tuple[float, ...]
    drafts: float
    sequences: int
    per_sequence: Tensor
    groups: tuple[str, ...]


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
    if k < 1:
        raise RefusedError("k", k, "at least 1", "ask for the served draft length")
    if not samples:
        raise _no_anchor()
    accepted_parts, drafts_parts = [], []
    groups: list[str] = []
    with torch.inference_mode():
        # ``batches`` sorts by length, the same way for every head: pairs stay pairs.
        device = head.lm_head.weight.device
        for batch in batches(samples, policy_heads, max_batch_tokens, device):
            groups.extend(batch.groups)
            known = valid_targets(batch, k)
            rate, survival = step_acceptance(head, batch, known, method)
            alive = visit_probabilities(survival, known, batch.loss_mask) * known[0]
            drafts_parts.append(alive.sum(1))
            for step in range(k):
                alive = alive * known[step]
                accepted_parts.append((alive * rate[step]).sum(1))
                alive = alive * survival[step]
    accepted = torch.stack([torch.cat(accepted_parts[step::k]) for step in range(k)])
    return _estimate(accepted.cpu(), torch.cat(drafts_parts).cpu(), groups)


def step_acceptance(
    head: Draft, batch: Batch, known: Tensor, method: Method
) -> tuple[Tensor, Tensor]:
    """Acceptance of every anchor's step, before and after its token is seen.

    Args:
        head: the draft head.
        batch: rows.
        known: bool [K, B, T], where to compute.
        method: how vLLM drafts.

    Returns:
        a and r, float64 [K, B, T], 0 where not known: the acceptance rate given the tokens up to
        x_{i+1+s}, and given x_{i+2+s} as well.
    """
    rate = torch.zeros(known.shape, dtype=torch.float64, device=known.device)
    survival = rate.clone()
    draft_ids = head.draft_ids_of(batch.token_ids)
    temperature = batch.temperature[:, None].expand(batch.token_ids.shape)
    first_anchor = int(known.flatten(0, 1).any(0).int().argmax())
    for step, output in enumerate(head.unroll(batch, known.shape[0], first_anchor)):
        chosen = known[step]
        q = (
            (head.logits(output[chosen[:, first_anchor:]]) / temperature[chosen][:, None])
            .double()
            .softmax(-1)
        )
        row, anchor = chosen.nonzero(as_tuple=True)
        p = batch.teacher_log_probs(row, anchor + step + 1).double().exp()
        x = ahead(draft_ids, step + 2)[chosen]
        if method == "greedy":
            best = q.argmax(-1)
            rate[step][chosen] = p.gather(1, best[:, None])[:, 0].clamp(max=1.0)
            survival[step][chosen] = (best == x).double()
        else:
            p_x = ahead(batch.sampled_logprobs, step + 2)[chosen].double().exp()
            q_x = q.gather(1, x.clamp(min=0)[:, None])[:, 0] * (x >= 0)
            rate[step][chosen] = torch.minimum(p, q).sum(-1)
            survival[step][chosen] = (q_x / p_x).clamp(max=1.0)
    return rate, survival


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


def _estimate(accepted: Tensor, drafts: Tensor, groups: Sequence[str]) -> AcceptanceEstimate:
    """From sums per sequence, accepted [k, rows] and drafts [rows], and the rows' groups."""
    present = drafts > 0
    accepted, drafts = accepted[:, present], drafts[present]
    count = len(drafts)
    if count == 0:
        raise _no_anchor()
    total = drafts.sum()
    positions = accepted.sum(1) / total
    ratio = float(positions.sum())
    # Linearised ratio estimator: how much each sequence moves sum(accepted) / sum(drafts).
    influence = (accepted.sum(0) - ratio * drafts) / total
    return AcceptanceEstimate(
        acceptance_length=1.0 + ratio,
        accepted_per_position=tuple(positions.tolist()),
        drafts=float(total),
        sequences=count,
        per_sequence=1.0 + ratio + count * influence,
        groups=tuple(g for g, here in zip(groups, present.tolist(), strict=True) if here),
    )


def _no_anchor() -> RefusedError:
    return RefusedError(
        "samples", "no anchor", "two completion tokens in a row", "wait for completions"
    )
