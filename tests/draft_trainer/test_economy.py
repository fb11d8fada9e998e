"""When training pays: decisions by hand, version after version."""

from __future__ import annotations

import pytest

from draft_trainer.config import EconomyConfig
from draft_trainer.training.economy import START, STOP, Economy
from slipstream.v1.release_pb2 import GateFigures
from slipstream.v1.rollout_server_pb2 import ServerState

HORIZON = 10


class Loop:
    """Policy versions of a run with two servers."""

    def __init__(self, mode: str = "when-it-pays", share: float = 1.0) -> None:
        self.economy = Economy(
            EconomyConfig(mode=mode, training_share=share, horizon_versions=HORIZON)  # type: ignore[arg-type]
        )
        self.seconds = {"a": 0.0, "b": 0.0}
        self.version = 0
        self.generate(0.0)
        self.economy.decide(0)

    def generate(self, seconds: float) -> None:
        for address in self.seconds:
            self.seconds[address] += seconds
            self.economy.served(address, ServerState(engine_seconds=self.seconds[address]))

    def judge(self, candidate: float, incumbent: float, released: bool) -> None:
        figures = GateFigures(
            candidate_acceptance_length=candidate, incumbent_acceptance_length=incumbent
        )
        self.economy.compared(figures, released)

    def step(self, generation: float, training: float = 0.0) -> bool:
        self.generate(generation)
        if training:
            self.economy.trained(training)
        self.version += 1
        return self.economy.decide(self.version).train


def test_what_is_not_known_counts_as_paying() -> None:
    loop = Loop()
    assert loop.step(10.0)
    assert loop.economy.last is not None
    assert loop.economy.last.reason.startswith("not known yet: training")
    assert loop.step(10.0, training=4.0)
    assert "acceptance on held-out states" in loop.economy.last.reason
    loop.judge(3.0, 2.0, released=True)
    assert loop.step(10.0, training=4.0)
    assert loop.economy.last.saving_seconds is not None


def test_saving_and_cost_by_hand() -> None:
    loop = Loop(share=0.5)
    loop.judge(3.0, 2.0, released=True)
    loop.step(10.0, training=4.0)
    last = loop.economy.last
    assert last is not None
    assert last.cost_seconds == pytest.approx(2.0)
    # One a version, from 3: of ten versions of ten seconds a quarter.
    assert last.saving_seconds == pytest.approx(HORIZON * 10.0 * 1.0 / 4.0)
    # Nothing gained in the second version: the mean halves, and generation moves half way.
    loop.step(20.0, training=4.0)
    assert loop.economy.last is not None
    assert loop.economy.last.saving_seconds == pytest.approx(HORIZON * 15.0 * 0.5 / 3.5)


def test_a_policy_that_hardly_moves_ends_training_and_drift_begins_it_again() -> None:
    loop = Loop()
    loop.judge(3.0, 2.0, released=True)
    trains = [loop.step(10.0, training=20.0)]
    while trains[-1]:
        loop.judge(3.0, 3.0, released=False)
        trains.append(loop.step(10.0, training=20.0))
        assert len(trains) < 10
    assert not loop.step(10.0)
    # Idle, only the served draft is measured: how far must it fall until a version's 20 s pay?
    length = 3.0
    while not loop.step(10.0):
        last = loop.economy.last
        assert last is not None and last.saving_seconds is not None
        assert last.saving_seconds <= START * 20.0
        length -= 0.1
        loop.economy.measured(length)
        assert length > 1.0
    lost = 3.0 - length
    assert HORIZON * 10.0 * lost / 3.0 > START * 20.0 >= HORIZON * 10.0 * (lost - 0.1) / 3.0


def test_it_stops_later_than_it_starts() -> None:
    assert STOP < 1 < START
    loop = Loop()
    loop.judge(3.0, 2.7, released=True)
    # Saving 100 * 0.3 / 3.3 = 9.1 s at a cost of 10 s: between the two.
    assert loop.step(10.0, training=10.0)
    idle = Loop()
    idle.judge(3.0, 3.0, released=True)
    assert not idle.step(10.0, training=10.0)
    idle.economy.measured(2.727)
    assert not idle.step(10.0)
    idle.economy.measured(2.6)
    assert idle.step(10.0)


def test_one_decision_a_version() -> None:
    loop = Loop()
    first = loop.economy.decide(1)
    loop.judge(3.0, 3.0, released=True)
    assert loop.economy.decide(1) is first


def test_a_server_that_restarts_counts_from_zero() -> None:
    loop = Loop()
    loop.judge(2.0, 1.0, released=True)
    loop.generate(10.0)
    loop.seconds = dict.fromkeys(loop.seconds, 0.0)
    loop.step(5.0, training=1.0)
    last = loop.economy.last
    assert last is not None
    assert last.saving_seconds == pytest.approx(HORIZON * 15.0 * 1.0 / 3.0)


@pytest.mark.parametrize(("mode", "train"), [("always", True), ("never", False)])
def test_modes_that_decide_nothing(mode: str, train: bool) -> None:
    loop = Loop(mode)
    loop.judge(3.0, 3.0, released=True)
    assert loop.step(1.0, training=100.0) is train
