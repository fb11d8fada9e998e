"""One capture window: forward passes in, chosen samples out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from policy_bridge.copier import Runner, Staging
from policy_bridge.extraction import (
    Chosen,
    HostRecord,
    Record,
    candidates_of,
    fill,
    sampled_of,
    state_dtype,
    with_logits,
    without_logits,
)
from policy_bridge.hooks import ForwardTap
from policy_bridge.model import PolicyModules, stamp_of
from policy_bridge.outbox import PRIORITIES
from policy_bridge.selection import Selector, bytes_per_token, choose
from policy_bridge.session import Session
from policy_bridge.stats import Counters
from slipstream.errors import RefusedError
from slipstream.sample import Layout, Sample, header_of, layout_of


def raise_error(error: RefusedError) -> None:
    """What a strict window does with an error."""
    raise error


def check_temperature(temperature: float) -> None:
    """Raise RefusedError unless ``temperature`` is a finite number above 0."""
    if not math.isfinite(temperature) or temperature <= 0:
        step = "pass the rollouts' temperature"
        raise RefusedError("temperature", temperature, "a finite number > 0", step)


def _aligned(name: str, values: torch.Tensor | None, shape: tuple[int, ...]) -> torch.Tensor | None:
    """``values`` as [B, S], detached, a missing first column padded with 0."""
    if values is None:
        return None
    values = values.detach()
    if tuple(values.shape) == (shape[0], shape[1] - 1):
        return F.pad(values, (1, 0))
    if tuple(values.shape) != shape:
        expected = f"{list(shape)} (or without the first column)"
        raise RefusedError(name, list(values.shape), expected, "align it with input_ids")
    return values


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
        states_dtype: what the states are sent in; None keeps theirs.
        selector: chooses.
        next_id: a fresh sample id.
        offer: hands a sample over with its priority, 0 to ``PRIORITIES`` - 1.
        takes: whether a sample of so many bytes and such a priority would be taken.
        runner: where choosing and copying is done.
        staging: memory in which blocks are assembled.
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
    takes: Callable[[int, int], bool] = lambda nbytes, priority: True
    runner: Runner = field(default_factory=Runner)
    staging: Staging = field(default_factory=Staging)
    refuse: Callable[[RefusedError], None] = raise_error
    done: Callable[[], None] = lambda: None
    weights: Sequence[torch.Tensor] = ()


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
        self._tap = ForwardTap(plan.modules, plan.session.aux_layers)
        self._records: list[Record] = []
        self._recorded = 0
        self._budget = plan.budget_bytes
        self._refused = False

    def __enter__(self) -> Capture:
        self._tap.__enter__()
        self._counters.add(captures=1)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
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
            states = self._tap.take()
            if states is None:
                found = "no complete forward pass since the last ship"
                step = "call the model first; set modules.final_norm if the loss is fused"
                raise RefusedError("capture.ship", found, "a forward pass through lm_head", step)
            shape = tuple(states.final.shape[:2])
            for name, tensor in (
                ("input_ids", input_ids),
                ("loss_mask", loss_mask),
                ("attention_mask", attention_mask),
                ("position_ids", position_ids),
            ):
                if tensor is not None and tuple(tensor.shape) != shape:
                    expected = f"the pass's {list(shape)}"
                    raise RefusedError(name, list(tensor.shape), expected, "pass what was run")
            for layer, aux in zip(self._plan.session.aux_layers, states.aux, strict=True):
                if aux.shape != states.final.shape:
                    name = f"hidden state after {layer} layers"
                    step = "run lm_head on every position (no logits_to_keep)"
                    raise RefusedError(name, aux.shape, states.final.shape, step)
            plan = self._plan
            if stamp_of(plan.weights or plan.modules.weights()) != plan.weights_stamp:
                # An optimizer step since the sync: these states belong to no announced version.
                self._counters.shed("policy_moved", len(input_ids), 0)
                return
            record = Record(
                states=states,
                token_ids=_own(input_ids),
                loss_mask=_own(loss_mask).bool(),
                attention_mask=None if attention_mask is None else _own(attention_mask),
                position_ids=None if position_ids is None else _own(position_ids),
                logprobs=_aligned("sampled_logprobs", sampled_logprobs, shape),
                logits=_aligned("sampled_logits", sampled_logits, shape),
                acceptance=acceptance,
            )
            if self._at_once:
                record = without_logits(record, self._plan.modules, self._plan.temperature)
            else:
                record = with_logits(record)
            self._records.append(record)
            self._recorded += 1
            if self._plan.forwards is not None:
                self._submit(max(1, self._plan.forwards - self._recorded + 1))
        except RefusedError as error:
            self._tap.__exit__()
            self._records = []
            self._refuse(error)
        except torch.OutOfMemoryError:
            # The loop needs the device's memory more than the draft needs this window.
            self._records = []
            self._counters.shed("device_memory", len(input_ids), 0)

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
            except torch.OutOfMemoryError:
                self._counters.shed("device_memory", sum(len(r.token_ids) for r in records), 0)
            return None

        def copy(chosen: list[Chosen]) -> None:
            try:
                with torch.no_grad():
                    self._copy_and_offer(chosen)
            except RefusedError as error:
                self._refuse(error)
            except torch.OutOfMemoryError:
                self._counters.shed("device_memory", len(chosen), 0)
            else:
                self._plan.done()

        if not self._plan.runner.submit(choose, copy):
            self._counters.shed("copies_behind", sum(len(r.token_ids) for r in records), 0)

    def _choose(self, records: list[Record], passes_left: int) -> list[Chosen]:
        """What goes out, its numbers on the host, most wanted first."""
        plan = self._plan
        hosts = [HostRecord.of(record) for record in records]
        candidates = []
        for index, host in enumerate(hosts):
            states = host.record.states
            dtype = state_dtype(plan.states_dtype, states.final)
            token_bytes = bytes_per_token(len(states.aux), states.final.shape[-1], dtype)
            most = plan.session.max_sample_tokens(token_bytes)
            candidates += candidates_of(index, host, token_bytes, most)
        # Choices are made one after the other: what the last one left is known here.
        wanted = choose(plan.selector, candidates, self._budget // passes_left)
        self._budget -= sum(candidate.nbytes for candidate in wanted)
        self._counters.add(
            captured_tokens=sum(span.end - span.start for host in hosts for span in host.spans),
            chosen_samples=len(wanted),
            chosen_tokens=sum(candidate.tokens for candidate in wanted),
            not_chosen_samples=len(candidates) - len(wanted),
        )
        chosen = []
        for rank, candidate in enumerate(wanted):
            host = hosts[candidate.forward]
            sampled = sampled_of(host, candidate, plan.modules, plan.temperature)
            if sampled is None:
                self._counters.shed("non_finite", 1, candidate.nbytes)
                continue
            priority = PRIORITIES - 1 - rank * PRIORITIES // len(wanted)
            chosen.append(Chosen(host, candidate, sampled, priority))
        _check_unwritten(chosen)
        return chosen

    def _copy_and_offer(self, chosen: list[Chosen]) -> None:
        plan = self._plan
        for group in self._groups(chosen):
            with plan.staging.borrow(sum(layout.nbytes for _, layout in group)) as memory:
                at, filled = 0, []
                for one, layout in group:
                    facts = (plan.next_id(), plan.policy_version, plan.temperature)
                    header = header_of(*facts, plan.session.aux_layers, layout)
                    sample = Sample(header, memory[at : at + layout.nbytes])
                    fill(sample, one)
                    filled.append((sample, one.priority))
                    at += layout.nbytes
                plan.runner.settle()
                # Again, with the copies done: the loop has gone on meanwhile.
                _check_unwritten([one for one, _ in group])
                for sample, priority in filled:
                    plan.offer(sample, priority)

    def _groups(self, chosen: list[Chosen]) -> Iterator[list[tuple[Chosen, Layout]]]:
        """What is copied together: as much as the staging memory holds."""
        plan = self._plan
        group: list[tuple[Chosen, Layout]] = []
        for one in chosen:
            states = one.host.record.states
            dtype = state_dtype(plan.states_dtype, states.final)
            width = states.final.shape[-1]
            layout = layout_of(one.candidate.tokens, len(states.aux), width, dtype)
            nbytes = layout.nbytes + sum(other.nbytes for _, other in group)
            if group and nbytes > plan.staging.nbytes:
                yield group
                group = []
            if plan.takes(layout.nbytes, one.priority):
                group.append((one, layout))
        if group:
            yield group


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """Detached; on a device a copy: it is read later there, and the loop may use its own again."""
    return tensor.detach() if tensor.device.type == "cpu" else tensor.detach().clone()


def _check_unwritten(chosen: Sequence[Chosen]) -> None:
    for host in {id(one.host): one.host for one in chosen}.values():
        host.record.states.check_unwritten()
