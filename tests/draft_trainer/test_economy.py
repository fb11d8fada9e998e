"""The rule by which training pays: decisions by hand, version after version."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from draft_trainer.config import EconomyConfig
from draft_trainer.training.cores import CoreSeconds
from draft_trainer.training.economy import (
    HYSTERESIS,
    PROBE_VERSIONS,
    Decision,
    Economy,
    Figures,
)
from slipstream.v1.draft_trainer_pb2 import TrainerStatus
from slipstream.v1.release_pb2 import GateFigures
from slipstream.v1.rollout_server_pb2 import ServerState

pytestmark = pytest.mark.contract("economy")

ROOT = Path(__file__).resolve().parents[2]
HORIZON = 10


class Loop:
    """Policy versions of a run with two servers, whose trainer shares its cores."""

    def __init__(
        self, mode: str = "when-it-pays", share: float | None = 1.0, horizon: int = HORIZON
    ) -> None:
        self.ran = self.waited = 0.0
        self.economy = Economy(
            EconomyConfig(mode=mode, training_share=share, horizon_versions=horizon),  # type: ignore[arg-type]
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
        self.ran += training
        self.waited += waited
        self.economy.trained(training)
        self.version += 1
        return self.economy.decide(self.version).train

    def until_paused(self, length: float, training: float) -> int:
        """Pass versions of ten seconds whose candidates gain nothing, until training is paused."""
        trained = 0
        while self.last.train:
            self.judge(length, length, released=False)
            self.step(10.0, training)
            trained += 1
            assert trained < 10
        return trained

    def until_probed(self) -> None:
        """Pass versions of ten seconds in which nothing is trained, until it is tried again."""
        while not self.step(10.0):
            assert self.economy.paused

    @property
    def last(self) -> Decision:
        assert self.economy.last is not None
        return self.economy.last

    @property
    def saves(self) -> float | None:
        return self.last.figures.saves

    @property
    def costs(self) -> float | None:
        return self.last.figures.costs


def test_example_of_the_documentation() -> None:
    """The example's figures are the status's fields of these names."""
    page = (ROOT / "docs" / "economics.md").read_text()
    (table,) = re.findall(r"\| figure in the status \|.*?\n\n", page, re.DOTALL)
    figures = Figures(
        **{name: float(value) for name, value in re.findall(r"\| `(\w+)` \| ([\d.]+) ", table)}  # type: ignore[arg-type]
    )
    assert set(vars(figures)) <= set(TrainerStatus.DESCRIPTOR.fields_by_name)
    (saves,) = re.findall(r"saves [\d. x]+ = ([\d.]+) s", page)
    (costs,) = re.findall(r"costs [\d. x]+ = ([\d.]+) s", page)
    assert figures.saves == pytest.approx(float(saves))
    assert figures.costs == pytest.approx(float(costs))
    begins, ends = re.findall(r"begins above ([\d.]+) s and ends below ([\d.]+) s", page)[0]
    assert float(begins) == pytest.approx((1 + HYSTERESIS) * float(costs))
    assert float(ends) == pytest.approx((1 - HYSTERESIS) * float(costs))
    loop = Loop(share=figures.training_share, horizon=int(figures.horizon_versions))
    loop.economy.figures = figures
    loop.economy._probing = False
    assert loop.economy.decide(1).train
    assert f"saves {float(saves):.3g} s" in loop.last.reason
    assert f"costs {float(costs):.3g} s, so it pays above {float(ends):.3g} s" in loop.last.reason


def test_what_is_not_known_counts_as_paying() -> None:
    loop = Loop()
    assert loop.last.train
    for _ in range(2 * PROBE_VERSIONS):
        assert loop.step(10.0, training=4.0)
    assert loop.last.reason == "not known yet, so training counts as paying: gain_per_version"
    loop.judge(3.0, 3.0, released=False)
    assert not loop.step(10.0, training=4.0)
    assert loop.saves == 0.0


def test_first_verdict_decides_by_gain() -> None:
    for candidate, pays in ((2.4, True), (2.01, False)):
        loop = Loop()
        assert loop.step(10.0)
        loop.judge(candidate, 2.0, released=True)
        # 0.4 more saves 10 * 10 / 6 s, 0.01 half of one; training took 4.
        assert loop.step(10.0, training=4.0) is pays


def test_weak_draft_trains_on_while_it_gains() -> None:
    """A draft that pays nowhere has to be trained, as on servers on which none ran yet."""
    loop = Loop()
    length = 1.2
    for _ in range(5):
        loop.judge(length + 0.13, length, released=True)
        length += 0.13
        assert loop.step(10.0, training=4.0, speed_up=1.0)
    loop.until_paused(length, training=4.0)
    loop.economy.begin("another")
    assert loop.step(10.0, speed_up=1.0)


def test_a_first_version_without_reports_does_not_count() -> None:
    loop = Loop()
    loop.judge(3.0, 2.7, released=True)
    assert loop.step(0.0, training=1.0)
    assert loop.last.reason.endswith(": generation_seconds_per_version")
    loop.step(10.0)
    assert loop.saves == pytest.approx(HORIZON * 10.0 * 0.3 / 3.0)
    # A later version without reports counts.
    loop.step(0.0)
    assert loop.saves == pytest.approx(HORIZON * 5.0 * 0.3 / 3.0)


def test_saving_and_cost_by_hand() -> None:
    loop = Loop(share=0.5)
    loop.judge(3.0, 2.0, released=True)
    loop.step(10.0, training=4.0)
    assert loop.costs == pytest.approx(2.0)
    # From 2 to 3: a third of ten versions of ten seconds.
    assert loop.saves == pytest.approx(HORIZON * 10.0 / 3)
    # What the second version gained is not known yet, and generation moves half way.
    loop.step(20.0, training=4.0)
    assert loop.saves == pytest.approx(HORIZON * 15.0 / 3)
    # A candidate of two versions is judged in a pause: each of them has gained half.
    loop.step(15.0, training=4.0)
    loop.judge(4.0, 3.0, released=True)
    loop.step(15.0)
    gain = (1 / 3 + 1 / 4 / 2) / 2
    assert loop.saves == pytest.approx(HORIZON * 15.0 * gain)
    # While nobody judges what is trained, it counts as nothing after a while.
    for left in (*[gain] * (PROBE_VERSIONS - 1), gain / 2):
        loop.step(15.0, training=4.0)
        assert loop.saves == pytest.approx(HORIZON * 15.0 * left)


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
    assert loop.costs == pytest.approx(cost)
    # A version without training says nothing of its cost.
    loop.step(10.0, waited=4.0)
    assert loop.costs == pytest.approx(cost)
    # What was taken before is not taken again.
    loop.step(10.0, training=8.0, waited=waited)
    assert loop.costs == pytest.approx(cost)


def test_where_nothing_can_be_measured_training_costs_its_seconds() -> None:
    economy = Economy(EconomyConfig(mode="when-it-pays"), cores=lambda: None)
    for version in range(2):
        economy.trained(3.0)
        economy.decide(version)
    assert (economy.figures.training_share, economy.figures.costs) == (1.0, 3.0)


@pytest.mark.parametrize("speed_up", [None, 2.0, 1.0, 0.8])
def test_still_policy_stops_training_and_drift_starts_it(speed_up: float | None) -> None:
    """Whatever the servers' speed-up, the gain alone decides."""
    loop = Loop()
    loop.judge(3.0, 2.0, released=True)
    loop.step(10.0, training=20.0, speed_up=speed_up)
    loop.until_paused(3.0, training=20.0)
    # The policy is still: a probe finds nothing. How much must it regain until 20 s pay?
    for regained in (0.0, 0.5, 0.8, 1.0):
        loop.until_probed()
        assert "tried for a verdict of the gate; training does not pay" in loop.last.reason
        loop.judge(2.0 + regained, 2.0, released=regained > 0)
        loop.step(10.0, training=20.0, speed_up=speed_up)
        assert loop.saves is not None
        assert loop.last.train is (loop.saves > (1 + HYSTERESIS) * 20.0)
        if loop.last.train:
            break
    assert regained == 1.0


def test_training_stop_threshold_is_below_start() -> None:
    assert 0 < HYSTERESIS < 1
    loop = Loop()
    # A tenth of ten versions saves as many seconds as one of them generates.
    loop.judge(2.0, 1.8, released=True)
    assert not loop.step(11.0, training=10.0)
    assert loop.step(14.0) and loop.saves == pytest.approx(12.5)
    assert loop.step(5.5) and loop.saves == pytest.approx(9.0)
    assert not loop.step(6.0) and loop.saves == pytest.approx(7.5)
    assert not loop.step(15.0) and loop.saves == pytest.approx(11.25)


def test_no_gain_saves_nothing() -> None:
    loop = Loop()
    loop.judge(3.0, 3.0, released=True)
    for _ in range(3 * PROBE_VERSIONS):
        loop.step(10.0, training=5.0)
        assert loop.saves == 0.0
        loop.judge(3.0, 3.0, released=False)
    # Idle cores cost nothing, but a gain of nothing does not exceed that.
    idle = Loop(share=0.0)
    idle.judge(3.0, 3.0, released=True)
    assert not idle.step(10.0, training=5.0)


def test_loss_without_regain_stops_training_until_next_loss() -> None:
    loop = Loop()
    loop.judge(3.0, 2.5, released=True)
    assert loop.step(10.0, training=5.0)
    # The first version without a gain, which may be chance, does not stop it.
    assert loop.until_paused(2.5, training=5.0) > 1
    # A version without a verdict says nothing.
    before = loop.last.figures.gain_per_version
    loop.step(10.0)
    assert loop.last.figures.gain_per_version == before
    loop.until_probed()
    loop.judge(2.5, 2.0, released=True)
    assert loop.step(10.0, training=5.0)


@pytest.mark.parametrize("pinned", [False, True])
def test_passed_candidate_while_pinned_stops_training(
    pinned: bool,
) -> None:
    loop = Loop(share=0.2)
    loop.judge(3.0, 2.5, released=True)
    assert loop.step(10.0, training=5.0)
    figures = GateFigures(incumbent_acceptance_length=2.5, difference=0.5, passed=True)
    for _ in range(10):
        loop.economy.compared(figures, released=False, pinned=pinned)
        loop.step(10.0, training=5.0)
    assert loop.last.train is not pinned


def test_a_version_waits_for_the_slowest_server() -> None:
    loop = Loop()
    loop.judge(3.0, 2.0, released=True)
    loop.economy.served("b", ServerState(engine_seconds=loop.seconds.pop("b")))  # idle
    loop.step(10.0, training=1.0)
    assert loop.saves == pytest.approx(HORIZON * 10.0 / 3)


def test_training_decision_is_made_once_a_version() -> None:
    loop = Loop()
    assert not loop.economy.paused
    first = loop.last
    loop.judge(3.0, 3.0, released=False)
    assert loop.economy.decide(0) is first
    assert not loop.step(10.0, training=4.0)
    assert loop.economy.paused


def test_a_draft_that_holds_is_trained_once_in_a_while() -> None:
    """Bridges send all that they have only for its probes."""
    loop = Loop()
    loop.judge(3.0, 3.0, released=False)
    loop.step(10.0, training=10.0)
    trained, wanted = [], []
    while loop.version < 40:
        if loop.economy.wants_states:
            # What bridges are told bounds the next version's capture, trained on one later.
            wanted.append(loop.version + 2)
        if loop.last.train:
            trained.append(loop.version)
            loop.judge(3.0, 3.0, released=False)
        loop.step(10.0, training=10.0 if loop.last.train else 0.0)
    assert trained == [9, 18, 27, 36]
    # During a probe it is not known yet when it ends.
    assert wanted[:10] == [9, 10, 11, 18, 19, 20, 27, 28, 29, 36]


def test_probe_lasts_until_a_verdict() -> None:
    loop = Loop()
    loop.judge(3.0, 3.0, released=False)
    loop.step(10.0, training=4.0)
    loop.until_probed()
    assert loop.step(10.0, training=4.0), "not judged yet"
    loop.judge(3.0, 3.0, released=False)
    assert not loop.step(10.0, training=4.0)
    # Or until it has gone without a verdict for long.
    loop.until_probed()
    trains = [loop.step(10.0, training=4.0) for _ in range(PROBE_VERSIONS)]
    assert trains == [True] * (PROBE_VERSIONS - 1) + [False]


def test_another_run_begins_with_figures_of_its_own() -> None:
    loop = Loop(share=0.3)
    loop.economy.begin("easy")
    loop.economy.decide(0)
    while loop.version < 500:
        loop.judge(2.0, 2.0, released=False)
        loop.step(10.0, training=4.0)
    known = loop.economy.figures
    loop.economy.begin("easy")
    assert loop.last.policy_version == 500 and loop.economy.figures is known
    loop.economy.begin("hard")
    assert loop.economy.last is None and not loop.economy.paused and loop.economy.wants_states
    assert loop.economy.figures == Figures(None, None, HORIZON, None, 0.3)
    loop.version = -1
    assert loop.step(10.0, training=4.0)
    loop.judge(3.5, 3.4, released=True)
    loop.step(10.0, training=4.0)
    assert loop.last.figures.gain_per_version == pytest.approx(0.1 / 3.5)


def test_gain_is_the_gates_difference() -> None:
    loop = Loop()
    figures = GateFigures(
        candidate_acceptance_length=3.5, incumbent_acceptance_length=3.0, difference=0.2
    )
    loop.economy.compared(figures, released=True)
    loop.step(10.0, training=4.0)
    assert loop.last.figures.gain_per_version == pytest.approx(0.2 / 3.2)


def test_a_server_that_restarts_counts_from_zero() -> None:
    loop = Loop()
    loop.judge(3.0, 2.0, released=True)
    loop.generate(10.0)
    loop.seconds = dict.fromkeys(loop.seconds, 0.0)
    loop.step(5.0, training=1.0)
    assert loop.saves == pytest.approx(HORIZON * 15.0 / 3)


def test_report_without_figures_changes_nothing() -> None:
    """A server whose figure was refused reports none."""
    loop = Loop()
    loop.judge(3.0, 2.0, released=True)
    loop.generate(10.0)
    for address in loop.seconds:
        loop.economy.served(address, ServerState())
    loop.step(5.0, training=1.0)
    assert loop.saves == pytest.approx(HORIZON * 15.0 / 3)


@pytest.mark.parametrize(("mode", "train"), [("always", True), ("never", False)])
def test_modes_that_decide_nothing(mode: str, train: bool) -> None:
    loop = Loop(mode)
    assert loop.economy.paused is not train
    loop.judge(3.0, 3.0, released=True)
    assert loop.step(1.0, training=100.0) is train
    for _ in range(2 * PROBE_VERSIONS):
        assert loop.step(1.0, training=100.0) is train
    assert loop.economy.wants_states is train
    # The figures are known all the same.
    assert (loop.saves, loop.costs) == (0.0, 100.0)


@pytest.mark.parametrize("short", [1000, 50])
def test_what_is_wanted_follows_what_training_keeps_up_with(short: int) -> None:
    """A store has room for eight versions of work; the newest of four is trained on first.

    Every third version may be short. The first two are sent before anything is known.
    """
    economy = Economy(EconomyConfig(mode="always"))
    economy.decide(0)
    waiting: dict[int, int] = {}
    sent = lost = trained = could = 0
    for version in range(1, 121):
        wanted = min(economy.trainable or 8000, 8000)
        waiting[version], sent = wanted, sent + wanted
        left = short if version % 3 == 0 else 1000
        could += left
        for one in sorted(waiting, reverse=True):
            took = min(left, waiting[one])
            waiting[one], left, trained = waiting[one] - took, left - took, trained + took
            economy.trained(1.0, took)
        if left:
            economy.ran_dry()
        lost += waiting.pop(version - 3, 0)
        economy.decide(version)
    assert lost < 0.2 * sent and trained > 0.85 * could


def test_what_is_wanted_grows_where_training_runs_dry() -> None:
    economy = Economy(EconomyConfig(mode="always"))
    economy.decide(0)

    def version(number: int, tokens: int, dry: bool) -> int:
        economy.trained(1.0, tokens)
        if dry:
            economy.ran_dry()
        economy.decide(number)
        return economy.trainable

    assert [version(n, 100, True) for n in (1, 2)] == [0, 0], "it has kept up with all that came"
    # One that began late, or is short, counts with the one before it.
    assert [version(n, 10, False) for n in (3, 4)] == [0, 10]
    assert [version(n, 10, True) for n in (5, 6)] == [15, 15]
    # Within a version too, which may be a long one.
    economy.trained(1.0, 30)
    assert economy.trainable == 15
    economy.ran_dry()
    assert economy.trainable == 45 and economy.tokens == 30
    economy.decide(7)
    assert (economy.trainable, economy.tokens) == (30, 0)
    economy.decide(8)
    assert economy.trainable == 30, "no training, no news"
    economy.begin("another run")
    assert economy.trainable == 0
