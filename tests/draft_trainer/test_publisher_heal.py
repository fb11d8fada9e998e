"""Servers that serve something else than wanted are put right without being asked."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

import pytest

from benchmarks.publish_faults.memory_server import MemoryServer
from draft_trainer.releases import fleet as fleets
from draft_trainer.releases import reconcile as healing
from draft_trainer.releases.commits import PublishResult
from draft_trainer.releases.fleet import Fleet, Members
from draft_trainer.releases.rollout_client import Failure, RolloutClient
from slipstream.errors import RefusedError, StatusCode
from tests.draft_trainer.fleet_rig import LONG, Rig, fleet_events
from tests.draft_trainer.registry_rig import flip_bit

pytestmark = [pytest.mark.usefixtures("no_backoff"), pytest.mark.contract("all or none")]


def test_restarted_server_gets_release_of_fleet(rig: Rig) -> None:
    rig.publisher.promote(2, pin=False)
    rig.servers[1].stop()
    rig.heal()
    rig.servers[1].restart()
    rig.reachable(1)
    assert rig.served == [2, 0, 2]
    rig.heal()
    assert rig.served == [2, 2, 2]
    rig.assert_live(2)
    assert rig.events() == [("committed", 2), ("healed", 2)]
    assert fleet_events(rig.counters) == {"committed": 1, "healed": 1}


def test_restarted_fleet_is_healed_in_batches(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer's link is not for all of them at once."""
    monkeypatch.setattr(healing, "STAGES_AT_ONCE", 1)
    rig.publisher.promote(2, pin=False)
    for index in range(3):
        rig.put(index, 0)
    rig.heal()
    assert sorted(rig.served) == [0, 0, 2]
    rig.heal()
    assert sorted(rig.served) == [0, 2, 2]
    rig.heal()
    assert rig.served == [2, 2, 2]


def test_two_trainers_do_not_heal_one_server_in_turn(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """The server belongs to the one that staged there last; the other is told which one that is."""
    rig.fleet.close()
    rig.fleet = Fleet(rig.fleet.config, trainer="one")
    rig.restart()
    rig.publisher.promote(2, pin=False)
    address = rig.servers[1].address
    other = RolloutClient(address, rig.fleet.config, trainer="two")
    refused = other.stage(rig.publisher.payloads.get(3))
    assert isinstance(refused, Failure) and "a server of trainer one" in refused.text
    control = rig.servers[1].control
    control._trainer = "two"  # As if it had staged while this trainer was silent.
    rig.put(1, 3)
    commits = dict(control.commits)
    for _ in range(3):
        rig.heal()
    assert rig.served == [2, 3, 2] and control.commits == commits
    assert "a server of trainer two" in caplog.text
    assert fleet_events(rig.counters)["not_healed"] == 3
    other.close()


@pytest.mark.parametrize(("took", "pause"), [(0.0, 0.05), (0.1, 0.4), (60.0, 1.0)])
def test_reconciler_pauses_longer_than_trial_checks_take(
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


def test_reconcile_goes_on_with_damaged_release(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(3)
    rig.publisher.promote(1, pin=False)
    flip_bit(rig.registry.path(1) / "model.safetensors")
    rig.restart()
    rig.put(1, 0)
    rig.heal()
    assert rig.servers[1].told == [1], "it is not ready meanwhile"
    assert fleet_events(rig.counters)["not_healed"] == 1
    assert rig.counters.servers == {"known": 3, "reachable": 3, "ready": 2, "current": 2}


@pytest.mark.parametrize("what", ["checksum", "not_ready"])
def test_same_version_with_other_content_is_committed_again(rig: Rig, what: str) -> None:
    rig.publisher.promote(1, pin=False)
    server = rig.servers[2]
    if what == "checksum":
        rig.put(2, 1, tensors_of=3)
    else:
        server.read_back("differs")
    commits = len(server.commits())
    rig.heal()
    assert len(server.commits()) == commits + 1
    assert not server.state.not_ready
    rig.assert_live(1)
    rig.heal()
    assert len(server.commits()) == commits + 1
    assert [len(d.commits()) for d in rig.servers[:2]] == [1, 1]


def test_heal_backs_off_exponentially(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(healing, "FIRST_WAIT", 1.0)
    monkeypatch.setattr(healing.time, "monotonic", lambda: now[0])
    rig.publisher.promote(1, pin=False)
    rig.put(0, 3)
    rig.servers[0].faults.stage = True
    tries = []
    for _ in range(36):
        before = len(rig.servers[0].calls)
        rig.heal()
        if len(rig.servers[0].calls) > before:
            tries.append(now[0])
        now[0] += 0.5
    assert tries[:5] == [100.0, 101.0, 103.0, 107.0, 115.0]
    assert fleet_events(rig.counters)["not_healed"] == len(tries)
    rig.servers[0].faults.stage = False
    now[0] += 60
    rig.heal()
    assert rig.served == [1, 1, 1]


@pytest.mark.parametrize("committed", [0, 1, 2])
def test_trainer_killed_between_commits_undoes_them(rig: Rig, committed: int) -> None:
    """The pointer is as ``intends`` left it; so many servers have committed already."""
    rig.publisher.promote(1, pin=False)
    rig.pointer.begin_commit(2)
    for server in rig.servers[:committed]:
        client = rig.fleet.client(server.address)
        client.stage(rig.publisher.payloads.get(2))
        client.commit(["draft-2"])
    assert rig.pointer.now.intent == 2
    rig.restart()
    rig.heal()
    assert rig.served == [1, 1, 1]
    rig.assert_live(1)
    assert rig.pointer.now.intent is None
    assert ("interrupted", 2) in rig.events()
    assert rig.publisher.promote(2, pin=False).draft_version == 2
    rig.assert_live(2)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("index", [0, 2])
def test_server_cut_off_at_commit_ends_on_fleets_release(rig: Rig, when: str, index: int) -> None:
    rig.publisher.promote(1, pin=False)
    cut = rig.servers[index]
    cut.faults.die = when
    assert rig.publisher.promote(2, pin=False).draft_version == 1
    others = [d for d in rig.servers if d is not cut]
    assert [d.state.draft_version for d in others] == [1, 1]
    assert cut.state.draft_version == (1 if when == "before" else 2)
    cut.faults.die = ""
    cut.reconnect()
    rig.reachable(index)
    rig.heal()
    assert rig.served == [1, 1, 1]
    rig.assert_live(1)
    assert rig.publisher.promote(2, pin=False).draft_version == 2


def test_full_disk_at_commit_changes_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.publisher.promote(1, pin=False)

    def full(*_: object) -> None:
        raise RefusedError("draft.registry", "No space left", "space", "make some")

    with monkeypatch.context() as patch:
        patch.setattr(rig.pointer, "_write", full)
        result = rig.publisher.promote(2, pin=False)
        assert (result.draft_version, result.changes) == (1, False)
        assert all("No space left" in o.error for o in result.outcomes.values())
    assert rig.served == [1, 1, 1]
    assert all(list(d.state.staged) == [] for d in rig.servers)
    assert rig.publisher.promote(2, pin=False).draft_version == 2


@pytest.mark.parametrize("written", ["go_live", "promote"])
def test_full_disk_after_commit_rolls_back(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, written: str
) -> None:
    """Every server has committed, and the disk fills up before that can be written down: what is
    served and what is promoted are written together."""

    def full(*_: object) -> None:
        raise RefusedError("draft.registry", "No space left", "space", "make some")

    with monkeypatch.context() as patch:
        patch.setattr(rig.pointer, written, full)
        result = rig.publisher.promote(2, pin=True)
    assert (result.draft_version, result.changes) == (0, False)
    assert rig.served == [0, 0, 0]
    now = rig.pointer.now
    assert (now.live, now.promoted, now.pinned, now.intent) == (0, 0, False, None)


def test_stray_stages_are_aborted_and_used_ones_kept(
    rig: Rig,
) -> None:
    for server in rig.servers:
        for stage_id in ("draft-3", "draft-1-healed-7"):
            rig.fleet.client(server.address).stage(rig.publisher.payloads.get(3), stage_id)
        server.stage_policy("mine", 4)
    rig.heal()
    assert [d.staged for d in rig.servers] == [["mine"]] * 3
    rig.pointer.offer(2)
    rig.publisher.prepare()
    rig.heal()
    assert [sorted(d.staged) for d in rig.servers] == [["draft-2", "mine"]] * 3
    assert rig.publisher.complete(0, "").draft_version == 2


def test_late_read_back_loses_no_server(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    state = RolloutClient.state

    def late(client: RolloutClient, read_back: bool = False) -> object:
        if read_back:
            return Failure("no answer in time", StatusCode.DEADLINE_EXCEEDED)
        return state(client)

    monkeypatch.setattr(RolloutClient, "state", late)
    states = rig.fleet.states(read_back=True)
    assert not any(isinstance(state, Failure) for state in states.values())


def test_servers_join_and_leave(rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleets, "LOOK_UP_SECONDS", LONG)
    members = tmp_path / "fleet"
    rig.fleet._members = Members((f"file:{members}",))

    def write_members() -> None:
        members.write_text("\n".join(server.address for server in rig.servers))

    write_members()
    rig.publisher.promote(1, pin=False)
    left = rig.servers.pop()
    rig.servers.append(MemoryServer(rig.initial))
    write_members()
    rig.heal()
    assert rig.served == [1, 1, 1]
    rig.publisher.promote(2, pin=False)
    assert rig.served == [2, 2, 2]
    assert left.state.draft_version == 1
    # What is asked of it meanwhile goes on, as the list may lack it for a moment only.
    same = rig.fleet.client(left.address)
    assert not isinstance(same.state(), Failure)
    rig.servers.append(left)
    write_members()
    rig.fleet.refresh()
    assert rig.fleet.client(rig.servers.pop().address) is same
    write_members()
    rig.fleet.refresh()
    monkeypatch.setattr(fleets, "LEFT_SECONDS", 0.0)
    rig.fleet.refresh()
    assert rig.fleet.client(left.address).state().unknown_fate  # type: ignore[union-attr]
    left.stop()


@pytest.mark.parametrize("fault", ["stage", "refused"])
def test_failed_publish_on_promotion_is_retried(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """No sync comes that would do it."""
    rig = make_rig(3, on="promotion")
    tried, over, published = (threading.Event() for _ in range(3))
    real = rig.publisher.publish_promoted

    def publish() -> PublishResult:
        for server in rig.servers:
            server.faults.stage = fault == "stage" and not over.is_set()
        if fault == "refused" and not over.is_set():
            tried.set()
            raise RefusedError("publish", "another publish", "one at a time", "try again")
        result = real()
        tried.set()
        if result.changes:
            published.set()
        return result

    monkeypatch.setattr(rig.publisher, "publish_promoted", publish)
    rig.pointer.offer(1)
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
def test_reconciler_survives_error_in_round(
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
    rig.put(0, 3)
    rig.reconciler.start()
    assert put_right.wait(LONG)
    assert rig.reconciler.stop(LONG)
    assert rig.served == [0, 0, 0]
    said = [one for one in caplog.records if one.getMessage() == str(error)]
    assert len(said) == 2
    traced = [bool(one.exc_info) for one in said]
    assert traced == [not isinstance(error, RefusedError)] * 2


def test_watch_retries_thread_that_did_not_start(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    addresses = [server.address for server in rig.servers]
    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(threading.Thread, "start", start)
        rig.watch.follow(addresses)
    rig.watch.follow(addresses)
    for server in rig.servers:
        server.draft(1, [0, 0, 0])
        assert server.watched.wait(LONG)


def test_heal_backoff_does_not_overflow(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """2 to the power of its tries has no float any more."""
    monkeypatch.setattr(healing, "FIRST_WAIT", 1.0)
    rig.put(0, 3)
    rig.servers[0].faults.stage = True
    rig.heal()
    found = rig.reconciler._diverged[rig.servers[0].address]
    found.attempts, found.not_before = 1500, 0.0
    rig.heal()
    assert found.attempts == 1501


def test_heal_does_nothing_during_publish(rig: Rig) -> None:
    rig.put(0, 3)
    with rig.publisher._publishing():
        rig.heal()
    assert rig.served == [3, 0, 0]
