"""Servers that serve something else than wanted are put right without being asked."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from draft_trainer.releases import fleet as fleets
from draft_trainer.releases import reconcile as healing
from draft_trainer.releases.client import Failure, RolloutClient
from draft_trainer.releases.commits import PublishResult
from draft_trainer.releases.fleet import Members
from slipstream.errors import RefusedError, StatusCode
from tests.draft_trainer.fleet_double import RolloutDouble
from tests.draft_trainer.fleet_rig import LONG, Rig, fleet_events
from tests.draft_trainer.registry_rig import flip_bit

pytestmark = pytest.mark.usefixtures("no_backoff")


def test_server_that_restarts_gets_the_release_of_the_fleet(rig: Rig) -> None:
    rig.publisher.promote(2, pin=False)
    rig.doubles[1].stop()
    rig.heal()
    rig.doubles[1] = RolloutDouble(rig.doubles[1].port)
    rig.reachable(1)
    assert rig.served == [2, 0, 2]
    rig.heal()
    assert rig.served == [2, 2, 2]
    rig.assert_live(2)
    assert rig.events() == [("committed", 2), ("healed", 2)]
    assert fleet_events(rig.counters) == {"committed": 1, "healed": 1}


def test_a_fleet_that_restarts_as_a_whole_is_put_right_by_and_by(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trainer's link is not for all of them at once."""
    monkeypatch.setattr(healing, "MOST_AT_ONCE", 1)
    rig.publisher.promote(2, pin=False)
    for double in rig.doubles:
        double.state.draft_version = 0
    rig.heal()
    assert sorted(rig.served) == [0, 0, 2]
    rig.heal()
    assert rig.served == [2, 2, 2]


@pytest.mark.parametrize(("took", "pause"), [(0.0, 0.05), (0.1, 0.4), (60.0, 1.0)])
def test_looks_at_a_trial_leave_most_of_the_time_to_training(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, took: float, pause: float
) -> None:
    now, waits = [100.0], list[float]()
    monkeypatch.setattr(healing.time, "monotonic", lambda: now[0])

    def settle() -> bool:
        now[0] += took
        return False

    monkeypatch.setattr(rig.publisher, "settle", settle)
    monkeypatch.setattr(rig.watch, "wait_beyond", lambda revision, timeout: revision)
    stopping = MagicMock()
    stopping.is_set = lambda: bool(waits)
    stopping.wait = waits.append
    monkeypatch.setattr(rig.reconciler, "_stopping", stopping)
    rig.reconciler._run()
    assert waits == [pytest.approx(pause)]


def test_a_damaged_release_keeps_no_other_server_from_being_looked_after(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(3, quorum=0.6)
    rig.publisher.promote(1, pin=False)
    flip_bit(rig.registry.path(1) / "model.safetensors")
    rig.restart()
    rig.doubles[1].state.draft_version = 0
    rig.heal()
    assert ("Expect", ("1",)) in rig.doubles[1].calls, "it is not ready meanwhile"
    assert fleet_events(rig.counters)["not_healed"] == 1
    assert rig.counters.servers == {"known": 3, "reachable": 3, "ready": 2, "current": 2}


@pytest.mark.parametrize("what", ["checksum", "not_ready"])
def test_same_number_with_other_bytes_is_committed_again(rig: Rig, what: str) -> None:
    rig.publisher.promote(1, pin=False)
    double = rig.doubles[2]
    if what == "checksum":
        double.state.draft_sha256 = b"?" * 32
    else:
        double.state.not_ready = "draft read back from memory: worker 0: differs"
    commits = len(double.commits())
    rig.heal()
    assert len(double.commits()) == commits + 1
    assert double.state.not_ready == ""
    rig.assert_live(1)
    rig.heal()
    assert len(double.commits()) == commits + 1
    assert [len(d.commits()) for d in rig.doubles[:2]] == [1, 1]


def test_server_that_cannot_be_healed_is_tried_less_and_less(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(healing, "FIRST_WAIT", 1.0)
    monkeypatch.setattr(healing.time, "monotonic", lambda: now[0])
    rig.publisher.promote(1, pin=False)
    rig.doubles[0].state.draft_version = 3
    rig.doubles[0].faults.stage = True
    tries = []
    for _ in range(36):
        before = len(rig.doubles[0].calls)
        rig.heal()
        if len(rig.doubles[0].calls) > before:
            tries.append(now[0])
        now[0] += 0.5
    assert tries[:5] == [100.0, 101.0, 103.0, 107.0, 115.0]
    assert fleet_events(rig.counters)["not_healed"] == len(tries)
    rig.doubles[0].faults.stage = False
    now[0] += 60
    rig.heal()
    assert rig.served == [1, 1, 1]


@pytest.mark.parametrize("committed", [0, 1, 2])
def test_trainer_that_dies_between_commits_undoes_them_when_it_is_back(
    rig: Rig, committed: int
) -> None:
    """The pointer is as ``intends`` left it; so many servers have committed already."""
    rig.publisher.promote(1, pin=False)
    rig.promotions.intends(2)
    for double in rig.doubles[:committed]:
        client = rig.fleet.client(double.address)
        client.stage(rig.publisher.payloads.get(2))
        client.commit(["draft-2"])
    assert rig.promotions.now.intent == 2
    rig.restart()
    rig.heal()
    assert rig.served == [1, 1, 1]
    rig.assert_live(1)
    assert rig.promotions.now.intent is None
    assert ("interrupted", 2) in rig.events()
    assert rig.publisher.promote(2, pin=False).draft_version == 2
    rig.assert_live(2)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("index", [0, 2])
def test_server_that_is_cut_off_at_its_commit_ends_where_the_others_are(
    rig: Rig, when: str, index: int
) -> None:
    rig.publisher.promote(1, pin=False)
    cut = rig.doubles[index]
    cut.faults.die = when
    assert rig.publisher.promote(2, pin=False).draft_version == 1
    others = [d for d in rig.doubles if d is not cut]
    assert [d.state.draft_version for d in others] == [1, 1]
    assert cut.state.draft_version == (1 if when == "before" else 2)
    cut.stop()
    back = RolloutDouble(cut.port, like=cut)
    rig.doubles[index] = back
    rig.reachable(index)
    rig.heal()
    assert rig.served == [1, 1, 1]
    rig.assert_live(1)
    assert rig.publisher.promote(2, pin=False).draft_version == 2


def test_disk_that_is_full_at_the_commit_leaves_everything_as_it_was(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.publisher.promote(1, pin=False)

    def full(*_: object) -> None:
        raise RefusedError("draft.registry", "No space left", "space", "make some")

    with monkeypatch.context() as patch:
        patch.setattr(rig.promotions, "_write", full)
        result = rig.publisher.promote(2, pin=False)
        assert (result.draft_version, result.changes) == (1, False)
        assert all("No space left" in o.error for o in result.outcomes.values())
    assert rig.served == [1, 1, 1]
    assert all(list(d._state().staged) == [] for d in rig.doubles)
    assert rig.publisher.promote(2, pin=False).draft_version == 2


@pytest.mark.parametrize("written", ["serves", "promote"])
def test_release_that_becomes_known_to_the_fleet_only_is_taken_back(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    """Every server has committed, and the disk fills up before that can be written down: what is
    served and what is promoted are written together."""

    def full(*_: object) -> None:
        raise RefusedError("draft.registry", "No space left", "space", "make some")

    with monkeypatch.context() as patch:
        patch.setattr(rig.promotions, written, full)
        result = rig.publisher.promote(2, pin=True)
    assert (result.draft_version, result.changes) == (0, False)
    assert rig.served == [0, 0, 0]
    now = rig.promotions.now
    assert (now.live, now.promoted, now.pinned, now.intent) == (0, 0, False, None)


def test_stages_that_a_dead_trainer_left_are_forgotten_and_those_in_use_are_kept(
    rig: Rig,
) -> None:
    for stage_id in ("draft-3", "draft-1-healed-7", "mine"):
        for double in rig.doubles:
            rig.fleet.client(double.address).stage(rig.publisher.payloads.get(3), stage_id)
    rig.heal()
    assert [list(d._state().staged) for d in rig.doubles] == [["mine"]] * 3
    rig.promotions.offer(2)
    rig.publisher.prepare()
    rig.heal()
    assert [list(d._state().staged) for d in rig.doubles] == [["draft-2", "mine"]] * 3
    assert rig.publisher.complete(0, "").draft_version == 2


def test_a_look_into_memory_that_waits_for_a_commit_loses_no_server(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = RolloutClient.state

    def late(client: RolloutClient, read_back: bool = False) -> object:
        if read_back:
            return Failure("no answer in time", StatusCode.DEADLINE_EXCEEDED)
        return state(client)

    monkeypatch.setattr(RolloutClient, "state", late)
    states = rig.fleet.states(read_back=True)
    assert not any(isinstance(state, Failure) for state in states.values())
    assert rig.fleet.any_ready([*states])


def test_servers_join_and_leave(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "LOOK_UP_SECONDS", LONG)
    members = tmp_path / "fleet"
    rig.fleet._members = Members((f"file:{members}",))

    def write_members() -> None:
        members.write_text("\n".join(double.address for double in rig.doubles))

    write_members()
    rig.publisher.promote(1, pin=False)
    left = rig.doubles.pop()
    rig.doubles.append(RolloutDouble())
    write_members()
    rig.heal()
    assert rig.served == [1, 1, 1]
    rig.publisher.promote(2, pin=False)
    assert rig.served == [2, 2, 2]
    assert left.state.draft_version == 1
    # What is asked of it meanwhile goes on, as the list may lack it for a moment only.
    same = rig.fleet.client(left.address)
    assert not isinstance(same.state(), Failure)
    rig.doubles.append(left)
    write_members()
    rig.fleet.refresh()
    assert rig.fleet.client(rig.doubles.pop().address) is same
    write_members()
    rig.fleet.refresh()
    monkeypatch.setattr(fleets, "LEFT_SECONDS", 0.0)
    rig.fleet.refresh()
    assert rig.fleet.client(left.address).state().unknown_fate  # type: ignore[union-attr]
    left.stop()


@pytest.mark.parametrize("fault", ["stage", "refused"])
def test_a_promoted_release_that_could_not_be_published_is_published_again(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """No sync comes that would do it."""
    rig = make_rig(3, on="promotion")
    tried, over, published = (threading.Event() for _ in range(3))
    real = rig.publisher.publish_promoted

    def publish() -> PublishResult:
        for double in rig.doubles:
            double.faults.stage = fault == "stage" and not over.is_set()
        if fault == "refused" and not over.is_set():
            tried.set()
            raise RefusedError("publish", "another publish", "one at a time", "try again")
        result = real()
        tried.set()
        if result.changes:
            published.set()
        return result

    monkeypatch.setattr(rig.publisher, "publish_promoted", publish)
    rig.promotions.offer(1)
    rig.reconciler.start()
    assert tried.wait(LONG)
    assert rig.served == [0, 0, 0]
    over.set()
    assert published.wait(LONG)
    assert rig.served == [1, 1, 1]
    assert rig.reconciler.stop(LONG)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, "Too many open files"),
        RuntimeError("can't start new thread"),
        MemoryError(),
        RefusedError("draft.registry", "locked", "a folder that can be written", "wait"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_in_a_round_does_not_end_the_reconciler(
    make_rig: Callable[..., Rig],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: Exception,
) -> None:
    """Nor keep it from the next round for as long as it pauses between two that went well."""
    monkeypatch.setattr(healing, "LOOK_SECONDS", 0.05)
    rig = make_rig(3, reconcile_s=3600.0)
    real, left, put_right = rig.fleet.states, [error, error], threading.Event()

    def states(read_back: bool = False) -> object:
        if left:
            raise left.pop()
        return real(read_back)

    tried = rig.reconciler._tried

    def after(address: str, answer: object) -> None:
        tried(address, answer)  # type: ignore[arg-type]
        put_right.set()

    monkeypatch.setattr(rig.fleet, "states", states)
    monkeypatch.setattr(rig.reconciler, "_tried", after)
    rig.doubles[0].state.draft_version = 3
    rig.reconciler.start()
    assert put_right.wait(LONG)
    assert rig.reconciler.stop(LONG)
    assert rig.served == [0, 0, 0]
    said = [one for one in caplog.records if one.getMessage() == str(error)]
    assert len(said) == 2
    traced = [bool(one.exc_info) for one in said]
    assert traced == [not isinstance(error, RefusedError)] * 2


def test_a_server_without_a_thread_that_watches_it_gets_one_later(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    addresses = [double.address for double in rig.doubles]
    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(threading.Thread, "start", start)
        rig.watch.follow(addresses)
    rig.watch.follow(addresses)
    for double in rig.doubles:
        double.draft(1, [0, 0, 0])
        assert double.watched.wait(LONG)


def test_a_server_that_fails_for_a_day_is_still_tried(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2 to the power of its tries has no float any more."""
    monkeypatch.setattr(healing, "FIRST_WAIT", 1.0)
    rig.doubles[0].state.draft_version = 3
    rig.doubles[0].faults.stage = True
    rig.heal()
    found = rig.reconciler._diverged[rig.doubles[0].address]
    found.attempts, found.not_before = 1500, 0.0
    rig.heal()
    assert found.attempts == 1501


def test_heal_leaves_a_publish_alone(rig: Rig) -> None:
    rig.doubles[0].state.draft_version = 9
    with rig.publisher._staged_alone():
        rig.heal()
    assert rig.served == [9, 0, 0]
