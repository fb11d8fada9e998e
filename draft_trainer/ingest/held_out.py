"""The choice of what is held out of training: prompts, or completions where prompts are few.

A draft that has trained on some completions of a prompt knows something of the others, so all
completions of a prompt are held out or none. The gate measures on those of several versions. Where
these have so few prompts that fewer than ``ENOUGH_PROMPTS`` would be held out, completions are held
out one by one; the gate then measures on prompts that are trained on, and says so.

The choice follows from a sample's own names and from what is kept here, so a restart makes the same
one. What was held out never trains because the choice changes: a sample's own stays with it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from itertools import chain
from typing import Any

from draft_trainer.config import ENOUGH_HELD_OUT, ENOUGH_PROMPTS, HELD_OUT_LEAST
from slipstream.sample import Sample, is_held_out

logger = logging.getLogger(__name__)

_MOST_PROMPTS = 64
"""The number of prompts that are never too few, however small the share."""
_FEW_SAMPLES = 8


@dataclass(frozen=True)
class HeldOut:
    """The choice of a run, and what is known of its prompts so far.

    Attributes:
        fraction: the share of prompts, or of completions.
        by_completion: whether completions are held out.
        many: whether there were prompts enough at a time: from then on prompts are held out,
            whatever follows, as the few samples of a pause in training.
        prompts: those of the newest versions that had samples, the newest last, while they are few.
        samples: how many samples the newest version has, as far as it matters.
    """

    fraction: float
    by_completion: bool = False
    many: bool = False
    prompts: tuple[tuple[str, ...], ...] = ((),)
    samples: int = 0

    @classmethod
    def read(cls, kept: Any, fraction: float) -> HeldOut:
        """Return what ``facts`` was; ``kept`` is None, or of an earlier release."""
        if not isinstance(kept, dict):
            return cls(kept or fraction)
        prompts = tuple(tuple(names) for names in kept["prompts"] if isinstance(names, list))
        return cls(**kept | {"prompts": prompts or ((),)})

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
        *before, newest = self.prompts
        names, count = {*newest}, self.samples
        for sample in samples:
            names.add(sample.group)
            count = min(count + 1, 2 * _MOST_PROMPTS)
        prompts = (*before, tuple(sorted(names)))
        if len({*chain(*prompts)}) >= self._enough:
            if self.by_completion:
                logger.warning("the newest policy versions have more prompts: they are held out")
            return HeldOut(self.fraction, many=True)
        return replace(self, prompts=prompts, samples=count)

    def next_version(self, versions: int) -> HeldOut:
        """Begin to count for another policy version, and decide by those before.

        Args:
            versions: the gate measures on the samples of so many.
        """
        found, newest = len({*chain(*self.prompts)}), len(self.prompts[-1])
        # Fewer samples say nothing: they may be all that the loop sends of many prompts.
        known = not self.many and newest > 0 and self.samples >= max(_FEW_SAMPLES, 2 * newest)
        few = known and found * versions / len(self.prompts) < self._enough
        if few and not self.by_completion:
            logger.warning(
                "the newest %d policy version(s) have %d prompt(s): from now on %.0f %% of the "
                "completions are held out, instead of prompts, so the gate measures on prompts "
                "that are trained on. Next step: nothing, or send at least %d different prompts "
                "in %d versions",
                *(len(self.prompts), found, 100 * self.fraction, math.ceil(self._enough), versions),
            )
        prompts = (*filter(None, self.prompts), ())[-versions:]
        by_completion = self.by_completion or few
        return replace(self, by_completion=by_completion, prompts=prompts, samples=0)

    @property
    def _enough(self) -> float:
        """The prompts of which ``ENOUGH_PROMPTS`` are held out on average."""
        return min(ENOUGH_PROMPTS / self.fraction, _MOST_PROMPTS)

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
