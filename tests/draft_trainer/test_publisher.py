"""Publishing to a fleet of real gRPC servers, with every phase failing in turn."""

from __future__ import annotations

import threading
from collections.abc import Callable

import grpc
import pytest

from draft_trainer.config import PublishConfig
from draft_trainer.releases.publisher import PublishResult
from draft_trainer.releases.rollout_client import Failure
from tests.draft_trainer.fleet_rig import LONG, Rig, fleet_events
from tests.waiting import until

pytestmark = pytest.mark.contract("all or none")


def test_complete_without_prepare_commits_policy_alone(rig: Rig) -> None:
    rig.pointer.offer(1)
    assert all(
        o.committed for o in rig.publisher.complete(4, rig.stage_policy(4)).outcomes.values()
    )
    assert rig.policies == [4, 4, 4]
    result = rig.publisher.complete(5, "")
    assert [o.committed for o in result.outcomes.values()] == [False] * 3
    assert rig.served == [0, 0, 0]


def test_stage_failure_keeps_drafts_and_commits_policy(rig: Rig) -> None:
    rig.pointer.offer(1)
    rig.servers[1].faults.stage = True
    prepared = rig.publisher.prepare()
    assert (prepared.draft_version, prepared.changes) == (0, False)
    errors = [prepared.outcomes[d.address].error for d in rig.servers]
    assert "staging failed" in errors[1] and "a wrong shape" in errors[1]
    assert all("draft-1 was aborted" in errors[i] for i in (0, 2))
    assert all(("Abort", ("draft-1",)) in d.calls for d in rig.servers)
    result = rig.publisher.complete(7, rig.stage_policy(7))
    assert rig.policies == [7, 7, 7]
    assert rig.served == [0, 0, 0]
    assert result.draft_version == 0
    assert all(o.error == "" and o.committed for o in result.outcomes.values())
    assert fleet_events(rig.counters) == {"stage_failed": 1, "policy_only": 1}
    # The next sync tries again.
    rig.servers[1].faults.stage = False
    rig.publisher.prepare()
    rig.publisher.complete(8, "")
    assert rig.served == [1, 1, 1]


def test_commit_failure_rolls_back_fleet_and_commits_policy(rig: Rig) -> None:
    rig.pointer.offer(1)
    rig.publisher.prepare()
    rig.servers[2].faults.commit = {"draft-1"}
    result = rig.publisher.complete(7, rig.stage_policy(7))
    assert rig.served == [0, 0, 0]
    assert rig.policies == [7, 7, 7]
    assert (result.draft_version, result.changes) == (0, False)
    outcomes = [result.outcomes[d.address] for d in rig.servers]
    assert all(o.committed and not o.draft_committed for o in outcomes)
    assert "weights that load" in outcomes[2].error
    assert "policy-7 was committed without it" in outcomes[2].error
    for outcome in outcomes[:2]:
        assert "draft 1 was rolled back: it failed on " + rig.servers[2].address in outcome.error
        assert outcome.state is not None and outcome.state.draft_version == 0
    assert rig.servers[2].commits() == [("draft-1", "policy-7"), ("policy-7",)]
    assert rig.pointer.now.good_versions == (0,)
    assert fleet_events(rig.counters) == {"rolled_back": 1}


def test_roll_back_stages_last_good_release_where_needed(rig: Rig) -> None:
    rig.publisher.promote(1, pin=False)
    rig.pointer.offer(2)
    rig.publisher.prepare()
    rig.servers[0].faults.commit = {"draft-2"}
    # The server in the middle came back with another draft while the publish ran.
    rig.put(1, 0)
    result = rig.publisher.complete(0, "")
    assert result.draft_version == 1
    assert rig.served == [1, 1, 1]
    rig.assert_live(1)
    assert ("RollBack", ()) in rig.servers[2].calls
    assert rig.servers[1].commits()[-1] == ("draft-1",)


def test_lost_answer_is_settled_by_server_state(rig: Rig) -> None:
    rig.pointer.offer(1)
    rig.publisher.prepare()
    rig.servers[0].faults.lose_answer = True
    result = rig.publisher.complete(7, rig.stage_policy(7))
    assert (result.draft_version, result.changes) == (1, True)
    assert rig.served == [1, 1, 1]
    assert rig.servers[0].commits() == [("draft-1", "policy-7")]


def test_lost_answer_of_server_without_draft_rolls_back(rig: Rig) -> None:
    """It restarted during the commit, and serves what it served before."""
    rig.publisher.promote(1, pin=False)
    rig.servers[1].faults.drop = "forget"
    result = rig.publisher.promote(2, pin=False)
    assert (result.draft_version, result.changes) == (1, False)
    assert not result.outcomes[rig.servers[1].address].draft_committed
    assert rig.served == [1, 1, 1] and rig.pointer.now.live == 1


def test_roll_back_replaces_other_content_of_same_version(rig: Rig) -> None:
    """One server had it as its draft before, another one serves it."""
    rig.put(0, 0, tensors_of=3)
    rig.publisher.promote(1, pin=False)
    rig.put(1, 0, tensors_of=3)
    result = rig.publisher.roll_back("test")
    assert all(outcome.committed for outcome in result.outcomes.values())
    assert rig.served == [0, 0, 0]
    rig.assert_live(0)


def test_failed_catch_up_of_one_server_is_no_roll_back(rig: Rig) -> None:
    rig.publisher.promote(1, pin=False)
    back, bad, _ = rig.servers
    rig.put(0, 0)
    rig.put(1, 0)
    bad.faults.commit = {"draft-1"}
    rig.publisher.prepare()
    result = rig.publisher.complete(7, rig.stage_policy(7))
    assert rig.served == [1, 0, 1] and rig.policies == [7, 7, 7]
    outcome = result.outcomes[back.address]
    assert outcome.committed and outcome.draft_committed and outcome.error == ""
    assert "draft-1 was not committed" in result.outcomes[bad.address].error
    assert (result.draft_version, rig.pointer.now.intent) == (1, None)
    assert fleet_events(rig.counters) == {"committed": 1}
    assert rig.events() == [("committed", 1)]


def test_publish_to_unreachable_fleet_fails(rig: Rig) -> None:
    for server in rig.servers:
        server.stop()
    rig.pointer.offer(1)
    assert not rig.publisher.prepare().changes
    result = rig.publisher.complete(7, "policy-7")
    assert result.draft_version == 0
    assert all("UNAVAILABLE" in o.error and not o.committed for o in result.outcomes.values())
    assert fleet_events(rig.counters) == {"policy_failed": 1}


def test_server_without_policy_stage_gets_draft(rig: Rig) -> None:
    """Else it would be rolled back on all of them, at every sync."""
    rig.publisher.promote(1, pin=False)
    rig.pointer.offer(2)
    rig.publisher.prepare()
    stage_id = rig.stage_policy(7)
    rig.servers[0].abort(stage_id)
    result = rig.publisher.complete(7, stage_id)
    assert rig.served == [2, 2, 2] and rig.policies[1:] == [7, 7] and result.changes
    lacking = result.outcomes[rig.servers[0].address]
    assert (lacking.committed, lacking.draft_committed) == (False, True)
    assert f"{stage_id} was not committed" in lacking.error


@pytest.mark.parametrize("kind", ["none", "ngram"])
def test_server_without_draft_weights_is_left_out(rig: Rig, kind: str) -> None:
    """It is in the list because policies are pushed to it, too."""
    rig.servers[0].restart(draft_kind=kind, draft_dir=None, draft_length=9)
    rig.reachable(0)
    rig.publisher.promote(1, pin=False)
    assert rig.served == [0, 1, 1]
    rig.heal()
    assert rig.served == [0, 1, 1] and rig.fleet.drafting()[0] != 9
    rig.pointer.offer(2)
    rig.publisher.prepare()
    rig.publisher.complete(7, rig.stage_policy(7))
    assert rig.served == [0, 2, 2] and rig.policies == [7, 7, 7]


def test_stage_sends_changed_tensors_only(rig: Rig) -> None:
    same = ("d2t", "t2d", "norm.weight")
    changed = sum(
        t.nbytes
        for n, t in rig.registry.tensors(2).items()
        if n not in same and not n.endswith("norm.weight") and "layernorm" not in n
    )
    for version in (1, 2):
        rig.publisher.promote(version, pin=False)
        assert rig.servers[0].bytes_received == version * changed
    for name in ("stage_seconds", "commit_seconds"):
        assert rig.counters.registry.get_sample_value(f"slipstream_trainer_{name}_count") == 6


def test_release_that_an_ended_sync_left_is_not_sent_again(rig: Rig) -> None:
    """A bridge whose deadline passed does not complete its sync."""
    rig.pointer.offer(1)
    rig.publisher.prepare()
    sent = [server.bytes_received for server in rig.servers]
    assert rig.publisher.prepare().changes and min(sent) > 0
    assert [server.bytes_received for server in rig.servers] == sent
    rig.pointer.offer(2)
    rig.publisher.prepare()
    assert [server.staged for server in rig.servers] == [["draft-2"]] * 3
    assert rig.publisher.complete(0, "").draft_version == 2 and rig.served == [2] * 3


def test_policy_commit_does_not_wait_for_staging_publish(rig: Rig) -> None:
    started, go_on = threading.Event(), threading.Event()
    real = rig.publisher.payloads.get

    def slow(version: int) -> object:
        started.set()
        assert go_on.wait(20)
        return real(version)

    rig.publisher.payloads.get = slow  # type: ignore[method-assign,assignment]
    promoting = threading.Thread(target=rig.publisher.promote, args=(1, False))
    promoting.start()
    assert started.wait(20)
    rig.publisher.complete(7, rig.stage_policy(7))
    assert rig.policies == [7, 7, 7]
    go_on.set()
    promoting.join(20)
    assert rig.served == [1, 1, 1]


def test_drafting_follows_config_then_servers(rig: Rig) -> None:
    assert rig.fleet.drafting() == (3, "probabilistic")
    rig.servers[1].restart(draft_length=5, draft_sample_method="greedy")
    rig.reachable(1)
    rig.fleet.states()
    assert rig.fleet.drafting() == (5, "greedy")
    # What is known stays known while no server answers.
    for server in rig.servers:
        server.stop()
    rig.fleet.states()
    assert rig.fleet.drafting() == (5, "greedy")
    rig.fleet.config = PublishConfig(num_speculative_tokens=2, draft_sample_method="probabilistic")
    assert rig.fleet.drafting() == (2, "probabilistic")


def test_policy_commit_has_longer_deadline_than_draft(make_rig: Callable[..., Rig]) -> None:
    """vLLM's own weight transfer is received within the commit."""
    rig, go = make_rig(commit_timeout_s=0.5), threading.Event()
    rig.pointer.offer(1)
    rig.publisher.prepare()
    first = rig.servers[0]
    first.faults.waits["Commit"] = go
    stage_id, results = rig.stage_policy(7), list[PublishResult]()

    def complete() -> None:
        results.append(rig.publisher.complete(7, stage_id))

    completing = threading.Thread(target=complete)
    completing.start()
    until(lambda: bool(first.commits()))
    # A draft alone has its deadline, which passes meanwhile.
    late = rig.fleet.client(first.address).commit(["draft-of-nobody"])
    assert isinstance(late, Failure) and late.code is grpc.StatusCode.DEADLINE_EXCEEDED
    go.set()
    completing.join(LONG)
    [result] = results
    assert (result.draft_version, result.changes) == (1, True)
    assert (rig.served, rig.policies) == ([1, 1, 1], [7, 7, 7])
    assert rig.events() == [("committed", 1)]
    assert rig.pointer.now.good_versions == (0, 1)
