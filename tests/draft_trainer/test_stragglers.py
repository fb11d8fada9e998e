"""``publish.quorum``: a release goes live on enough servers; the rest is not ready without it."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from pydantic import ValidationError

from benchmarks.publish_faults.memory_server import Faults, MemoryServer
from draft_trainer.config import PublishConfig
from draft_trainer.releases import commits as commits_module
from draft_trainer.releases.client import RolloutClient
from tests.draft_trainer.fleet_rig import LONG, Rig, fleet_events
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("no_backoff")


@pytest.fixture
def quorum(make_rig: Callable[..., Rig]) -> Rig:
    """Four servers of which three are enough; each is waited for until its own deadline."""
    return make_rig(4, quorum=0.75, straggler_s=LONG)


def ready(rig: Rig) -> set[int]:
    """The releases that ready servers serve."""
    return {d.state.draft_version for d in rig.servers if not d.state.not_ready}


def wait_for_stragglers(rig: Rig, seconds: float) -> None:
    """From now on, once enough servers have answered."""
    rig.fleet.config = rig.fleet.config.model_copy(update={"straggler_s": seconds})


def told(server: MemoryServer, version: int) -> bool:
    return ("Expect", (str(version),)) in server.calls


@pytest.mark.parametrize("phase", ["stage", "commit"])
def test_enough_servers_make_a_release_live(quorum: Rig, phase: str) -> None:
    straggler = quorum.servers[1]
    straggler.faults = Faults(stage=phase == "stage", commit={"draft-1"})
    result = quorum.publisher.promote(1, pin=False)
    assert (result.draft_version, result.changes) == (1, True)
    assert quorum.served == [1, 0, 1, 1]
    assert quorum.pointer.now.live == 1 and quorum.pointer.now.intent is None
    assert result.outcomes[straggler.address].error != ""
    assert fleet_events(quorum.counters) == {"committed": 1}
    until(lambda: told(straggler, 1))
    assert ready(quorum) == {1}
    assert straggler.state.not_ready == "serves draft 0, the fleet 1"
    straggler.faults = Faults()
    quorum.heal()
    assert quorum.served == [1] * 4 and ready(quorum) == {1}
    assert straggler.state.not_ready == ""


@pytest.mark.parametrize("phase", ["stage", "commit"])
def test_fewer_than_enough_undo_it_everywhere(quorum: Rig, phase: str) -> None:
    for server in quorum.servers[:2]:
        server.faults = Faults(stage=phase == "stage", commit={"draft-1"})
    result = quorum.publisher.promote(1, pin=False)
    assert (result.draft_version, result.changes) == (0, False)
    assert quorum.served == [0] * 4 and ready(quorum) == {0}
    assert quorum.pointer.now.live == 0 and quorum.pointer.now.intent is None
    assert not any(told(server, 1) for server in quorum.servers)


@pytest.mark.parametrize("phase", ["Stage", "Commit"])
def test_a_straggler_that_answers_late_is_on_the_release(
    make_rig: Callable[..., Rig], phase: str
) -> None:
    rig = make_rig(4, quorum=0.75, straggler_s=LONG)
    late, go = rig.servers[3], threading.Event()
    late.faults.waits[phase] = go
    rig.pointer.offer(1)
    if phase == "Stage":
        wait_for_stragglers(rig, 0.0)
    rig.publisher.prepare()
    wait_for_stragglers(rig, 0.0)
    result = rig.publisher.complete(0, "")
    assert (result.draft_version, result.changes) == (1, True)
    assert "no answer 0 s after 3 servers had done it" in result.outcomes[late.address].error
    until(lambda: told(late, 1))
    assert rig.served == [1, 1, 1, 0] and ready(rig) == {1}
    go.set()
    if phase == "Commit":
        until(lambda: late.state.draft_version == 1)
        assert late.state.not_ready == "", "its commit came after it was told"
    else:
        until(lambda: list(late.state.staged) == ["draft-1"])
        late.faults = Faults()
    # What it staged too late is taken away, and it is put right like any other.
    rig.heal()
    assert rig.served == [1] * 4 and ready(rig) == {1}
    assert list(late.state.staged) == []


def test_late_commits_leave_reported_result_unchanged(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two servers answer late: one commits, one refuses."""
    rig = make_rig(5, quorum=0.6, straggler_s=LONG)
    refuses, commits = rig.servers[3:]
    answers, go = queue.SimpleQueue[bool](), threading.Event()
    real = commits_module.commit_on

    def commit_on(client: RolloutClient, *arguments: object) -> bool:
        live = real(client, *arguments)  # type: ignore[arg-type]
        if client.address in (refuses.address, commits.address):
            answers.put(live)
        return live

    monkeypatch.setattr(commits_module, "commit_on", commit_on)
    rig.pointer.offer(1)
    rig.publisher.prepare()
    for late in (refuses, commits):
        late.faults.waits["Commit"] = go
    refuses.faults.commit = {"draft-1"}
    wait_for_stragglers(rig, 0.0)
    result = rig.publisher.complete(0, "")
    reported = {late.address: replace(result.outcomes[late.address]) for late in (refuses, commits)}
    assert not any(outcome.draft_committed for outcome in reported.values())
    go.set()
    assert {answers.get(timeout=LONG) for _ in range(2)} == {False, True}
    assert {address: result.outcomes[address] for address in reported} == reported


def test_commit_after_next_publish_changes_nothing(
    make_rig: Callable[..., Rig],
) -> None:
    """The call of release 1 lies at a server while release 2 goes live everywhere."""
    rig = make_rig(4, quorum=0.75, straggler_s=LONG)
    late, go = rig.servers[3], threading.Event()
    late.faults.waits["Commit"] = go
    rig.pointer.offer(1)
    rig.publisher.prepare()
    wait_for_stragglers(rig, 0.0)
    rig.publisher.complete(0, "")
    until(lambda: late.commits() == [("draft-1",)])
    late.faults = Faults()
    wait_for_stragglers(rig, LONG)
    assert rig.publisher.promote(2, pin=False).changes
    assert rig.served == [2] * 4 and list(late.state.staged) == []
    go.set()
    rig.heal()
    assert rig.served == [2] * 4 and ready(rig) == {2}


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_straggler_that_dies_is_told_when_it_is_back(quorum: Rig, when: str) -> None:
    quorum.publisher.promote(1, pin=False)
    dead = quorum.servers[2]
    dead.faults.die = when
    assert quorum.publisher.promote(2, pin=False).changes
    dead.faults = Faults(stage=True)
    if when == "after":
        dead.reconnect()
    else:
        dead.restart()
    quorum.reachable(2)
    quorum.heal()
    assert ready(quorum) == {2}
    assert told(dead, 2) == (when == "before"), "what is on the release is not told"
    dead.faults = Faults()
    quorum.heal()
    assert quorum.served == [2] * 4 and ready(quorum) == {2}


def test_a_trainer_that_dies_between_commits_undoes_them(quorum: Rig) -> None:
    """Nothing on disk says that enough had committed."""
    quorum.pointer.begin_commit(1)
    for server in quorum.servers[:3]:
        client = quorum.fleet.client(server.address)
        client.stage(quorum.publisher.payloads.get(1))
        client.commit(["draft-1"])
    quorum.restart()
    quorum.heal()
    assert quorum.served == [0] * 4 and ready(quorum) == {0}


def test_straggler_is_ready_after_fleet_rolls_back(quorum: Rig) -> None:
    straggler = quorum.servers[1]
    straggler.faults.commit = {"draft-1"}
    quorum.publisher.promote(1, pin=False)
    until(lambda: told(straggler, 1))
    quorum.publisher.roll_back("a drill")
    assert quorum.served == [0] * 4
    quorum.heal()
    assert quorum.served == [0] * 4 and ready(quorum) == {0}
    assert all(server.state.not_ready == "" for server in quorum.servers)


def test_a_policy_in_the_same_call_is_waited_for_everywhere(
    make_rig: Callable[..., Rig],
) -> None:
    rig = make_rig(4, quorum=0.75, straggler_s=LONG)
    rig.pointer.offer(1)
    rig.publisher.prepare()
    wait_for_stragglers(rig, 0.0)
    late, go = rig.servers[3], threading.Event()
    late.faults.waits["Commit"] = go
    stage_id = rig.stage_policy(7)
    threading.Thread(target=lambda: (until(lambda: rig.served[:3] == [1] * 3), go.set())).start()
    result = rig.publisher.complete(7, stage_id)
    assert all(outcome.committed for outcome in result.outcomes.values())
    assert rig.served == [1] * 4 and rig.policies == [7] * 4


@pytest.mark.parametrize("seed", range(3))
def test_ready_servers_serve_one_release_whatever_happens(
    make_rig: Callable[..., Rig], seed: int
) -> None:
    """Faults at random on any servers, publishes and repairs one after the other."""
    rig = make_rig(5, quorum=0.6, straggler_s=LONG)
    chance = random.Random(seed)
    for version in (1, 2, 3):
        for server in rig.servers:
            if chance.random() < 0.4:
                fault = chance.choice(("stage", "commit", "lose", "drop", "forget"))
                server.faults = Faults(
                    stage=fault == "stage",
                    commit={f"draft-{version}"} if fault == "commit" else set(),
                    lose_answer=fault == "lose",
                    drop={"drop": "keep", "forget": "forget"}.get(fault, ""),
                )
        result = rig.publisher.promote(version, pin=False)
        live = rig.pointer.now.live
        assert result.changes == (live == version)
        # One round of the reconciler at most, in which a server may still refuse to be healed.
        for server in rig.servers:
            server.faults = Faults(stage=server.faults.stage)
        rig.heal()
        assert ready(rig) == {live}
        for server in rig.servers:
            server.faults = Faults()
        rig.heal()
        assert rig.served == [live] * 5 and ready(rig) == {live}


def test_a_quorum_is_more_than_half_and_has_somebody_who_heals() -> None:
    assert PublishConfig().quorum == 1.0
    for wrong in ({"quorum": 0.5}, {"quorum": 1.1}, {"quorum": float("nan")}):
        with pytest.raises(ValidationError, match="quorum"):
            PublishConfig(**wrong)
    with pytest.raises(ValidationError, match="needs reconcile_s above 0"):
        PublishConfig(quorum=0.9, reconcile_s=0.0)
