"""Trains the head: its own optimizer, its own clipping, and a guard against non-finite numbers."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from draft_trainer.batch import Batch, batches
from draft_trainer.head import Eagle3Head
from draft_trainer.objective import METRICS, step_weights, ttt_objective, valid_targets
from draft_trainer.policy_head import PolicyHeads
from draft_trainer.sample import Sample
from slipstream.refusal import RefusedError


@dataclass(frozen=True)
class LearnerConfig:
    """How the head is trained.

    Attributes:
        learning_rate: AdamW's, after warm-up.
        warmup_steps: optimizer steps of linear warm-up after every (re)start of the optimizer. A
            fresh AdamW at full rate takes its first steps on one batch's signs and threw a good
            head back by 6 % of its acceptance length.
        weight_decay: AdamW's, on matrices only.
        betas: AdamW's.
        grad_clip: bound on the global gradient norm.
        weight_averaging: decay per step of the exponential average of the weights that is judged
            and released; 0 releases the weights of the last step. A rate high enough to follow a
            moving policy leaves a noise in the last step's weights that costs acceptance.
        ttt_steps: depth K of the training-time test; at least the served draft length.
        step_weight_decay: step s weighs this to the power s.
        compute_dtype: float32, or bfloat16 for autocast. Master weights are float32 either way.
        max_batch_tokens: tokens, padding included, of one forward pass; a step accumulates
            gradients over as many passes as its samples need.
        seed: reserved for what a step draws at random; kept so that a run names it.
    """

    learning_rate: float = 1e-3
    warmup_steps: int = 20
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    grad_clip: float = 1.0
    weight_averaging: float = 0.0
    ttt_steps: int = 5
    step_weight_decay: float = 0.8
    compute_dtype: torch.dtype = torch.float32
    max_batch_tokens: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        if self.compute_dtype not in (torch.float32, torch.bfloat16):
            raise RefusedError(
                "compute_dtype", self.compute_dtype, "float32 or bfloat16", "set one of them"
            )
        if not 0.0 <= self.weight_averaging < 1.0:
            raise RefusedError("weight_averaging", self.weight_averaging, "in [0, 1)", "lower it")
        for name in ("learning_rate", "grad_clip", "ttt_steps", "step_weight_decay"):
            if not getattr(self, name) > 0:
                raise RefusedError(name, getattr(self, name), "above 0", "raise it")


@dataclass(frozen=True)
class StepMetrics:
    """One call of ``Learner.step``. Per-step tuples have K entries, NaN where nothing was valid.

    Attributes:
        skipped: True when nothing was learned: no valid anchor, or a non-finite number (only the
            latter counts in ``Learner.steps_skipped``).
        loss: the weighted loss that was minimised.
        step_loss: mean cross-entropy per TTT step.
        step_acceptance: mean of sum over x of min(p, q) per TTT step, in [0, 1].
        step_greedy_acceptance: mean of p(argmax q) per TTT step, in [0, 1].
        step_top1: share of anchors with argmax q = argmax p, per TTT step.
        outside_mass: the policy's mean probability outside the draft vocabulary at step 0.
        grad_norm: before clipping.
        learning_rate: of this step.
        anchors: step-0 anchors.
        tokens: tokens of the samples.
        seconds: wall time.
        policy_version: newest policy version among the samples.
    """

    skipped: bool
    loss: float
    step_loss: tuple[float, ...]
    step_acceptance: tuple[float, ...]
    step_greedy_acceptance: tuple[float, ...]
    step_top1: tuple[float, ...]
    outside_mass: float
    grad_norm: float
    learning_rate: float
    anchors: int
    tokens: int
    seconds: float
    policy_version: int


class Learner:
    """Owns the head's float32 master weights and their optimizer. Not thread-safe.

    Args:
        head: trained in place.
        config: how.
    """

    def __init__(self, head: Eagle3Head, config: LearnerConfig) -> None:
        self.head = head.float()
        self.config = config
        self.steps = 0
        self.steps_skipped = 0
        self.anchors_trained = 0
        self._weights = step_weights(config.ttt_steps, config.step_weight_decay)
        self._restart_optimizer()
        self._average = self._new_average()

    def step(self, samples: Sequence[Sample], policy_heads: PolicyHeads) -> StepMetrics:
        """One optimizer step on all of ``samples``.

        A non-finite loss or gradient norm leaves weights and optimizer as they were and is
        counted in ``steps_skipped``.

        Args:
            samples: at least one.
            policy_heads: must hold their policy versions.

        Raises:
            RefusedError: a policy version is not held; nothing was changed.
        """
        started = time.perf_counter()
        config = self.config
        parts = [
            (batch, valid_targets(batch, config.ttt_steps))
            for batch in batches(samples, policy_heads, config.max_batch_tokens)
        ]
        counts = torch.stack([valid.flatten(1).sum(1) for _, valid in parts]).sum(0)
        sums = torch.zeros(config.ttt_steps, len(METRICS), dtype=torch.float64)
        loss = 0.0
        self._optimizer.zero_grad(set_to_none=True)
        for batch, valid in parts:
            value, part = self._backward(batch, valid, counts.clamp(min=1))
            loss += value
            sums += part.cpu()
        norm = float(torch.nn.utils.clip_grad_norm_(self.head.parameters(), config.grad_clip))
        rate = config.learning_rate * min((self._since_restart + 1) / (config.warmup_steps + 1), 1)
        finite = torch.tensor([loss, norm]).isfinite().all() and bool(sums.isfinite().all())
        skipped = not finite or int(counts[0]) == 0
        self.steps_skipped += not finite
        if not skipped:
            for group in self._optimizer.param_groups:
                group["lr"] = rate
            self._optimizer.step()
            self._average.update_parameters(self.head)
            self._since_restart += 1
            self.steps += 1
            self.anchors_trained += int(counts[0])
        self._optimizer.zero_grad(set_to_none=True)
        means = sums / torch.where(counts > 0, counts, torch.nan)[:, None]
        columns = {name: tuple(means[:, i].tolist()) for i, name in enumerate(METRICS)}
        return StepMetrics(
            skipped=skipped,
            loss=loss,
            step_loss=columns["loss"],
            step_acceptance=columns["acceptance"],
            step_greedy_acceptance=columns["greedy_acceptance"],
            step_top1=columns["top1_agreement"],
            outside_mass=columns["outside_mass"][0],
            grad_norm=norm,
            learning_rate=rate,
            anchors=int(counts[0]),
            tokens=sum(sample.num_tokens for sample in samples),
            seconds=time.perf_counter() - started,
            policy_version=max(sample.policy_version for sample in samples),
        )

    def snapshot(self, dtype: torch.dtype = torch.bfloat16) -> Eagle3Head:
        """A float32 copy of the averaged head, its weights rounded to ``dtype``, as it is served.

        The gate must judge these weights: rounding is part of a release.
        """
        head = copy.deepcopy(self.head).requires_grad_(False)
        head.load_state_dict(self._average.module.state_dict())
        for parameter in head.parameters():
            parameter.copy_(parameter.to(dtype))
        return head

    def restart_from(self, head: Eagle3Head) -> None:
        """Take another head's weights, with a fresh optimizer and warm-up (after a roll-back)."""
        self.head.load_state_dict(head.state_dict())
        self._restart_optimizer()
        self._average = self._new_average()

    def state_dict(self) -> dict[str, Tensor]:
        """Weights, optimizer moments and counters as copied tensors, for a safetensors file."""
        state = {f"head.{k}": v.detach().clone() for k, v in self.head.state_dict().items()}
        average = self._average.module.state_dict()
        state |= {f"average.{k}": v.detach().clone() for k, v in average.items()}
        for name, parameter in self.head.named_parameters():
            for key, value in self._optimizer.state.get(parameter, {}).items():
                state[f"optimizer.{name}.{key}"] = value.detach().clone()
        for name in _COUNTERS:
            state[f"counter.{name}"] = torch.tensor(getattr(self, name))
        return state

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """The inverse of ``state_dict``; warm-up starts again, the moments are kept.

        Raises:
            RefusedError: a tensor is missing or has another shape; nothing was changed.
        """
        expected = {f"head.{k}": v.shape for k, v in self.head.state_dict().items()}
        expected |= {f"average.{k}": v.shape for k, v in self.head.state_dict().items()}
        expected |= {f"counter.{name}": torch.Size([]) for name in _COUNTERS}
        for name, shape in expected.items():
            found = state[name].shape if name in state else None
            if found != shape:
                raise RefusedError(
                    f"learner state {name}", found, shape, "resume from this head's own checkpoint"
                )
        self.head.load_state_dict({k: state[f"head.{k}"] for k in self.head.state_dict()})
        self._restart_optimizer()
        self._average = self._new_average()
        self._average.module.load_state_dict(
            {k: state[f"average.{k}"] for k in self.head.state_dict()}
        )
        # Else the next update would start the average anew.
        self._average.n_averaged.fill_(max(int(state["counter.steps"]), 1))
        for name, parameter in self.head.named_parameters():
            prefix = f"optimizer.{name}."
            moments = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
            if moments:
                self._optimizer.state[parameter] = {k: v.clone() for k, v in moments.items()}
        for name in _COUNTERS:
            setattr(self, name, int(state[f"counter.{name}"]))

    def _backward(self, batch: Batch, valid: Tensor, denominators: Tensor) -> tuple[float, Tensor]:
        device = batch.aux.device.type
        enabled = self.config.compute_dtype is not torch.float32
        with torch.autocast(device, self.config.compute_dtype, enabled=enabled):
            outcome = ttt_objective(
                self.head, batch, valid, weights=self._weights, denominators=denominators
            )
        if outcome.loss.requires_grad:
            outcome.loss.backward()
        return float(outcome.loss.detach()), outcome.sums

    def _new_average(self) -> AveragedModel:
        average = AveragedModel(
            self.head, multi_avg_fn=get_ema_multi_avg_fn(self.config.weight_averaging)
        )
        # The first update of a fresh average copies; it should average with where it started.
        average.n_averaged.fill_(1)
        return average

    def _restart_optimizer(self) -> None:
        matrices = [p for p in self.head.parameters() if p.ndim >= 2]
        vectors = [p for p in self.head.parameters() if p.ndim < 2]
        self._optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": self.config.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=self.config.learning_rate,
            betas=self.config.betas,
        )
        self._since_restart = 0


_COUNTERS = ("steps", "steps_skipped", "anchors_trained")
