"""One capture window: forward passes in, chosen samples out.

Everything up to the choice stays on the policy's device and copies nothing;
only the chosen tokens' states move to host memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

import torch

from policy_bridge.batch import aligned, spans_of
from policy_bridge.logprobs import sampled_logits, sampled_logprobs
from policy_bridge.modules import PolicyModules
from policy_bridge.sample import Sample
from policy_bridge.selection import Candidate, Selector, bytes_per_token, choose, windows
from policy_bridge.session import Session
from policy_bridge.stats import Counters
from policy_bridge.tap import ForwardStates, ForwardTap
from slipstream.refusal import RefusedError

STATE_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


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
        offer: hands a sample over.
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
    offer: Callable[[Sample], bool]


@dataclass(frozen=True)
class _Record:
    states: ForwardStates
    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    logprobs: torch.Tensor | None
    logits: torch.Tensor | None
    spans: tuple[tuple[int, int], ...]


class Capture:
    """A context manager around the policy's own log-prob (or training) forward.

    Hooks are on the model only inside it. After each forward call ``ship`` says
    what its rows were; at the end the byte budget picks sequences from all passes.
    With ``forwards`` known, each pass gets its share of what is left and its
    device memory is let go at once.
    """

    def __init__(self, plan: CapturePlan, counters: Counters) -> None:
        self._plan = plan
        self._counters = counters
        self._tap = ForwardTap(plan.modules, plan.session.aux_layers)
        self._records: list[_Record] = []
        self._recorded = 0
        self._budget = plan.budget_bytes

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
            if kind is None:
                self._choose_and_offer(self._budget)
        finally:
            self._records.clear()

    def ship(
        self,
        input_ids: torch.Tensor,
        *,
        loss_mask: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        sampled_logprobs: torch.Tensor | None = None,
        sampled_logits: torch.Tensor | None = None,
    ) -> None:
        """Say what the forward pass that has just run was; what is chosen of it goes out.

        B rows of S columns.

        Args:
            input_ids: whole numbers [B, S], what the pass was given.
            loss_mask: bool or 0/1 [B, S], true on completion tokens.
            attention_mask: bool or 0/1 [B, S]; each row's real tokens are contiguous,
                padded left or right. None: no padding.
            sampled_logprobs: float [B, S], log p(x_t | x_<t) at the window's temperature,
                or [B, S-1] without the first column. Read where the loss mask is true.
                None: computed for the chosen rows.
            sampled_logits: float, same shapes, logits before temperature. None: computed.

        Raises:
            RefusedError: no forward pass to describe, or shapes that do not fit it.
        """
        states = self._tap.take()
        if states is None:
            raise RefusedError(
                "capture.ship",
                "no complete forward pass since the last ship",
                "one forward pass through lm_head per ship",
                "call the model first; set modules.final_norm if the loss is fused",
            )
        shape = tuple(states.final.shape[:2])
        for name, tensor in (("input_ids", input_ids), ("loss_mask", loss_mask)):
            if tuple(tensor.shape) != shape:
                raise RefusedError(
                    name, list(tensor.shape), f"the pass's {list(shape)}", "pass what was run"
                )
        for layer, aux in zip(self._plan.session.aux_layers, states.aux, strict=True):
            if aux.shape != states.final.shape:
                raise RefusedError(
                    f"hidden state after {layer} layers",
                    list(aux.shape),
                    f"the final one's {list(states.final.shape)}",
                    "run lm_head on every position (no logits_to_keep)",
                )
        if self._plan.modules.stamp() != self._plan.weights_stamp:
            # An optimizer step since the sync: these states belong to no announced version.
            self._counters.shed("policy_moved", len(input_ids), 0)
            return
        record = _Record(
            states=states,
            token_ids=input_ids.detach(),
            loss_mask=loss_mask.detach().bool(),
            logprobs=aligned("sampled_logprobs", sampled_logprobs, shape),
            logits=aligned("sampled_logits", sampled_logits, shape),
            spans=spans_of(attention_mask, shape),
        )
        self._records.append(record)
        self._counters.add(captured_tokens=sum(end - start for start, end in record.spans))
        self._recorded += 1
        if self._plan.forwards is not None:
            left = max(1, self._plan.forwards - self._recorded + 1)
            self._budget -= self._choose_and_offer(self._budget // left)

    def _choose_and_offer(self, budget_bytes: int) -> int:
        """Choose from the held records, hand the chosen over, let the rest go; bytes chosen."""
        candidates = [c for index in range(len(self._records)) for c in self._candidates(index)]
        chosen = choose(self._plan.selector, candidates, budget_bytes)
        self._counters.add(
            chosen_samples=len(chosen),
            chosen_tokens=sum(candidate.tokens for candidate in chosen),
            not_chosen_samples=len(candidates) - len(chosen),
        )
        with torch.no_grad():
            for candidate in chosen:
                self._records[candidate.forward].states.check_unwritten()
                sample = self._extract(self._records[candidate.forward], candidate)
                if bool(sample.sampled_logprobs.isfinite().all()):
                    self._plan.offer(sample)
                else:
                    self._counters.shed("non_finite", 1, sample.nbytes)
        self._records.clear()
        return sum(candidate.nbytes for candidate in chosen)

    def _candidates(self, index: int) -> list[Candidate]:
        record = self._records[index]
        dtype = self._dtype_of(record.states)
        token_bytes = bytes_per_token(
            len(record.states.aux), record.states.final.shape[-1], dtype.itemsize
        )
        mask: Sequence[Sequence[bool]] = record.loss_mask.tolist()
        return [
            candidate
            for row, (start, end) in enumerate(record.spans)
            for candidate in windows(
                forward=index,
                row=row,
                start=start,
                loss_mask=mask[row][start:end],
                token_bytes=token_bytes,
                max_tokens=self._plan.session.max_sample_tokens(token_bytes),
            )
        ]

    def _dtype_of(self, states: ForwardStates) -> torch.dtype:
        dtype = self._plan.states_dtype or states.final.dtype
        if dtype not in STATE_DTYPES:
            raise RefusedError(
                "hidden_states.dtype", dtype, f"one of {STATE_DTYPES}", "set states_dtype"
            )
        return dtype

    def _extract(self, record: _Record, chosen: Candidate) -> Sample:
        plan, states = self._plan, record.states
        columns = slice(chosen.start, chosen.end)
        final = states.final[chosen.row, columns]
        tokens = record.token_ids[chosen.row, columns].to(final.device)
        aux = torch.cat([layer[chosen.row, columns] for layer in states.aux], dim=-1)
        head = (plan.modules.head_weight, plan.modules.head_bias, states.logits_dtype)
        mask = record.loss_mask[chosen.row, columns].to("cpu", copy=True)
        mask[: max(1, chosen.fresh - chosen.start)] = False
        if record.logits is None:
            logits = sampled_logits(final, tokens, *head)
        else:
            logits = record.logits[chosen.row, columns]
        if record.logprobs is None:
            logprobs = sampled_logprobs(final, tokens, *head, plan.temperature)
        else:
            logprobs = record.logprobs[chosen.row, columns]
        dtype = self._dtype_of(states)
        return Sample(
            sample_id=plan.next_id(),
            policy_version=plan.policy_version,
            temperature=plan.temperature,
            aux_layers=plan.session.aux_layers,
            token_ids=tokens.to("cpu", torch.int32, copy=True),
            positions=torch.arange(chosen.offset, chosen.offset + chosen.tokens).int(),
            loss_mask=mask,
            aux_hidden_states=aux.to("cpu", dtype, copy=True),
            final_hidden_state=final.to("cpu", dtype, copy=True),
            sampled_logprobs=_cleared(logprobs, mask),
            sampled_logits=_cleared(logits, mask),
        )


def _cleared(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Float32 on CPU; the first is 0, and so is what is not finite outside the loss mask."""
    values = values.to("cpu", torch.float32, copy=True)
    values[0] = 0.0
    return values.masked_fill_(~mask & ~values.isfinite(), 0.0)
