"""Turns forward passes into candidates, and chosen candidates into samples.

Up to the choice everything stays on the policy's device. What is computed for a sample (the sampled
tokens' logits and log-probabilities) is computed for the chosen rows alone, where the policy's
weights are at hand then; only the chosen tokens' states move to host memory.

For a sequence x with final hidden states h: logit_t = f(h_{t-1} . W[x_t]), where f is what the
policy makes of its lm_head's output (``slipstream.sampling``), and log p(x_t | x_<t) = logit_t /
temperature - log Z_{t-1}. The wire carries logit and log-probability of every token, which fixes
log Z without a full row of logits (slipstream.v1.PackedStates).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from policy_bridge.hooks import ForwardStates
from policy_bridge.logits import PROBED_ROWS, check_logits, check_logprobs
from policy_bridge.model import Matrix, PolicyModules
from policy_bridge.selection import Candidate, PassInputs, Span, scores_of, spans_of, windows
from slipstream.errors import RefusedError
from slipstream.sample import STATE_DTYPES, Layout, Sample, prompt_hash, window_id
from slipstream.sampling import LogitForm
from slipstream.v1 import draft_trainer_pb2 as pb

Floats = NDArray[np.float32]

_BLOCK_BYTES = 64 << 20
"""Bound on the float32 logits of one block of rows, while log Z is computed."""

_COPY_VALUES = (1 << 15) - 1
"""The most values of one copy. From ``at::internal::GRAIN_SIZE`` (ATen/Parallel.h) on, torch shares
a copy out over a pool of threads: beside the policy's own, twice as many threads as cores."""


class Origin(NamedTuple):
    """Says of a sequence its prompt, the policy version that sampled it, and its name."""

    prompt: bytes
    version: int | None
    name: str


@dataclass(frozen=True)
class Record:
    """A forward pass and what ``Capture.ship`` was told of it.

    Attributes:
        states: those of the pass.
        token_ids, loss_mask, attention_mask, position_ids, logprobs, logits: [B, S], see
            ``Capture.ship``.
        prompt_lengths, rollout_versions: one number a sequence, see ``Capture.ship``.
        sample_ids: one name a sequence, see ``Capture.ship``.
        at: row and column of the pass that the first element of these tensors is.
        spans: the sequences, once the record is on the host.
        origins: of each by row and start.
    """

    states: ForwardStates
    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor | None
    logprobs: torch.Tensor | None
    logits: torch.Tensor | None
    prompt_lengths: torch.Tensor | Sequence[int] | None = None
    rollout_versions: torch.Tensor | Sequence[int] | int | None = None
    sample_ids: Sequence[str] | None = None
    at: tuple[int, int] = (0, 0)
    spans: Sequence[Span] = ()
    origins: Mapping[tuple[int, int], Origin] = field(default_factory=dict)

    def on_host(self, next_id: Callable[[], str]) -> Record:
        """Return the record with all but the states in host memory: int32 ids, float32 numbers.

        A sequence without a name is given one, which its windows share.

        Raises:
            RefusedError: masks or positions that are not of whole sequences.
        """

        def floats(values: torch.Tensor | None) -> torch.Tensor | None:
            return None if values is None else values.to("cpu", torch.float32, copy=True)

        record = replace(
            self,
            states=replace(self.states, inputs=self.states.inputs.on_host()),
            spans=spans_of(self.attention_mask, self.position_ids, self.states.final.shape[:2]),
            # Always copies: the loop may write into its own before the samples are written.
            token_ids=self.token_ids.to("cpu", torch.int32, copy=True),
            loss_mask=self.loss_mask.to("cpu", copy=True),
            logprobs=floats(self.logprobs),
            logits=floats(self.logits),
        )
        return replace(record, origins=_origins(record, next_id))

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's states, in the dtypes of the pass."""
        return sum(s.shape[-1] * s.element_size() for s in (*self.states.aux, self.states.final))

    @property
    def nbytes(self) -> int:
        """Bytes of the states, padding included."""
        return self.states.final.shape[:2].numel() * self.token_bytes

    @property
    def complete(self) -> bool:
        """True if no part of a sample has to be computed from the policy's weights."""
        return self.logprobs is not None and self.logits is not None

    def place(self, candidate: Candidate) -> tuple[int, slice]:
        """Row and columns of a candidate in these tensors."""
        row, column = self.at
        return candidate.row - row, slice(candidate.start - column, candidate.end - column)

    def part(self, candidate: Candidate) -> Record:
        """A copy of what one candidate is made of, so that the pass can be let go of."""
        row, columns = self.place(candidate)

        def cut(values: torch.Tensor) -> torch.Tensor:
            return values[row : row + 1, columns].clone()

        states = self.states
        aux, final = tuple(map(cut, states.aux)), cut(states.final)
        versions = (0,) * (len(aux) + 1)
        return replace(
            self,
            states=replace(states, aux=aux, final=final, versions=versions, inputs=PassInputs()),
            token_ids=cut(self.token_ids),
            loss_mask=cut(self.loss_mask),
            logprobs=None if self.logprobs is None else cut(self.logprobs),
            logits=None if self.logits is None else cut(self.logits),
            attention_mask=None,
            position_ids=None,
            at=(candidate.row, candidate.start),
        )


@dataclass(frozen=True, eq=False)
class Chosen:
    """A candidate that goes out.

    Attributes:
        record: the pass, on the host.
        candidate: a part of it.
        layout: of its block.
        sampled: float32 [2, T], log-probs and logits.
        priority: see ``Outbox.put``.
    """

    record: Record
    candidate: Candidate
    layout: Layout
    sampled: Floats
    priority: int

    def write_origin(self, header: pb.VerifierStates) -> None:
        """Write whose completion it is, who sampled it, and its name."""
        one = self.candidate
        origin = self.record.origins[one.row, one.start - one.offset]
        header.prompt = origin.prompt
        if origin.version is not None:
            header.rollout_policy_version = origin.version
        header.sample_id = window_id(origin.name, one.offset)


def _origins(record: Record, next_id: Callable[[], str]) -> dict[tuple[int, int], Origin]:
    """The origin of every sequence by row and start, so that all its windows say the same."""
    count, versions = len(record.spans), record.rollout_versions
    lengths = scores_of("prompt_lengths", record.prompt_lengths, count)
    if isinstance(versions, int):
        versions = [versions] * count
    found, sampled_by = {}, scores_of("rollout_versions", versions, count)
    names = [next_id() for _ in range(count)] if record.sample_ids is None else record.sample_ids
    if len(names) != count:
        expected, step = f"a name for each of the {count} sequences", "name every one, or none"
        raise RefusedError("sample_ids", f"{len(names)} names", expected, step)
    for span, length, version, name in zip(record.spans, lengths, sampled_by, names, strict=True):
        if version is not None and (version < 0 or not version.is_integer()):
            step = "pass the versions that bridge.sync was given, or None"
            raise RefusedError("rollout_versions", f"{version:g}", "whole numbers >= 0", step)
        tokens = record.token_ids[span.row, span.start : span.end]
        if length is None:
            # Also 0 where the mask has no token: without a prompt the whole sequence is hashed.
            length = int(record.loss_mask[span.row, span.start : span.end].int().argmax())
        if not 0 <= length <= len(tokens):
            expected, step = f"0 to {len(tokens)}", "count the tokens before the completion"
            raise RefusedError("prompt_lengths", f"{length:g}", expected, step)
        prompt = prompt_hash(tokens[: int(length)] if length else tokens)
        sampled_with = None if version is None else int(version)
        found[span.row, span.start] = Origin(prompt, sampled_with, name)
    return found


def check_tokens(record: Record, vocab_size: int) -> None:
    """Raise RefusedError for tokens outside the vocabulary, or other ones than those of the pass.

    Padding may differ. A pass that was given no token ids is not compared.
    """
    ran = record.states.inputs.ids
    for span in record.spans:
        tokens = record.token_ids[span.row, span.start : span.end]
        least, most = int(tokens.min()), int(tokens.max())
        if least < 0 or most >= vocab_size:
            found, expected = f"{least} to {most}", f"0 to {vocab_size - 1}"
            step = "pass the ids that the model was given, not labels, and mark what is padding"
            raise RefusedError("input_ids", found, expected, step)
        if ran is not None and not torch.equal(tokens, ran[span.row, span.start : span.end]):
            found, expected = f"other tokens in row {span.row}", "those of the pass"
            step = "ship a pass before the next one runs, its rows in the order in which they ran"
            raise RefusedError("input_ids", found, expected, step)
    record.states.inputs.check(record.spans, record.loss_mask)


def state_dtype(wanted: torch.dtype | None, state: torch.Tensor) -> torch.dtype:
    """The dtype in which states are sent. Raises RefusedError for one that is not sent."""
    dtype = wanted or state.dtype
    if dtype not in STATE_DTYPES:
        expected = f"one of {STATE_DTYPES}"
        raise RefusedError("hidden_states.dtype", dtype, expected, "set states_dtype")
    return dtype


def candidates_of(
    record: Record, token_bytes: int, max_sample_tokens: int, draw: Callable[[], float]
) -> list[Candidate]:
    """Every sequence (or window of it) of a pass that could be sent; ``draw`` gives it its lot."""
    return [
        candidate
        for span in record.spans
        for candidate in windows(
            row=span.row,
            start=span.start,
            loss_mask=record.loss_mask[span.row, span.start : span.end].numpy(),
            token_bytes=token_bytes,
            max_tokens=max_sample_tokens,
            draw=draw,
        )
    ]


def sampled_of(
    record: Record, chosen: Candidate, modules: PolicyModules, temperature: float
) -> Floats | None:
    """Log-probs and logits of the chosen tokens, float32 [2, T]; None where one is not finite.

    Values that nobody reads are 0: those of the first token, and, where they are not finite, those
    outside the loss mask.
    """
    if not record.complete:
        # Keeps the weights' memory until the numbers are on the host.
        modules = _with_current_head(modules, record.states.final.device)
    pair = _sampled_of_row(record, modules, temperature, *record.place(chosen))
    found = torch.stack([values.to("cpu", torch.float32) for values in pair]).numpy()
    found[:, 0] = 0.0
    mask = _mask_of(record, chosen)
    found[:, ~mask] = np.where(np.isfinite(found[:, ~mask]), found[:, ~mask], 0.0)
    return found if np.isfinite(found).all() else None


def fill(sample: Sample, chosen: Chosen) -> None:
    """Write a chosen candidate into a sample's block; complete when the current stream is."""
    record, candidate = chosen.record, chosen.candidate
    row, columns = record.place(candidate)
    sample.token_ids.copy_(record.token_ids[row, columns])
    sample.positions.numpy()[:] = np.arange(candidate.offset, candidate.offset + candidate.tokens)
    sample.segment_ids.zero_()
    sample.loss_mask.numpy()[:] = _mask_of(record, candidate)
    sample.sampled_logprobs.numpy()[:], sample.sampled_logits.numpy()[:] = chosen.sampled
    sample.clear_padding()
    gather_into(sample.aux, [layer[row, columns] for layer in record.states.aux])
    gather_into(sample.final_hidden, [record.states.final[row, columns]])


def gather_into(host: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Fill ``host`` with ``parts`` side by side, cast to its dtype.

    [T, width] each, into [T, sum of widths] on the CPU. From host memory it copies in blocks small
    enough to stay on one core; from a device in one copy, complete when the current stream is.
    """
    if parts and parts[0].device.type != "cpu":
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


@torch.no_grad()
def without_logits(
    record: Record, modules: PolicyModules, temperature: float, *, whole: bool
) -> Record:
    """Return the record without the pass's logits, which are large: the sampled ones are picked.

    Values that the pass does not give are computed later, for the chosen tokens alone. With
    ``whole`` they are computed now, for every token, because the weights cannot be read later.

    Raises:
        RefusedError: (whole) weights that are spread or elsewhere, of a pass whose logits were not
            seen; logits that were written in place since the pass.
    """
    states, logprobs = record.states, record.logprobs
    # Prefer those picked inside the pass: fused kernels write gradients over the logits, which
    # raises no version counter.
    logits = states.picked if record.logits is None else record.logits
    seen = states.logits
    if logits is None or (whole and logprobs is None):
        if seen is not None and not states.logits_unwritten:
            if whole and (logits is None or logprobs is None):
                found = "written in place between the forward pass and ship"
                step = "pass sampled_logprobs, or divide by the temperature out of place"
                raise RefusedError("logits", found, "the output of lm_head as it was", step)
        elif seen is not None:
            if logits is None:
                logits = picked_logits(seen, record.token_ids, modules.form)
            if whole and logprobs is None:
                logprobs = picked_logprobs(seen, record.token_ids, modules.form, temperature)
        elif whole and modules.shards:
            found = "not given, of a pass that does not call lm_head"
            step = "pass both, or let the pass call lm_head (no modules.final_norm)"
            raise RefusedError("sampled_logits", found, "sampled logits and log-probs", step)
        elif whole:
            modules = _with_current_head(modules, states.final.device)
            rows = [
                _sampled_of_row(record, modules, temperature, row, slice(None))
                for row in range(len(record.token_ids))
            ]
            logprobs, logits = (torch.stack(values) for values in zip(*rows, strict=True))
    states = replace(states, logits=None, returned=None, head=None, picked=None)
    return replace(record, states=states, logits=logits, logprobs=logprobs)


@torch.no_grad()
def probed(record: Record, modules: PolicyModules, temperature: float) -> bool:
    """Compare some of a pass's own logits, or else the given log-probs, with those of its states.

    Returns:
        False where the pass has nothing to compare, or nothing that is finite.

    Raises:
        RefusedError: the policy's logits are not what its lm_head and ``modules.form`` give.
    """
    states = record.states
    final, dtype, columns = states.final, states.logits_dtype, states.final.shape[1]
    plain = replace(modules, form=LogitForm())
    readable = not modules.shards and modules.head_weight.device == final.device
    if states.returned is not None:
        index = states.returned.index
        if readable:
            before = whole_logits(plain, dtype)(final[index // columns, index % columns])
        elif states.head is not None:
            before = states.head.rows.float()
        else:
            return False
        config = getattr(modules.policy, "config", None)
        return check_logits(states.returned.rows, before, modules.form, dtype, config)
    if record.logprobs is None or not readable:
        return False
    chosen = record.loss_mask.to(final.device, copy=True)
    chosen[:, 0] = False
    places = chosen.flatten().nonzero().flatten()
    count = min(PROBED_ROWS, len(places))
    places = places[torch.linspace(0, len(places) - 1, count, dtype=torch.float32).long()]
    tokens = record.token_ids.to(final.device).flatten()[places].long()
    tokens = tokens.clamp(0, modules.vocab_size - 1)  # what is out of range is refused later
    before = final[places // columns, places % columns - 1]
    own = (whole_logits(modules, dtype)(before) / temperature).log_softmax(-1)
    given = record.logprobs.to(final.device).flatten()[places]
    return check_logprobs(given, own.gather(-1, tokens[:, None]).squeeze(-1))


def sampled_logits(
    final: torch.Tensor, token_ids: torch.Tensor, modules: PolicyModules, dtype: torch.dtype
) -> torch.Tensor:
    """The logit of each token given those before it, rounded as the policy rounds its own.

    The sum is taken in float32 and rounded to ``dtype``, as a matrix product with float32
    accumulation does: a log-probability that the policy derived from its bfloat16 logits then
    gives back its own log Z. States [T, H] and whole numbers [T] to float32 [T]; the first is 0.
    """
    target = token_ids[1:].long()
    rows = modules.head_weight[target].to(dtype).float()
    logits = (final[:-1].to(dtype).float() * rows).sum(-1)
    if modules.head_bias is not None:
        logits = logits + modules.head_bias[target].to(dtype).float()
    return F.pad(modules.form.apply(logits.to(dtype)).float(), (1, 0))


def sampled_logprobs(
    final: torch.Tensor,
    token_ids: torch.Tensor,
    modules: PolicyModules,
    dtype: torch.dtype,
    temperature: float,
) -> torch.Tensor:
    """The log-probability of each token given those before it; as ``sampled_logits``.

    In blocks of rows, so that a long sequence does not need [T, V] floats at once.
    """
    blocks = [final.new_zeros(1, dtype=torch.float32)]
    logits_of = whole_logits(modules, dtype)
    rows = max(1, _BLOCK_BYTES // (4 * modules.vocab_size))
    for start in range(0, len(token_ids) - 1, rows):
        end = min(start + rows, len(token_ids) - 1)
        logits = logits_of(final[start:end]) / temperature
        target = token_ids[start + 1 : end + 1].long()
        blocks.append(logits.log_softmax(-1).gather(-1, target[:, None]).squeeze(-1))
    return torch.cat(blocks)


def whole_logits(
    modules: PolicyModules, dtype: torch.dtype
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a function from final states [N, H] to the policy's logits, float32 [N, V].

    It multiplies in ``dtype``.
    """
    weight = modules.head_weight.to(dtype)
    bias = None if modules.head_bias is None else modules.head_bias.to(dtype)

    def logits(final: torch.Tensor) -> torch.Tensor:
        with torch.autocast(final.device.type, enabled=False):
            return modules.form.apply(F.linear(final.to(dtype), weight, bias)).float()

    return logits


def picked_logits(logits: torch.Tensor, token_ids: torch.Tensor, form: LogitForm) -> torch.Tensor:
    """Pick the logits of tokens [B, S] from lm_head's output [B, S, V]: float32 [B, S].

    Column 0 is 0.

    An id out of range is clamped: the index would end the process on a CUDA device.
    ``check_tokens`` refuses it.
    """
    target = token_ids[:, 1:, None].long().to(logits.device).clamp(0, logits.shape[2] - 1)
    picked = logits[:, :-1].gather(-1, target).squeeze(-1)
    return F.pad(form.apply(picked).float(), (1, 0))


def picked_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, form: LogitForm, temperature: float
) -> torch.Tensor:
    """The log-probabilities [B, S] of the tokens at ``temperature``; as ``picked_logits``."""
    columns = max(1, _BLOCK_BYTES // (4 * logits.shape[2]))
    log_z = logits.new_zeros(logits.shape[:2], dtype=torch.float32)
    for row, into in zip(logits, log_z, strict=True):
        for start in range(0, len(row) - 1, columns):
            end = min(start + columns, len(row) - 1)
            scaled = form.apply(row[start:end]).float() / temperature
            into[start + 1 : end + 1] = scaled.logsumexp(-1)
    return picked_logits(logits, token_ids, form) / temperature - log_z


def _with_current_head(modules: PolicyModules, device: torch.device) -> PolicyModules:
    """Return ``modules`` with lm_head's memory as it is now: the loop may move the weights later.

    Raises RefusedError: it is not on the states' device.
    """
    head = Matrix(modules.head_weight, modules.head_bias)
    if head.weight.device != device:
        step = "pass sampled_logprobs and sampled_logits, or leave the weights where the pass ran"
        raise RefusedError("lm_head.weight", f"on {head.weight.device}", f"on {device}", step)
    return replace(modules, lm_head=head)


def _mask_of(record: Record, chosen: Candidate) -> NDArray[np.bool_]:
    """The loss mask without the context that a window repeats, and without the first token."""
    mask = record.loss_mask[record.place(chosen)].numpy().copy()
    mask[: max(1, chosen.fresh - chosen.start)] = False
    return mask


def _sampled_of_row(
    record: Record, modules: PolicyModules, temperature: float, row: int, columns: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and logits of a row's sampled tokens: as given, else from the weights."""
    logprobs = record.logprobs[row, columns] if record.logprobs is not None else None
    logits = record.logits[row, columns] if record.logits is not None else None
    if logprobs is None or logits is None:
        final, dtype = record.states.final[row, columns], record.states.logits_dtype
        tokens = record.token_ids[row, columns].to(final.device)
        if logits is None:
            logits = sampled_logits(final, tokens, modules, dtype)
        if logprobs is None:
            logprobs = sampled_logprobs(final, tokens, modules, dtype, temperature)
    return logprobs, logits
