"""Trials over real gRPC servers: live acceptance decides what the whole fleet serves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import add
from types import SimpleNamespace

import pytest

from draft_trainer.config import TrialConfig
from draft_trainer.releases import trial, watch
from draft_trainer.releases.confidence import Batch
from draft_trainer.releases.rollout_client import RolloutClient
from draft_trainer.releases.states import ReleaseState
from draft_trainer.releases.trial import HISTORY_SECONDS
from slipstream.errors import RefusedError
from tests.draft_trainer.fleet_rig import RELEASES, Rig, fleet_events

pytestmark = pytest.mark.contract("trial")

GOOD, RUINED = [70, 50, 30], [2, 0, 0]
"""The tokens accepted at each position of 100 drafts."""


def settle(rig: Rig, version: int = -1, accepted: Sequence[int] = GOOD) -> int:
    """Draft with ``version`` until the trial under way has a result; return the steps that each
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
    rig = make_rig(servers, TrialConfig(max_seconds=120.0))
    rig.watching()
    rig.draft(0, GOOD, 2000)
    assert rig.publisher.promote(2, pin=True).changes
    assert rig.served == [2] * servers
    assert settle(rig, 2, RUINED) <= 2000
    assert rig.served == [0] * len(rig.servers)
    now = rig.pointer.now
    assert (now.promoted, now.pinned, now.live, now.good_versions) == (0, False, 0, (0,))
    assert now.intent is None and not now.on_trial
    assert ("trial_rolled_back", 2) in rig.events()
    assert fleet_events(rig.counters)["trial_rolled_back"] == 1
    line = rig.pointer.state.events.since(0)[-1].reason
    assert "draft 2: acceptance length 1.02" in line and "draft 0: acceptance length 2.50" in line
    assert all(list(d.state.staged) == [] for d in rig.servers)


@pytest.mark.parametrize("servers", [4, 1])
def test_equal_draft_passes_trial(make_rig: Callable[..., Rig], servers: int) -> None:
    rig = make_rig(servers, TrialConfig(max_seconds=120.0))
    rig.watching()
    rig.draft(0, GOOD, 6000)
    rig.publisher.promote(1, pin=False)
    settle(rig, 1)
    assert rig.served == [1] * len(rig.servers)
    rig.assert_live(1)
    assert rig.pointer.now.good_versions == (0, 1) and not rig.pointer.now.on_trial
    assert ("trial_passed", 1) in rig.events()


def test_trial_without_traffic_is_undecided_until_traffic(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(2, TrialConfig(max_seconds=0.05))
    rig.watching()
    rig.draft(0, GOOD, 2000)
    rig.publisher.promote(1, pin=False)
    settle(rig)
    assert rig.served == [1, 1], "an idle fleet does not hold a release up"
    undecided = rig.pointer.now
    assert undecided.on_trial and "too few verification steps" in undecided.undecided
    assert rig.pointer.now.good_versions == (0,) and rig.pointer.now.incumbent == 0
    assert fleet_events(rig.counters)["trial_undecided"] == 1
    assert not rig.publisher.settle(), "it is said once"
    rig.restart()
    assert rig.pointer.now == undecided
    rig.draft(1, RUINED, 1000)
    settle(rig)
    assert rig.served == [0, 0] and not rig.pointer.now.on_trial
    assert rig.events()[-1] == ("trial_rolled_back", 1)


def test_undecided_releases_never_become_incumbent(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each release loses a little and replaces the one before it in its trial."""
    rig = make_rig(1, TrialConfig(max_loss=0.1))
    rig.watching()
    rig.draft(0, GOOD, 4000)
    began = time.time()
    for version in (1, 2, 3):
        rig.publisher.promote(version, pin=False)
        rig.draft(version, [70 - 20 * version, 50 - 15 * version, 30 - 9 * version], 200)
        assert not rig.publisher.settle(), "too few to tell"
    now = rig.pointer.now
    assert now.good_versions == (0,) and (now.live, now.incumbent) == (3, 0)
    undecided = [version for name, version in rig.events() if name == "trial_undecided"]
    assert undecided == [1, 2]
    assert began <= now.left_good_at <= time.time() and not now.undecided
    monkeypatch.setattr(trial.time, "time", lambda: now.left_good_at + 61)
    assert rig.publisher.settle(), "the fleet has served nothing that passed for a minute"
    assert rig.pointer.now.state_of(3) is ReleaseState.UNDECIDED
    rig.draft(3, [10, 5, 3], 4000)
    settle(rig)
    assert rig.served == [0], "neither 2 nor 1, which nobody tested"
    assert rig.pointer.now.promoted == 0


def test_release_passes_where_incumbent_left_no_figures(make_rig: Callable[..., Rig]) -> None:
    """The gate compared the two; what comes next is compared with its figures."""
    rig = make_rig(1, TrialConfig())
    rig.watching()
    rig.publisher.promote(1, pin=False)
    assert not rig.publisher.settle(), "nor has it figures itself"
    settle(rig, 1)
    now = rig.pointer.now
    assert now.good_versions == (0, 1) and now.good[-1].ratio == 1.0
    assert rig.pointer.state.events.since(0)[-1].reason == "draft 0 left nothing to compare with"
    rig.draft(1, GOOD, 4000)
    rig.publisher.promote(2, pin=False)
    settle(rig, 2, RUINED)
    assert rig.served == [1] and rig.events()[-1] == ("trial_rolled_back", 2)


def test_roll_back_by_hand_needs_no_trial(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(1, TrialConfig())
    rig.watching()
    rig.draft(0, GOOD, 6000)
    for version in (1, 2):
        rig.publisher.promote(version, pin=False)
        settle(rig, version)
    assert rig.pointer.now.good_versions == (0, 1, 2)
    assert rig.publisher.roll_back("by hand").draft_version == 1
    now = rig.pointer.now
    assert rig.served == [1] and now.good_versions == (0, 1) and not now.on_trial
    rig.draft(1, RUINED, 4000)
    assert not rig.publisher.settle() and rig.served == [1], "nobody goes back to 2"


def test_small_losses_use_up_one_tolerance(make_rig: Callable[..., Rig]) -> None:
    """Six releases that each accept 4.3 % less would go from 2.95 to 2.26; the tolerance of 10 % is
    of the best of the recent good ones. Error rate of each trial: 0.01."""
    rig = make_rig(1, TrialConfig(design_effect=1.0))
    rig.watching()
    rates, lengths = [90.0, 65.0, 40.0], [2.95]
    rig.draft(0, [round(rate) for rate in rates], 40_000)
    for version in range(1, RELEASES):
        rates = [rate - 0.043 * (100 + sum(rates)) / 3 for rate in rates]
        rig.publisher.promote(version, pin=False)
        settle(rig, version, [round(rate) for rate in rates])
        lengths.append(1 + sum(round(rate) for rate in rates) / 100)
        if rig.served == [version]:
            rig.draft(version, [round(rate) for rate in rates], 40_000)
            rig.publisher.measure()
    good = rig.pointer.now.good
    assert [one.version for one in good] == [0, 1, 2]
    assert good[-1].ratio == pytest.approx(lengths[1] / lengths[0], abs=0.01)
    assert rig.events()[-1] == ("trial_rolled_back", 3)


def test_one_broken_server_of_four_vetoes_nothing(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(4, TrialConfig())
    rig.watching()
    rig.draft(0, GOOD, 6000)
    rig.publisher.promote(1, pin=False)
    deadline, broken = time.monotonic() + 60, rig.servers[2]
    while not rig.publisher.settle():
        assert time.monotonic() < deadline, "no result"
        for server in rig.servers:
            server.draft(1000, [10 * n for n in (RUINED if server is broken else GOOD)])
        time.sleep(0.01)
    now = rig.pointer.now
    assert rig.served == [1] * 4 and now.good_versions == (0, 1)
    assert f"without {broken.address}" in rig.pointer.state.events.since(0)[-1].reason


def test_figures_of_the_incumbent_survive_a_pause(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that trains drafts nothing for longer than figures reach back."""
    rig = make_rig(1, TrialConfig())
    rig.watching()
    rig.draft(0, GOOD, 4000)
    rig.publisher.measure()
    known = rig.pointer.now.figures
    later = time.monotonic() + 0.9 * HISTORY_SECONDS
    seen = rig.trials.watch._seen[rig.servers[0].address]
    rig.draft(0, GOOD, 400)
    tail = seen.pop()
    seen.append(replace(tail, at=later, batch=Batch((400,) * 3, (280, 200, 120))))
    for seconds in (0.0, 0.5 * HISTORY_SECONDS, 3 * HISTORY_SECONDS):
        clock = SimpleNamespace(monotonic=partial(add, later, seconds), time=time.time)
        monkeypatch.setattr(trial, "time", clock)
        rig.publisher.measure()
        figures = rig.pointer.now.figures
        assert sum(batch.drafts for batch in figures) > sum(batch.drafts for batch in known)


def test_figures_of_the_incumbent_survive_the_trainer(make_rig: Callable[..., Rig]) -> None:
    rig = make_rig(1, TrialConfig())
    rig.watching()
    rig.draft(0, GOOD, 4000)
    rig.publisher.measure()
    known = rig.pointer.now.figures
    rig.forget()
    rig.watching()
    rig.draft(0, GOOD, 400)
    rig.publisher.measure()
    steps = [sum(batch.drafts for batch in f) for f in (known, rig.pointer.now.figures)]
    assert steps[0] >= 4000 and steps[1] >= steps[0] + 400, "a few new ones replace nothing"
    rig.publisher.promote(2, pin=False)
    rig.draft(2, RUINED, 1000)
    settle(rig)
    assert rig.served == [0] and rig.events()[-1] == ("trial_rolled_back", 2)


def test_report_interval_grows_with_fleet(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "OFTEN", 1)
    monkeypatch.setattr(watch, "KEPT", 8)
    rig = make_rig(4)
    asked: list[int] = []
    real = RolloutClient.watch

    def watched(client: RolloutClient, interval: int, seconds: float) -> Iterator[object]:
        asked.append(interval)
        yield from real(client, interval, seconds)

    monkeypatch.setattr(RolloutClient, "watch", watched)
    rig.watching()
    rig.draft(0, GOOD, 100)
    assert asked == [4 * watch.INTERVAL_MS] * 4
    assert {seen.maxlen for seen in rig.watch._seen.values()} == {2}
    one = rig.servers[0].address
    rig.watch.follow([one])
    assert rig.watch._seen.keys() == {one} and rig.watch._seen[one].maxlen == 8
    assert rig.seen(0) >= 100, "what is known of it stays"


def test_full_disk_at_trial_start_rolls_back(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = make_rig(2, TrialConfig())

    def full(*_: object) -> None:
        raise RefusedError("draft.registry", "No space left", "space", "make some")

    monkeypatch.setattr(rig.pointer, "begin_trial", full)
    result = rig.publisher.promote(1, pin=False)
    assert not result.changes and rig.served == [0, 0]
    assert not rig.pointer.now.on_trial and rig.pointer.now.intent is None
