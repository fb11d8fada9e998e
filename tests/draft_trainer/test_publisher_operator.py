"""The operator's acts on the fleet: promote, pin, roll back, restart."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import grpc
import pytest

from draft_trainer.config import TrialConfig
from draft_trainer.releases import trial, watch
from draft_trainer.releases.pointer import promote_offline
from draft_trainer.releases.registry import Registry
from draft_trainer.releases.trial import HISTORY_SECONDS
from slipstream.errors import RefusedError
from tests.draft_trainer.fleet_rig import Rig
from tests.draft_trainer.test_trial import GOOD, settle

MIDDLE, WORSE = [35, 20, 10], [30, 10, 3]


def test_promote_pins_until_promoted_without_a_pin(rig: Rig) -> None:
    result = rig.publisher.promote(2, pin=True)
    assert result.changes and rig.served == [2, 2, 2]
    assert not rig.pointer.offer(3)
    assert rig.pointer.now.promoted == 2
    assert not rig.publisher.prepare().changes
    assert not rig.publisher.promote(2, pin=False).changes
    assert rig.pointer.offer(3)
    assert rig.publisher.prepare().draft_version == 3


def test_offer_replaces_only_release_it_was_compared_with(rig: Rig) -> None:
    """Release 2 was promoted while the gate compared release 3 with release 0."""
    rig.publisher.promote(2, pin=False)
    assert not rig.pointer.offer(3, against=0)
    assert rig.pointer.now.promoted == 2
    assert rig.pointer.offer(3, against=2)
    assert rig.pointer.now.promoted == 3


def test_failed_promote_changes_nothing(rig: Rig) -> None:
    rig.servers[0].faults.stage = True
    result = rig.publisher.promote(2, pin=True)
    assert (result.draft_version, result.changes) == (0, False)
    rig.servers[0].faults.stage = False
    rig.servers[0].faults.commit = {"draft-2"}
    assert rig.publisher.promote(2, pin=True).draft_version == 0
    assert rig.served == [0, 0, 0]
    assert (rig.pointer.now.promoted, rig.pointer.now.pinned) == (0, False)
    with pytest.raises(RefusedError) as caught:
        rig.publisher.promote(99, pin=False)
    assert caught.value.code is grpc.StatusCode.NOT_FOUND


def test_promote_replaces_what_was_prepared(rig: Rig) -> None:
    rig.pointer.offer(1)
    rig.publisher.prepare()
    rig.publisher.promote(2, pin=False)
    rig.publisher.complete(7, rig.stage_policy(7))
    assert rig.served == [2, 2, 2]
    assert rig.policies == [7, 7, 7]
    assert [d.commits() for d in rig.servers] == [[("draft-2",), ("policy-7",)]] * 3
    assert all(list(d.state.staged) == [] for d in rig.servers)


def test_roll_back_goes_one_release_back_each_time(rig: Rig) -> None:
    for version in (1, 2, 3):
        rig.publisher.promote(version, pin=False)
    for version in (2, 1, 0):
        result = rig.publisher.roll_back("test")
        assert result.draft_version == version
        assert all(o.committed for o in result.outcomes.values())
        assert rig.served == [version] * 3
        rig.assert_live(version)
    with pytest.raises(RefusedError) as caught:
        rig.publisher.roll_back("test")
    assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION
    assert "no release before 0 that is good" in caught.value.found


def test_roll_back_when_a_server_cannot(rig: Rig) -> None:
    rig.publisher.promote(1, pin=False)
    rig.servers[1].faults.roll_back = True
    rig.servers[1].faults.stage = True
    result = rig.publisher.roll_back("test")
    assert result.draft_version == 0
    assert [d.state.draft_version for d in rig.servers] == [0, 1, 0]
    outcome = result.outcomes[rig.servers[1].address]
    assert not outcome.committed
    assert "putting it on draft 0 failed" in outcome.error
    # The next window brings it in line.
    rig.servers[1].faults.stage = False
    assert rig.publisher.prepare().changes
    rig.publisher.complete(0, "")
    assert rig.served == [0, 0, 0]


def test_prune_keeps_release_under_promotion(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention asks what is in use, and removes, while the pointer cannot move."""

    def promote() -> None:
        with contextlib.suppress(RefusedError):
            rig.publisher.promote(1, pin=False)

    promoting = threading.Thread(target=promote)

    def versions() -> tuple[int, ...]:
        patch.undo()
        promoting.start()
        promoting.join(0.5)
        return rig.registry.versions()

    with monkeypatch.context() as patch:
        patch.setattr(rig.registry, "versions", versions)
        removed = rig.registry.prune(1, keep_bytes=1)
    promoting.join(20)
    assert 1 not in removed or rig.pointer.now.promoted == 0
    rig.registry.get(rig.pointer.now.promoted)


@pytest.mark.parametrize("steps", [0, 2000])
@pytest.mark.parametrize("what", ["another run", "a restart for another run", "a day later"])
def test_figures_of_other_policy_judge_no_release(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, what: str, steps: int
) -> None:
    rig = make_rig(1, TrialConfig())
    rig.run = SimpleNamespace(run_id="one", began=0.0)
    rig.watching()
    rig.draft(0, GOOD, 4000)
    rig.publisher.measure()
    assert rig.pointer.now.figures_run == "one"
    if what != "another run":
        rig.forget()
        rig.watching()
    if what == "a day later":
        tomorrow = time.time() + 86_400
        monkeypatch.setattr(time, "time", lambda: tomorrow)
    else:
        rig.run = SimpleNamespace(run_id="other", began=time.monotonic())
    rig.draft(0, WORSE, steps)
    rig.publisher.measure()
    rig.publisher.promote(1, pin=False)
    rig.draft(1, MIDDLE, 4000)
    settle(rig, 1, MIDDLE)
    now = rig.pointer.now
    assert rig.served == [1] and now.promoted == 1 and now.good_versions == (0, 1)
    reason = rig.pointer.state.events.since(0)[-1].reason
    assert ("nothing to compare with" in reason) == (not steps)


@pytest.mark.parametrize("reopened", ["one", "other"])
def test_figures_count_until_another_run_is_opened(
    make_rig: Callable[..., Rig], reopened: str
) -> None:
    """A trainer that starts knows of no run until a policy opens one."""
    rig = make_rig(1, TrialConfig())
    rig.run = SimpleNamespace(run_id="one", began=0.0)
    rig.watching()
    rig.draft(0, GOOD, 4000)
    rig.publisher.measure()
    rig.run = None
    rig.forget()
    rig.watching()
    rig.draft(0, GOOD, 400)
    rig.publisher.measure()
    now = rig.pointer.now
    assert sum(batch.drafts for batch in now.figures) >= 4400 and now.figures_run == "one"
    rig.run = SimpleNamespace(run_id=reopened, began=time.monotonic())
    rig.publisher.promote(2, pin=False)
    rig.draft(2, WORSE, 4000)
    if reopened == "one":
        settle(rig, 2, WORSE)
        assert rig.served == [0] and not rig.pointer.now.on_trial
        assert rig.events()[-1] == ("trial_rolled_back", 2)
    else:
        assert rig.publisher.settle() and rig.pointer.now.good_versions == (0, 2)
        assert "nothing to compare with" in rig.pointer.state.events.since(0)[-1].reason


def one_passed(rig: Rig) -> None:
    """Have release 1 pass its trial against release 0 in run "one", and be measured."""
    rig.run = SimpleNamespace(run_id="one", began=0.0)
    rig.watching()
    rig.draft(0, GOOD, 6000)
    rig.publisher.promote(1, pin=False)
    settle(rig, 1)
    assert rig.pointer.now.good_versions == (0, 1)
    rig.publisher.measure()


@pytest.mark.parametrize("what", ["a day later", "another run"])
def test_release_rolled_back_by_hand_is_not_served_again(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """The next release is not held up either if nothing is known to compare it with."""
    rig = make_rig(1, TrialConfig())
    one_passed(rig)
    if what == "a day later":
        tomorrow = time.time() + 86_400
        monkeypatch.setattr(time, "time", lambda: tomorrow)
    assert rig.publisher.roll_back("by hand").draft_version == 0
    now = rig.pointer.now
    assert not now.on_trial and now.incumbent == 0
    if what == "another run":
        rig.run = SimpleNamespace(run_id="other", began=time.monotonic())
    rig.draft(0, GOOD, 6000)
    rig.publisher.promote(2, pin=False)
    settle(rig, 2)
    now = rig.pointer.now
    assert rig.served == [2] and now.good_versions == (0, 2)
    assert not now.on_trial


def test_trial_of_good_release_ends_without_incumbent_figures(make_rig: Callable[..., Rig]) -> None:
    """A run begins before there is a verdict on what an operator went back to."""
    rig = make_rig(1, TrialConfig())
    one_passed(rig)
    rig.publisher.promote(0, pin=False)
    now = rig.pointer.now
    assert now.on_trial and (now.live, now.incumbent) == (0, 1)
    rig.run = SimpleNamespace(run_id="other", began=time.monotonic())
    rig.draft(0, WORSE, 1000)
    assert rig.publisher.settle()
    now = rig.pointer.now
    assert rig.served == [0] and now.incumbent == 0 and not now.on_trial
    assert rig.events()[-1] == ("trial_passed", 0)


def test_release_replacing_damaged_one_needs_no_trial(
    make_rig: Callable[..., Rig],
) -> None:
    """The fleet cannot go back to what is damaged."""
    rig = make_rig(1, TrialConfig())
    one_passed(rig)
    path = rig.root / "release-000001" / "config.json"
    path.write_bytes(b" " + path.read_bytes())
    rig.registry.close()
    promote_offline(Registry(rig.root), 2, pin=False)
    rig.run = SimpleNamespace(run_id="other", began=time.monotonic())
    rig.forget()
    rig.heal()
    now = rig.pointer.now
    assert rig.served == [2] and now.incumbent == 2 and not now.on_trial
    rig.publisher.promote(3, pin=False)
    now = rig.pointer.now
    assert now.on_trial and (now.live, now.incumbent) == (3, 2)


def test_figures_from_before_restart_are_taken_over_once(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are not taken over again with each trial that begins and ends."""
    rig, clock = make_rig(1, TrialConfig()), time.monotonic

    def pass_by(seconds: float) -> None:
        # Only for the trainer: the server, in this process, would end the call that is read.
        later = SimpleNamespace(monotonic=lambda: clock() + seconds, time=time.time)
        for module in (trial, watch):
            monkeypatch.setattr(module, "time", later)

    rig.watching()
    rig.draft(0, GOOD, 4000)
    rig.publisher.measure()
    rig.forget()
    rig.watching()
    pass_by(0.7 * HISTORY_SECONDS)
    rig.publisher.promote(1, pin=False)
    rig.publisher.roll_back("by hand")
    assert sum(batch.drafts for batch in rig.pointer.now.figures) >= 4000
    pass_by(1.4 * HISTORY_SECONDS)
    rig.draft(0, WORSE, 400)
    rig.publisher.measure()
    assert sum(batch.drafts for batch in rig.pointer.now.figures) == 400


def test_trial_ignores_drafts_of_previous_run(make_rig: Callable[..., Rig]) -> None:
    """Nothing is known of either release under the policy that another run begins with."""
    rig = make_rig(1, TrialConfig())
    rig.run = SimpleNamespace(run_id="one", began=0.0)
    rig.watching()
    rig.draft(0, GOOD, 4000)
    rig.publisher.measure()
    rig.publisher.promote(1, pin=False)
    rig.draft(1, GOOD, 600)
    before = rig.pointer.now
    rig.run = SimpleNamespace(run_id="other", began=time.monotonic())
    assert not rig.publisher.settle()
    assert rig.served == [1] and rig.pointer.now == before


def test_figures_from_before_restart_count_for_incumbent_only(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(1, TrialConfig())
    rig.watching()
    rig.draft(0, GOOD, 6000)
    rig.publisher.measure()
    rig.forget()
    rig.watching()
    rig.publisher.promote(1, pin=False)
    settle(rig, 1)
    assert rig.pointer.now.good_versions == (0, 1)
    rig.publisher.measure()
    assert sum(batch.drafts for batch in rig.pointer.now.figures) == rig.seen(1)


def test_figures_of_replaced_release_are_dropped(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator rolls back while they are summed; nothing is known of the release before."""
    rig = make_rig(1, TrialConfig())
    one_passed(rig)
    tomorrow = time.time() + 86_400
    monkeypatch.setattr(time, "time", lambda: tomorrow)
    figures = rig.trials.figures

    def then_roll_back(*arguments: object) -> object:
        found = figures(*arguments)  # type: ignore[arg-type]
        assert found is not None
        rig.publisher.roll_back("by hand")
        return found

    monkeypatch.setattr(rig.trials, "figures", then_roll_back)
    rig.publisher.measure()
    now = rig.pointer.now
    assert now.live == 0 and not now.on_trial and now.figures == ()
