"""When training pays: decisions by hand, version after version."""

from __future__ import annotations

import pytest

from draft_trainer.config import EconomyConfig
from draft_trainer.training.economy import (
    ASSUMED_SHARE,
    LOOK_VERSIONS,
    START,
    STOP,
    CoreSeconds,
    Decision,
    Economy,
)
from slipstream.v1.release_pb2 import GateFigures
from slipstream.v1.rollout_server_pb2 import ServerState

pytestmark = pytest.mark.contract("economy")

HORIZON = 10
STEP = 30.0
"""Seconds of a policy version."""


class Loop:
    """Policy versions of a run with two servers, whose trainer shares its cores."""

    def __init__(self, mode: str = "when-it-pays", share: float | None = 1.0) -> None:
        self.now = self.ran = self.waited = 0.0
        self.economy = Economy(
            EconomyConfig(mode=mode, training_share=share, horizon_versions=HORIZON),  # type: ignore[arg-type]
            clock=lambda: self.now,
            cores=lambda: CoreSeconds(self.ran, self.waited),
        )
        self.seconds = {"a": 0.0, "b": 0.0}
        self.version = 0
        self.generate(0.0)
        self.economy.decide(0)

    def generate(self, seconds: float, speed_up: float | None = None) -> None:
        for address in self.seconds:
            self.seconds[address] += seconds
            state = ServerState(
                engine_seconds=self.seconds[address],
                speed_up=speed_up,
                speculation_enabled=speed_up != 1.0,
            )
            self.economy.served(address, state)

    def judge(self, candidate: float, incumbent: float, released: bool) -> None:
        gain = candidate - incumbent
        figures = GateFigures(incumbent_acceptance_length=incumbent, difference=gain)
        self.economy.compared(figures, released)

    def step(
        self,
        generation: float,
        training: float = 0.0,
        speed_up: float | None = None,
        waited: float = 0.0,
    ) -> bool:
        self.generate(generation, speed_up)
        self.now += STEP
        self.ran += training
        self.waited += waited
        self.economy.trained(training)
        self.version += 1
        return self.economy.decide(self.version).train

    @property
    def last(self) -> Decision:
        assert self.economy.last is not None
        return self.economy.last


def test_unknown_acceptance_trains_after_look_versions() -> None:
    loop = Loop()
    assert not loop.last.train
    assert [loop.step(10.0) for _ in range(LOOK_VERSIONS)] == [False] * (LOOK_VERSIONS - 1) + [True]
    assert loop.last.reason == (
        "not known yet, training counts as paying: the draft's acceptance on held-out states"
    )
    loop.economy.measured(3.0, proposed=3)
    assert not loop.step(10.0, training=4.0)
    assert loop.last.saving_seconds == 0.0


def test_weak_draft_trains_one_version_then_by_gain() -> None:
    for candidate, pays in ((2.4, True), (2.01, False)):
        loop = Loop()
        loop.economy.measured(2.0, proposed=3)
        assert loop.step(10.0)
        assert "training is tried" in loop.last.reason
        loop.judge(candidate, 2.0, released=True)
        # 0.4 more saves 10 * 10 / 6 s, 0.01 a quarter of one; training took 4.
        assert loop.step(10.0, training=4.0) is pays


def test_weak_draft_trains_on_while_it_gains() -> None:
    """On servers on which no draft ran yet; they need no more than what has not paid."""
    loop = Loop()
    loop.economy.measured(1.2, proposed=3)
    assert loop.step(10.0, speed_up=1.0)
    # A version of which nothing was judged does not count.
    assert loop.step(10.0, training=4.0, speed_up=1.0)
    for left in range(LOOK_VERSIONS - 1, -1, -1):
        loop.judge(1.2, 1.2, released=False)
        assert loop.step(10.0, training=4.0, speed_up=1.0) is (left > 0)
    loop.economy.begin("another")
    loop.economy.measured(1.2, proposed=3)
    loop.step(10.0, speed_up=1.0)
    length = 1.2
    for _ in range(5):
        loop.judge(length + 0.13, length, released=True)
        length += 0.13
        assert loop.step(10.0, training=4.0, speed_up=1.0)
    # 0.13 more of a draft that no server runs, by what lies beyond its length.
    assert loop.last.saving_seconds == pytest.approx(HORIZON * 10.0 * 0.13 / (length + 0.13))


@pytest.mark.parametrize(("share", "assumed"), [(0.3, 0.3), (None, ASSUMED_SHARE)])
def test_the_cost_is_assumed_until_something_was_trained(
    share: float | None, assumed: float
) -> None:
    loop = Loop(share=share)
    loop.economy.measured(3.0, proposed=3)
    loop.step(10.0)
    assert loop.last.cost_seconds == STEP * assumed
    assert "(assumed)" in loop.last.reason


def test_a_first_version_without_reports_does_not_count() -> None:
    loop = Loop()
    loop.economy.measured(3.0)
    assert not loop.step(0.0)
    assert "not known yet, 2 of 3 policy versions waited for them: generation" in loop.last.reason
    loop.economy.measured(2.7)
    loop.step(10.0)
    assert loop.last.saving_seconds == pytest.approx(HORIZON * 10.0 * 0.3 / 3.0)


def test_saving_and_cost_by_hand() -> None:
    loop = Loop(share=0.5)
    loop.judge(3.0, 2.0, released=True)
    loop.step(10.0, training=4.0)
    assert loop.last.cost_seconds == pytest.approx(2.0)
    # One a version, from 3: of ten versions of ten seconds a quarter.
    assert loop.last.saving_seconds == pytest.approx(HORIZON * 10.0 * 1.0 / 4.0)
    # What the second version gained is not known yet, and generation moves half way.
    loop.step(20.0, training=4.0)
    assert loop.last.saving_seconds == pytest.approx(HORIZON * 15.0 * 1.0 / 4.0)
    # A candidate of it and of the next one is judged in a pause: each has gained half of one.
    loop.step(15.0, training=4.0)
    loop.judge(4.0, 3.0, released=True)
    loop.step(15.0)
    assert loop.last.saving_seconds == pytest.approx(HORIZON * 15.0 * 0.75 / 4.75)
    # While nobody judges what is trained, it counts as nothing after a while.
    for progress in (*[0.75] * LOOK_VERSIONS, 0.375):
        loop.economy.measured(4.0)
        loop.step(15.0, training=4.0)
        assert loop.last.saving_seconds == pytest.approx(HORIZON * 15 * progress / (4 + progress))


@pytest.mark.parametrize(
    ("waited", "cost"),
    [(0.0, 0.0), (1.5, 1.5), pytest.param(30.0, 8.0, id="of others, who wait for one another too")],
)
def test_where_the_share_is_not_given_cost_is_what_others_waited(
    waited: float, cost: float
) -> None:
    loop = Loop(share=None)
    loop.judge(3.0, 2.0, released=True)
    loop.step(10.0, training=8.0, waited=waited)
    assert loop.last.cost_seconds == pytest.approx(cost)
    # A version without training says nothing of its cost.
    loop.step(10.0, waited=4.0)
    assert loop.last.cost_seconds == pytest.approx(cost)
    # What was taken before is not taken again.
    loop.step(10.0, training=8.0, waited=waited)
    assert loop.last.cost_seconds == pytest.approx(cost)


def test_still_policy_stops_training_and_drift_starts_it() -> None:
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
        assert loop.last.saving_seconds is not None
        assert loop.last.saving_seconds <= START * 20.0
        length -= 0.1
        loop.economy.measured(length)
        assert length > 1.0
    lost = 3.0 - length
    assert HORIZON * 10.0 * lost / 3.0 > START * 20.0 >= HORIZON * 10.0 * (lost - 0.1) / 3.0


def test_training_stop_threshold_is_below_start() -> None:
    assert STOP < 1 < START
    loop = Loop()
    loop.economy.measured(2.0, proposed=3)
    assert loop.step(10.0)
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


def test_gain_lasts_until_drift_has_taken_it() -> None:
    loop = Loop()
    loop.judge(4.0, 4.0, released=True)
    loop.step(10.0, training=1.0)
    # 1.5 lost in a version, in the mean 0.75: of 3 that can be lost 4 versions' worth.
    loop.economy.measured(2.5)
    loop.step(10.0)
    assert loop.last.saving_seconds == pytest.approx(4 * 10.0 * 1.5 / 4.0)


@pytest.mark.parametrize(
    ("speed_up", "length", "saved"),
    [
        # Twice as fast at 4: back from 3 to 4 a quarter of the generation is saved.
        (1.5, 3.0, 0.25),
        # Drafts stopped to pay at 2, and do not run: at 4 generation would take half.
        (1.0, 1.5, 0.5),
        (1.0, 2.0, 0.5),
    ],
)
def test_saving_uses_the_servers_speed_up(speed_up: float, length: float, saved: float) -> None:
    loop = Loop()
    loop.judge(4.0, 4.0, released=True)
    for _ in range(20):
        loop.step(10.0, training=5.0, speed_up=2.0)
        loop.economy.measured(4.0)
    loop.step(10.0, speed_up=2.0)
    loop.economy.measured(length)
    loop.step(10.0, speed_up=speed_up)
    lasts = min(HORIZON, 3.0 / ((4.0 - length) / 2))  # what was lost, the mean over versions
    assert loop.last.saving_seconds == pytest.approx(lasts * 10.0 * saved, rel=0.01)


@pytest.mark.parametrize("speed_ups", [(2.0, 1.0), (2.2, 1.8), (2.0, 0.8)])
def test_no_gain_saves_nothing_at_any_server_speed(
    speed_ups: tuple[float, float],
) -> None:
    """More load, noise, and servers that draft at a loss: no draft of the same length is faster."""
    loop = Loop()
    loop.judge(3.0, 3.0, released=True)
    loop.step(10.0, training=5.0, speed_up=2.0)
    for speed_up in speed_ups * 5:
        loop.judge(3.0, 3.0, released=False)
        assert not loop.step(10.0, training=5.0, speed_up=speed_up)
        assert loop.last.saving_seconds == 0.0


def test_saving_counts_beyond_best_length_that_did_not_pay() -> None:
    loop = Loop()
    loop.judge(4.0, 4.0, released=True)
    for length, speed_up in ((4.0, 2.0), (3.0, 1.0), (2.4, 1.0)):
        loop.economy.measured(length)
        loop.step(10.0, training=1.0, speed_up=speed_up)
    # At 4 generation is twice as fast, so drafts pay from 2 on; under more load not even at 3.
    drift = (0.5 + 0.6) / 2
    assert loop.last.saving_seconds == pytest.approx(3.0 / drift * 10.0 * (1 - 3.0 / 4.0))


def test_past_load_does_not_count_after_acceptance_fell() -> None:
    loop = Loop()
    loop.judge(3.0, 3.0, released=True)
    loop.step(10.0, training=5.0, speed_up=1.5)
    length, trains = 3.0, []
    for version in range(20):
        # For ten versions the load is such that not even 3 pays; at 1.9 no draft pays anyway.
        length = 3.0 if version < 10 else max(1.9, length - 0.4)
        loop.economy.measured(length)
        trains.append(loop.step(10.0, speed_up=1.0))
    assert not any(trains[:10]) and trains[-1]


def test_gains_undone_by_drift_do_not_pay() -> None:
    loop = Loop()
    for version in range(45):
        # What training gains, each version takes; from the sixth on no draft runs at either length.
        loop.judge(2.8, 2.7, released=True)
        loop.step(10.0, training=2.0, speed_up=2.0 if version < 5 else 1.0)
        assert version != 4 or loop.last.train
    assert not loop.last.train


def test_server_with_speculation_off_may_draft_again() -> None:
    """As `SetSpeculation` switches off a server with a fixed draft length."""
    loop = Loop()
    loop.judge(3.0, 2.5, released=True)
    loop.step(10.0, training=5.0)
    loop.judge(3.0, 3.0, released=False)
    while loop.step(10.0, training=5.0):
        loop.judge(3.0, 3.0, released=False)
        assert loop.version < 10
    for address in loop.seconds:
        off = ServerState(engine_seconds=loop.seconds[address], speculation_enabled=False)
        loop.economy.served(address, off)
    loop.economy.measured(2.0)
    assert loop.step(10.0)
    assert "1.000 of acceptance length 2.000" in loop.last.reason


def test_loss_without_regain_stops_training_until_next_loss() -> None:
    loop = Loop()
    loop.judge(3.0, 2.5, released=True)
    assert loop.step(10.0, training=5.0)
    trained = 0
    while loop.last.train:
        loop.judge(2.5, 2.5, released=False)
        loop.step(10.0, training=5.0)
        trained += 1
        assert trained < 10
    # Not by the first version without a gain, which may be chance.
    assert trained > 1
    # A version of which nothing was judged says nothing.
    before = loop.economy._reference
    loop.step(10.0)
    assert loop.economy._reference == before
    loop.economy.measured(2.0)
    assert loop.step(10.0)


@pytest.mark.parametrize("pinned", [False, True])
def test_passed_candidate_while_pinned_stops_training(
    pinned: bool,
) -> None:
    loop = Loop(share=0.2)
    loop.economy.measured(3.0)
    loop.step(10.0)
    loop.economy.measured(2.5)
    assert loop.step(10.0)
    figures = GateFigures(incumbent_acceptance_length=2.5, difference=0.5, passed=True)
    for _ in range(10):
        loop.economy.compared(figures, released=False, pinned=pinned)
        loop.step(10.0, training=5.0)
    assert loop.last.train is not pinned
    assert loop.economy._reference == pytest.approx(2.5 if pinned else 3.0, abs=1e-3)


def test_a_version_waits_for_the_slowest_server() -> None:
    loop = Loop()
    loop.judge(3.0, 2.0, released=True)
    loop.economy.served("b", ServerState(engine_seconds=loop.seconds.pop("b")))  # idle
    loop.step(10.0)
    assert loop.last.saving_seconds == pytest.approx(HORIZON * 10.0 * 1.0 / 4.0)


def test_a_server_that_left_says_nothing_any_more() -> None:
    loop = Loop()
    loop.judge(4.0, 4.0, released=True)
    for _ in range(20):
        loop.step(10.0, training=5.0, speed_up=2.0)
        loop.economy.measured(4.0)
    idle = ServerState(engine_seconds=1.0, speed_up=1.0, speculation_enabled=False)
    loop.economy.served("c", idle)
    loop.step(10.0, speed_up=2.0)
    loop.economy.measured(3.0)
    loop.step(10.0, speed_up=1.5)
    assert loop.last.saving_seconds == pytest.approx(3.0 / 0.5 * 10.0 * 0.25, rel=0.01)


def test_what_an_untrained_draft_gained_by_itself_can_be_lost() -> None:
    """As where the policy's entropy falls at first, and then it moves away."""
    loop = Loop(share=0.2)
    for tenths in range(24, 34):
        loop.economy.measured(tenths / 10)
        assert not loop.step(10.0)
    length = 3.3
    while not loop.last.train:
        length -= 0.1
        assert length > 2.4
        loop.economy.measured(length)
        loop.step(10.0)


def test_training_decision_is_made_once_a_version() -> None:
    loop = Loop()
    assert loop.economy.looks_only
    first = loop.last
    loop.judge(3.0, 2.0, released=True)
    assert loop.economy.decide(0) is first
    assert loop.step(10.0, training=4.0)
    assert not loop.economy.looks_only
    assert Economy(EconomyConfig(mode="when-it-pays")).looks_only
    assert not Economy(EconomyConfig(mode="always")).looks_only


@pytest.mark.parametrize(
    ("gains", "due"),
    [((), [1, 3, 7, 11, 15, 19, 23, 27, 31]), ((1, 0, 0), [5, 9, 13, 17, 21, 25, 29])],
)
def test_a_draft_that_holds_is_not_trained_and_measured_seldom(
    gains: tuple[int, ...], due: list[int]
) -> None:
    loop = Loop()
    loop.economy.measured(3.0 - sum(gains))
    for gain in gains:
        loop.judge(3.0, 3.0 - gain, released=gain > 0)
        loop.step(10.0, training=10.0)
    assert not loop.last.train  # a quarter gained lately saves 7.7 s, and training takes 10
    measured = []
    while loop.version < 32:
        # What is told in a version bounds the next one's capture.
        assert loop.economy.measures_next is loop.economy.measures(loop.version + 2)
        if loop.economy.measures(loop.version + 1):
            measured.append(loop.version + 1)
            loop.economy.measured(3.0, proposed=2)
        assert not loop.step(10.0)
    assert measured == due
    # 100 * 0.6 / 3 s: enough where training takes 10, too little where 30 are assumed.
    loop.economy.measured(2.4)
    assert loop.step(10.0) is bool(gains)
    assert loop.economy.measures_next


def test_failed_measurement_is_repeated_next_version() -> None:
    loop = Loop()
    loop.economy.measured(3.0)
    loop.step(10.0)
    while loop.version < 6:
        assert loop.economy.measures(loop.version + 1) is (loop.version >= 2)
        loop.step(10.0)
    loop.economy.measured(2.4)
    loop.step(10.0)
    # 0.6 lost in the six versions since the last measurement, 0.05 a version in the mean.
    assert loop.economy._drift == pytest.approx(0.6 / 6 / 2)
    # It drifts, and is due in every version.
    trains = [loop.step(10.0) for _ in range(LOOK_VERSIONS + 1)]
    assert trains == [False] * LOOK_VERSIONS + [True]
    assert "not known yet, training counts as paying: the draft's acc" in loop.last.reason
    loop.judge(2.4, 2.4, released=False)
    assert not loop.step(10.0, training=20.0)


def test_another_run_begins_paused_and_with_figures_of_its_own() -> None:
    loop = Loop(share=0.3)
    loop.economy.begin("easy")
    loop.economy.measured(2.0)
    loop.economy.decide(0)
    while loop.version < 500:
        loop.step(10.0, training=4.0, speed_up=2.0)
    loop.economy.begin("easy")
    assert loop.last.policy_version == 500
    loop.economy.begin("hard")
    assert loop.economy.looks_only and loop.economy.last is None
    loop.version = -1
    assert [loop.economy.measures(version) for version in (0, 1)] == [True, True]
    for length in (3.5, 3.4):
        loop.economy.measured(length)
        assert not loop.step(10.0, speed_up=2.0)
    assert loop.economy._drift == pytest.approx(0.1)
    while not loop.last.train:
        length -= 0.3
        assert length > 2.0
        loop.economy.measured(length)
        loop.step(10.0, speed_up=2.0)
    # Against what the draft had in this run, and at an assumed cost.
    assert f"{3.5 - length:.3f} of acceptance length {length:.3f}" in loop.last.reason
    assert "(assumed)" in loop.last.reason


def test_gain_is_the_gates_difference() -> None:
    loop = Loop()
    figures = GateFigures(
        candidate_acceptance_length=3.5, incumbent_acceptance_length=3.0, difference=0.2
    )
    loop.economy.compared(figures, released=True)
    loop.step(10.0, training=4.0)
    assert "0.200 of acceptance length 3.200" in loop.last.reason


def test_a_server_that_restarts_counts_from_zero() -> None:
    loop = Loop()
    loop.judge(2.0, 1.0, released=True)
    loop.generate(10.0)
    loop.seconds = dict.fromkeys(loop.seconds, 0.0)
    loop.step(5.0, training=1.0)
    assert loop.last.saving_seconds == pytest.approx(HORIZON * 15.0 * 1.0 / 3.0)


@pytest.mark.parametrize(("mode", "train"), [("always", True), ("never", False)])
def test_modes_that_decide_nothing(mode: str, train: bool) -> None:
    loop = Loop(mode)
    loop.judge(3.0, 3.0, released=True)
    assert loop.step(1.0, training=100.0) is train
