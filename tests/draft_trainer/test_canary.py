"""Trials over real gRPC servers: live acceptance decides what the whole fleet serves."""

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
from slipstream.errors import RefusedError
from tests.draft_trainer.fleet_rig import Rig, fleet_events

pytestmark = pytest.mark.contract("trial")

GOOD, RUINED = [70, 50, 30], [2, 0, 0]
"""Accepted at each position of 100 drafts."""


def settle(rig: Rig, version: int = -1, accepted: Sequence[int] = GOOD) -> int:
    """Until the trial under way has a result, while ``version`` drafts; how many steps of it each
    server made."""
    deadline, steps = time.monotonic() + 60, 0
    while not rig.publisher.settle():
        assert time.monotonic() < deadline, "no result"
        rig.draft(version, accepted, 1000)
        steps += 1000
    return steps


@pytest.mark.parametrize("servers", [4, 1])
def test_ruined_draft_promoted_by_hand_is_rolled_back(
    make_rig: Callable[..., Rig], servers: int
) -> None:
    rig = make_rig(servers, CanaryConfig(max_seconds=120.0))
    rig.watching()
    rig.draft(0, GOOD, 2000)
    assert rig.publisher.promote(2, pin=True).changes
    assert rig.served == [2] * servers
    assert settle(rig, 2, RUINED) <= 2000
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
    rig = make_rig(servers, CanaryConfig(max_seconds=120.0))
    rig.watching()
    rig.draft(0, GOOD, 6000)
    rig.publisher.promote(1, pin=False)
    settle(rig, 1)
    assert rig.served == [1] * len(rig.servers)
    rig.assert_live(1)
    assert rig.promotions.now.good == (0, 1) and rig.promotions.now.trial is None
    assert ("canary_promoted", 1) in rig.events()


def test_trial_without_traffic_is_undecided_until_traffic(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(2, CanaryConfig(max_seconds=0.05))
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


def test_incumbent_without_figures_leaves_trial_undecided(make_rig: Callable[..., Rig]) -> None:
    """Whatever the release does, until it is replaced or rolled back by hand."""
    rig = make_rig(1, CanaryConfig(max_seconds=0.05))
    rig.watching()
    rig.publisher.promote(1, pin=False)
    rig.draft(1, RUINED, 4000)
    settle(rig)
    trial = rig.promotions.now.trial
    assert rig.served == [1] and trial is not None
    assert trial.undecided == "draft 0 left nothing to compare with"
    rig.publisher.promote(2, pin=False)
    rig.draft(2, GOOD, 8000)
    assert not rig.publisher.settle()
    trial = rig.promotions.now.trial
    assert rig.served == [2] and rig.promotions.now.good == (0,)
    assert trial is not None and (trial.version, trial.incumbent) == (2, 0)
    rig.publisher.roll_back("by hand")
    assert rig.served == [0] and rig.promotions.now.trial is None
    rig.draft(0, GOOD, 16000)
    rig.publisher.measure()
    rig.publisher.promote(2, pin=False)
    rig.draft(2, GOOD, 16000)
    assert rig.publisher.settle()
    assert rig.served == [2] and rig.promotions.now.good == (0, 2)


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


def test_figures_of_the_incumbent_survive_the_trainer(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(1, CanaryConfig())
    rig.watching()
    rig.draft(0, GOOD, 4000)
    rig.publisher.measure()
    known = rig.promotions.now.figures
    rig.forget()
    rig.watching()
    rig.draft(0, GOOD, 400)
    rig.publisher.measure()
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
    rig = make_rig(2, CanaryConfig())

    def full(*_: object) -> None:
        raise RefusedError("draft.registry", "No space left", "space", "make some")

    monkeypatch.setattr(rig.promotions, "on_trial", full)
    result = rig.publisher.promote(1, pin=False)
    assert not result.changes and rig.served == [0, 0]
    assert rig.promotions.now.trial is None and rig.promotions.now.intent is None
