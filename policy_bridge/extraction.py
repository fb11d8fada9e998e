"""From records of forward passes to candidates, and from a chosen one to a sample."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from policy_bridge.batch import scores_of
from policy_bridge.capture_plan import CapturePlan, Chosen, HostRecord, Record
from policy_bridge.gather import gather_into
from policy_bridge.logprobs import (
    picked_logits,
    picked_logprobs,
    sampled_logits,
    sampled_logprobs,
)
from policy_bridge.sample import Sample
from policy_bridge.selection import Candidate, bytes_per_token, windows
from slipstream.packed import Numbers, layout_of, states_in, write_numbers
from slipstream.refusal import RefusedError

STATE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def candidates_of(plan: CapturePlan, index: int, record: Record) -> list[Candidate]:
    """Every sequence of a pass, or the windows of it, that could be shipped.

    Args:
        plan: of the window.
        index: the pass's place among those that are chosen from.
        record: the pass, with its numbers on the host.

    Raises:
        RefusedError: numbers that do not fit the pass, or states of a dtype that is not shipped.
    """
    final, host = record.states.final, _host(record)
    scores = scores_of("acceptance", record.acceptance, len(host.spans))
    layers = len(record.states.aux)
    token_bytes = bytes_per_token(layers, final.shape[-1], _dtype_of(plan, final).itemsize)
    max_tokens = plan.session.max_sample_tokens(token_bytes)
    return [
        candidate
        for span, acceptance in zip(host.spans, scores, strict=True)
        for candidate in windows(
            forward=index,
            row=span.row,
            start=span.start,
            loss_mask=host.loss_mask[span.row, span.start : span.end],
            token_bytes=token_bytes,
            max_tokens=max_tokens,
            acceptance=acceptance,
        )
    ]


def numbers_of(plan: CapturePlan, record: Record, chosen: Candidate) -> Numbers | None:
    """What the chosen tokens have beside states; None where a log-prob to be read is not finite.

    The context is out of the loss mask, and what nobody reads is 0: the first token's log-prob
    and logit, and where they are not finite those outside the loss mask.
    """
    host = _host(record)
    row, columns = chosen.row, slice(chosen.start, chosen.end)
    mask = host.loss_mask[row, columns].copy()
    mask[: max(1, chosen.fresh - chosen.start)] = False
    logprobs, logits = _sampled_on_host(plan, record, row, columns)
    for values in (logprobs, logits):
        values[0] = 0.0
        # Hardly ever: squares that overflow are looked at again.
        if not np.isfinite(np.dot(values, values)):
            values[~mask & ~np.isfinite(values)] = 0.0
            if values is logprobs and not np.isfinite(values).all():
                return None
    return Numbers(
        token_ids=host.token_ids[row, columns],
        positions=np.arange(chosen.offset, chosen.offset + chosen.tokens, dtype=np.int32),
        segment_ids=0,
        sampled_logprobs=logprobs,
        sampled_logits=logits,
        loss_mask=mask,
    )


def needs_weights(record: Record) -> bool:
    """Whether ``numbers_of`` reads the policy's weights for this pass."""
    host = _host(record)
    return host.logprobs is None or host.logits is None


def extract(plan: CapturePlan, chosen: Chosen, numbers: Numbers) -> Sample | None:
    """The chosen tokens in memory of their own, to be read after the runner's ``settle``.

    Returns:
        None where there is no memory for a sample of this priority.
    """
    states, candidate = chosen.record.states, chosen.candidate
    dtype = _dtype_of(plan, states.final)
    layout = layout_of(candidate.tokens, len(states.aux), states.final.shape[-1], dtype)
    loan = plan.reserve(layout.nbytes, chosen.priority)
    if loan is None:
        return None
    write_numbers(numbers, layout, loan.numpy())
    aux, final = states_in(loan, layout)
    row, start, tokens = candidate.row, candidate.start, candidate.tokens
    gather_into(aux, [layer[row].narrow(0, start, tokens) for layer in states.aux])
    gather_into(final, [states.final[row].narrow(0, start, tokens)])
    return Sample(
        plan.next_id(),
        plan.policy_version,
        plan.temperature,
        plan.session.aux_layers,
        layout,
        loan,
    )


def with_logits(record: Record) -> Record:
    """The record with the logits of the sampled tokens picked out of the pass's, if they are there.

    Without the pass's own, which are large. Those that the loop wrote into since, by a temperature
    for one, are no logits any more: then the chosen tokens' are computed from the weights.
    """
    states, logits = record.states, record.logits
    if states.logits is None:
        return record
    if logits is None and states.logits_unwritten:
        logits = picked_logits(states.logits, record.token_ids)
    return replace(record, states=replace(states, logits=None), logits=logits)


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


def _host(record: Record) -> HostRecord:
    assert record.host is not None, "its numbers are not on the host"
    return record.host


def _dtype_of(plan: CapturePlan, state: torch.Tensor) -> torch.dtype:
    dtype = plan.states_dtype or state.dtype
    if dtype not in STATE_DTYPES:
        raise RefusedError(
            "hidden_states.dtype", dtype, f"one of {STATE_DTYPES}", "set states_dtype"
        )
    return dtype


def _sampled_on_host(
    plan: CapturePlan, record: Record, row: int, columns: slice
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Copies of a row's log-probs and logits, float32."""
    host = _host(record)
    if host.logprobs is not None and host.logits is not None:
        return host.logprobs[row, columns].copy(), host.logits[row, columns].copy()
    found = _sampled(plan, record, row, columns)
    logprobs, logits = (values.float().cpu().numpy().copy() for values in found)
    return logprobs, logits


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
