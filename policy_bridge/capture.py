"""One capture window: forward passes in, chosen samples out."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar, cast

import torch

from policy_bridge.copier import GROUP_BYTES, Copier
from policy_bridge.extraction import (
    Chosen,
    Record,
    candidates_of,
    check_tokens,
    fill,
    picked_logits,
    probed,
    sampled_of,
    state_dtype,
    without_logits,
)
from policy_bridge.hooks import ForwardTap
from policy_bridge.logits import check_width, is_sharded, unfit
from policy_bridge.model import PolicyModules, compiled_whole
from policy_bridge.outbox import PRIORITIES
from policy_bridge.selection import Candidate, Spent, aligned, bytes_per_token, shape_of
from policy_bridge.session import Session
from policy_bridge.stats import Counters
from slipstream.errors import RefusedError
from slipstream.sample import Sample, header_of, layout_of
from slipstream.shortage import raise_unless_shortage
from slipstream.tensors import dtype_to_wire
from slipstream.v1 import draft_trainer_pb2 as pb

T = TypeVar("T")


def raise_error(error: RefusedError) -> None:
    """Raise ``error``, as a strict window does."""
    raise error


class NullCapture(AbstractContextManager["NullCapture"]):
    """A capture window that captures nothing: no hooks, no copies."""

    def __exit__(self, *_: object) -> None:
        return None

    def ship(self, *_: object, **__: object) -> None:
        """Do nothing; takes the arguments of ``Capture.ship``."""


@dataclass(eq=False, kw_only=True)
class Capture:
    """A context manager around the policy's own log-prob (or training) forward.

    Hooks are on the model only inside it. After each forward call ``ship`` says what its rows were;
    at the end the byte budget picks sequences from all passes. Passes that together hold more than
    half of ``device_bytes`` are thinned out before: only copies of what the budget would pick from
    them so far are kept, until the next passes or the end. With ``forwards`` known, each pass gets
    its share of what is left and its device memory is freed at once. Passes with PEFT's adapters
    off, or with others on than at the last sync, are those of a reference model and are skipped.

    With ``training`` the passes are those that the loss is computed from: ones without gradients
    (evaluation) are skipped, recomputation by checkpointing inside backward is no pass, and
    ``ship`` may follow the backward, during which the window then holds the pass's logits. Leave
    the window before the optimizer's step: passes after it belong to no version, and are shed as
    ``policy_moved``.

    A call that cannot be served ends the window's capture: the hooks come off, nothing more of it
    is shipped, and the error goes to ``refuse``.

    Attributes:
        modules: the policy.
        session: what the trainer wants.
        policy_version: whose states these are.
        moved: tells whether the policy's weights have changed since that version.
        temperature: of the rollouts.
        sampling: what else they were sampled with.
        training: the passes are those that the loop trains on.
        budget_bytes: for all windows that share ``spent``.
        spent: what these windows have chosen.
        device_bytes: bound on the states that are held beside the policy's own, those that the
            copier has not done with included.
        forwards: how many passes will be shipped, if known.
        draw: gives each candidate its lot.
        states_dtype: the dtype in which states are sent; None keeps their own.
        next_id: a fresh name for a sequence.
        offer: hands a sample over with its priority, 0 to ``PRIORITIES`` - 1.
        probe: whether to compare the policy's own logits with those that follow from its states.
        takes: whether a sample of so many bytes and such a priority would be taken.
        copier: where choosing and copying is done.
        copier_for: returns the copier for a device and another bound on ``budget_bytes``, called at
            the first ``ship``; None: ``copier``, and no other bound.
        refuse: called with the error of a call that cannot be served; may raise it.
        done: called when a window ended well, with whether nothing is left to ``probe``.
        counters: of the bridge.
        is_open: whether it was entered and not left.
    """

    modules: PolicyModules
    session: Session
    policy_version: int
    moved: Callable[[], bool]
    temperature: float
    budget_bytes: int
    spent: Spent = field(default_factory=Spent)
    device_bytes: int = sys.maxsize
    forwards: int | None = None
    draw: Callable[[], float] = random.random
    states_dtype: torch.dtype | None = None
    next_id: Callable[[], str]
    offer: Callable[[Sample, int], bool]
    sampling: pb.SamplingParameters = field(default_factory=pb.SamplingParameters)
    training: bool = False
    probe: bool = False
    takes: Callable[[int, int], bool] = lambda nbytes, priority: True
    copier: Copier = field(default_factory=Copier)
    copier_for: Callable[[torch.device], tuple[Copier, int]] | None = None
    refuse: Callable[[RefusedError], None] = raise_error
    done: Callable[[bool], None] = lambda probed: None
    counters: Counters = field(default_factory=Counters)
    is_open: bool = field(default=False, init=False)
    _records: list[Record] = field(default_factory=list, init=False)
    _recorded: int = field(default=0, init=False)
    _refused: bool = field(default=False, init=False)
    # What is left of passes that were thinned out; used only where choosing is done, in order.
    _kept: dict[Candidate, Record] = field(default_factory=dict, init=False)
    _kept_bytes: int = field(default=0, init=False)
    _thinned: bool = field(default=False, init=False)
    _dropped: bool = field(default=False, init=False)

    def __enter__(self) -> Capture:
        layers = self.session.aux_layers
        self._tap = ForwardTap(self.modules, layers, self.probe, self.training, self._pick_logits)
        self.counters.add(captures=1)
        try:
            self._tap.__enter__()
        except RefusedError as error:
            self._refuse(error)
        self.is_open = True
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._tap.__exit__()
        self.is_open = False
        try:
            if kind is not None or self._refused:
                self._drop_held()
            elif not self._submit(partial(self._choose, passes_left=1)):
                # Nothing will choose from what earlier passes left.
                self.counters.shed("copies_behind", len(self._kept), 0)
                self._drop_held()
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
        prompt_lengths: torch.Tensor | Sequence[int] | None = None,
        rollout_versions: torch.Tensor | Sequence[int] | int | None = None,
        logits_dtype: torch.dtype | None = None,
        sample_ids: Sequence[str] | None = None,
    ) -> None:
        """Describe the forward pass that has just run; the samples chosen from it are sent.

        B rows of S columns.

        Args:
            input_ids: whole numbers [B, S], what the pass was given.
            loss_mask: bool or 0/1 [B, S], true on completion tokens.
            attention_mask: bool or 0/1 [B, S]; without ``position_ids`` each row's real tokens are
                contiguous, padded left or right. None: no padding.
            position_ids: whole numbers [B, S] of packed rows: a sequence begins at each 0. None:
                one sequence a row.
            sampled_logprobs: float [B, S], log p(x_t | x_<t) at the window's temperature, or
                [B, S-1] without the first column. Read where the loss mask is true. Those of the
                pass itself; the rollouts' only where they are of this version: the trainer refuses
                a teacher that is no distribution. None: computed where the weights are at hand.
            sampled_logits: float, same shapes, logits before temperature. None: computed.
            prompt_lengths: tokens of each sequence before its completion: the completions of a
                prompt are held out of training together. None: those before the first true of its
                loss mask, which is wrong where that leaves out the beginning of completions.
            rollout_versions: the policy version that sampled each sequence or all; None: this one.
            logits_dtype: in which a loss that is fused with lm_head has its logits. None:
                autocast's where that is on, else that of the states.
            sample_ids: a name for each sequence, of which the trainer takes one sample, also where
                it is captured again after a restart. None: fresh names.

        Raises:
            RefusedError: (to ``refuse``) no pass to describe, or shapes that do not fit it.
        """
        if self._refused:
            self._tap.__exit__()
            return
        try:
            states = self._tap.take()
            if self._tap.traced:
                raise compiled_whole(type(self.modules.root).__name__)
            if states is None:
                found = "no complete forward pass since the last ship"
                step = (
                    "call the model first; set modules.final_norm if the loss is fused; compile "
                    "the layers, not the model; a pass with the adapters off, or others on, is none"
                )
                if self.training:
                    step += "; a pass under no_grad is none in a window with training=True"
                raise RefusedError("capture.ship", found, "a forward pass through lm_head", step)
            self.modules.check_exact()
            if any(map(is_sharded, (*states.aux, states.final, states.logits))):
                step = "leave lm_head and the norm before it out of the tensor-parallel plan"
                raise unfit("a DTensor in its pass", "whole states", step)
            if len(devices := {str(x.device) for x in (*states.aux, states.final)}) > 1:
                step = "load the policy without a device_map over several devices"
                raise unfit(f"states on {sorted(devices)}", "one device", step)
            for layer, aux in zip(self.session.aux_layers, states.aux, strict=True):
                name, width = f"hidden state after {layer} layers", states.final.shape[-1]
                if aux.shape[-1] != width:
                    step = "this policy projects its states before lm_head: it cannot be captured"
                    expected = f"{width}, the input of lm_head"
                    raise RefusedError(f"size of the {name}", aux.shape[-1], expected, step)
                if aux.shape != states.final.shape:
                    step = (
                        "set modules.final_norm, or run lm_head once on every position "
                        "(no logits_to_keep, no chunks)"
                    )
                    expected = f"{list(states.final.shape)}, as at lm_head"
                    raise RefusedError(f"shape of the {name}", list(aux.shape), expected, step)
            if states.logits is not None:
                check_width(states.logits, self.modules.vocab_size)
            shape = tuple(states.final.shape[:2])
            for name, tensor in (
                ("input_ids", input_ids),
                ("loss_mask", loss_mask),
                ("attention_mask", attention_mask),
                ("position_ids", position_ids),
            ):
                if tensor is not None and shape_of(tensor) != [*shape]:
                    expected = f"a tensor of the pass's {list(shape)}"
                    raise RefusedError(name, shape_of(tensor), expected, "pass what was run")
            if self.moved():
                # An optimizer step since the sync: these states belong to no announced version.
                self.counters.shed("policy_moved", len(input_ids), 0)
                return
            if self.copier_for is not None and not self._recorded:
                # By the device of the states: weights may be on it for the pass alone.
                self.copier, most = self.copier_for(states.final.device)
                self.budget_bytes = min(self.budget_bytes, most)
            if logits_dtype is not None and states.logits is None:
                states = replace(states, logits_dtype=logits_dtype)
            record = Record(
                states=states,
                token_ids=self._own(input_ids),
                loss_mask=self._own(loss_mask).bool(),
                attention_mask=self._own(attention_mask),
                position_ids=self._own(position_ids),
                logprobs=self._own(aligned("sampled_logprobs", sampled_logprobs, shape)),
                logits=self._own(aligned("sampled_logits", sampled_logits, shape)),
                prompt_lengths=self._own(prompt_lengths),
                rollout_versions=self._own(rollout_versions),
                sample_ids=self._own(sample_ids),
            )
            self._recorded += 1
            if self.probe:
                self.probe = not probed(record, self.modules, self.temperature)
            whole = self._needs_logits_now(states.final.device)
            record = without_logits(record, self.modules, self.temperature, whole=whole)
            self._hold(record if self.copier.deferred else record.on_host(self.next_id))
        except RefusedError as error:
            self._tap.__exit__()
            self._refuse(error)
        except RuntimeError as error:
            raise_unless_shortage(error)
            # The loop needs the device's memory more than the draft needs this window.
            rows = len(input_ids) + sum(len(record.token_ids) for record in self._records)
            self._records = []
            self.counters.shed("device_memory", rows, 0)

    def _pick_logits(self, logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor | None:
        # Before ``ship`` it is not known whether the copier defers.
        if not (self.training or self._needs_logits_now(logits.device)):
            return None
        return picked_logits(logits, ids, self.modules.form)

    def _needs_logits_now(self, device: torch.device) -> bool:
        """Return whether values that were not given must be taken from the pass's logits, now.

        Weights that are spread over ranks cannot be read later, those that are not on ``device``
        (offloaded between the steps) are not there when they are needed, and those that are
        stepped next have changed by the time a side stream would read them.
        """
        spread, elsewhere = self.modules.shards, self.modules.head_weight.device != device
        return bool(spread) or elsewhere or (self.training and self.copier.deferred)

    def _own(self, values: T) -> T:
        """Detach what the loop may reuse after ``ship``; copy it too where it is read later."""
        if isinstance(values, torch.Tensor):
            own = values.detach()
            return cast(T, own.clone() if self.copier.deferred else own)
        return copy(values)

    def _hold(self, record: Record) -> None:
        """Take a pass into the window, which stays within ``device_bytes``."""
        behind = self.copier.nbytes
        held = record.nbytes + sum(other.nbytes for other in self._records)
        if behind and behind + self._kept_bytes + held > self.device_bytes:
            self.counters.shed("device_full", len(record.token_ids), 0)
            return
        self._records.append(record)
        if self.forwards is not None:
            left = max(1, self.forwards - self._recorded + 1)
            self._submit(partial(self._choose, passes_left=left))
        elif held > self.device_bytes // 2:
            self._thinned = True
            self._submit(self._thin_out)

    def _drop_held(self) -> None:
        """Drop what is held, also what the choosing side is about to keep."""
        self._dropped = True
        self._records = []
        self._kept.clear()

    def _refuse(self, error: RefusedError) -> None:
        # Also called from the copier's thread: the hooks then come off with the window's next call.
        if not self._refused:
            self._refused = True
            self.counters.add(captures_refused=1)
        if self._kept:
            # Nothing will choose from what earlier passes left.
            self.counters.shed("capture_refused", len(self._kept), 0)
        self._drop_held()
        self.refuse(error)

    def _submit(self, pick: Callable[[list[Record]], list[Chosen] | None]) -> bool:
        """Let ``pick`` choose from the held records, send the chosen and drop the rest.

        False, with the records counted as shed, where the copier takes nothing.
        """
        records, self._records = self._records, []
        if not records and not self._thinned:
            return True
        rows = sum(len(record.token_ids) for record in records)
        nbytes = sum(record.nbytes for record in records)
        if self._thinned and not self.is_open:
            # The most that is kept until then; a window that follows does not know how much.
            nbytes += self.device_bytes // 2

        def choose() -> list[Chosen] | None:
            try:
                with torch.no_grad():
                    return pick(records)
            except RefusedError as error:
                self._refuse(error)
            except RuntimeError as error:
                raise_unless_shortage(error)
                self.counters.shed("device_memory", rows, 0)
            return None

        def copy_chosen(chosen: list[Chosen]) -> None:
            try:
                with torch.no_grad():
                    self._copy_and_offer(chosen)
            except RefusedError as error:
                self.counters.shed("capture_refused", len(chosen), 0)
                self._refuse(error)
            except RuntimeError as error:
                raise_unless_shortage(error)
                self.counters.shed("device_memory", len(chosen), 0)
            else:
                self.done(not self.probe)

        taken = self.copier.submit(choose, copy_chosen, nbytes)
        if not taken:
            self.counters.shed("copies_behind", rows, 0)
        return taken

    def _candidates(self, records: list[Record]) -> dict[Candidate, Record]:
        """The candidates of these passes, and those kept from the passes before."""
        found = dict(self._kept)
        for record in records:
            record = record.on_host(self.next_id) if self.copier.deferred else record
            check_tokens(record, self.modules.vocab_size)
            states = record.states
            dtype = state_dtype(self.states_dtype, states.final)
            width = (len(states.aux), states.final.shape[-1], dtype)
            token_bytes, most = bytes_per_token(*width), self.session.max_sample_tokens(*width)
            found |= dict.fromkeys(candidates_of(record, token_bytes, most, self.draw), record)
            self.counters.add(captured_tokens=sum(span.end - span.start for span in record.spans))
        return found

    def _thin_out(self, records: list[Record]) -> None:
        """Keep copies of what would be sent if no passes followed, and drop the rest."""
        found, kept, left = self._candidates(records), {}, self.device_bytes // 2
        for candidate in self.spent.choose(found, self.budget_bytes):
            record = found[candidate]
            left -= candidate.tokens * record.token_bytes
            if left < 0:
                break
            kept[candidate] = record if candidate in self._kept else record.part(candidate)
        self.copier.settle()
        _check_unwritten(records)
        self.counters.add(not_chosen_samples=len(found) - len(kept))
        # Summed first: from the assignment on, ``_drop_held`` may clear ``_kept``.
        nbytes = sum(record.nbytes for record in kept.values())
        self._kept, self._kept_bytes = kept, nbytes
        if self._dropped:
            self._kept.clear()

    def _choose(self, records: list[Record], passes_left: int) -> list[Chosen]:
        """Choose what is sent, most wanted first, with its numbers on the host."""
        found = self._candidates(records)
        self._kept, self._kept_bytes = {}, 0
        # Choices are made one after the other: what the last one left is known here.
        wanted = self.spent.choose(found, self.budget_bytes, passes_left)
        self.spent.add(wanted)
        self.counters.add(
            chosen_samples=len(wanted),
            chosen_tokens=sum(candidate.tokens for candidate in wanted),
            not_chosen_samples=len(found) - len(wanted),
        )
        chosen = []
        for rank, candidate in enumerate(wanted):
            record = found[candidate]
            sampled = sampled_of(record, candidate, self.modules, self.temperature)
            if sampled is None:
                self.counters.shed("non_finite", 1, candidate.nbytes)
                continue
            width, layers = record.states.final.shape[-1], len(record.states.aux)
            dtype = state_dtype(self.states_dtype, record.states.final)
            layout = layout_of(candidate.tokens, layers, width, dtype)
            priority = PRIORITIES - 1 - rank * PRIORITIES // len(wanted)
            chosen.append(Chosen(record, candidate, layout, sampled, priority))
        computed = [one for one in chosen if not one.record.complete]
        if computed and self.moved():
            # Their numbers may come from other weights than those of the pass.
            self.counters.shed("policy_moved", len(computed), 0)
            chosen = [one for one in chosen if one.record.complete]
        _check_unwritten([one.record for one in chosen])
        return chosen

    def _copy_and_offer(self, chosen: list[Chosen]) -> None:
        """Send ``chosen``, from which what is offered, or counted as shed, is removed."""
        for group in self._copy_groups(chosen):
            nbytes = [one.layout.nbytes for one in group]
            pinned = self.copier.pinned
            memory = torch.empty(sum(nbytes), dtype=torch.uint8, device="cpu", pin_memory=pinned)
            filled = []
            for one, block in zip(group, memory.split(nbytes), strict=True):
                facts = (self.policy_version, self.temperature)
                header = header_of("", *facts, self.session.aux_layers, one.layout)
                header.sampling.CopyFrom(self.sampling)
                header.logits_dtype = dtype_to_wire(one.record.states.logits_dtype)
                one.write_origin(header)
                sample = Sample(header, block)
                fill(sample, one)
                filled.append((sample, one))
            self.copier.settle()
            # Once more after the copies: the loop went on meanwhile.
            _check_unwritten([one.record for one in group])
            for sample, one in filled:
                chosen.remove(one)
                self.offer(sample, one.priority)

    def _copy_groups(self, chosen: list[Chosen]) -> Iterator[list[Chosen]]:
        """Yield ``chosen`` in groups that are copied together, without what would be shed."""
        group: list[Chosen] = []
        for one in [*chosen]:
            nbytes = one.layout.nbytes + sum(other.layout.nbytes for other in group)
            if group and nbytes > GROUP_BYTES:
                yield group
                group = []
            if self.takes(one.layout.nbytes, one.priority):
                group.append(one)
            else:
                chosen.remove(one)
        if group:
            yield group


def _check_unwritten(records: Sequence[Record]) -> None:
    for record in {id(record): record for record in records}.values():
        record.states.check_unwritten()
