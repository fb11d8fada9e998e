"""From records of forward passes to candidates, and from a chosen one to a sample."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from policy_bridge.batch import scores_of
from policy_bridge.capture_plan import CapturePlan, Record
from policy_bridge.gather import gather_into, sample_pieces
from policy_bridge.logprobs import (
    picked_logits,
    picked_logprobs,
    sampled_logits,
    sampled_logprobs,
)
from policy_bridge.pool import carve, carved_bytes
from policy_bridge.sample import Sample
from policy_bridge.selection import Candidate, bytes_per_token, windows
from slipstream.refusal import RefusedError

STATE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def candidates_of(plan: CapturePlan, index: int, record: Record) -> list[Candidate]:
    """Every sequence of a pass, or the windows of it, that could be shipped.

    Args:
        plan: of the window.
        index: the pass's place among those that are chosen from.
        record: the pass.

    Raises:
        RefusedError: masks, positions or numbers that do not fit the pass.
    """
    final = record.states.final
    scores = scores_of("acceptance", record.acceptance, len(record.spans))
    layers = len(record.states.aux)
    token_bytes = bytes_per_token(layers, final.shape[-1], _dtype_of(plan, final).itemsize)
    mask: Sequence[Sequence[bool]] = record.loss_mask.tolist()
    return [
        candidate
        for span, acceptance in zip(record.spans, scores, strict=True)
        for candidate in windows(
            forward=index,
            row=span.row,
            start=span.start,
            loss_mask=mask[span.row][span.start : span.end],
            token_bytes=token_bytes,
            max_tokens=plan.session.max_sample_tokens(token_bytes),
            acceptance=acceptance,
        )
    ]


def extract(plan: CapturePlan, record: Record, chosen: Candidate, priority: int) -> Sample | None:
    """The chosen tokens in memory of their own, to be read after ``settle`` and ``cleared``.

    Returns:
        None where there is no memory for a sample of this priority.
    """
    states = record.states
    dtype = _dtype_of(plan, states.final)
    pieces = sample_pieces(chosen.tokens, len(states.aux), states.final.shape[-1], dtype)
    loan = plan.reserve(carved_bytes(pieces), priority)
    if loan is None:
        return None
    aux, final, token_ids, positions, logprobs, logits, mask = carve(loan, pieces)
    columns = slice(chosen.start, chosen.end)
    gather_into(aux, [layer[chosen.row, columns] for layer in states.aux])
    gather_into(final, [states.final[chosen.row, columns]])
    token_ids.copy_(record.token_ids[chosen.row, columns], non_blocking=True)
    torch.arange(chosen.offset, chosen.offset + chosen.tokens, out=positions)
    mask.copy_(record.loss_mask[chosen.row, columns], non_blocking=True)
    own_logprobs, own_logits = _sampled(plan, record, chosen.row, columns)
    logprobs.copy_(own_logprobs, non_blocking=True)
    logits.copy_(own_logits, non_blocking=True)
    return Sample(
        sample_id=plan.next_id(),
        policy_version=plan.policy_version,
        temperature=plan.temperature,
        aux_layers=plan.session.aux_layers,
        token_ids=token_ids,
        positions=positions,
        loss_mask=mask,
        aux_hidden_states=aux,
        final_hidden_state=final,
        sampled_logprobs=logprobs,
        sampled_logits=logits,
    )


def cleared(sample: Sample, chosen: Candidate) -> Sample:
    """The sample with its context out of the loss mask and 0 for what nobody reads.

    That is the first token's log-prob and logit, and where they are not finite those
    outside the loss mask. In place.
    """
    mask = sample.loss_mask
    mask[: max(1, chosen.fresh - chosen.start)] = False
    for values in (sample.sampled_logprobs, sample.sampled_logits):
        values[0] = 0.0
        finite = values.isfinite()
        # Hardly ever: and every operation here is one of the policy's thread, for each sample.
        if not bool(finite.all()):
            values.masked_fill_(~mask & ~finite, 0.0)
    return sample


@torch.no_grad()
def without_logits(plan: CapturePlan, record: Record) -> Record:
    """The record with every token's logit and log-prob, and without the pass's logits.

    For weights that cannot be read later: those that are spread over ranks, and those on a
    device, which the policy may have changed when the side stream gets to them.

    Raises:
        RefusedError: weights that are spread, of a pass whose logits were not seen; logits
            that were written in place since the pass.
    """
    states, logits, logprobs = record.states, record.logits, record.logprobs
    if logits is None or logprobs is None:
        if states.logits is not None:
            seen = states.unwritten_logits()
            own_logits = picked_logits(seen, record.token_ids)
            if logprobs is None:
                logprobs = picked_logprobs(seen, record.token_ids, plan.temperature)
        elif plan.modules.shards:
            raise RefusedError(
                "sampled_logits",
                "not given, of a pass that does not call lm_head",
                "sampled_logits and sampled_logprobs",
                "pass both, or let the pass call lm_head (no modules.final_norm)",
            )
        else:
            rows = [
                _sampled(plan, record, row, slice(None)) for row in range(len(record.token_ids))
            ]
            logprobs = torch.stack([row[0] for row in rows])
            own_logits = torch.stack([row[1] for row in rows])
        logits = own_logits if logits is None else logits
    return replace(record, states=replace(states, logits=None), logits=logits, logprobs=logprobs)


def _dtype_of(plan: CapturePlan, state: torch.Tensor) -> torch.dtype:
    dtype = plan.states_dtype or state.dtype
    if dtype not in STATE_DTYPES:
        raise RefusedError(
            "hidden_states.dtype", dtype, f"one of {STATE_DTYPES}", "set states_dtype"
        )
    return dtype


def _sampled(
    plan: CapturePlan, record: Record, row: int, columns: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and logits of a row's sampled tokens: as given, else from the weights."""
    logprobs = record.logprobs[row, columns] if record.logprobs is not None else None
    logits = record.logits[row, columns] if record.logits is not None else None
    if logprobs is not None and logits is not None:
        return logprobs, logits
    states, modules = record.states, plan.modules
    final = states.final[row, columns]
    tokens = record.token_ids[row, columns].to(final.device)
    head = (modules.head_weight, modules.head_bias, states.logits_dtype)
    if logits is None:
        logits = sampled_logits(final, tokens, *head)
    if logprobs is None:
        logprobs = sampled_logprobs(final, tokens, *head, plan.temperature)
    return logprobs, logits
