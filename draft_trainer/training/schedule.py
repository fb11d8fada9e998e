"""The learning rate of every optimizer step, from two counters and nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass

from slipstream.refusal import RefusedError


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then a constant rate, or a cosine to a floor over a known number of steps.

    Attributes:
        peak: the rate after warm-up.
        warmup_steps: steps of linear warm-up after every (re)start of the optimizer's moments.
        decay_steps: applied steps, warm-up included, after which the floor is reached; 0 for a
            constant rate, which is what a policy that goes on moving needs.
        decay_share: the cosine takes this share of ``decay_steps``, the last; before it the rate is
            constant. In (0, 1].
        floor: the last rate as a share of ``peak``, in [0, 1].
    """

    peak: float
    warmup_steps: int = 0
    decay_steps: int = 0
    floor: float = 0.1
    decay_share: float = 1.0

    def __post_init__(self) -> None:
        if not self.peak > 0:
            raise RefusedError("learning_rate", self.peak, "above 0", "raise it")
        if self.warmup_steps < 0:
            raise RefusedError("warmup_steps", self.warmup_steps, "at least 0", "raise it")
        if self.decay_steps and self.decay_steps <= self.warmup_steps:
            raise RefusedError(
                "decay_steps",
                self.decay_steps,
                f"0, or more than warmup_steps = {self.warmup_steps}",
                "train for more steps, or warm up for fewer",
            )
        if not 0.0 <= self.floor <= 1.0:
            raise RefusedError("decay_floor", self.floor, "in [0, 1]", "give a share of the rate")
        if not 0.0 < self.decay_share <= 1.0:
            raise RefusedError("decay_share", self.decay_share, "in (0, 1]", "lower it")

    def rate(self, step: int, since_restart: int) -> float:
        """The rate of the next optimizer step.

        Args:
            step: steps applied so far.
            since_restart: those of them since the moments were last made anew.
        """
        warmth = min((since_restart + 1) / (self.warmup_steps + 1), 1.0)
        if not self.decay_steps:
            return self.peak * warmth
        begin = max(self.decay_steps * (1.0 - self.decay_share), self.warmup_steps)
        done = (step - begin) / (self.decay_steps - begin)
        cosine = 0.5 * (1.0 + math.cos(math.pi * min(max(done, 0.0), 1.0)))
        return self.peak * warmth * (self.floor + (1.0 - self.floor) * cosine)
