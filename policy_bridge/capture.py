"""One capture window: forward passes in, chosen samples out.

Everything up to the choice stays on the policy's device and copies nothing;
only the chosen tokens' states move to host memory.

What a capture window works from: the plan of the window, and one record a forward pass.

From records of forward passes to candidates, and from a chosen one to a sample.

Moves one chosen sequence's states from where the policy computed them to host memory.

The sampled tokens' logits and log-probabilities from the final hidden state.

For a sequence x with final hidden states h: logit_t = h_{t-1} . W[x_t], and
log p(x_t | x_<t) = logit_t / temperature - log Z_{t-1}. The wire carries logit
and log-probability of every token, which fixes log Z without a full row of
logits (slipstream.v1.VerifierStates).

Reads what a caller says of a batch of B rows and S columns: padded, packed, or both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray

from policy_bridge.copier import Inline, Runner
from policy_bridge.hooks import ForwardStates, ForwardTap
from policy_bridge.model import PolicyModules, stamp_of
from policy_bridge.outbox import PRIORITIES, Sample
from policy_bridge.selection import Candidate, Selector, bytes_per_token, choose, windows
from policy_bridge.session import Session
from policy_bridge.stats import Counters
from slipstream.errors import RefusedError
from slipstream.sample import Numbers, layout_of, states_in, write_numbers


@dataclass(frozen=True)
class Span:
    """One sequence: a row's columns from ``start`` up to, not including, ``end``."""

    row: int
    start: int
    end: int


def check_temperature(temperature: float) -> None:
    """Raise RefusedError unless ``temperature`` is a finite number above 0."""
    if not math.isfinite(temperature) or temperature <= 0:
        raise RefusedError(
            "temperature", temperature, "a finite number > 0", "pass the rollouts' temperature"
        )


def check_shape(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    """Raise RefusedError unless ``tensor`` has the forward pass's shape [B, S]."""
    if tuple(tensor.shape) != shape:
        raise RefusedError(
            name, list(tensor.shape), f"the pass's {list(shape)}", "pass what was run"
        )


def aligned(name: str, values: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor | None:
    """``values`` as [B, S], detached, a missing first column padded with 0."""
    if values is None:
        return None
    values = values.detach()
    if tuple(values.shape) == (shape[0], shape[1] - 1):
        return F.pad(values, (1, 0))
    if tuple(values.shape) != shape:
        raise RefusedError(
            name,
            list(values.shape),
            f"{list(shape)} (or without the first column)",
            "align it with input_ids",
        )
    return values


def spans_of(
    attention_mask: torch.Tensor | None,
    position_ids: torch.Tensor | None,
    shape: tuple[int, ...],
) -> list[Span]:
    """Every sequence of a batch, row by row.

    Args:
        attention_mask: [B, S], true (or > 0) on real tokens; None: all are.
        position_ids: [B, S] of a packed batch: where they begin again at 0, so does a
            sequence. None: one sequence a row.
        shape: (B, S).

    Raises:
        RefusedError: a row with gaps, or positions that neither go on nor begin again.
    """
    if attention_mask is None and position_ids is None:
        return [Span(row, 0, shape[1]) for row in range(shape[0]) if shape[1]]
    # With numpy: these are many operations on few numbers.
    if attention_mask is None:
        real = np.ones(shape, dtype=np.bool_)
    else:
        real = attention_mask.detach().bool().cpu().numpy()
    begins = real.copy()
    begins[:, 1:] &= ~real[:, :-1]
    if position_ids is None:
        if (begins.sum(1) > 1).any():
            raise RefusedError(
                "attention_mask", "a row with gaps", "left or right padding", "pad at one end"
            )
    else:
        positions = position_ids.detach().long().cpu().numpy()
        goes_on = np.zeros(shape, dtype=np.bool_)
        goes_on[:, 1:] = positions[:, 1:] == positions[:, :-1] + 1
        begins |= real & ~goes_on
        if positions[begins].any():
            raise RefusedError(
                "position_ids",
                f"a sequence that begins at {int(positions[begins].max())}",
                "0 where a sequence begins, else one more than the token before",
                "pass the positions that the forward pass was given",
            )
    # A sequence ends where the next token is padding or begins another one.
    ends = real.copy()
    ends[:, :-1] &= (begins | ~real)[:, 1:]
    starts = np.argwhere(begins).tolist()
    stops = np.nonzero(ends)[1].tolist()
    return [Span(row, start, stop + 1) for (row, start), stop in zip(starts, stops, strict=True)]


def scores_of(
    name: str, values: torch.Tensor | Sequence[float] | None, sequences: int
) -> list[float | None]:
    """One number a sequence, in the order of ``spans_of``; None where none were given."""
    if values is None:
        return [None] * sequences
    numbers = values.tolist() if isinstance(values, torch.Tensor) else list(values)
    if len(numbers) != sequences or not all(math.isfinite(number) for number in numbers):
        raise RefusedError(
            name,
            f"{len(numbers)} numbers",
            f"a finite number for each of the {sequences} sequences",
            "give one per row, or per sequence of a packed row",
        )
    return [float(number) for number in numbers]


def allocate(nbytes: int, priority: int) -> torch.Tensor:
    """Memory for a sample where no pool is given."""
    return torch.empty(nbytes, dtype=torch.uint8)


def raise_error(error: RefusedError) -> None:
    """What a strict window does with an error."""
    raise error


@dataclass(frozen=True)
class CapturePlan:
    """What stays the same over a window.

    Attributes:
        modules: the policy.
        session: what the trainer wants.
        policy_version: whose states these are.
        weights_stamp: ``PolicyModules.stamp`` when that version was synced.
        temperature: of the rollouts.
        budget_bytes: for the whole window.
        forwards: how many passes will be shipped, if known.
        states_dtype: what the states are cast to; None keeps theirs.
        selector: chooses.
        next_id: a fresh sample id.
        offer: hands a sample over with its priority, 0 to ``PRIORITIES`` - 1.
        reserve: memory of so many bytes for a sample of such a priority; None if there is
            no room for it.
        runner: where choosing and copying is done.
        refuse: told of a call that cannot be served; raises it if it should.
        done: told that a window ended well.
        weights: ``PolicyModules.weights`` when that version was synced; empty: they are found
            again.
    """

    modules: PolicyModules
    session: Session
    policy_version: int
    weights_stamp: int
    temperature: float
    budget_bytes: int
    forwards: int | None
    states_dtype: torch.dtype | None
    selector: Selector
    next_id: Callable[[], str]
    offer: Callable[[Sample, int], bool]
    reserve: Callable[[int, int], torch.Tensor | None] = allocate
    runner: Runner = field(default_factory=Inline)
    refuse: Callable[[RefusedError], None] = raise_error
    done: Callable[[], None] = lambda: None
    weights: Sequence[torch.Tensor] = ()


@dataclass(frozen=True)
class Record:
    """A pass and what ``ship`` was told of it.

    Attributes:
        states: of the pass.
        token_ids, loss_mask, attention_mask, position_ids, logprobs, logits: [B, S], see
            ``Capture.ship``.
        acceptance: one number a sequence.
        host: of all that and of the sequences what is needed to choose, once it is on the host.
    """

    states: ForwardStates
    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor | None
    logprobs: torch.Tensor | None
    logits: torch.Tensor | None
    acceptance: torch.Tensor | Sequence[float] | None
    host: HostRecord | None = None


@dataclass(frozen=True)
class HostRecord:
    """The numbers of a pass on the host, where the choice is made and samples are written.

    With numpy and once for the pass: torch operations on each short sequence were most of what
    a capture cost the policy's thread.

    Attributes:
        spans: the sequences.
        token_ids: int32 [B, S].
        loss_mask: bool [B, S].
        logprobs, logits: float32 [B, S]; None where they are to be computed for what is chosen.
    """

    spans: Sequence[Span]
    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32] | None
    logits: NDArray[np.float32] | None

    @classmethod
    def of(cls, record: Record) -> HostRecord:
        """Of a pass. Raises RefusedError for masks or positions that are not of whole sequences."""
        shape = record.states.final.shape[:2]
        spans = spans_of(record.attention_mask, record.position_ids, (shape[0], shape[1]))
        return cls(
            spans=spans,
            # Copies in any case: the loop may write into its own before the samples are written.
            token_ids=record.token_ids.cpu().numpy().astype(np.int32),
            loss_mask=record.loss_mask.cpu().numpy().copy(),
            logprobs=_floats(record.logprobs),
            logits=_floats(record.logits),
        )


@dataclass(frozen=True)
class Chosen:
    """What goes out.

    Attributes:
        record: its pass, with its numbers on the host.
        candidate: which rows of it.
        numbers: its own, where they had to come from the weights as they were when it was chosen.
        priority: 0 to ``PRIORITIES`` - 1.
    """

    record: Record
    candidate: Candidate
    numbers: Numbers | None
    priority: int


def _floats(values: torch.Tensor | None) -> NDArray[np.float32] | None:
    return None if values is None else values.float().cpu().numpy().copy()


_BLOCK = (1 << 15) - 1
"""Values: from ``at::internal::GRAIN_SIZE`` (ATen/Parallel.h) on, torch shares a copy out over a
pool of threads. Beside the policy's own pool that would be twice as many threads as cores."""


def gather_into(host: torch.Tensor, parts: Sequence[torch.Tensor]) -> None:
    """Fill ``host`` with ``parts`` side by side, cast to its dtype.

    On the host that is one copy of each part, in blocks that take no second core. From a
    device the parts are laid together and cast there, then copied once; ``host`` is complete
    when the current stream is (at once, where its memory is not pinned).

    Args:
        host: [T, sum of widths], CPU.
        parts: [T, width] each, on one device.
    """
    if parts[0].device.type != "cpu":
        host.copy_(torch.cat([part.to(host.dtype) for part in parts], -1), non_blocking=True)
        return
    at = 0
    for part in parts:
        tokens, width = part.shape
        columns = host.narrow(1, at, width)
        rows = max(1, _BLOCK // width)
        if tokens <= rows:
            columns.copy_(part)
        else:
            for to, block in zip(columns.split(rows), part.split(rows), strict=True):
                to.copy_(block)
        at += width


_ROWS_PER_BLOCK = 256


def sampled_logits(
    final: torch.Tensor,
    token_ids: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The logit of each token given those before it, rounded as the policy rounds its own.

    The sum is taken in float32 and rounded to ``dtype``, as a matrix product with
    float32 accumulation does: a log-probability that the policy derived from its
    bfloat16 logits then gives back its own log Z.

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

    Goes through the full vocabulary in blocks of rows, so that a long sequence does
    not need [T, V] floats at once. Arguments and result as ``sampled_logits``.
    """
    blocks = [final.new_zeros(1, dtype=torch.float32)]
    head = weight.to(dtype)
    head_bias = bias.to(dtype) if bias is not None else None
    for start in range(0, len(token_ids) - 1, _ROWS_PER_BLOCK):
        end = min(start + _ROWS_PER_BLOCK, len(token_ids) - 1)
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
    blocks = [
        (logits[:, start : start + _ROWS_PER_BLOCK].float() / temperature).logsumexp(-1)
        for start in range(0, logits.shape[1], _ROWS_PER_BLOCK)
    ]
    log_z = F.pad(torch.cat(blocks, 1)[:, :-1], (1, 0))
    return picked_logits(logits, token_ids) / temperature - log_z


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


class Capture:
    """A context manager around the policy's own log-prob (or training) forward.

    Hooks are on the model only inside it. After each forward call ``ship`` says
    what its rows were; at the end the byte budget picks sequences from all passes.
    With ``forwards`` known, each pass gets its share of what is left and its
    device memory is let go at once.

    A call that cannot be served ends the window's capture: the hooks come off, nothing
    more of it is shipped, and the error goes to ``plan.refuse``.
    """

    def __init__(self, plan: CapturePlan, counters: Counters) -> None:
        self._plan = plan
        self._counters = counters
        # Weights that are spread over ranks, or that the policy may move on from before the
        # side stream gets to them, cannot be read later. Its logits hold what is needed.
        head = plan.modules.head_weight
        self._at_once = bool(plan.modules.shards) or head.device.type != "cpu"
        self._tap = ForwardTap(plan.modules, plan.session.aux_layers, keep_logits=True)
        self._records: list[Record] = []
        self._recorded = 0
        self._budget = plan.budget_bytes
        self._refused = False

    def __enter__(self) -> Capture:
        self._tap.__enter__()
        self._counters.add(captures=1)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._tap.__exit__()
        try:
            if kind is None and not self._refused:
                self._submit(passes_left=1)
        finally:
            self._records = []

    def ship(
        self,
        input_ids: torch.Tensor,
        *,
        loss_mask: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        sampled_logprobs: torch.Tensor | None = None,
        sampled_logits: torch.Tensor | None = None,
        acceptance: torch.Tensor | Sequence[float] | None = None,
    ) -> None:
        """Say what the forward pass that has just run was; what is chosen of it goes out.

        B rows of S columns.

        Args:
            input_ids: whole numbers [B, S], what the pass was given.
            loss_mask: bool or 0/1 [B, S], true on completion tokens.
            attention_mask: bool or 0/1 [B, S]; without ``position_ids`` each row's real
                tokens are contiguous, padded left or right. None: no padding.
            position_ids: whole numbers [B, S] of packed rows: a sequence begins at each 0.
                None: one sequence a row.
            sampled_logprobs: float [B, S], log p(x_t | x_<t) at the window's temperature,
                or [B, S-1] without the first column. Read where the loss mask is true.
                None: computed, for the chosen rows where the weights are at hand.
            sampled_logits: float, same shapes, logits before temperature. None: computed.
            acceptance: how well the draft did on each sequence, row by row; read by
                ``MostRejected``. None: not known.

        Raises:
            RefusedError: (to ``plan.refuse``) no forward pass to describe, or shapes that do
                not fit it.
        """
        if self._refused:
            self._tap.__exit__()
            return
        try:
            self._ship(
                input_ids,
                loss_mask,
                attention_mask,
                position_ids,
                sampled_logprobs,
                sampled_logits,
                acceptance,
            )
        except RefusedError as error:
            self._tap.__exit__()
            self._records = []
            self._refuse(error)

    def _ship(
        self,
        input_ids: torch.Tensor,
        loss_mask: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        logprobs: torch.Tensor | None,
        logits: torch.Tensor | None,
        acceptance: torch.Tensor | Sequence[float] | None,
    ) -> None:
        states = self._tap.take()
        if states is None:
            raise RefusedError(
                "capture.ship",
                "no complete forward pass since the last ship",
                "one forward pass through lm_head per ship",
                "call the model first; set modules.final_norm if the loss is fused",
            )
        shape = tuple(states.final.shape[:2])
        for name, tensor in (
            ("input_ids", input_ids),
            ("loss_mask", loss_mask),
            ("attention_mask", attention_mask),
            ("position_ids", position_ids),
        ):
            if tensor is not None:
                check_shape(name, tensor, shape)
        for layer, aux in zip(self._plan.session.aux_layers, states.aux, strict=True):
            if aux.shape != states.final.shape:
                raise RefusedError(
                    f"hidden state after {layer} layers",
                    list(aux.shape),
                    f"the final one's {list(states.final.shape)}",
                    "run lm_head on every position (no logits_to_keep)",
                )
        if stamp_of(self._plan.weights or self._plan.modules.weights()) != self._plan.weights_stamp:
            # An optimizer step since the sync: these states belong to no announced version.
            self._counters.shed("policy_moved", len(input_ids), 0)
            return
        record = Record(
            states=states,
            token_ids=input_ids.detach(),
            loss_mask=loss_mask.detach().bool(),
            attention_mask=attention_mask,
            position_ids=position_ids,
            logprobs=aligned("sampled_logprobs", logprobs, shape),
            logits=aligned("sampled_logits", logits, shape),
            acceptance=acceptance,
        )
        record = without_logits(self._plan, record) if self._at_once else with_logits(record)
        self._records.append(record)
        self._recorded += 1
        if self._plan.forwards is not None:
            self._submit(max(1, self._plan.forwards - self._recorded + 1))

    def _refuse(self, error: RefusedError) -> None:
        # Also called from the side: then the hooks come off with the next call of the window.
        if self._refused:
            raise error
        self._refused = True
        self._counters.add(captures_refused=1)
        self._plan.refuse(error)

    def _submit(self, passes_left: int) -> None:
        """Choose from the held records, hand the chosen over, let the rest go."""
        records, self._records = self._records, []
        if not records:
            return

        def choose() -> list[Chosen] | None:
            try:
                with torch.no_grad():
                    return self._choose(records, passes_left)
            except RefusedError as error:
                self._refuse(error)
                return None

        def copy(chosen: list[Chosen]) -> None:
            try:
                with torch.no_grad():
                    self._copy_and_offer(chosen)
            except RefusedError as error:
                self._refuse(error)
            else:
                self._plan.done()

        if not self._plan.runner.submit(choose, copy):
            self._counters.shed("copies_behind", sum(len(r.token_ids) for r in records), 0)

    def _choose(self, records: list[Record], passes_left: int) -> list[Chosen]:
        """What goes out, its numbers on the host, most wanted first."""
        plan = self._plan
        records = [replace(record, host=HostRecord.of(record)) for record in records]
        candidates = [
            candidate
            for index, record in enumerate(records)
            for candidate in candidates_of(plan, index, record)
        ]
        # Choices are made one after the other: what the last one left is known here.
        wanted = choose(plan.selector, candidates, self._budget // passes_left)
        self._budget -= sum(candidate.nbytes for candidate in wanted)
        self._counters.add(
            captured_tokens=sum(
                span.end - span.start for r in records if r.host for span in r.host.spans
            ),
            chosen_samples=len(wanted),
            chosen_tokens=sum(candidate.tokens for candidate in wanted),
            not_chosen_samples=len(candidates) - len(wanted),
        )
        chosen = []
        for rank, candidate in enumerate(wanted):
            record, numbers = records[candidate.forward], None
            if needs_weights(record):
                numbers = numbers_of(plan, record, candidate)
                if numbers is None:
                    self._counters.shed("non_finite", 1, candidate.nbytes)
                    continue
            priority = PRIORITIES - 1 - rank * PRIORITIES // len(wanted)
            chosen.append(Chosen(record, candidate, numbers, priority))
        _check_unwritten(chosen)
        return chosen

    def _copy_and_offer(self, chosen: list[Chosen]) -> None:
        plan = self._plan
        filled = []
        for one in chosen:
            numbers = one.numbers or numbers_of(plan, one.record, one.candidate)
            if numbers is None:
                self._counters.shed("non_finite", 1, one.candidate.nbytes)
                continue
            sample = extract(plan, one, numbers)
            if sample is not None:
                filled.append((sample, one.priority))
        plan.runner.settle()
        # Again, with the copies done: the loop has gone on meanwhile.
        _check_unwritten(chosen)
        # Only when all are filled: the first one wakes the shipper, which takes the interpreter's
        # lock whenever an operation here lets go of it.
        for sample, priority in filled:
            plan.offer(sample, priority)


def _check_unwritten(chosen: Sequence[Chosen]) -> None:
    for record in {id(one.record): one.record for one in chosen}.values():
        record.states.check_unwritten()
