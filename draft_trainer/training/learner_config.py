"""How a head is trained, and what one step of it says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from draft_trainer.config import TrainingConfig
from draft_trainer.eagle3.soft_targets import Target
from draft_trainer.training.schedule import Schedule
from slipstream.refusal import RefusedError

Optimizer = Literal["adamw", "muon"]


@dataclass(frozen=True)
class LearnerConfig:
    """How the head is trained. Nothing in a step is drawn at random, so there is no seed here.

    Attributes:
        optimizer: "adamw", or "muon" for the matrices between hidden states; see
            ``HeadOptimizer``.
        learning_rate: AdamW's, and by its scale Muon's, after warm-up.
        warmup_steps: optimizer steps of linear warm-up after every (re)start of the moments. A
            fresh AdamW at full rate takes its first steps on one batch's signs and threw a good
            head back by 6 % of its acceptance length.
        decay_steps: 0 for a constant rate, or the steps of an offline fit; see ``Schedule``.
        decay_share: share of those steps, the last ones, over which the rate falls.
        decay_floor: the last rate of a decaying schedule as a share of ``learning_rate``.
        weight_decay: decoupled, on matrices only.
        betas: AdamW's.
        grad_clip: bound on the global gradient norm.
        weight_averaging: decay per step of the exponential average of the weights that is judged
            and released; 0 releases the weights of the last step. A rate high enough to follow a
            moving policy leaves a noise in the last step's weights that costs acceptance.
        target: what is minimised against the policy: forward KL, total variation or the negative
            log of the acceptance rate (see ``soft_targets``).
        ttt_steps: depth K of the training-time test; at least the served draft length.
        step_weight_decay: step s weighs this to the power s.
        compute_dtype: float32 or bfloat16. Weights, gradients and moments are float32 either way.
        max_batch_tokens: tokens, padding included, of one forward pass; a step accumulates
            gradients over as many passes as its samples need.
    """

    optimizer: Optimizer = "adamw"
    learning_rate: float = 1e-3
    warmup_steps: int = 20
    decay_steps: int = 0
    decay_share: float = 1.0
    decay_floor: float = 0.1
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    grad_clip: float = 1.0
    weight_averaging: float = 0.0
    target: Target = "kl"
    ttt_steps: int = 5
    step_weight_decay: float = 0.8
    compute_dtype: torch.dtype = torch.float32
    max_batch_tokens: int = 4096

    def __post_init__(self) -> None:
        if self.optimizer not in ("adamw", "muon"):
            raise RefusedError("optimizer", self.optimizer, "adamw or muon", "set one of them")
        if self.compute_dtype not in (torch.float32, torch.bfloat16):
            raise RefusedError(
                "compute_dtype", self.compute_dtype, "float32 or bfloat16", "set one of them"
            )
        if not 0.0 <= self.weight_averaging < 1.0:
            raise RefusedError("weight_averaging", self.weight_averaging, "in [0, 1)", "lower it")
        for name in ("learning_rate", "grad_clip", "ttt_steps", "step_weight_decay"):
            if not getattr(self, name) > 0:
                raise RefusedError(name, getattr(self, name), "above 0", "raise it")
        _ = self.schedule

    @property
    def schedule(self) -> Schedule:
        """The learning rate of every step."""
        return Schedule(
            self.learning_rate,
            self.warmup_steps,
            self.decay_steps,
            self.decay_floor,
            self.decay_share,
        )


@dataclass(frozen=True)
class StepMetrics:
    """One call of ``Learner.step``, over all ranks.

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
    seconds: float
    policy_version: int


def learner_config(training: TrainingConfig) -> LearnerConfig:
    """[training] as the learner takes it; at a constant rate."""
    return LearnerConfig(
        optimizer=training.optimizer,
        learning_rate=training.learning_rate,
        warmup_steps=training.warmup_steps,
        weight_decay=training.weight_decay,
        grad_clip=training.grad_clip,
        weight_averaging=training.weight_averaging,
        target=training.target,
        ttt_steps=training.ttt_steps,
        step_weight_decay=training.step_weight_decay,
        compute_dtype=getattr(torch, training.compute_dtype),
        max_batch_tokens=training.forward_tokens,
    )
