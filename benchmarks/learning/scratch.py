"""A random head that learns from recorded rollouts of one policy version, as a trainer lets it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from benchmarks.learning.moving import considered, drawn
from draft_trainer.config import TrainingConfig
from draft_trainer.drafters import Draft
from draft_trainer.drafters.policy import PolicyHeads
from draft_trainer.training.learner import Learner
from slipstream.sample import Sample

VERSION_TOKENS = 4096
"""That come at once."""
HELD_OUT = 160
"""Samples that the gate measures candidates on."""
T = TypeVar("T")


def learned(
    start: Callable[[], Draft],
    config: TrainingConfig,
    epochs: int,
    samples: Sequence[Sample],
    heads: PolicyHeads,
    marks: Iterable[int],
    measured: Callable[[int, float, Draft], T],
) -> list[T]:
    """Train as ``TrainingLoop`` does while versions come.

    Args:
        start: makes the head that training begins with.
        config: of training.
        epochs: passes over each sample.
        samples: in their order; the last ``HELD_OUT`` are the gate's.
        heads: the policy's matrices.
        marks: numbers of tokens, each read once; ascending.
        measured: called at each mark with tokens read, CPU seconds of the steps so far, and the
            weights that would be released.

    Returns:
        What ``measured`` returned.
    """
    learner, served = Learner(start(), config), start()
    learner.restart_optimizer()
    gated, left = samples[-HELD_OUT:], iter(samples[:-HELD_OUT])
    used, seconds, steps = 0, 0.0, 0
    found: list[T] = []
    for mark in marks:
        while used < mark:
            version: list[Sample] = []
            least = min(VERSION_TOKENS, mark - used)
            while sum(sample.tokens for sample in version) < least:
                version.append(next(left))
            used += sum(sample.tokens for sample in version)
            for batch in drawn(version, epochs, learner, random.Random(used)):
                began = time.process_time()
                learner.step(batch, heads)
                seconds += time.process_time() - began
                steps += 1
                if steps >= learner.pace.steps_per_candidate(config):
                    served, steps = considered(learner, served, gated, heads, steps).served, 0
        found.append(measured(used, seconds, learner.snapshot()))
    return found
