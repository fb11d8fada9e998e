"""How training goes on: with many small steps far from the draft's best, with careful ones near it.

A head far from its best gains with every update, whatever its noise: the number of updates decides
how much a token teaches. Near its best the same steps add noise alone, and a candidate is worse
than the draft that it began as. Which of the two it is, is measured: by the first step before any
candidate was, then by what the last candidate gained over the served draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from draft_trainer.config import TrainingConfig

BATCH_TOKENS = (256, 4096)
LEAST_STEPS = 64
"""Least and most tokens of a step, and how many steps what a policy version brings should make,
near the draft's best."""

FAR_STEPS = 4
"""Times as many steps, each of as much less, far from it."""

NEW_LENGTH = 1.5
"""Acceptance length below which a draft has next to nothing to lose: a random one has 1."""

FAR_GAIN = 0.15
"""Acceptance length that one candidate gains over the served draft."""

MOST_HALVINGS = 4
_SHARES = (1.0, 0.5, 0.25)


@dataclass
class Pace:
    """Step size, update size and candidates of a learner.

    Attributes:
        far: whether the draft is far from its best.
        halvings: of the learning rate, 0 to ``MOST_HALVINGS``.
        measured: whether ``far`` was measured since ``restart``.
    """

    far: bool = False
    halvings: int = 0
    measured: bool = True

    @property
    def shares(self) -> tuple[float, ...]:
        """Of the line from the served weights, the candidates that are worth measuring."""
        return _SHARES if self.halvings else _SHARES[:1]

    @property
    def rate(self) -> float:
        """Factor of the learning rate."""
        return 0.5**self.halvings

    def restart(self) -> None:
        """For another policy: carefully, until it is measured how the draft does on it."""
        self.far, self.halvings, self.measured = False, 1, False

    def begin(self, step_acceptance: Sequence[float]) -> None:
        """Of the first step, before it moves the weights: acceptance rate by draft position."""
        length = 1.0 + sum(accumulate(step_acceptance, mul))
        self.measured = True
        # Not a number where nothing was valid: false.
        self.far = length < NEW_LENGTH
        if self.far:
            self.halvings = 0

    def settle(self, share: float, gain: float) -> None:
        """What the gate found.

        Args:
            share: of the candidate that accepts most.
            gain: its acceptance length over that of the served draft.
        """
        slower = share < 1.0 or gain <= 0.0
        self.halvings = min(max(self.halvings + (1 if slower else -1), 0), MOST_HALVINGS)
        self.far = share == 1.0 and gain >= FAR_GAIN

    def batch_tokens(self, config: TrainingConfig, arrived: int) -> int:
        """Tokens of a step.

        Args:
            config: [training].
            arrived: what a policy version brings, as often as it is trained on.
        """
        if config.batch_tokens is not None:
            return config.batch_tokens
        least, most = BATCH_TOKENS
        times = FAR_STEPS if self.far else 1
        return min(max(arrived // LEAST_STEPS, least), most) // times

    def steps_per_candidate(self, config: TrainingConfig) -> int:
        """Steps between two gate decisions: of as many tokens far from the best as near it."""
        smaller = self.far and config.batch_tokens is None
        return config.steps_per_candidate * (FAR_STEPS if smaller else 1)
