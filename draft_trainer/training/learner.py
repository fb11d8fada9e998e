"""Trains the draft: one optimizer step on a set of samples."""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from draft_trainer.config import TrainingConfig
from draft_trainer.drafters import Draft
from draft_trainer.drafters.batch import Batch, batches
from draft_trainer.drafters.loss import METRICS, step_weights, ttt_objective, valid_targets
from draft_trainer.drafters.policy import PolicyHeads
from draft_trainer.training.optimizer import DraftOptimizer, Schedule
from draft_trainer.training.pace import Pace
from slipstream.errors import RefusedError
from slipstream.sample import Sample
from slipstream.shortage import raise_unless_shortage
from slipstream.v1 import release_pb2

_COUNTERS = ("steps", "steps_skipped", "anchors_trained", "steps_since_restart")
_STEPS_UNTIL_GROWTH = 64
_SMALLEST_PASS = 8
"""Part of ``forward_tokens`` below which a pass is not made shorter: it would hardly need less, for
the context of its tokens stays, and a shortage that passes leaves passes to grow back."""
"""Field of the refusal of a step that found too little memory on its device."""

logger = logging.getLogger(__name__)


class Collated(NamedTuple):
    """The samples of a step, ready for passes of at most ``pass_tokens``.

    Attributes:
        counts: int64 [K], places where the loss is computed.
        parts: batches, each with these places; None where a sample is longer than a pass: all of
            its windows, each with its past, would hold it many times over.
    """

    samples: Sequence[Sample]
    pass_tokens: int
    counts: Tensor
    parts: list[tuple[Batch, Tensor]] | None


@dataclass(frozen=True)
class StepMetrics:
    """One call of ``Learner.step``.

    Per-step tuples have K entries, NaN where nothing was valid.

    Attributes:
        skipped: True when nothing was learned: no valid anchor, or a non-finite number (only the
            latter counts in ``Learner.steps_skipped``).
        loss: the weighted loss that was minimised.
        step_loss: its mean per TTT step.
        step_acceptance: mean of sum over x of min(p, q) per TTT step, in [0, 1].
        step_top1: share of anchors with argmax q = argmax p, per TTT step.
        outside_mass: the policy's mean probability outside the draft vocabulary at step 0.
        grad_norm: before clipping.
        learning_rate: of this step.
        anchors: step-0 anchors.
        tokens: tokens of the samples.
        memory_retries: because the device had too little memory for a pass.
        seconds: wall time.
        policy_version: newest policy version among the samples.
    """

    skipped: bool
    loss: float
    step_loss: tuple[float, ...]
    step_acceptance: tuple[float, ...]
    step_top1: tuple[float, ...]
    outside_mass: float
    grad_norm: float
    learning_rate: float
    anchors: int
    tokens: int
    memory_retries: int
    seconds: float
    policy_version: int


class Learner:
    """Owns the head's float32 master weights and their optimizer. Not thread-safe, except that one
    thread may ``collate`` what comes next while another one is in ``step``.

    Candidates lie on the line from the served weights to the learner's (``snapshot``).

    Two learners that start from the same weights and take the same steps have the same bits, on
    the same hardware with the same number of threads; on a GPU, whether torch uses deterministic
    algorithms is the caller's choice.

    Attributes:
        pace: step size and update size.

    Args:
        head: trained in place, on its device.
        config: [training].
    """

    def __init__(
        self,
        head: Draft,
        config: TrainingConfig,
    ) -> None:
        self.head = head.float()
        self.config = config
        self.steps = 0
        self.steps_skipped = 0
        self.anchors_trained = 0
        self.steps_since_restart = 0
        self.pace = Pace()
        self._schedule = Schedule(config.learning_rate, config.warmup_steps)
        self._weights = step_weights(config.ttt_steps, config.step_weight_decay)
        self._optimizer = DraftOptimizer(head, config)
        self._pass_tokens = config.forward_tokens
        self._steps_of_the_size = 0
        self._copied: torch.cuda.Event | None = None
        if self.head.device.type == "cuda" and config.gpu_memory_fraction < 1.0:
            torch.cuda.set_per_process_memory_fraction(config.gpu_memory_fraction, self.head.device)

    def collate(self, samples: Sequence[Sample], policy_heads: PolicyHeads) -> Collated:
        """Collate what ``step`` is to train on. Raises RefusedError as that."""
        samples, tokens = self._within_the_window(samples), self._pass_tokens
        counts = torch.zeros(self.config.ttt_steps, dtype=torch.int64)
        parts: list[tuple[Batch, Tensor]] | None = []
        if any(sample.tokens > tokens for sample in samples):
            parts = None
        try:
            for batch, valid in self._collated(samples, policy_heads, tokens):
                counts += valid.flatten(1).sum(1)
                if parts is not None:
                    parts.append((batch, valid))
        except RuntimeError as error:
            raise_unless_shortage(error)
            raise _no_memory("too little page-locked memory for a step's samples") from error
        return Collated(samples, tokens, counts, parts)

    def step(
        self,
        samples: Sequence[Sample],
        policy_heads: PolicyHeads,
        collated: Collated | None = None,
    ) -> StepMetrics:
        """One optimizer step on all of ``samples``.

        A non-finite loss or gradient norm leaves weights and optimizer as they were, and is
        counted in ``steps_skipped``.

        Where the device has too little memory, the passes are made half as long, down to
        1 / ``_SMALLEST_PASS`` of ``forward_tokens``, and made again, once; they grow back after a
        while.

        Samples past the draft's sliding window, as a store holds them after ``ttt_steps`` was
        raised, are left out.

        Args:
            samples: at least one.
            policy_heads: must hold their policy versions.
            collated: of ``collate``, where it was called before.

        Raises:
            RefusedError: a policy version is not held, or memory is too little for half a pass
                (``REFUSAL_REASON_DEVICE_MEMORY``); nothing was changed.
        """
        started = time.perf_counter()
        if collated is None or collated.pass_tokens != self._pass_tokens:
            collated = self.collate(samples, policy_heads)
        steps, (samples, _, counts, parts) = self.config.ttt_steps, collated
        made = self._collated(samples, policy_heads, self._pass_tokens) if parts is None else parts
        totals, retries = self._passes(made, counts.clamp(min=1)), 0
        if totals is None:
            retries, made, parts, collated = 1, [], None, None
            least = max(self.config.forward_tokens // _SMALLEST_PASS, 1)
            self._resize(max(self._pass_tokens // 2, least))
            smaller = self._collated(samples, policy_heads, self._pass_tokens)
            totals = self._passes(smaller, counts.clamp(min=1))
        if totals is None:
            raise _no_memory(f"too little for {self._pass_tokens} tokens")
        norm = self._optimizer.gradient_norm()
        sums = totals[1:].view(steps, len(METRICS))
        means = sums / torch.where(counts > 0, counts, torch.nan)[:, None]
        columns = {name: tuple(means[:, i].tolist()) for i, name in enumerate(METRICS)}
        finite = bool(totals.isfinite().all()) and norm < float("inf")
        skipped = not finite or int(counts[0]) == 0
        if not skipped and not self.pace.measured:
            self.pace.begin(columns["acceptance"])
        since = self.config.warmup_steps if self.pace.halvings < 0 else self.steps_since_restart
        rate = self._schedule.rate(since) * self.pace.rate
        self.steps_skipped += not finite
        if not skipped:
            self._wait_for_copy()
            self._optimizer.step(rate, norm)
            self._steps_of_the_size += 1
            if self._steps_of_the_size >= _STEPS_UNTIL_GROWTH:
                self._resize(min(2 * self._pass_tokens, self.config.forward_tokens))
            self.steps += 1
            self.steps_since_restart += 1
            self.anchors_trained += int(counts[0])
        self._optimizer.clear_gradients()
        return StepMetrics(
            skipped=skipped,
            loss=float(totals[0]),
            step_loss=columns["loss"],
            step_acceptance=columns["acceptance"],
            step_top1=columns["top1_agreement"],
            outside_mass=columns["outside_mass"][0],
            grad_norm=norm,
            learning_rate=rate,
            anchors=int(counts[0]),
            tokens=sum(sample.tokens for sample in samples),
            memory_retries=retries,
            seconds=time.perf_counter() - started,
            policy_version=max((sample.policy_version for sample in samples), default=-1),
        )

    @torch.no_grad()
    def snapshot(
        self,
        dtype: torch.dtype = torch.bfloat16,
        served: Draft | None = None,
        share: float = 1.0,
    ) -> Draft:
        """A float32 copy of the averaged head, its weights rounded to ``dtype``, as it is served.

        The gate compares these weights: rounding is part of a release.

        Args:
            dtype: of a release.
            served: where the line begins; needed for a share below 1.
            share: how far from there to the averaged head.
        """
        head = copy.deepcopy(self.head).requires_grad_(False)
        averaged = self._optimizer.averaged
        begin = None if served is None else dict(served.named_parameters())
        for name, parameter in head.named_parameters():
            weight = averaged[name]
            if begin is not None and share < 1.0:
                weight = begin[name].to(weight.device, weight.dtype).lerp(weight, share)
            parameter.copy_(weight.to(dtype))
        return head

    def restart_optimizer(self) -> None:
        """Fresh moments and a new pace: for another policy, whose gradients are other ones."""
        self._wait_for_copy()
        self._optimizer.restart()
        self.steps_since_restart = 0
        self.pace.restart()

    def state_dict(self) -> dict[str, Tensor]:
        """Weights, average, moments and counters, copied to the CPU, for a ``StateStore``.

        With the position in the data it is all that the next steps depend on.
        """
        return {name: tensor.to("cpu", copy=True) for name, tensor in self.tensors.items()}

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors that ``state_dict`` copies, where they are; the counters are copies."""
        named = {f"head.{name}": tensor for name, tensor in self.head.state_dict().items()}
        counters = {f"counter.{name}": torch.tensor(getattr(self, name)) for name in _COUNTERS}
        counters["pace"] = torch.tensor(astuple(self.pace), dtype=torch.int64)
        return {n: t.detach() for n, t in (named | self._optimizer.tensors | counters).items()}

    def change_after(self, copied: torch.cuda.Event) -> None:
        """Leave ``tensors`` as they are until another stream has copied them."""
        self._copied = copied

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """The inverse of ``state_dict``: what follows is what would have followed there.

        A change of ``weight_averaging`` is no obstacle: the average starts at the weights.

        Raises:
            RefusedError: a tensor is missing, unknown or of another shape or type; nothing was
                changed.
        """
        self._wait_for_copy()
        own = self.tensors
        if not self.config.weight_averaging:
            state = {k: v for k, v in state.items() if not k.startswith("average.")}
        elif not any(name.startswith("average.") for name in state):
            averages = {f"average.{name}": f"head.{name}" for name in self._optimizer.averaged}
            state = {**state, **{k: state[v] for k, v in averages.items() if v in state}}
        for name in sorted(own.keys() | state.keys()):
            found, expected = (
                (list(some[name].shape), some[name].dtype) if name in some else None
                for some in (state, own)
            )
            if found != expected:
                raise RefusedError(
                    f"learner state {name}", found, expected, "resume a state of this head"
                )
        for name, tensor in own.items():
            tensor.copy_(state[name])
        for name in _COUNTERS:
            setattr(self, name, int(state[f"counter.{name}"]))
        halvings, measured, *steps = state["pace"].tolist()
        self.pace = Pace(halvings, bool(measured), *steps)

    def _within_the_window(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        window, steps = self.head.config.max_row_tokens, self.config.ttt_steps
        if window is None:
            return samples
        fitting = [sample for sample in samples if sample.tokens <= window - steps + 1]
        if left_out := len(samples) - len(fitting):
            text = "%d of %d samples are left out: too long for sliding_window %d with ttt_steps %d"
            logger.warning(text, left_out, len(samples), window, steps)
        return fitting

    def _collated(
        self, samples: Sequence[Sample], policy_heads: PolicyHeads, size: int
    ) -> Iterator[tuple[Batch, Tensor]]:
        steps = self.config.ttt_steps
        for batch in batches(samples, policy_heads, size, self.head.device, window_steps=steps):
            yield batch, valid_targets(batch, steps)

    def _passes(self, parts: Iterable[tuple[Batch, Tensor]], denominators: Tensor) -> Tensor | None:
        """The loss, then METRICS of every TTT step, summed over the passes, with gradients.

        None where the device had too little memory. Raises RefusedError: a policy version is not
        held. Neither leaves gradients.
        """
        self._optimizer.clear_gradients()
        totals = torch.zeros(
            1 + self.config.ttt_steps * len(METRICS), dtype=torch.float64, device=self.head.device
        )
        try:
            for batch, valid in parts:
                totals += self._backward(batch, valid, denominators)
            return totals.cpu()
        except RuntimeError as error:
            raise_unless_shortage(error)
            logger.warning("out of memory in passes of %d tokens: %s", self._pass_tokens, error)
        except RefusedError:
            # A second try reads the policy versions again, and one may be gone.
            self._optimizer.clear_gradients()
            raise
        # Not in the handler: the exception holds what the pass held.
        self._optimizer.clear_gradients()
        if self.head.device.type == "cuda":
            torch.cuda.empty_cache()
        return None

    def _resize(self, tokens: int) -> None:
        self._pass_tokens, self._steps_of_the_size = tokens, 0

    def _wait_for_copy(self) -> None:
        if self._copied is not None:
            torch.cuda.current_stream(self.head.device).wait_event(self._copied)
            self._copied = None

    def _backward(self, batch: Batch, valid: Tensor, denominators: Tensor) -> Tensor:
        outcome = ttt_objective(
            self.head,
            batch,
            valid,
            weights=self._weights,
            denominators=denominators,
            compute_dtype=getattr(torch, self.config.compute_dtype),
            target=self.config.target,
        )
        if outcome.loss.requires_grad:
            outcome.loss.backward()
        return torch.cat([outcome.loss.detach().double()[None], outcome.sums.flatten()])


def _no_memory(found: str) -> RefusedError:
    return RefusedError(
        "device_memory",
        found,
        "room for half a pass",
        "lower training.forward_tokens, or what else is on the device",
        reason=release_pb2.REFUSAL_REASON_DEVICE_MEMORY,
    )
