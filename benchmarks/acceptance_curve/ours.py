"""Ours: the learner, as the service and ``draft-trainer fit`` drive it.

Its clock includes padding samples into batches and looking embeddings up, which ``Learner.step``
does itself.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from benchmarks.acceptance_curve.contestants import (
    GRAD_CLIP,
    LEARNING_RATE,
    TTT_STEPS,
    WARMUP_STEPS,
    Contestant,
)
from benchmarks.acceptance_curve.data import TrainingData
from draft_trainer.config import LearnerConfig
from draft_trainer.drafters.eagle3.head import Eagle3Head
from draft_trainer.sample import Sample
from draft_trainer.training.learner import Learner
from slipstream.tensors import through_float8


class Ours:
    """See ``Trainer``."""

    def __init__(self, contestant: Contestant, data: TrainingData) -> None:
        self._heads = data.heads
        self._float8_states = contestant.float8_states
        self._hidden_size = data.initial_head.config.target_hidden_size
        self._learner = Learner(
            copy.deepcopy(data.initial_head),
            LearnerConfig(
                optimizer=contestant.optimizer,
                learning_rate=LEARNING_RATE,
                warmup_steps=WARMUP_STEPS,
                grad_clip=GRAD_CLIP,
                target=contestant.target,
                ttt_steps=TTT_STEPS,
                compute_dtype=torch.bfloat16,
            ),
        )

    def prepare(self, samples: Sequence[Sample]) -> object:
        """The samples as they are, or as float8 shipping would have brought them."""
        return [self._shipped(sample) for sample in samples] if self._float8_states else samples

    def _shipped(self, sample: Sample) -> Sample:
        return sample.repacked(
            aux=through_float8(sample.aux, self._hidden_size),
            final_hidden=through_float8(sample.final_hidden, self._hidden_size),
        )

    def step(self, batch: object) -> None:
        """See ``Trainer``."""
        assert isinstance(batch, list)
        metrics = self._learner.step(batch, self._heads)
        assert not metrics.skipped

    def head(self) -> Eagle3Head:
        """See ``Trainer``."""
        head = self._learner.snapshot()
        assert isinstance(head, Eagle3Head)
        return head


def build(contestant: Contestant, data: TrainingData, total_steps: int) -> Ours:
    """See ``contestants.build``."""
    del total_steps
    return Ours(contestant, data)
