"""The pace of training: many small steps far from the draft's best, careful ones near it.

A head far from its best gains with every update, whatever its noise: the number of updates decides
how much a token teaches. Near its best the same steps add noise alone, and a candidate is worse
than the draft that it began as. Which of the two it is, is measured: by the first step before any
candidate was, then by the candidates. What the gate's intervals do not tell from chance changes
nothing: a rate that is halved by chance, again and again, leaves a draft behind its policy.
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
"""Least and most tokens of a step, and how many steps what a policy version brings should make,
at the configured learning rate."""

NEW_LENGTH = 1.5
"""Acceptance length of the first step below which a draft is far from its best; 1 at random."""

FAR, SLOWEST = -2, 4
"""``Pace.halvings`` far from the best, and its upper bound."""

_SHARES = (1.0, 0.5, 0.25)


@dataclass
class Pace:
    """Step size, update size and candidates of a learner.

    Attributes:
        halvings: of the learning rate, 0 to ``SLOWEST``; or ``FAR``, of a step's tokens.
        measured: whether a step was measured since ``restart``.
    """

    halvings: int = 0
    measured: bool = True

    @property
    def shares(self) -> tuple[float, ...]:
        """Of the line from the served weights, the candidates that are worth measuring."""
        return _SHARES if self.halvings > 0 else _SHARES[:1]

    @property
    def rate(self) -> float:
        """Factor of the learning rate."""
        return 0.5 ** max(self.halvings, 0)

    @property
    def steps(self) -> int:
        """Times as many steps, each of as much less."""
        return 2 ** max(-self.halvings, 0)

    def restart(self) -> None:
        """For another policy: carefully, until it is measured how the draft does on it."""
        self.halvings, self.measured = 1, False

    def begin(self, step_acceptance: Sequence[float]) -> None:
        """Of the first step, before it moves the weights: acceptance rate by draft position, NaN
        where no completion is that long."""
        known = [rate for rate in step_acceptance if not math.isnan(rate)]
        self.measured = True
        if 1.0 + sum(accumulate(known, mul)) < NEW_LENGTH:
            self.halvings = FAR

    def settle(self, share: float, gain: float, half_width: float) -> None:
        """What the gate found.

        Args:
            share: of the candidate that was gated; below 1 it is surely better than the whole way.
            gain: its acceptance length over that of the served draft.
            half_width: of the interval of ``gain``.
        """
        far = self.halvings < 0
        if share == 1.0 and gain > half_width:
            self.halvings = FAR if far else max(self.halvings - 1, 0)
        elif far or share < 1.0 or gain < -half_width:
            self.halvings = min(max(self.halvings, 0) + 1, SLOWEST)

    def batch_tokens(self, config: TrainingConfig, arrived: int) -> int:
        """Tokens of a step.

        Args:
            config: [training].
            arrived: what a policy version brings, as often as it is trained on.
        """
        if config.batch_tokens is not None:
            return config.batch_tokens
        least, most = BATCH_TOKENS
        return min(max(arrived // LEAST_STEPS, least), most) // self.steps

    def steps_per_candidate(self, config: TrainingConfig) -> int:
        """Steps between two gate decisions: as many tokens at every pace."""
        return config.steps_per_candidate * (self.steps if config.batch_tokens is None else 1)
