"""Simulated runs: the seconds that the rule takes, beside training always and never."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean

import pytest

from draft_trainer.config import EconomyConfig
from draft_trainer.training.economy import Economy
from slipstream.v1.release_pb2 import GateFigures
from slipstream.v1.rollout_server_pb2 import ServerState

pytestmark = pytest.mark.contract("economy")

VERSIONS, SEEDS = 120, 5
PLAIN = 30.0
"""Seconds of a version's generation without drafts."""

NOISE = 0.02
"""Standard deviation of the gate's differences; what passes is beyond twice that."""

MODERATE, OVERLOADED = 1.5, 4.0
"""Acceptance lengths from which drafts are faster than none."""


@dataclass(frozen=True)
class Story:
    """A run. Each version, the policy takes some of the draft's acceptance length, and training, if
    any, brings its weights nearer to the best that they can reach on this policy.

    Attributes:
        drift: acceptance length that a version takes.
        begins: the draft's acceptance length at the start.
        best: the one that training comes to.
        rate: share of the way there that a version's training goes.
        even: break-even of a version; a server whose draft is below it drafts nothing.
    """

    drift: Callable[[int], float] = lambda version: 0.0
    begins: float = 3.0
    best: Callable[[int], float] = lambda version: 3.05
    rate: float = 0.5
    even: Callable[[int], float] = lambda version: MODERATE


def always(amount: float) -> Callable[[int], float]:
    return lambda version: amount


STORIES = {
    "still": Story(),
    "slow drift": Story(always(0.02)),
    "drift": Story(always(0.1)),
    "drift, still, drift": Story(lambda version: 0.0 if 40 <= version < 80 else 0.1),
    "untrained": Story(always(0.02), begins=1.1, best=always(3.0), rate=0.1),
    "harder prompts": Story(
        lambda version: 0.7 if version == 30 else 0.02,
        best=lambda version: 3.05 if version < 30 else 2.3,
    ),
    "overloaded": Story(always(0.1), even=always(OVERLOADED)),
    "overloaded, then not": Story(
        always(0.1), even=lambda version: OVERLOADED if version < 60 else MODERATE
    ),
}


def run(story: Story, mode: str, training: float, seed: int) -> tuple[float, int]:
    """Return the seconds of generation and training together, and the versions trained."""
    economy = Economy(
        EconomyConfig(mode=mode, training_share=1.0),  # type: ignore[arg-type]
        cores=lambda: None,
    )
    chance = random.Random(seed)
    served = weights = story.begins
    engine, trained = 0.0, 0
    economy.served("a", ServerState(engine_seconds=engine))
    for version in range(VERSIONS):
        served = max(1.0, served - story.drift(version))
        weights = max(1.0, weights - story.drift(version))
        if economy.decide(version).train:
            trained += 1
            economy.trained(training)
            weights += story.rate * max(0.0, story.best(version) - weights)
            gain = weights - served + chance.gauss(0.0, NOISE)
            passed = gain > 2 * NOISE
            figures = GateFigures(
                incumbent_acceptance_length=served, difference=gain, passed=passed
            )
            economy.compared(figures, passed)
            served = weights if passed else served
        engine += PLAIN * min(1.0, story.even(version) / served)
        economy.served("a", ServerState(engine_seconds=engine))
    return engine + trained * training, trained


@pytest.mark.parametrize("training", [1.0, 4.0, 12.0, 24.0])
@pytest.mark.parametrize("name", STORIES)
def test_rule_is_near_the_better_of_always_and_never(name: str, training: float) -> None:
    """The bound is wider where no server can draft: the rule trains for gains that nobody has."""
    story = STORIES[name]
    seconds = {
        mode: mean(run(story, mode, training, seed)[0] for seed in range(SEEDS))
        for mode in ("when-it-pays", "always", "never")
    }
    best = min(seconds["always"], seconds["never"])
    assert seconds["when-it-pays"] < best * (1.5 if "overloaded" in name else 1.2)


def test_still_policy_is_trained_in_probes_alone() -> None:
    _, trained = run(STORIES["still"], "when-it-pays", 24.0, seed=0)
    assert trained <= VERSIONS // 8
    assert run(STORIES["drift"], "when-it-pays", 4.0, seed=0)[1] == VERSIONS
