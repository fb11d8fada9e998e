"""The pace of training: many small steps far from the draft's best, careful ones near it.

A head far from its best gains with every update, whatever its noise: the number of updates decides
how much a token teaches. Near its best, most of what a candidate differs by from the served draft
is the noise of its last steps, and an average of the two is better than the candidate itself. Which
of the two holds is measured: by the first step until a candidate is gated, then by the candidates.
A difference that may be chance by the gate's intervals changes nothing.

Averages are served, not trained on: training goes on from its own weights at its own rate. Going on
from an average at a lower rate looks better at once, and learns next to nothing from then on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from draft_trainer.config import TrainingConfig

BATCH_TOKENS = (256, 4096)
LEAST_STEPS = 64
"""Least and most tokens of a step, and the steps that the tokens of one policy version should make
at least, at the configured learning rate. Where a pass is longer than the most, a step may be."""

NEW_LENGTH = 1.5
"""Acceptance length of the first step below which a draft is far from its best; 1 at random."""

FAR, SLOWEST = -2, 4
"""``Pace.halvings`` far from the best, and its upper bound."""

_SHARES = (1.0, 0.5, 0.25)


@dataclass
class Pace:
    """Step size, update size and candidates of a learner.

    Attributes:
        halvings: of the learning rate, 0 to ``SLOWEST``; if negative, of a step's tokens (``FAR``).
        measured: whether a step was measured since ``restart``.
        steps_since_gain: far from the best, optimizer steps since a candidate was surely better.
    """

    halvings: int = 0
    measured: bool = True
    steps_since_gain: int = 0

    @property
    def shares(self) -> tuple[float, ...]:
        """The candidates worth measuring, as shares of the way from served to new weights."""
        return _SHARES if self.halvings >= 0 else _SHARES[:1]

    @property
    def rate(self) -> float:
        """Factor of the learning rate."""
        return 0.5 ** max(self.halvings, 0)

    @property
    def steps(self) -> int:
        """Factor of the number of steps, and divisor of the tokens of each."""
        return 2 ** max(-self.halvings, 0)

    def restart(self) -> None:
        """Start carefully on another policy, until a step measures how the draft does on it."""
        self.halvings, self.measured, self.steps_since_gain = 1, False, 0

    def begin(self, step_acceptance: Sequence[float]) -> None:
        """Take what the first step measured before it moved the weights: the acceptance rate by
        draft position, NaN where no completion is that long."""
        known = [rate for rate in step_acceptance if not math.isnan(rate)]
        self.measured = True
        if 1.0 + sum(accumulate(known, mul)) < NEW_LENGTH:
            self.halvings = FAR

    def settle(self, gain: float, half_width: float, steps: int, config: TrainingConfig) -> None:
        """Take the gate's result on a candidate.

        Far from the best, one that is no better ends that pace only with as many steps as
        ``steps_per_candidate`` says behind it: a gate may be due by time after a few.

        Args:
            gain: its acceptance length over that of the served draft.
            half_width: half the width of the interval of ``gain``.
            steps: since the candidate before it.
            config: [training].
        """
        far = self.halvings < 0
        if gain > half_width:
            self.steps_since_gain = 0
            self.halvings = FAR if far else max(self.halvings - 1, 0)
            return
        self.steps_since_gain += steps
        if far and self.steps_since_gain >= self.steps_per_candidate(config):
            self.halvings = 0
        elif gain < -half_width:
            self.halvings = min(max(self.halvings, 0) + 1, SLOWEST)
        if self.halvings >= 0:
            self.steps_since_gain = 0

    def batch_tokens(self, config: TrainingConfig, arrived: int) -> int:
        """Return the tokens of a step.

        Args:
            config: [training].
            arrived: tokens of a policy version, counted as often as they are trained on.
        """
        if config.batch_tokens is not None:
            return config.batch_tokens
        least, most = BATCH_TOKENS
        most = max(most, config.forward_tokens)
        return min(max(arrived // LEAST_STEPS, least), most) // self.steps

    def steps_per_candidate(self, config: TrainingConfig) -> int:
        """Return the steps between two gate decisions, which are as many tokens at every pace."""
        return config.steps_per_candidate * (self.steps if config.batch_tokens is None else 1)
