"""Trials over real gRPC servers: some first, live acceptance decides, the fleet follows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from draft_trainer.config import CanaryConfig
from slipstream.errors import RefusedError, StatusCode
from tests.draft_trainer.fleet_rig import Rig

GOOD, RUINED = [70, 50, 30], [2, 0, 0]
"""Accepted at each position of 100 drafts."""


class Running:
    """A rig whose reconciler runs."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.reconciler = rig.reconciler
        self.settled = rig.settled
        self.reconciler.start()

    def draft_until(self, done: Callable[[], bool], ruined: int) -> int:
        """Drafts on all servers, 100 at a time, until ``done``; drafts of ``ruined`` spent."""
        deadline, spent = time.monotonic() + 30, 0
        while not done():
            assert time.monotonic() < deadline, "no verdict"
            for double in self.rig.doubles:
                bad = double.state.draft_version == ruined
                spent += 100 * bad
                double.draft(100, RUINED if bad else GOOD)
            self.settled.wait(0.03)
        return spent

    def history(self, drafts: int = 2000) -> None:
        """The incumbent's acceptance before anything is tried."""
        rig = self.rig
        seen = lambda: sum(  # noqa: E731
            b.drafts for b in rig.watch.since(rig.served[0], [d.address for d in rig.doubles], 0.0)
        )
        self.draft_until(lambda: seen() >= drafts, -1)


@pytest.fixture(params=[(4, 0.25), (1, 0.25)], ids=["one-of-four", "alone"])
def running(make_rig: Callable[..., Rig], request: pytest.FixtureRequest) -> Iterator[Running]:
    servers, share = request.param
    rig = make_rig(servers, CanaryConfig(share=share, max_seconds=20.0))
    running = Running(rig)
    yield running
    assert running.reconciler.stop(10)


def test_a_ruined_draft_that_was_forced_is_rolled_back(running: Running) -> None:
    rig = running.rig
    running.history()
    assert rig.publisher.promote(2, pin=True).changes
    assert rig.served.count(2) == 1
    spent = running.draft_until(running.settled.is_set, ruined=2)
    assert spent <= 2000
    assert rig.served == [0] * len(rig.doubles)
    now = rig.promotions.now
    assert (now.promoted, now.pinned, now.served, now.intent) == (0, False, (0,), None)
    assert ("canary_rolled_back", 2) in rig.events()
    assert rig.counters.fleet_events()["canary_rolled_back"] == 1
    line = rig.promotions.state.events.since(0)[-1].reason
    assert "draft 2: acceptance length 1.02" in line and "draft 0: acceptance length 2.50" in line
    assert all(list(d._state().staged) == [] for d in rig.doubles)


def test_a_draft_as_good_goes_to_everybody(running: Running) -> None:
    rig = running.rig
    running.history(6000)
    rig.publisher.promote(1, pin=False)
    running.draft_until(running.settled.is_set, ruined=-1)
    assert rig.served == [1] * len(rig.doubles)
    rig.assert_live(1)
    assert rig.promotions.now.served == (0, 1)
    assert ("canary_promoted", 1) in rig.events()


def test_a_trial_on_some_servers_comes_first(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(4, CanaryConfig(share=0.5, max_seconds=20.0))
    rig.publisher.promote(1, pin=False)
    assert sorted(rig.served) == [0, 0, 1, 1]
    assert rig.promotions.now.wanted_on(rig.promotions.now.canaries[0]) == 1
    with pytest.raises(RefusedError) as caught:
        rig.publisher.promote(2, pin=False)
    assert caught.value.code is StatusCode.ABORTED
    assert "draft 1 on trial" in caught.value.found
    rig.promotions.offer(3)
    assert not rig.publisher.prepare().changes
    rig.publisher.complete(7, rig.stage_policy(7))
    assert rig.policies == [7] * 4 and sorted(rig.served) == [0, 0, 1, 1]
    rig.heal()
    assert sorted(rig.served) == [0, 0, 1, 1], "canaries are where they should be"
    assert rig.publisher.roll_back("enough").draft_version == 0
    assert rig.served == [0] * 4
    assert rig.promotions.now.canaries == ()
    assert rig.publisher.prepare().draft_version == 3


@pytest.mark.parametrize("fault", ["stage", "commit"])
def test_a_promotion_to_the_rest_that_fails_takes_the_canaries_back(
    make_rig: Callable[..., Rig], fault: str
) -> None:
    rig = make_rig(3, CanaryConfig(share=0.34))
    rig.publisher.promote(1, pin=False)
    assert rig.served.count(1) == 1
    other = next(d for d in rig.doubles if d.state.draft_version == 0)
    if fault == "stage":
        other.faults.stage = True
    else:
        other.faults.commit = {"draft-1"}
    rig.publisher._publish(1, trial=False)
    assert rig.served == [0, 0, 0]
    assert rig.promotions.now.canaries == ()
    other.faults.stage, other.faults.commit = False, set()
    rig.publisher._publish(1, trial=False)
    assert rig.served == [1, 1, 1]


def test_no_traffic_is_no_verdict_but_does_not_hold_a_release_up_for_ever(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(2, CanaryConfig(share=0.5, max_seconds=0.05))
    assert rig.canary is not None
    rig.publisher.promote(1, pin=False)
    deadline = time.monotonic() + 10
    while not rig.publisher.settle():
        assert time.monotonic() < deadline
    assert rig.served == [1, 1]
    assert rig.counters.fleet_events()["canary_undecided"] == 1


def test_no_draft_is_served_further_behind_than_configured(make_rig: Callable[..., Rig]) -> None:
    """Releases 1 to 3 were trained against policy versions 11 to 13."""
    rig = make_rig(2, max_draft_lag=2)
    speculating = lambda: [d.state.speculation_enabled for d in rig.doubles]  # noqa: E731
    rig.publisher.promote(1, pin=False)
    for policy, expected in ((12, True), (13, True), (14, False), (15, False)):
        rig.publisher.prepare()
        rig.publisher.complete(policy, rig.stage_policy(policy))
        assert speculating() == [expected] * 2, policy
    calls = rig.doubles[0].calls
    off = calls.index(("SetSpeculation", ("False",)))
    assert off < calls.index(("Commit", ("policy-14",))), "off before the policy is live"
    rig.doubles[1].state.speculation_enabled = True
    rig.heal()
    assert speculating() == [False, False], "it is switched off again where it came back"
    rig.promotions.offer(3)
    rig.publisher.prepare()
    rig.publisher.complete(15, rig.stage_policy(15))
    assert rig.served == [3, 3] and speculating() == [True, True]
    # Where the framework syncs the policy itself only its version is known.
    for double in rig.doubles:
        double.state.ClearField("policy_version")
    rig.publisher.complete(16, "")
    assert speculating() == [False, False]


@pytest.mark.parametrize("servers", [3, 1], ids=["shared", "alone"])
def test_a_trial_survives_a_restart_of_the_trainer(
    make_rig: Callable[..., Rig], servers: int
) -> None:
    """A ruined draft on trial is still found and rolled back by the next trainer."""
    rig = make_rig(servers, CanaryConfig(share=0.34, max_seconds=20.0))
    first = Running(rig)
    first.history()
    rig.publisher.promote(2, pin=False)
    trial = rig.canary.trial
    assert trial is not None and trial.shared == (servers > 1)
    assert first.reconciler.stop(10)
    rig.restart()
    assert rig.canary.trial == trial
    second = Running(rig)
    assert rig.served.count(2) == 1
    second.draft_until(second.settled.is_set, ruined=2)
    assert rig.served == [0] * servers
    assert rig.canary.trial is None and rig.promotions.state.trial is None
    assert ("canary_rolled_back", 2) in rig.events()
    assert "interrupted" not in [name for name, _ in rig.events()]
    assert second.reconciler.stop(10)


def test_a_trial_that_no_disk_knows_of_is_taken_back(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(2, CanaryConfig(share=0.5))

    def full(trial: object) -> None:
        raise RefusedError("draft.registry", "No space left", "space", "make some")

    monkeypatch.setattr(rig.promotions.state, "set_trial", full)
    result = rig.publisher.promote(1, pin=False)
    assert not result.changes and rig.served == [0, 0]
    assert rig.canary.trial is None and rig.promotions.now.intent is None
