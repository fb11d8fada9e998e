"""What a fit trains on and what it is judged by, out of one recording."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from draft_trainer.eagle3.policy_head import PolicyHeads
from draft_trainer.feed.sample import Sample, is_held_out
from draft_trainer.offline.fit_config import FitConfig
from draft_trainer.recordings.recording import Recording
from slipstream.refusal import RefusedError


@dataclass(frozen=True, eq=False)
class FitData:
    """A recording, split by prompt.

    Attributes:
        recording: narrowed to the draft's layers.
        heads: every recorded policy version's matrices.
        training: numbers of the samples that are trained on.
        lengths: tokens of each of them.
        held_out: samples that are not; at most ``fit.held_out_tokens``.
    """

    recording: Recording
    heads: PolicyHeads
    training: list[int]
    lengths: list[int]
    held_out: list[Sample]

    def batch(self, chosen: Sequence[int]) -> list[Sample]:
        """Samples by their place in ``training``."""
        return [self.recording[self.training[i]] for i in chosen]


def split(recording: Recording, heads: PolicyHeads, config: FitConfig) -> FitData:
    """Hold out a share of the prompts.

    Raises:
        RefusedError: one of the two parts is empty.
    """
    fit, lengths = config.fit, recording.lengths()
    kept: list[int] = []
    training: list[int] = []
    groups = recording.groups()
    for number, group in enumerate(groups):
        (kept if is_held_out(group, fit.held_out_fraction) else training).append(number)
    # Any of them: the first would be the oldest policy version's.
    random.Random(config.training.seed).shuffle(kept)
    held_out: list[Sample] = []
    tokens = 0
    for number in kept:
        tokens += lengths[number]
        if held_out and tokens > fit.held_out_tokens:
            break
        held_out.append(recording[number])
    if not training or not held_out:
        raise RefusedError(
            "fit.held_out_fraction",
            f"{fit.held_out_fraction}: {len(training)} samples to train on, {len(kept)} held out, "
            f"of {len(set(groups))} prompts",
            "some of each",
            "record more prompts, or change fit.held_out_fraction",
        )
    return FitData(recording, heads, training, [lengths[i] for i in training], held_out)
