"""Publishing to a fleet of real gRPC servers, with every phase failing in turn."""

from __future__ import annotations

import threading
from collections.abc import Callable

import grpc
import pytest

from draft_trainer.config import PublishConfig
from draft_trainer.releases.client import Failure
from draft_trainer.releases.publisher import PublishResult
from tests.draft_trainer.fleet_rig import LONG, Rig, fleet_events
from tests.waiting import until


def test_policy_is_committed_without_a_prepare_and_nothing_without_both(rig: Rig) -> None:
    rig.promotions.offer(1)
    assert all(
        o.committed for o in rig.publisher.complete(4, rig.stage_policy(4)).outcomes.values()
    )
    assert rig.policies == [4, 4, 4]
    result = rig.publisher.complete(5, "")
    assert [o.committed for o in result.outcomes.values()] == [False] * 3
    assert rig.served == [0, 0, 0]


def test_staging_failure_leaves_the_fleet_and_the_policy_goes_on(rig: Rig) -> None:
    rig.promotions.offer(1)
    rig.doubles[1].faults.stage = True
    prepared = rig.publisher.prepare()
    assert (prepared.draft_version, prepared.changes) == (0, False)
    errors = [prepared.outcomes[d.address].error for d in rig.doubles]
    assert "staging failed" in errors[1] and "a wrong shape" in errors[1]
    assert all("draft-1 was aborted" in errors[i] for i in (0, 2))
    assert all(("Abort", ("draft-1",)) in d.calls for d in rig.doubles)
    result = rig.publisher.complete(7, rig.stage_policy(7))
    assert rig.policies == [7, 7, 7]
    assert rig.served == [0, 0, 0]
    assert result.draft_version == 0
    assert all(o.error == "" and o.committed for o in result.outcomes.values())
    assert fleet_events(rig.counters) == {"stage_failed": 1, "policy_only": 1}
    # The next sync tries again.
    rig.doubles[1].faults.stage = False
    rig.publisher.prepare()
    rig.publisher.complete(8, "")
    assert rig.served == [1, 1, 1]


def test_commit_failure_rolls_the_fleet_back_and_the_policy_is_committed(rig: Rig) -> None:
    rig.promotions.offer(1)
    rig.publisher.prepare()
    rig.doubles[2].faults.commit = {"draft-1"}
    result = rig.publisher.complete(7, rig.stage_policy(7))
    assert rig.served == [0, 0, 0]
    assert rig.policies == [7, 7, 7]
    assert (result.draft_version, result.changes) == (0, False)
    outcomes = [result.outcomes[d.address] for d in rig.doubles]
    assert all(o.committed and not o.draft_committed for o in outcomes)
    assert "weights that load" in outcomes[2].error
    assert "policy-7 was committed without it" in outcomes[2].error
    for outcome in outcomes[:2]:
        assert "draft 1 was rolled back: it failed on " + rig.doubles[2].address in outcome.error
        assert outcome.state is not None and outcome.state.draft_version == 0
    assert rig.doubles[2].commits() == [("draft-1", "policy-7"), ("policy-7",)]
    assert rig.promotions.now.good == (0,)
    assert fleet_events(rig.counters) == {"rolled_back": 1}


def test_rolling_back_stages_the_last_good_release_where_the_server_cannot(rig: Rig) -> None:
    rig.publisher.promote(1, pin=False)
    rig.promotions.offer(2)
    rig.publisher.prepare()
    rig.doubles[0].faults.commit = {"draft-2"}
    # The server in the middle came back with another draft while the publish ran.
    rig.doubles[1].state.draft_version = 0
    result = rig.publisher.complete(0, "")
    assert result.draft_version == 1
    assert rig.served == [1, 1, 1]
    rig.assert_live(1)
    assert ("RollBack", ()) in rig.doubles[2].calls
    assert rig.doubles[1].commits()[-1] == ("draft-1",)


def test_lost_answer_is_settled_by_reading_the_state_back(rig: Rig) -> None:
    rig.promotions.offer(1)
    rig.publisher.prepare()
    rig.doubles[0].faults.lose_answer = True
    result = rig.publisher.complete(7, rig.stage_policy(7))
    assert (result.draft_version, result.changes) == (1, True)
    assert rig.served == [1, 1, 1]
    assert rig.doubles[0].commits() == [("draft-1", "policy-7")]


def test_a_server_that_cannot_be_caught_up_is_no_roll_back(rig: Rig) -> None:
    rig.publisher.promote(1, pin=False)
    back, bad, _ = rig.doubles
    back.state.draft_version = bad.state.draft_version = 0
    bad.faults.commit = {"draft-1"}
    rig.publisher.prepare()
    result = rig.publisher.complete(7, rig.stage_policy(7))
    assert rig.served == [1, 0, 1] and rig.policies == [7, 7, 7]
    outcome = result.outcomes[back.address]
    assert outcome.committed and outcome.draft_committed and outcome.error == ""
    assert "draft-1 was not committed" in result.outcomes[bad.address].error
    assert (result.draft_version, rig.promotions.now.intent) == (1, None)
    assert fleet_events(rig.counters) == {"committed": 1}
    assert rig.events() == [("committed", 1)]


def test_whole_fleet_away(rig: Rig) -> None:
    for double in rig.doubles:
        double.stop()
    rig.promotions.offer(1)
    assert not rig.publisher.prepare().changes
    result = rig.publisher.complete(7, "policy-7")
    assert result.draft_version == 0
    assert all("UNAVAILABLE" in o.error and not o.committed for o in result.outcomes.values())
    assert fleet_events(rig.counters) == {"policy_failed": 1}


def test_a_server_that_the_policy_could_not_be_staged_on_gets_the_draft(rig: Rig) -> None:
    """Else it would be rolled back on all of them, at every sync."""
    rig.publisher.promote(1, pin=False)
    rig.promotions.offer(2)
    rig.publisher.prepare()
    stage_id = rig.stage_policy(7)

    del rig.doubles[0]._staged[stage_id]
    result = rig.publisher.complete(7, stage_id)
    assert rig.served == [2, 2, 2] and rig.policies[1:] == [7, 7] and result.changes
    lacking = result.outcomes[rig.doubles[0].address]
    assert (lacking.committed, lacking.draft_committed) == (False, True)
    assert f"{stage_id} was not committed" in lacking.error


@pytest.mark.parametrize("kind", ["none", "ngram"])
def test_a_server_without_a_draft_keeps_no_release_from_the_others(rig: Rig, kind: str) -> None:
    """It is in the list because policies are pushed to it, too."""
    rig.doubles[0].state.draft_kind = kind
    rig.doubles[0].state.num_speculative_tokens = 9
    rig.publisher.promote(1, pin=False)
    assert rig.served == [0, 1, 1]
    rig.heal()
    assert rig.served == [0, 1, 1] and rig.fleet.drafting()[0] != 9
    rig.promotions.offer(2)
    rig.publisher.prepare()
    rig.publisher.complete(7, rig.stage_policy(7))
    assert rig.served == [0, 2, 2] and rig.policies == [7, 7, 7]


def test_only_changed_tensors_cross_the_wire(rig: Rig) -> None:
    rig.publisher.promote(1, pin=False)
    first = rig.doubles[0].bytes_received
    size = sum(t.nbytes for t in rig.registry.tensors(1).values())
    assert first == size
    rig.publisher.promote(2, pin=False)
    same = ("d2t", "t2d", "norm.weight")
    unchanged = sum(
        t.nbytes
        for n, t in rig.registry.tensors(2).items()
        if n in same or n.endswith("norm.weight") or "layernorm" in n
    )
    assert rig.doubles[0].bytes_received - first == size - unchanged
    for name in ("stage_seconds", "commit_seconds"):
        assert rig.counters.registry.get_sample_value(f"slipstream_trainer_{name}_count") == 6


def test_a_policy_commit_does_not_wait_for_a_publish_that_is_staging(rig: Rig) -> None:
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


def test_the_fleet_drafts_as_configured_else_as_its_servers_say(rig: Rig) -> None:
    assert rig.fleet.drafting() == (3, "probabilistic")
    rig.doubles[1].state.num_speculative_tokens = 5
    rig.doubles[1].state.draft_sample_method = "greedy"
    rig.fleet.states()
    assert rig.fleet.drafting() == (5, "greedy")
    # What is known stays known while no server answers.
    for double in rig.doubles:
        double.stop()
    rig.fleet.states()
    assert rig.fleet.drafting() == (5, "greedy")
    rig.fleet.config = PublishConfig(num_speculative_tokens=2, draft_sample_method="probabilistic")
    assert rig.fleet.drafting() == (2, "probabilistic")


def test_a_policy_may_take_longer_than_a_drafts_commit(make_rig: Callable[..., Rig]) -> None:
    """vLLM's own weight transfer is received within the commit."""
    rig, go = make_rig(commit_timeout_s=0.5), threading.Event()
    rig.promotions.offer(1)
    rig.publisher.prepare()
    first = rig.doubles[0]
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
    assert rig.promotions.now.good == (0, 1)
