"""The choice of what is held out of training: prompts, or completions where prompts are few.

A draft that has trained on some completions of a prompt knows something of the others, so all
completions of a prompt are held out or none. Where a run has few prompts a version, that leaves the
gate two or three clusters, or training nothing; completions are then held out one by one. The gate
measures on prompts that are trained on, and says so.

The choice follows from a sample's own names and from what is kept here, so a restart makes the same
one. What was held out never trains because the choice changes: a sample's own stays with it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

from draft_trainer.config import ENOUGH_HELD_OUT, FEW_PROMPTS, HELD_OUT_LEAST
from slipstream.sample import Sample, is_held_out

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HeldOut:
    """The choice of a run, and what is known of its prompts so far.

    Attributes:
        fraction: the share of prompts, or of completions.
        by_completion: whether completions are held out.
        many: whether a version had more than ``FEW_PROMPTS`` prompts: from then on prompts are held
            out, whatever follows, as the few samples of a pause in training.
        prompts: those of the newest version, while they are few.
        samples: how many samples they have, as far as it matters.
    """

    fraction: float
    by_completion: bool = False
    many: bool = False
    prompts: tuple[str, ...] = ()
    samples: int = 0

    @classmethod
    def read(cls, kept: Any, fraction: float) -> HeldOut:
        """Return what ``facts`` was; ``kept`` is None, or a number alone of an earlier release."""
        if isinstance(kept, dict):
            return cls(**kept | {"prompts": tuple(kept["prompts"])})
        return cls(kept or fraction)

    @property
    def facts(self) -> dict[str, Any]:
        """The fields, to be kept as JSON."""
        return asdict(self)

    def name_of(self, sample: Sample) -> str:
        """Return the prompt or the completion that a sample is held out with."""
        return sample.completion if self.by_completion else sample.group

    def holds(self, sample: Sample) -> bool:
        """Return whether a new sample is held out."""
        return is_held_out(self.name_of(sample), self.fraction)

    def seen(self, samples: Iterable[Sample]) -> HeldOut:
        """Count new samples of the newest policy version."""
        if self.many:
            return self
        prompts, count = {*self.prompts}, self.samples
        for sample in samples:
            prompts.add(sample.group)
            count = min(count + 1, 2 * FEW_PROMPTS)
        if len(prompts) > FEW_PROMPTS:
            if self.by_completion:
                logger.warning("a version has more than %d prompts: they are held out", FEW_PROMPTS)
            return HeldOut(self.fraction, many=True)
        return replace(self, prompts=tuple(sorted(prompts)), samples=count)

    def next_version(self) -> HeldOut:
        """Begin to count for another policy version, and decide by the one before."""
        few, least = len(self.prompts), max(FEW_PROMPTS, 2 * len(self.prompts))
        # Fewer samples say nothing: they may be all that the loop sends of many prompts.
        by_completion = self.by_completion or (not self.many and few > 0 and self.samples >= least)
        if by_completion and not self.by_completion:
            logger.warning(
                "a policy version has %d prompt(s): from now on %.0f %% of the completions are "
                "held out, instead of prompts, so the gate measures on prompts that are trained "
                "on. Next step: nothing, or send more than %d prompts a version",
                *(few, 100 * self.fraction, FEW_PROMPTS),
            )
        return replace(self, by_completion=by_completion, prompts=(), samples=0)

    def less(self, newest: Iterable[Sample]) -> HeldOut:
        """Hold out less where the held-out samples of the newest two versions are more than enough.

        Never more again: the gate would judge on what was trained on.
        """
        names = len({self.name_of(sample) for sample in newest})
        fraction = max(self.fraction * ENOUGH_HELD_OUT / max(names, 1), HELD_OUT_LEAST)
        if fraction >= self.fraction:
            return self
        what = "completions" if self.by_completion else "prompts"
        logger.info("%d %s are held out; the share is now %.0f %%", names, what, 100 * fraction)
        return replace(self, fraction=fraction)
