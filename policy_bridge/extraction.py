"""From forward passes to candidates, and from chosen ones to samples.

Up to the choice everything stays on the policy's device. What is computed for a sample (the sampled
tokens' logits and log-probabilities) is computed for the chosen rows alone, where the policy's
weights are at hand then; only the chosen tokens' states move to host memory.

For a sequence x with final hidden states h: logit_t = h_{t-1} . W[x_t], and log p(x_t | x_<t) =
logit_t / temperature - log Z_{t-1}. The wire carries logit and log-probability of every token,
which fixes log Z without a full row of logits (slipstream.v1.PackedStates).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from policy_bridge.hooks import ForwardStates
from policy_bridge.model import PolicyModules
from policy_bridge.selection import Candidate, Span, scores_of, spans_of, windows
from slipstream.errors import RefusedError
from slipstream.sample import FLOAT8, STATE_DTYPES, Sample
from slipstream.tensors import quantize

Floats = NDArray[np.float32]

_BLOCK_BYTES = 64 << 20
"""Bound on the float32 logits of one block of rows, while log Z is computed."""

_COPY_VALUES = (1 << 15) - 1
"""From ``at::internal::GRAIN_SIZE`` values (ATen/Parallel.h) on, torch shares a copy out over a
pool of threads. Beside the policy's own pool that would be twice as many threads as cores."""


@dataclass(frozen=True)
class Record:
    """A forward pass and what ``Capture.ship`` was told of it.

    Attributes:
        states: of the pass.
        token_ids, loss_mask, attention_mask, position_ids, logprobs, logits: [B, S], see
            ``Capture.ship``.
        acceptance: one number a sequence.
    """

    states: ForwardStates
    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor | None
    logprobs: torch.Tensor | None
    logits: torch.Tensor | None
    acceptance: torch.Tensor | Sequence[float] | None


@dataclass(frozen=True)
class HostRecord:
    """A pass with the numbers that the choice and the samples need on the host, copied once.

    Attributes:
        record: the pass.
        spans: its sequences.
        token_ids: int32 [B, S].
        loss_mask: bool [B, S].
        logprobs, logits: float32 [B, S]; None where they are computed for what is chosen.
    """

    record: Record
    spans: Sequence[Span]
    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    logprobs: Floats | None
    logits: Floats | None

    @classmethod
    def of(cls, record: Record) -> HostRecord:
        """Of a pass. Raises RefusedError for masks or positions that are not of whole sequences."""
        shape = record.states.final.shape[:2]
        return cls(
            record=record,
            spans=spans_of(record.attention_mask, record.position_ids, (shape[0], shape[1])),
            # Copies in any case: the loop may write into its own before the samples are written.
            token_ids=record.token_ids.cpu().numpy().astype(np.int32),
            loss_mask=record.loss_mask.cpu().numpy().copy(),
            logprobs=_floats(record.logprobs),
            logits=_floats(record.logits),
        )


@dataclass(frozen=True)
class Chosen:
    """A candidate that goes out, with its log-probs and logits, ``sampled``: float32 [2, T]."""

    host: HostRecord
    candidate: Candidate
    sampled: Floats
    priority: int


def state_dtype(wanted: torch.dtype | None, state: torch.Tensor) -> torch.dtype:
    """The dtype in which states are sent. Raises RefusedError for one that is not sent."""
    dtype = wanted or state.dtype
    if dtype not in (*STATE_DTYPES, FLOAT8):
        expected = f"one of {STATE_DTYPES}"
        raise RefusedError("hidden_states.dtype", dtype, expected, "set states_dtype")
    return dtype


def candidates_of(
    index: int, host: HostRecord, token_bytes: int, max_sample_tokens: int
) -> list[Candidate]:
    """Every sequence of a pass, or the windows of it, that could be sent.

    ``index`` is the pass's place among those that are chosen from.

    Raises:
        RefusedError: an acceptance that does not fit the pass.
    """
    scores = scores_of("acceptance", host.record.acceptance, len(host.spans))
    return [
        candidate
        for span, acceptance in zip(host.spans, scores, strict=True)
        for candidate in windows(
            forward=index,
            row=span.row,
            start=span.start,
            loss_mask=host.loss_mask[span.row, span.start : span.end],
            token_bytes=token_bytes,
            max_tokens=max_sample_tokens,
            acceptance=acceptance,
        )
    ]


def sampled_of(
    host: HostRecord, chosen: Candidate, modules: PolicyModules, temperature: float
) -> Floats | None:
    """Log-probs and logits of the chosen tokens; None where one that is read is not finite.

    What is not read is 0: those of the first token, and where they are not finite those outside
    the loss mask.

    Returns:
        float32 [2, T].
    """
    row, columns = chosen.row, slice(chosen.start, chosen.end)
    if host.logprobs is not None and host.logits is not None:
        found = np.stack([host.logprobs[row, columns], host.logits[row, columns]])
    else:
        pair = _sampled(host.record, modules, temperature, row, columns)
        found = torch.stack([values.float() for values in pair]).cpu().numpy()
    found[:, 0] = 0.0
    mask = _mask_of(host, chosen)
    found[:, ~mask] = np.where(np.isfinite(found[:, ~mask]), found[:, ~mask], 0.0)
    return found if np.isfinite(found).all() else None


def fill(sample: Sample, chosen: Chosen) -> None:
    """Write a chosen candidate into a sample's block; complete when the current stream is."""
    host, candidate = chosen.host, chosen.candidate
    row, columns = candidate.row, slice(candidate.start, candidate.end)
    sample.token_ids.numpy()[:] = host.token_ids[row, columns]
    sample.positions.numpy()[:] = np.arange(candidate.offset, candidate.offset + candidate.tokens)
    sample.segment_ids.numpy()[:] = 0
    sample.loss_mask.numpy()[:] = _mask_of(host, candidate)
    sample.sampled_logprobs.numpy()[:], sample.sampled_logits.numpy()[:] = chosen.sampled
    sample.clear_padding()
    states = host.record.states
    aux = [layer[row].narrow(0, candidate.start, candidate.tokens) for layer in states.aux]
    final = states.final[row].narrow(0, candidate.start, candidate.tokens)
    if sample.layout.dtype != FLOAT8:
        gather_into(sample.aux, aux)
        gather_into(sample.final_hidden, [final])
        return
    for into, scales, parts in (
        (sample.aux, sample.scales[:-1], aux),
        (sample.final_hidden, sample.scales[-1:], [final]),
    ):
        values, found = quantize(torch.cat(parts, -1), sample.layout.hidden_size)
        into.copy_(values, non_blocking=True)
        scales.copy_(found, non_blocking=True)


def gather_into(host: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Fill ``host`` with ``parts`` side by side, cast to its dtype.

    On the host that is one copy of each part, in blocks that take no second core. From a device
    the parts are concatenated and cast there, then copied once; ``host`` is complete when the
    current stream is (at once, where its memory is not pinned).

    Args:
        host: [T, sum of widths], CPU.
        parts: [T, width] each, on one device.
    """
    if parts[0].device.type != "cpu":
        host.copy_(torch.cat([part.to(host.dtype) for part in parts], -1), non_blocking=True)
        return
    at = 0
    for part in parts:
        width = part.shape[1]
        columns = host.narrow(1, at, width)
        rows = max(1, _COPY_VALUES // width)
        for to, block in zip(columns.split(rows), part.split(rows), strict=True):
            to.copy_(block)
        at += width


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
def without_logits(record: Record, modules: PolicyModules, temperature: float) -> Record:
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
            seen = states.logits
            if not states.logits_unwritten:
                found = "written in place between the forward pass and ship"
                step = "divide by the temperature out of place, or pass the sampled ones"
                raise RefusedError("logits", found, "the output of lm_head as it was", step)
            own_logits = picked_logits(seen, record.token_ids)
            if logprobs is None:
                logprobs = picked_logprobs(seen, record.token_ids, temperature)
        elif modules.shards:
            found = "not given, of a pass that does not call lm_head"
            step = "pass both, or let the pass call lm_head (no modules.final_norm)"
            raise RefusedError("sampled_logits", found, "sampled logits and log-probs", step)
        else:
            rows = [
                _sampled(record, modules, temperature, row, slice(None))
                for row in range(len(record.token_ids))
            ]
            logprobs = torch.stack([row[0] for row in rows])
            own_logits = torch.stack([row[1] for row in rows])
        logits = own_logits if logits is None else logits
    return replace(record, states=replace(states, logits=None), logits=logits, logprobs=logprobs)


def sampled_logits(
    final: torch.Tensor,
    token_ids: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The logit of each token given those before it, rounded as the policy rounds its own.

    The sum is taken in float32 and rounded to ``dtype``, as a matrix product with float32
    accumulation does: a log-probability that the policy derived from its bfloat16 logits then
    gives back its own log Z.

    Args:
        final: [T, H].
        token_ids: [T], whole numbers below V, on the same device.
        weight: lm_head [V, H].
        bias: lm_head [V] or None.
        dtype: of the policy's logits.

    Returns:
        float32 [T]; the first is 0.
    """
    target = token_ids[1:].long()
    rows = weight[target].to(dtype).float()
    logits = (final[:-1].to(dtype).float() * rows).sum(-1)
    if bias is not None:
        logits = logits + bias[target].to(dtype).float()
    return F.pad(logits.to(dtype).float(), (1, 0))


def sampled_logprobs(
    final: torch.Tensor,
    token_ids: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    temperature: float,
) -> torch.Tensor:
    """The log-probability of each token given those before it, at ``temperature``.

    Goes through the full vocabulary in blocks of rows, so that a long sequence does not need
    [T, V] floats at once. Arguments and result as ``sampled_logits``.
    """
    blocks = [final.new_zeros(1, dtype=torch.float32)]
    head = weight.to(dtype)
    head_bias = bias.to(dtype) if bias is not None else None
    rows = max(1, _BLOCK_BYTES // (4 * len(weight)))
    for start in range(0, len(token_ids) - 1, rows):
        end = min(start + rows, len(token_ids) - 1)
        logits = F.linear(final[start:end].to(dtype), head, head_bias).float() / temperature
        target = token_ids[start + 1 : end + 1].long()
        blocks.append(logits.log_softmax(-1).gather(-1, target[:, None]).squeeze(-1))
    return torch.cat(blocks)


def picked_logits(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """The logits [B, S] of the tokens [B, S] out of all [B, S, V]; column 0 is 0. Float32."""
    target = token_ids[:, 1:, None].long().to(logits.device)
    return F.pad(logits[:, :-1].gather(-1, target).squeeze(-1).float(), (1, 0))


def picked_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, temperature: float
) -> torch.Tensor:
    """The log-probabilities [B, S] of the tokens at ``temperature``; as ``picked_logits``."""
    columns = max(1, _BLOCK_BYTES // (4 * logits.shape[0] * logits.shape[2]))
    blocks = [
        (logits[:, start : start + columns].float() / temperature).logsumexp(-1)
        for start in range(0, logits.shape[1], columns)
    ]
    log_z = F.pad(torch.cat(blocks, 1)[:, :-1], (1, 0))
    return picked_logits(logits, token_ids) / temperature - log_z


def _floats(values: torch.Tensor | None) -> Floats | None:
    return None if values is None else values.float().cpu().numpy().copy()


def _mask_of(host: HostRecord, chosen: Candidate) -> NDArray[np.bool_]:
    """The loss mask without the context that a window repeats, and without the first token."""
    mask = host.loss_mask[chosen.row, chosen.start : chosen.end].copy()
    mask[: max(1, chosen.fresh - chosen.start)] = False
    return mask


def _sampled(
    record: Record, modules: PolicyModules, temperature: float, row: int, columns: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and logits of a row's sampled tokens: as given, else from the weights."""
    logprobs = record.logprobs[row, columns] if record.logprobs is not None else None
    logits = record.logits[row, columns] if record.logits is not None else None
    if logprobs is not None and logits is not None:
        return logprobs, logits
    final = record.states.final[row, columns]
    tokens = record.token_ids[row, columns].to(final.device)
    head = (modules.head_weight, modules.head_bias, record.states.logits_dtype)
    if logits is None:
        logits = sampled_logits(final, tokens, *head)
    if logprobs is None:
        logprobs = sampled_logprobs(final, tokens, *head, temperature)
    return logprobs.to(final.device), logits.to(final.device)
