"""Who trains the same head on the same samples, and with what."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from benchmarks.acceptance_curve.data import TrainingData
from draft_trainer.drafters.eagle3.head import Eagle3Head
from draft_trainer.drafters.loss import Target
from draft_trainer.sample import Sample

TTT_STEPS = 3
LEARNING_RATE = 2e-3
WARMUP_STEPS = 20
GRAD_CLIP = 1.0


@dataclass(frozen=True)
class Contestant:
    """One way of training.

    Attributes:
        name: for tables.
        trainer: whose code.
        target: of ours, what is minimised.
        optimizer: with everybody's rate, constant after warm-up; but speculators' "muon" comes
            with its default rate, schedule and weight decay, as it is its default.
        float8_states: of ours, trained on the states as float8 shipping brings them.
    """

    name: str
    trainer: Literal["ours", "speculators"]
    target: Target = "kl"
    optimizer: Literal["adamw", "muon"] = "adamw"
    float8_states: bool = False


OURS = "ours, kl"
FLOAT8 = "ours, kl, float8 states"
CONTESTANTS = (
    Contestant(OURS, "ours"),
    Contestant("ours, tv", "ours", target="tv"),
    Contestant("ours, lk", "ours", target="lk"),
    Contestant("ours, kl, muon", "ours", optimizer="muon"),
    Contestant(FLOAT8, "ours", float8_states=True),
    Contestant("speculators, same optimizer", "speculators"),
    Contestant("speculators, its defaults", "speculators", optimizer="muon"),
)
PEERS = tuple(one.name for one in CONTESTANTS if one.trainer == "speculators")


class Trainer(Protocol):
    """Holds the initial head, its optimizer, and what it needs of the policy."""

    def prepare(self, samples: Sequence[Sample]) -> object:
        """What ``step`` takes. Not on the clock."""
        ...

    def step(self, batch: object) -> None:
        """One optimizer step. On the clock."""
        ...

    def head(self) -> Eagle3Head:
        """What would be served now."""
        ...


MODULES = {
    "ours": "benchmarks.acceptance_curve.ours",
    "speculators": "benchmarks.acceptance_curve.peer_speculators",
}


def build(contestant: Contestant, data: TrainingData, total_steps: int) -> Trainer:
    """Make a trainer. The peer's module imports only in the peer's own environment.

    Args:
        contestant: which.
        data: what it trains on, and the head that it begins with.
        total_steps: for a schedule that must know it.
    """
    module = importlib.import_module(MODULES[contestant.trainer])
    return module.build(contestant, data, total_steps)  # type: ignore[no-any-return]
