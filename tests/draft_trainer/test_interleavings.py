"""The events between two steps of a publish, a trial or a repair: each case alone."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable

import pytest

from draft_trainer.config import TrialConfig
from draft_trainer.releases import reconcile
from draft_trainer.releases.confidence import Arm, Batch, decide
from draft_trainer.releases.pointer import Good, Pointer
from draft_trainer.releases.states import ReleaseEvent
from draft_trainer.releases.trial import TrialResult, Trials
from rollout_server.vllm.engine import VllmEngine
from rollout_server.vllm.standby import ASLEEP, SAME
from slipstream.v1 import rollout_server_pb2 as pb
from tests.draft_trainer.fleet_rig import LONG, Rig

pytestmark = [pytest.mark.usefixtures("no_backoff"), pytest.mark.contract("all or none")]

GOOD, RUINED = [70, 50, 30], [2, 0, 0]


def test_lost_commit_with_stage_still_held_is_no_success(rig: Rig) -> None:
    """The right number is live with other bytes, and the answer to the commit is lost."""
    rig.publisher.promote(1, pin=False)
    damaged = rig.servers[0]
    rig.put(0, 1, tensors_of=3)
    damaged.faults.drop = "keep"
    result = rig.publisher.promote(1, pin=False)
    outcome = result.outcomes[damaged.address]
    assert not outcome.draft_committed and "UNAVAILABLE" in outcome.error
    assert not result.changes


@pytest.mark.parametrize("drop", ["keep", "forget"])
def test_lost_commit_on_other_policy_version_is_no_success(rig: Rig, drop: str) -> None:
    """The server comes back without its stages, on the policy that it had."""
    rig.publisher.complete(6, rig.stage_policy(6))
    stage_id = rig.stage_policy(7)
    rig.servers[1].faults.drop = drop
    outcomes = rig.publisher.complete(7, stage_id).outcomes
    committed = [outcomes[server.address].committed for server in rig.servers]
    assert committed == [True, False, True] and rig.policies == [7, 6, 7]


def test_draft_committed_by_other_client_starts_trial(
    make_rig: Callable[..., Rig],
) -> None:
    """Another trainer put it there: nothing is staged, and the pointer follows."""
    rig = make_rig(2, TrialConfig())
    for server in rig.servers:
        client = rig.fleet.client(server.address)
        client.stage(rig.publisher.payloads.get(2))
        client.commit(["draft-2"])
    commits = [len(server.commits()) for server in rig.servers]
    assert rig.publisher.promote(2, pin=False).draft_version == 2
    assert [len(server.commits()) for server in rig.servers] == commits
    now = rig.pointer.now
    assert (now.live, now.promoted, now.good_versions) == (2, 2, (0,))
    assert now.on_trial and (now.live, now.incumbent) == (2, 0)
    assert rig.events() == [("committed", 2)]
    rig.publisher.promote(2, pin=False)
    assert rig.pointer.now == now, "it is not begun again"


def test_catching_server_up_keeps_trial(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(2, TrialConfig())
    rig.publisher.promote(2, pin=False)
    trial = rig.pointer.now
    rig.put(0, 0)
    rig.publisher.prepare()
    assert rig.publisher.complete(0, "").changes
    assert rig.served == [2, 2] and rig.pointer.now == trial
    assert rig.pointer.now.intent is None
    assert "trial_undecided" not in [name for name, _ in rig.events()]


def test_trial_result_ignored_after_concurrent_promote(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A release goes live between the look at the figures and what they would have done."""
    rig = make_rig(1, TrialConfig())
    rig.watching()
    rig.draft(0, GOOD, 2000)
    rig.publisher.promote(1, pin=False)
    rig.draft(1, RUINED, 2000)
    real = rig.trials.result

    def replaced(now: Pointer, addresses: Iterable[str]) -> object:
        found = real(now, addresses)
        assert found is not None and found.event is ReleaseEvent.FAIL
        rig.publisher.promote(2, pin=False)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(rig.trials, "result", replaced)
        assert not rig.publisher.settle()
    assert rig.served == [2]
    assert rig.pointer.now.on_trial and rig.pointer.now.live == 2


def test_trial_result_ignored_after_concurrent_roll_back(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It passed, and was taken back by hand before that was written down."""
    rig = make_rig(2, TrialConfig())
    rig.publisher.promote(1, pin=False)
    now = rig.pointer.now

    def then_roll_back(*_: object) -> TrialResult:
        rig.publisher.roll_back("by hand")
        return TrialResult(1, now.live_at, ReleaseEvent.PASS, "")

    monkeypatch.setattr(rig.trials, "result", then_roll_back)
    assert not rig.publisher.settle()
    assert rig.served == [0, 0] and rig.pointer.now.good_versions == (0,)


@pytest.mark.parametrize(
    "found", [ReleaseEvent.FAIL, ReleaseEvent.PASS, ReleaseEvent.FIND_TOO_LITTLE, None]
)
def test_trial_result_ignored_after_concurrent_sync(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, found: ReleaseEvent | None
) -> None:
    """None: nothing that it drafts is accepted, and the reconciler gives it up."""
    rig = make_rig(2, TrialConfig())
    rig.publisher.promote(1, pin=False)
    live_at = rig.pointer.now.live_at
    rig.pointer.offer(2)
    rig.publisher.prepare()
    if found is not None:
        result = TrialResult(1, live_at, found, "")
        monkeypatch.setattr(rig.trials, "result", lambda *_: result)
    alone = rig.publisher.committing

    def after_a_sync(*until: float) -> object:
        monkeypatch.setattr(rig.publisher, "committing", alone)
        assert rig.publisher.complete(7, rig.stage_policy(7)).draft_version == 2
        return alone(*until)

    monkeypatch.setattr(rig.publisher, "committing", after_a_sync)
    if found is None:
        assert not rig.publisher.roll_back("nothing is accepted", 1).changes
    else:
        assert not rig.publisher.settle()
    now = rig.pointer.now
    assert rig.served == [2, 2] and rig.policies == [7, 7]
    assert (now.live, now.promoted, now.good_versions) == (2, 2, (0,))
    assert now.on_trial and (now.live, now.incumbent) == (2, 0)
    assert rig.events()[-2:] == [("trial_undecided", 1), ("committed", 2)]


def test_sync_does_not_commit_draft_rolled_back_meanwhile(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would have caught a server up, and the next release is promoted already."""
    rig = make_rig(2, TrialConfig())
    rig.publisher.promote(1, pin=False)
    rig.put(0, 0)
    rig.publisher.prepare()
    rig.pointer.offer(2)
    stage_id = rig.stage_policy(7)
    alone = rig.publisher.committing

    def after_a_roll_back() -> object:
        monkeypatch.setattr(rig.publisher, "committing", alone)
        assert rig.publisher.roll_back("nothing is accepted", 1).changes
        return alone()

    monkeypatch.setattr(rig.publisher, "committing", after_a_roll_back)
    rig.publisher.complete(7, stage_id)
    assert rig.served == [0, 0] and rig.policies == [7, 7]
    assert rig.servers[0].commits()[-1] == ("policy-7",)
    assert (rig.pointer.now.live, rig.pointer.now.promoted) == (0, 2)
    assert rig.events()[-1] == ("trial_rolled_back", 1)
    assert [list(d.state.staged) for d in rig.servers] == [[]] * 2


def test_trial_ignores_drafts_from_before_it(make_rig: Callable[..., Rig]) -> None:
    """Draft 1 was bad under another policy, was taken back, and is tried again."""
    rig = make_rig(1, TrialConfig())
    rig.watching()
    rig.draft(0, GOOD, 8000)
    rig.publisher.promote(1, pin=False)
    rig.draft(1, RUINED, 4000)
    rig.publisher.roll_back("by hand")
    rig.publisher.promote(1, pin=False)
    assert not rig.publisher.settle()
    for _ in range(40):
        rig.draft(1, GOOD, 1000)
        if rig.publisher.settle():
            break
    assert rig.served == [1] and rig.pointer.now.good_versions == (0, 1)


@pytest.mark.parametrize("tried", [60, 140], ids=["fewer steps", "more steps"])
def test_falling_counter_means_restarted_server(tried: int) -> None:
    """It may have taken more steps since than before, with a worse draft."""
    before, now = Batch((100, 100), (80, 60)), Batch((tried, tried), (20, 10))
    assert now.since(before) == now
    assert (before + now).since(before) == now
    assert now.since(Batch((), ())) == now


def test_trial_splits_error_rate_between_both_sides() -> None:
    """There is no verdict yet on as many steps as would do with all of it."""
    config = TrialConfig()
    good, worse = Batch((100,) * 3, (80, 50, 20)), Batch((100,) * 3, (60, 30, 10))

    def verdict(batches: int, alpha: float) -> bool | None:
        arms = [Arm(config.design_effect) for _ in range(2)]
        for _ in range(batches):
            for arm, batch in zip(arms, (worse, good), strict=True):
                arm.add(batch)
        return decide(*(arm.interval(alpha, 3) for arm in arms), config.max_loss)

    count = next(n for n in range(3, 1000) if verdict(n, config.alpha) is False)
    assert verdict(count, config.alpha / 2) is None

    class Watch:
        def since(self, version: int, addresses: Iterable[str], begin: float) -> list[Batch]:
            return [worse] * count

    def result(figures: tuple[Batch, ...]) -> TrialResult | None:
        now = Pointer(1, 1, (Good(0),), left_good_at=1e12, figures=figures, figures_at=1e12)
        return trials.result(now, ())

    trials = Trials(config, lambda: 3, Watch())  # type: ignore[arg-type]
    assert result((good,) * count) is None
    count *= 2
    found = result((good,) * count)
    assert found is not None and found.event is ReleaseEvent.FAIL


@pytest.mark.parametrize("what", ["another release", "the same"])
def test_heal_commits_release_wanted_after_staging(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """While a server stages the release again, a sync commits another one on the fleet."""
    rig.publisher.promote(1, pin=False)
    rig.pointer.offer(2)
    rig.publisher.prepare()
    rig.servers[0].read_back("differs")
    real = reconcile.stage_version_on

    def staged(*arguments: object) -> object:
        answer = real(*arguments)  # type: ignore[arg-type]
        if what == "another release":
            rig.publisher.complete(0, "")
        return answer

    monkeypatch.setattr(reconcile, "stage_version_on", staged)
    rig.heal()
    assert rig.served == ([2, 2, 2] if what == "another release" else [1, 1, 1])
    left = [i for d in rig.servers for i in d.staged if "healed" in i]
    assert left == []


def test_sync_during_reconcile_is_no_divergence(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.pointer.offer(1)
    rig.publisher.prepare()
    real = rig.fleet.states

    def then_a_sync(read_back: bool) -> object:
        found = real(read_back)
        assert rig.publisher.complete(0, "").changes
        return found

    monkeypatch.setattr(rig.fleet, "states", then_a_sync)
    rig.heal()
    assert rig.served == [1, 1, 1]
    assert [server.commits() for server in rig.servers] == [[("draft-1",)]] * 3
    assert rig.events() == [("committed", 1)] and rig.counters.servers["current"] == 3


@pytest.mark.parametrize("what", ["a repair", "another publish"])
def test_stage_taken_by_sync_is_no_stray(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    rig.pointer.offer(1)
    rig.publisher.prepare()
    begin_commit = rig.pointer.begin_commit
    promoting = threading.Thread(target=rig.publisher.promote, args=(2, False))

    def meanwhile(version: int) -> None:
        monkeypatch.setattr(rig.pointer, "begin_commit", begin_commit)
        if what == "a repair":
            rig.heal()
        else:
            promoting.start()
        begin_commit(version)

    monkeypatch.setattr(rig.pointer, "begin_commit", meanwhile)
    assert rig.publisher.complete(7, rig.stage_policy(7)).draft_version == 1
    assert rig.policies == [7, 7, 7] and rig.servers[0].commits() == [("draft-1", "policy-7")]
    if what == "another publish":
        promoting.join(LONG)
    assert rig.served == ([1, 1, 1] if what == "a repair" else [2, 2, 2])
    # What is left of a sync that ended is one again.
    rig.heal()
    assert [list(d.state.staged) for d in rig.servers] == [[]] * 3


def test_failed_heal_leaves_nothing_staged(rig: Rig) -> None:
    rig.publisher.promote(1, pin=False)
    rig.put(0, 3)
    rig.servers[0].faults.commit = {"draft-1-healed-1"}
    rig.heal()
    assert rig.served == [3, 1, 1]
    assert ("Abort", ("draft-1-healed-1",)) in rig.servers[0].calls
    assert list(rig.servers[0].state.staged) == []


@pytest.mark.parametrize("servers", [1, 2, 4])
def test_unaccepted_release_is_recommitted_twice_at_most(
    make_rig: Callable[..., Rig], servers: int
) -> None:
    """It is rolled back where most servers say so: one that the others contradict is broken."""
    rig = make_rig(servers, TrialConfig())
    rig.publisher.promote(1, pin=False)
    bad = rig.servers[0]
    for turn in range(4):
        if bad.state.draft_version == 1:
            bad.accept_nothing()
        rig.heal()
        assert rig.served == [0 if turn >= 2 and servers == 1 else 1] * servers
    assert sum("healed" in ids[0] for ids in bad.commits()) == 2
    if servers == 1:
        assert rig.events()[-1] == ("trial_rolled_back", 1)
        assert rig.pointer.now.promoted == 0
    else:
        assert bad.state.not_ready and rig.counters.servers["ready"] == servers - 1


def test_unaccepted_old_draft_does_not_block_heal(
    rig: Rig,
) -> None:
    """It was put back on it twice, and was away while another release went live."""
    for _ in range(2):
        rig.servers[0].accept_nothing()
        rig.heal()
    rig.publisher.promote(1, pin=False)
    rig.put(0, 0)
    rig.put(1, 0)
    rig.servers[0].accept_nothing()
    rig.heal()
    assert rig.served == [1, 1, 1]
    rig.assert_live(1)


def test_unaccepted_only_good_release_is_replaced_by_next(rig: Rig) -> None:
    for _ in range(3):
        rig.servers[0].accept_nothing()
        rig.heal()
    assert len(rig.servers[0].commits()) == 2
    rig.pointer.offer(1)
    rig.publisher.prepare()
    rig.heal()
    assert rig.publisher.complete(0, "").draft_version == 1
    assert rig.served == [1, 1, 1]


def test_lost_worker_memory_does_not_blame_draft(make_rig: Callable[..., Rig]) -> None:
    """An engine slept at level 2, again and again, and generated before it was put right."""
    rig = make_rig(2, TrialConfig())
    rig.publisher.promote(1, pin=False)
    for _ in range(4):
        rig.servers[0].accept_nothing()
        rig.servers[0].engine.memory = "differs"
        rig.heal()
        assert not rig.servers[0].state.not_ready
    assert rig.served == [1, 1] and rig.pointer.now.live == 1


def test_sleeping_server_is_healed_after_wake_up(rig: Rig) -> None:
    rig.publisher.promote(1, pin=False)
    sleeper = rig.servers[0]
    calls = len(sleeper.calls)
    for worker in ("asleep", "asleep", "differs"):
        assert len(sleeper.calls) == calls
        sleeper.read_back(worker)
        rig.heal()
    assert not sleeper.state.not_ready and len(sleeper.commits()) == 2


def test_reconciler_knows_what_workers_read_back() -> None:
    class Sleeps(VllmEngine):
        async def _call_workers(self, seconds: float, method: str, *args: object) -> list[str]:
            return [SAME, ASLEEP]

    said = {found.reason for found in asyncio.run(Sleeps(None).read_back())}
    assert said <= reconcile.LOST and pb.NOT_READY_REASON_ASLEEP in said


def test_sync_after_roll_back_commits_policy_alone(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.publisher.promote(1, pin=False)
    rig.pointer.offer(2)
    rig.publisher.prepare()
    stage_id = rig.stage_policy(7)
    sync = threading.Thread(target=rig.publisher.complete, args=(7, stage_id))
    real = rig.pointer.roll_back

    def meanwhile(*arguments: bool) -> tuple[int, int]:
        sync.start()
        return real(*arguments)

    monkeypatch.setattr(rig.pointer, "roll_back", meanwhile)
    rig.publisher.roll_back("by hand")
    sync.join(LONG)
    assert rig.served == [0, 0, 0] and rig.policies == [7, 7, 7]
    assert [list(d.state.staged) for d in rig.servers] == [[]] * 3


def test_sync_does_not_replace_concurrent_promote(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It commits the release that was promoted before while another publish begins."""
    rig.publisher.promote(1, pin=False)
    rig.pointer.offer(2)
    rig.publisher.prepare()
    sync = threading.Thread(target=rig.publisher.complete, args=(7, rig.stage_policy(7)))
    drop = rig.publisher._drop_staged

    def after_the_sync(until: float) -> None:
        sync.start()
        sync.join(LONG)
        drop(until)

    monkeypatch.setattr(rig.publisher, "_drop_staged", after_the_sync)
    rig.publisher.promote(0, pin=True)
    sync.join(LONG)
    assert rig.served == [0, 0, 0] and rig.policies == [7, 7, 7]
    now = rig.pointer.now
    assert (now.live, now.promoted, now.pinned) == (0, 0, True)
