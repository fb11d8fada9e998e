"""One capture window: forward passes in, chosen samples out.

Everything up to the choice stays on the policy's device and copies nothing;
only the chosen tokens' states move to host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType

import torch

from policy_bridge.batch import aligned, check_shape
from policy_bridge.capture_plan import CapturePlan, Chosen, HostRecord, Record
from policy_bridge.extraction import (
    candidates_of,
    extract,
    needs_weights,
    numbers_of,
    with_logits,
    without_logits,
)
from policy_bridge.modules import stamp_of
from policy_bridge.outbox import PRIORITIES
from policy_bridge.selection import choose
from policy_bridge.stats import Counters
from policy_bridge.tap import ForwardTap
from slipstream.refusal import RefusedError

__all__ = ["Capture", "CapturePlan"]


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
