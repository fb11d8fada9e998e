"""A server that is late or gone while a release is staged: left out, not ready, caught up."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest

from benchmarks.publish_faults.memory_server import Faults, MemoryServer
from draft_trainer.releases import fleet as fleets
from draft_trainer.releases.rollout_client import DraftPayload, Failure, RolloutClient
from slipstream.readiness import not_ready_text
from slipstream.v1 import rollout_server_pb2 as pb
from tests.draft_trainer.fleet_rig import LONG, Rig, fleet_events
from tests.waiting import until

pytestmark = [pytest.mark.usefixtures("no_backoff"), pytest.mark.contract("all or none")]


@pytest.fixture
def four(make_rig: Callable[..., Rig]) -> Rig:
    return make_rig(4)


def ready(rig: Rig) -> set[int]:
    """Return the releases that ready servers serve."""
    return {d.state.draft_version for d in rig.servers if not d.state.not_ready}


def leave_out(rig: Rig, version: int, server: MemoryServer) -> None:
    """Publish a release while a server's connections break as it is staged there."""
    server.faults.gone = True
    result = rig.publisher.promote(version, pin=False)
    assert (result.draft_version, result.changes) == (version, True)
    assert "staging failed" in result.outcomes[server.address].error
    until(lambda: server.told == [version])


def test_server_that_is_gone_is_left_out_and_caught_up(four: Rig) -> None:
    gone = four.servers[1]
    leave_out(four, 1, gone)
    assert four.served == [1, 0, 1, 1]
    assert four.pointer.now.live == 1 and four.pointer.now.intent is None
    assert fleet_events(four.counters) == {"committed": 1}
    assert ready(four) == {1}
    assert not_ready_text(gone.state.not_ready) == "serves draft 0, the fleet 1"
    # It is not ready until it has the release, however often it cannot be caught up.
    for _ in range(2):
        four.heal()
        assert four.served == [1, 0, 1, 1] and ready(four) == {1}
    gone.faults = Faults()
    four.heal()
    assert four.served == [1] * 4 and not gone.state.not_ready


def test_late_server_is_left_out_of_a_sync(make_rig: Callable[..., Rig]) -> None:
    """It holds the release after the deadline, and forgets it."""
    rig, go = make_rig(4, stage_timeout_s=3.0), threading.Event()
    late = rig.servers[3]
    late.faults.waits["Stage"] = go
    rig.pointer.offer(1)
    prepared = rig.publisher.prepare()
    assert prepared.changes and "DEADLINE_EXCEEDED" in prepared.outcomes[late.address].error
    result = rig.publisher.complete(7, rig.stage_policy(7))
    assert (result.draft_version, result.changes) == (1, True)
    assert rig.served == [1, 1, 1, 0] and rig.policies == [7] * 4
    assert "staging failed" in result.outcomes[late.address].error
    until(lambda: late.told == [1])
    assert ready(rig) == {1} and list(late.state.staged) == []
    late.faults = Faults()
    go.set()
    rig.heal()
    assert rig.served == [1] * 4 and ready(rig) == {1}


def test_refusal_of_one_server_counts_for_all(four: Rig) -> None:
    """It counts if another server is gone, too."""
    gone, refuses = four.servers[:2]
    gone.faults.gone, refuses.faults.stage = True, True
    result = four.publisher.promote(1, pin=False)
    assert (result.draft_version, result.changes) == (0, False)
    assert four.served == [0] * 4 and ready(four) == {0}
    assert all(list(server.state.staged) == [] for server in four.servers)
    assert not any(server.told for server in four.servers)
    assert fleet_events(four.counters) == {"stage_failed": 1}


def test_commit_that_fails_on_one_undoes_all_that_hold_it(four: Rig) -> None:
    """A server that was left out before does not matter."""
    gone, bad = four.servers[:2]
    gone.faults.gone, bad.faults.commit = True, {"draft-1"}
    result = four.publisher.promote(1, pin=False)
    assert (result.draft_version, result.changes) == (0, False)
    assert four.served == [0] * 4 and ready(four) == {0}
    assert four.pointer.now.live == 0 and four.pointer.now.intent is None
    assert not any(server.told for server in four.servers)


def test_release_that_no_server_holds_is_not_live(four: Rig) -> None:
    for server in four.servers:
        server.faults.gone = True
    result = four.publisher.promote(1, pin=False)
    assert (result.draft_version, result.changes) == (0, False)
    assert four.served == [0] * 4 and ready(four) == {0}
    assert fleet_events(four.counters) == {"stage_failed": 1}


def test_server_that_comes_back_is_not_ready_without_the_release(four: Rig) -> None:
    back = four.servers[2]
    back.stop()
    assert four.publisher.promote(1, pin=False).changes
    back.restart()
    back.faults.stage = True
    four.reachable(2)
    assert ready(four) == {0, 1}, "nobody told it yet"
    four.heal()
    assert ready(four) == {1} and back.told == [1]
    back.faults = Faults()
    four.heal()
    assert four.served == [1] * 4 and ready(four) == {1}


def test_left_out_server_is_ready_after_fleet_rolls_back(four: Rig) -> None:
    leave_out(four, 1, four.servers[1])
    four.publisher.roll_back("a drill")
    four.servers[1].faults = Faults()
    four.heal()
    assert four.served == [0] * 4
    assert all(not server.state.not_ready for server in four.servers)


def test_release_is_sent_to_few_servers_at_a_time(
    make_rig: Callable[..., Rig], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleets, "STAGES_AT_ONCE", 2)
    rig, lock = make_rig(5), threading.Lock()
    now, most = 0, 0
    real = RolloutClient.stage

    def stage(
        client: RolloutClient, draft: DraftPayload, stage_id: str
    ) -> pb.StageResult | Failure:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        answer = real(client, draft, stage_id)
        with lock:
            now -= 1
        return answer

    monkeypatch.setattr(RolloutClient, "stage", stage)
    assert rig.publisher.promote(1, pin=False).changes
    assert rig.served == [1] * 5 and 1 <= most <= 2


@pytest.mark.parametrize("seed", range(3))
def test_ready_servers_serve_one_release_whatever_happens(
    make_rig: Callable[..., Rig], seed: int
) -> None:
    """Random faults hit any servers, publishes and repairs follow one another."""
    rig = make_rig(5, stage_timeout_s=LONG)
    chance = random.Random(seed)
    for version in (1, 2, 3):
        for server in rig.servers:
            if chance.random() < 0.3:
                fault = chance.choice(("gone", "gone", "stage", "commit", "lose", "drop", "forget"))
                server.faults = Faults(
                    gone=fault == "gone",
                    stage=fault == "stage",
                    commit={f"draft-{version}"} if fault == "commit" else set(),
                    lose_answer=fault == "lose",
                    drop={"drop": "keep", "forget": "forget"}.get(fault, ""),
                )
        result = rig.publisher.promote(version, pin=False)
        live = rig.pointer.now.live
        assert result.changes == (live == version)
        # One round of the reconciler, in which some servers can still not be healed.
        for server in rig.servers:
            server.faults = Faults(stage=server.faults.stage, gone=server.faults.gone)
        rig.heal()
        assert ready(rig) == {live}
        for server in rig.servers:
            server.faults = Faults()
        rig.heal()
        assert rig.served == [live] * 5 and ready(rig) == {live}
