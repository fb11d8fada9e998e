"""Trials over real gRPC servers: some first, live acceptance decides, the fleet follows."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import add
from types import SimpleNamespace

import pytest

from draft_trainer.config import CanaryConfig
from draft_trainer.releases import canary
from draft_trainer.releases.client import RolloutClient
from draft_trainer.releases.promotions import HISTORY_SECONDS, Batch
from slipstream.errors import RefusedError, StatusCode
from tests.draft_trainer.fleet_rig import LONG, Rig, fleet_events

pytestmark = pytest.mark.contract("trial")

GOOD, RUINED = [70, 50, 30], [2, 0, 0]
"""Accepted at each position of 100 drafts."""


def settle(
    rig: Rig, version: int = -1, accepted: Sequence[int] = GOOD, others: bool = False
) -> int:
    """Until the trial under way has a result, while ``version`` drafts, and release 0 too if it
    is asked for; how many steps of ``version`` each of its servers made."""
    deadline, steps = time.monotonic() + 60, 0
    while not rig.publisher.settle():
        assert time.monotonic() < deadline, "no result"
        rig.draft(version, accepted, 1000)
        if others:
            rig.draft(0, GOOD, 1000)
        steps += 1000
    return steps


@pytest.mark.parametrize("servers", [4, 1])
def test_ruined_draft_promoted_by_hand_is_rolled_back(
    make_rig: Callable[..., Rig], servers: int
) -> None:
    rig = make_rig(servers, CanaryConfig(share=0.25, max_seconds=120.0))
    rig.watching()
    rig.draft(0, GOOD, 2000)
    assert rig.publisher.promote(2, pin=True).changes
    assert rig.served.count(2) == 1
    assert settle(rig, 2, RUINED, others=True) <= 2000
    assert rig.served == [0] * len(rig.servers)
    now = rig.promotions.now
    assert (now.promoted, now.pinned, now.live, now.good) == (0, False, 0, (0,))
    assert (now.intent, now.trial) == (None, None)
    assert ("canary_rolled_back", 2) in rig.events()
    assert fleet_events(rig.counters)["canary_rolled_back"] == 1
    line = rig.promotions.state.events.since(0)[-1].reason
    assert "draft 2: acceptance length 1.02" in line and "draft 0: acceptance length 2.50" in line
    assert all(list(d.state.staged) == [] for d in rig.servers)


@pytest.mark.parametrize("servers", [4, 1])
def test_equal_draft_passes_canary_trial(make_rig: Callable[..., Rig], servers: int) -> None:
    rig = make_rig(servers, CanaryConfig(share=0.25, max_seconds=120.0))
    rig.watching()
    rig.draft(0, GOOD, 6000)
    rig.publisher.promote(1, pin=False)
    settle(rig, 1, others=True)
    assert rig.served == [1] * len(rig.servers)
    rig.assert_live(1)
    assert rig.promotions.now.good == (0, 1) and rig.promotions.now.trial is None
    assert ("canary_promoted", 1) in rig.events()


def test_canary_trial_on_some_servers_comes_first(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(4, CanaryConfig(share=0.5, max_seconds=120.0))
    rig.publisher.promote(1, pin=False)
    assert sorted(rig.served) == [0, 0, 1, 1]
    assert rig.promotions.now.wanted_on(rig.promotions.now.canaries[0]) == 1
    with pytest.raises(RefusedError) as caught:
        rig.publisher.promote(2, pin=False)
    assert caught.value.code is StatusCode.ABORTED
    assert "draft 1 on trial" in caught.value.found
    rig.promotions.offer(3)
    prepared = rig.publisher.prepare()
    assert not prepared.changes and {*prepared.outcomes} == {d.address for d in rig.servers}
    rig.publisher.complete(7, rig.stage_policy(7))
    assert rig.policies == [7] * 4 and sorted(rig.served) == [0, 0, 1, 1]
    rig.heal()
    assert sorted(rig.served) == [0, 0, 1, 1], "canaries are where they should be"
    assert rig.publisher.roll_back("enough").draft_version == 0
    assert rig.served == [0] * 4
    assert rig.promotions.now.canaries == ()
    assert rig.publisher.prepare().draft_version == 3


@pytest.mark.parametrize("fault", ["stage", "commit"])
def test_failed_promotion_after_trial_rolls_canaries_back(
    make_rig: Callable[..., Rig], fault: str
) -> None:
    rig = make_rig(3, CanaryConfig(share=0.34))
    rig.publisher.promote(1, pin=False)
    assert rig.served.count(1) == 1
    other = next(d for d in rig.servers if d.state.draft_version == 0)
    if fault == "stage":
        other.faults.stage = True
    else:
        other.faults.commit = {"draft-1"}
    passed = lambda: rig.promotions.serves(1)  # noqa: E731
    rig.publisher._publish(1, passed)
    assert rig.served == [0, 0, 0]
    assert rig.promotions.now.canaries == () and rig.promotions.now.good == (0,)
    other.faults.stage, other.faults.commit = False, set()
    rig.publisher._publish(1, passed)
    assert rig.served == [1, 1, 1] and rig.promotions.now.good == (0, 1)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_trial_without_traffic_is_undecided_until_traffic(
    make_rig: Callable[..., Rig], share: float
) -> None:
    rig = make_rig(2, CanaryConfig(share=share, max_seconds=0.05))
    rig.watching()
    rig.draft(0, GOOD, 2000)
    rig.publisher.promote(1, pin=False)
    settle(rig)
    assert rig.served == [1, 1], "an idle fleet does not hold a release up"
    trial = rig.promotions.now.trial
    assert trial is not None and "too few verification steps" in trial.undecided
    assert rig.promotions.now.good == (0,) and rig.promotions.now.incumbent == 0
    assert fleet_events(rig.counters)["canary_undecided"] == 1
    assert not rig.publisher.settle(), "it is said once"
    rig.restart()
    assert rig.promotions.now.trial == trial
    rig.draft(1, RUINED, 1000)
    settle(rig)
    assert rig.served == [0, 0] and rig.promotions.now.trial is None
    assert rig.events()[-1] == ("canary_rolled_back", 1)


@pytest.mark.parametrize("live", [0, 1], ids=["good", "undecided"])
@pytest.mark.parametrize("fault", ["stopped", "not ready"])
def test_release_with_dead_canaries_is_rolled_back(
    make_rig: Callable[..., Rig], live: int, fault: str
) -> None:
    """Whatever the others serve."""
    rig = make_rig(4, CanaryConfig(share=0.25, max_seconds=0.05))
    rig.watching()
    rig.draft(0, GOOD, 4000)
    if live:
        rig.publisher.promote(1, pin=False)
        settle(rig)
        assert rig.served == [1] * 4
    rig.publisher.promote(2, pin=False)
    assert not rig.promotions.now.trial.undecided  # type: ignore[union-attr]
    (first,) = rig.promotions.now.canaries
    server = next(d for d in rig.servers if d.address == first)
    if fault == "stopped":
        server.stop()
    else:
        server.run(server.control.report, "workers", "its workers ended")
    rig.fleet.states()
    settle(rig, live)
    assert rig.events()[-1] == ("canary_rolled_back", 2) and rig.promotions.now.trial is None
    assert rig.served.count(0) >= 3 and rig.promotions.now.promoted == 0


@pytest.mark.parametrize("idle", [0, 1], ids=["all draft", "first is idle"])
def test_canaries_are_chosen_where_drafts_are_made(make_rig: Callable[..., Rig], idle: int) -> None:
    """And where nothing is drafted after all, it goes to the others."""
    rig = make_rig(4, CanaryConfig(share=0.25, max_seconds=0.05))
    rig.watching()
    servers = sorted(rig.servers, key=lambda server: server.address)
    for server in servers[idle:]:
        server.draft(400, [280, 200, 120])
    revision = 0
    while rig.seen(0) < 400 * (4 - idle):
        revision = rig.watch.wait_beyond(revision, LONG)
    rig.promotions.offer(1)
    rig.publisher.prepare()
    rig.publisher.complete(0, "")
    assert rig.promotions.now.canaries == (servers[idle].address,)
    rig.draft(0, GOOD, 400)
    settle(rig)
    assert rig.served == [1] * 4 and rig.promotions.now.promoted == 1
    assert rig.events()[-1] == ("committed", 1) and ("canary_undecided", 1) in rig.events()


def test_undecided_releases_never_become_incumbent(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each release loses a little and replaces the one before it in its trial."""
    rig = make_rig(1, CanaryConfig(max_loss=0.1))
    rig.watching()
    rig.draft(0, GOOD, 4000)
    began = time.time()
    for version in (1, 2, 3):
        rig.publisher.promote(version, pin=False)
        rig.draft(version, [70 - 20 * version, 50 - 15 * version, 30 - 9 * version], 200)
        assert not rig.publisher.settle(), "too few to tell"
    now = rig.promotions.now
    assert now.good == (0,) and now.trial is not None
    assert (now.trial.version, now.trial.incumbent) == (3, 0)
    undecided = [version for name, version in rig.events() if name == "canary_undecided"]
    assert undecided == [1, 2]
    assert began <= now.trial.began_at <= time.time() and not now.trial.undecided
    monkeypatch.setattr(canary.time, "time", lambda: now.trial.began_at + 61)
    assert rig.publisher.settle(), "the fleet has served nothing that passed for a minute"
    late = rig.promotions.now.trial
    assert late is not None and late.undecided
    rig.draft(3, [10, 5, 3], 4000)
    settle(rig)
    assert rig.served == [0], "neither 2 nor 1, which nobody tested"
    assert rig.promotions.now.promoted == 0


def test_incumbent_without_figures_is_measured_first(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(1, CanaryConfig())
    rig.watching()
    rig.publisher.promote(1, pin=False)
    rig.draft(1, GOOD, 1000)
    settle(rig)
    assert rig.served == [0] and rig.promotions.now.hold
    assert rig.promotions.now.promoted == 1
    assert not rig.publisher.prepare().changes, "it waits"
    assert not rig.publisher.measure()
    rig.draft(0, GOOD, 8000)
    assert rig.publisher.measure() and rig.publisher.publish_promoted().changes
    settle(rig, 1)
    assert rig.promotions.now.good == (0, 1)
    assert rig.served == [1] and not rig.promotions.now.hold


def test_sync_commits_no_draft_while_incumbent_is_measured(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(1, CanaryConfig())
    rig.watching()
    rig.publisher.promote(1, pin=False)
    rig.draft(1, GOOD, 1000)
    rig.promotions.offer(2)
    assert rig.publisher.prepare().changes
    assert rig.publisher.settle()
    assert not rig.publisher.complete(7, rig.stage_policy(7)).changes
    assert rig.served == [0] and rig.policies == [7] and rig.promotions.now.measuring
    assert list(rig.servers[0].state.staged) == []


@pytest.mark.parametrize("by_hand", [False, True], ids=["in time", "by hand"])
def test_measuring_incumbent_ends_without_traffic(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, by_hand: bool
) -> None:
    """Nothing is drafted while it is served: no draft length pays, or drafting was turned off."""
    rig = make_rig(1, CanaryConfig())
    rig.watching()
    rig.publisher.promote(1, pin=False)
    rig.draft(1, GOOD, 1000)
    assert rig.publisher.settle()
    rig.heal()
    assert rig.served == [0] and rig.promotions.now.measuring
    assert not rig.publisher.prepare().changes, "it waits"
    if by_hand:
        rig.publisher.promote(1, pin=False)
    else:
        later = time.time() + canary.HISTORY_SECONDS
        monkeypatch.setattr(canary.time, "time", lambda: later)
        assert not rig.promotions.now.measuring
        assert rig.publisher.prepare().changes and rig.publisher.complete(0, "").changes
    assert rig.served == [1]
    rig.draft(1, GOOD, 1000)
    assert rig.publisher.settle()
    now = rig.promotions.now
    assert rig.served == [1] and (now.live, now.promoted, now.good) == (1, 1, (0, 1))
    assert now.trial is None and not now.hold
    assert rig.events()[-1] == ("canary_promoted", 1)


@pytest.mark.parametrize("accepted", [GOOD, RUINED])
def test_roll_back_by_hand_starts_trial(make_rig: Callable[..., Rig], accepted: list[int]) -> None:
    rig = make_rig(1, CanaryConfig())
    rig.watching()
    rig.draft(0, GOOD, 6000)
    for version in (1, 2):
        rig.publisher.promote(version, pin=False)
        settle(rig, version)
    assert rig.promotions.now.good == (0, 1, 2)
    assert rig.publisher.roll_back("by hand").draft_version == 1
    trial = rig.promotions.now.trial
    assert trial is not None and (trial.version, trial.incumbent) == (1, 2)
    uses = {use.draft_version: list(use.kept_as) for use in rig.registry.uses()[1]}
    assert uses[2] == ["previous"], "the trial may end there"
    settle(rig, 1, accepted)
    if accepted == GOOD:
        assert rig.served == [1] and rig.promotions.now.good == (0, 1)
    else:
        assert rig.served == [2] and rig.promotions.now.good == (0, 2)


def test_sleeping_canaries_count_as_ready(make_rig: Callable[..., Rig]) -> None:
    """A loop may put its servers to sleep before there is a verdict."""
    rig = make_rig(2, CanaryConfig(share=0.5, max_seconds=0.01))
    rig.watching()
    rig.publisher.promote(1, pin=False)
    trial = rig.promotions.now.trial
    assert trial is not None
    (server,) = [server for server in rig.servers if server.address in trial.servers]
    for found, ready in (("asleep", True), ("differs", False)):
        server.read_back(found)
        rig.fleet.states()
        assert rig.fleet.any_ready(trial.servers) is ready


def test_figures_of_the_incumbent_survive_a_pause(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a loop trains, nothing is drafted for longer than figures reach back."""
    rig = make_rig(1, CanaryConfig())
    rig.watching()
    rig.draft(0, GOOD, 4000)
    rig.publisher.measure()
    known = rig.promotions.now.figures
    later = time.monotonic() + 0.9 * HISTORY_SECONDS
    seen = rig.canary.watch._seen[rig.servers[0].address]
    rig.draft(0, GOOD, 400)
    tail = seen.pop()
    seen.append(replace(tail, at=later, batch=Batch((400,) * 3, (280, 200, 120))))
    for seconds in (0.0, 0.5 * HISTORY_SECONDS, 3 * HISTORY_SECONDS):
        clock = SimpleNamespace(monotonic=partial(add, later, seconds), time=time.time)
        monkeypatch.setattr(canary, "time", clock)
        rig.publisher.measure()
        figures = rig.promotions.now.figures
        assert sum(batch.drafts for batch in figures) > sum(batch.drafts for batch in known)


def test_incumbent_is_measured_until_equal_draft_could_pass(
    make_rig: Callable[..., Rig],
) -> None:
    """``canary.min_drafts`` of it are known soon, and no trial could end by them."""
    rig = make_rig(1, CanaryConfig())
    rig.watching()
    rig.draft(0, GOOD, 600)
    assert rig.canary.figures(0, [rig.servers[0].address]) is not None
    assert rig.canary.figures(0, [rig.servers[0].address], decisive=True) is None
    rig.draft(0, GOOD, 6000)
    assert rig.canary.figures(0, [rig.servers[0].address], decisive=True) is not None


def test_figures_of_the_incumbent_survive_the_trainer(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(1, CanaryConfig())
    rig.watching()
    rig.draft(0, GOOD, 4000)
    assert not rig.publisher.measure()
    known = rig.promotions.now.figures
    rig.forget()
    rig.watching()
    rig.draft(0, GOOD, 400)
    assert not rig.publisher.measure()
    steps = [sum(batch.drafts for batch in f) for f in (known, rig.promotions.now.figures)]
    assert steps[0] >= 4000 and steps[1] >= steps[0] + 400, "a few new ones replace nothing"
    rig.publisher.promote(2, pin=False)
    rig.draft(2, RUINED, 1000)
    settle(rig)
    assert rig.served == [0] and rig.events()[-1] == ("canary_rolled_back", 2)


def test_report_interval_grows_with_fleet(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(canary, "OFTEN", 1)
    monkeypatch.setattr(canary, "KEPT", 8)
    rig = make_rig(4)
    asked: list[int] = []
    real = RolloutClient.watch

    def watch(client: RolloutClient, interval: int, seconds: float) -> Iterator[object]:
        asked.append(interval)
        yield from real(client, interval, seconds)

    monkeypatch.setattr(RolloutClient, "watch", watch)
    rig.watching()
    rig.draft(0, GOOD, 100)
    assert asked == [4 * canary.INTERVAL_MS] * 4
    assert {seen.maxlen for seen in rig.watch._seen.values()} == {2}
    one = rig.servers[0].address
    rig.watch.follow([one])
    assert rig.watch._seen.keys() == {one} and rig.watch._seen[one].maxlen == 8
    assert rig.seen(0) >= 100, "what is known of it stays"


def test_full_disk_at_trial_start_rolls_back(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(2, CanaryConfig(share=0.5))

    def full(*_: object) -> None:
        raise RefusedError("draft.registry", "No space left", "space", "make some")

    monkeypatch.setattr(rig.promotions, "on_trial", full)
    result = rig.publisher.promote(1, pin=False)
    assert not result.changes and rig.served == [0, 0]
    assert rig.promotions.now.trial is None and rig.promotions.now.intent is None
