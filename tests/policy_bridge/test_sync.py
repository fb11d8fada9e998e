"""The weight-sync window: the rollouts always get their policy, or the caller hears of it."""

from __future__ import annotations

import dataclasses
import pickle
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest
import torch

from benchmarks.publish_faults.memory_server import DRAFT_DIR, MemoryServer
from policy_bridge import DisabledBridge, PolicyBridge, PolicySyncError
from policy_bridge.capture import NullCapture
from policy_bridge.stats import Counters, SyncResult
from policy_bridge.sync import policy_tensors
from slipstream.checkpoints import load_tensors
from slipstream.errors import RefusedError
from slipstream.v1 import draft_trainer_pb2 as pb

from .conftest import Connect, Rollouts, addresses, batch, deliver, make_model, ship
from .doubles import DEADLINE, BlackHole, FakeTrainer
from .policies import adapted

pytestmark = pytest.mark.contract("never waits")

Log = pytest.LogCaptureFixture
REFUSED = RefusedError("commit", "a switch", "no switch", "turn it off")


def push(bridge: PolicyBridge, version: int) -> SyncResult:
    """A weight sync that pushes the policy."""
    with bridge.sync(version) as window:
        window.push_policy()
    assert window.result is not None
    return window.result


def commit_all(trainer: FakeTrainer, rollouts: Rollouts) -> None:
    """Let the trainer do what a real one does in CompleteSync."""

    def complete(request: pb.CompleteSyncRequest) -> pb.PublishResult:
        outcomes = []
        for rollout in rollouts:
            rollout.put(7, load_tensors(DRAFT_DIR))
            if request.policy_stage_id:
                rollout.commit(request.policy_stage_id)
            outcomes.append(
                pb.ServerOutcome(address=rollout.address, committed=True, state=rollout.state)
            )
        return pb.PublishResult(draft_version=7, servers=outcomes)

    trainer.on_complete = complete


def test_sync_error_and_stats_can_be_pickled() -> None:
    """Ray and torch.distributed carry them pickled, and copied field by field."""
    error = PolicySyncError("staged", {"host:1": "it is gone"}, SyncResult(3, policy_pushed=True))
    again = pickle.loads(pickle.dumps(error))  # noqa: S301
    assert (str(again), again.errors, again.result) == (str(error), error.errors, error.result)
    counters = Counters()
    counters.shed("outbox_full", 2, 9)
    stats = counters.snapshot(last_sync=error.result)
    assert pickle.loads(pickle.dumps(stats)) == stats  # noqa: S301
    assert dataclasses.asdict(stats)["shed"] == {"outbox_full": 2}


def test_policy_and_draft_committed_in_one_call(
    trainer: FakeTrainer, connect: Connect, rollouts: Rollouts
) -> None:
    model = make_model()
    commit_all(trainer, rollouts)
    trainer.rollout_servers = addresses(rollouts)  # The bridge asks the trainer for them.
    bridge = connect(model=model)
    with bridge.sync(5) as window:
        window.push_policy()
        assert all(rollout.policy_version is None for rollout in rollouts)
    result = window.result
    assert result is not None
    assert result.draft_versions == dict.fromkeys(addresses(rollouts), 7)
    assert result.draft_errors == ()
    assert result.policy_pushed
    assert bridge.stats().last_sync == result
    assert bridge.policy_version == bridge.stats().policy_version == 5
    for rollout in rollouts:
        assert rollout.policy_version == 5
        assert [len(ids) for ids in rollout.commits()] == [1]
        assert set(rollout.policy) == set(model.state_dict())
        for name, tensor in model.state_dict().items():
            assert torch.equal(rollout.policy[name], tensor.bfloat16())


def test_server_joining_gets_policy_and_leaving_once_more(
    trainer: FakeTrainer, connect: Connect, rollouts: Rollouts
) -> None:
    first, second = addresses(rollouts)
    with trainer.serve() as server:
        bridge = connect(server.address)
        for version, named, asked in (
            (1, [first], {first}),
            (2, [second], {first, second}),  # The list may lack it for a moment only.
            (3, [second], {second}),
            (4, [first, second], {first, second}),
        ):
            trainer.rollout_servers = tuple(named)
            push(bridge, version)
            assert {r.address for r in rollouts if r.policy_version == version} == asked
        assert trainer.sessions == 1
    result = push(bridge, 5)
    assert result.draft_errors, "the trainer is gone"
    assert [rollout.policy_version for rollout in rollouts] == [5, 5]


@pytest.mark.parametrize("how", ["is gone", "Stage", "Commit"])
def test_unlisted_server_refusing_policy_is_left_out(
    trainer: FakeTrainer, connect: Connect, rollouts: Rollouts, how: str
) -> None:
    first, second = rollouts
    trainer.rollout_servers = addresses(rollouts)
    bridge = connect()
    push(bridge, 1)
    trainer.rollout_servers = (first.address,)
    if how == "is gone":
        second.stop()
    elif how == "Stage":  # as one that serves another experiment
        second.faults.stage = "a switch"
    else:
        second.engine.failure = REFUSED
    assert set(push(bridge, 2).left_out) == {second.address}
    assert push(bridge, 3).left_out == {} and first.policy_version == 3


def test_unlisted_server_is_asked_once_though_sync_fails(
    trainer: FakeTrainer, connect: Connect, rollouts: Rollouts
) -> None:
    """One that got another name has no memory for the policy twice."""
    former, renamed = rollouts
    trainer.rollout_servers = (former.address,)
    bridge = connect()
    push(bridge, 1)
    trainer.rollout_servers = (renamed.address,)
    renamed.faults.stage = "a switch"
    with pytest.raises(PolicySyncError, match="a switch"):
        push(bridge, 2)
    renamed.faults.stage = ""
    assert push(bridge, 3).left_out == {}
    assert [rollout.policy_version for rollout in rollouts] == [1, 3]


@pytest.mark.parametrize("skips", [False, True])
def test_server_joining_after_stage_gets_next_policy(
    trainer: FakeTrainer, connect: Connect, rollouts: Rollouts, skips: bool
) -> None:
    first, second = rollouts
    trainer.rollout_servers = (first.address,)

    def complete(request: pb.CompleteSyncRequest) -> pb.PublishResult:
        state = first.commit(request.policy_stage_id)
        done = pb.ServerOutcome(address=first.address, committed=True, state=state)
        lacks = pb.ServerOutcome(address=second.address, error="it is not staged")
        return pb.PublishResult(servers=[done, lacks])

    trainer.on_complete = complete
    bridge = connect(skip_unreachable_servers=skips)
    result = push(bridge, 1)
    assert set(result.left_out) == {second.address} and bridge.stats().servers_left_out == 1
    assert (first.policy_version, second.policy_version, second.commits()) == (1, None, [])
    trainer.rollout_servers = addresses(rollouts)
    assert push(bridge, 2).left_out == {}
    assert [rollout.policy_version for rollout in rollouts] == [2, 2]


def test_server_still_loading_is_left_out_until_ready(
    trainer: FakeTrainer, connect: Connect, rollouts: Rollouts, saved_policy: Path
) -> None:
    first, second = rollouts
    second.stop()
    bridge = connect()
    trainer.rollout_servers = addresses(rollouts)
    for _ in range(2):  # Before a push that went well: it may be one that nobody can reach.
        with pytest.raises(PolicySyncError, match="not staged on 1 rollout"):
            push(bridge, 1)
    trainer.rollout_servers = (first.address,)
    push(bridge, 1)
    trainer.rollout_servers = addresses(rollouts)
    assert set(push(bridge, 2).left_out) == {second.address}
    with pytest.raises(PolicySyncError, match="not staged on 1 rollout"), bridge.sync(3) as window:
        window.push_external({}, lambda: None)
    rollouts[1] = third = MemoryServer(policy=saved_policy)
    trainer.rollout_servers = addresses(rollouts)
    assert push(bridge, 3).left_out == {}
    assert (first.policy_version, third.policy_version) == (3, 3)
    third.stop()
    with pytest.raises(PolicySyncError, match="not staged on 1 rollout"):
        push(bridge, 4)


def test_push_of_adapters_refused_before_trainer_is_there(connect: Connect) -> None:
    model = adapted()
    bridge = connect("127.0.0.1:1", model=model, wait=False, connect_seconds=0.1)
    for source in (None, model.state_dict()):
        with (
            model.disable_adapter(),
            pytest.raises(RefusedError, match="adapters disabled"),
            bridge.sync(1) as window,
        ):
            window.push_policy(source)
    assert bridge.capture() is not None and bridge.stats().waiting_pushes == 0


def test_sync_without_push_commits_draft_only(
    trainer: FakeTrainer, connect: Connect, rollouts: Rollouts
) -> None:
    commit_all(trainer, rollouts)
    bridge = connect(rollout_servers=addresses(rollouts))
    with bridge.sync(1) as window:
        pass
    assert window.result is not None and not window.result.policy_pushed
    assert set(window.result.draft_versions.values()) == {7}
    assert all(rollout.policy_version is None for rollout in rollouts)


@pytest.mark.parametrize("failure", ["absent", "black hole", "PrepareSync", "CompleteSync"])
def test_policy_is_committed_without_trainer(
    trainer: FakeTrainer, connect: Connect, rollouts: Rollouts, failure: str
) -> None:
    model = make_model()
    settings = {"rollout_servers": addresses(rollouts), "sync_seconds": 0.2, "model": model}
    with trainer.serve() as server, BlackHole() as hole:
        if failure in ("absent", "black hole"):
            if failure == "absent":
                server.kill()
            address = server.address if failure == "absent" else hole
            bridge = connect(address, wait=False, connect_seconds=0.2, **settings)
        else:
            trainer.hang.add(failure)
            bridge = connect(server.address, **settings)
        result = push(bridge, 1)
        assert len(result.draft_errors) == 1
        assert result.draft_versions == dict.fromkeys(addresses(rollouts), 3)
        assert bridge.policy_version == 1
        trainer.release.set()
    for rollout in rollouts:
        assert rollout.policy_version == 1
        assert torch.equal(rollout.policy["lm_head.weight"], model.lm_head.weight.bfloat16())
        assert len(rollout.commits()) == 1


def test_commit_made_by_cut_off_trainer_is_not_repeated(
    trainer: FakeTrainer, connect: Connect, rollouts: Rollouts
) -> None:
    """CompleteSync reached one server of two, then failed."""

    def complete(request: pb.CompleteSyncRequest) -> pb.PublishResult:
        state = rollouts[0].commit(request.policy_stage_id)
        lost = pb.ServerOutcome(address=rollouts[1].address, error="cut off")
        done = pb.ServerOutcome(address=rollouts[0].address, committed=True, state=state)
        return pb.PublishResult(servers=[done, lost])

    trainer.on_complete = complete
    with trainer.serve() as server:
        bridge = connect(server.address, rollout_servers=addresses(rollouts))
        result = push(bridge, 1)
    assert result.draft_errors == (f"{rollouts[1].address}: cut off",)
    assert [len(rollout.commits()) for rollout in rollouts] == [1, 1]
    assert [rollout.policy_version for rollout in rollouts] == [1, 1]


def test_resumed_job_pushes_an_older_version(
    trainer: FakeTrainer, connect: Connect, rollouts: Rollouts
) -> None:
    """The servers have version 12 of the job that was killed."""
    commit_all(trainer, rollouts)
    trainer.rollout_servers = addresses(rollouts)
    push(connect(model=make_model()), 12)
    assert {rollout.policy_version for rollout in rollouts} == {12}
    resumed = connect(model=make_model())
    for version in (5, 12):
        result = push(resumed, version)
        assert result.policy_pushed and result.draft_errors == ()
        assert {rollout.policy_version for rollout in rollouts} == {version}


def test_same_version_with_other_weights_goes_live(
    trainer: FakeTrainer, connect: Connect, rollouts: Rollouts
) -> None:
    """A run that resumes at an older version pushes a number that the servers serve already."""
    settings = {"rollout_servers": addresses(rollouts), "connect_seconds": 0.2}
    with trainer.serve() as server:
        server.kill()
        for value in (0.25, 0.5):
            model = make_model()
            with torch.no_grad():
                model.lm_head.weight.fill_(value)
            bridge = connect(server.address, wait=False, model=model, **settings)
            push(bridge, 4)
            bridge.close()
            for rollout in rollouts:
                assert rollout.policy_version == 4
                assert torch.all(rollout.policy["lm_head.weight"] == value)
                assert rollout.state.staged == []
    assert [len(rollout.commits()) for rollout in rollouts] == [2, 2]


def test_draft_failure_is_reported_and_policy_committed(
    trainer: FakeTrainer, connect: Connect, rollouts: Rollouts
) -> None:
    """Staging failed on one server; the other committed the policy without its draft."""
    first, second = rollouts

    def complete(request: pb.CompleteSyncRequest) -> pb.PublishResult:
        state = second.commit(request.policy_stage_id)
        outcome = pb.ServerOutcome(
            address=second.address, committed=True, error="draft left behind", state=state
        )
        return pb.PublishResult(servers=[outcome])

    trainer.staging = [pb.ServerOutcome(address=first.address, error="disk full")]
    trainer.on_complete = complete
    bridge = connect(rollout_servers=addresses(rollouts))
    result = push(bridge, 1)
    assert result.draft_errors == (
        f"{first.address}: disk full",
        f"{second.address}: draft left behind",
    )
    assert [rollout.policy_version for rollout in rollouts] == [1, 1]


def test_sync_window_exception_aborts_stage(
    trainer: FakeTrainer, connect: Connect, rollouts: Rollouts
) -> None:
    bridge = connect(rollout_servers=addresses(rollouts))
    with pytest.raises(KeyError, match="the user's"), bridge.sync(1) as window:
        window.push_policy()
        raise KeyError("the user's")
    assert bridge.policy_version is None
    for rollout in rollouts:
        assert rollout.state.staged == [] and rollout.commits() == []
        assert [name for name, _ in rollout.calls].count("Abort") == 1
    assert ("CompleteSync", -1) not in trainer.events
    # The same version may be tried again.
    with bridge.sync(1) as window:
        window.push_policy()
    assert [rollout.policy_version for rollout in rollouts] == [1, 1]


@pytest.mark.parametrize(
    ("failure", "told"),
    [
        ("Stage", "not staged on 1 rollout.*a switch"),
        ("Commit", "not committed on 1 rollout.*a switch"),
        ("gone", "not staged on 1 rollout.*UNAVAILABLE"),
    ],
)
@pytest.mark.parametrize("swallowed", [False, True])
def test_server_that_does_not_take_policy_raises(
    trainer: FakeTrainer,
    connect: Connect,
    rollouts: Rollouts,
    failure: str,
    told: str,
    swallowed: bool,
) -> None:
    """Also where the caller swallows what ``push_policy`` raises."""
    first, second = rollouts
    if failure == "Stage":
        second.faults.stage = "a switch"
    elif failure == "Commit":
        second.engine.failure = REFUSED
    else:
        second.stop()
    bridge = connect(rollout_servers=addresses(rollouts))
    swallow = suppress(PolicySyncError) if swallowed else nullcontext()
    with pytest.raises(PolicySyncError, match=told) as raised, bridge.sync(1) as window, swallow:
        window.push_policy()
    assert set(raised.value.errors) == {second.address}
    assert bridge.policy_version is None
    committed = failure == "Commit"
    assert raised.value.result.draft_versions == ({first.address: 3} if committed else {})
    assert [d.policy_version for d in rollouts] == [1 if committed else None, None]
    assert [list(d.state.staged) for d in rollouts] == [[], []]


def test_push_before_trainer_is_there_waits(
    trainer: FakeTrainer, connect: Connect, rollouts: Rollouts, caplog: Log
) -> None:
    """A training job that starts first, or starts again while the sidecar is down."""
    model = make_model()
    trainer.rollout_servers = addresses(rollouts)
    server = trainer.serve()
    server.kill()
    bridge = connect(server.address, model=model, wait=False, connect_seconds=0.2)
    for version in (1, 2):
        result = push(bridge, version)
        assert result.policy_waits
        assert not result.policy_pushed
        ship(bridge, model, batch((6,)))
    assert bridge.policy_version == 2
    assert bridge.stats().waiting_pushes == 2
    assert sum("the push is left" in record.message for record in caplog.records) == 1
    with trainer.serve(server.port):
        assert bridge.wait_connected(DEADLINE)
        result = push(bridge, 3)
        assert result.policy_pushed
    assert [rollout.policy_version for rollout in rollouts] == [3, 3]


def test_policy_version_going_backwards_is_still_pushed(
    trainer: FakeTrainer, connect: Connect, rollouts: Rollouts
) -> None:
    trainer.rollout_servers = addresses(rollouts)
    bridge = connect(version=5)
    push(bridge, 4)
    assert [rollout.policy_version for rollout in rollouts] == [4, 4]


def test_resumed_job_is_captured_from_its_first_version(
    trainer: FakeTrainer, connect: Connect, rollouts: Rollouts
) -> None:
    """Its first version is below those that the trainer knows."""
    first, second = addresses(rollouts)
    trainer.rollout_servers = (first,)
    connect(version=7)
    trainer.wait_for(lambda: 7 in trainer.tensors)
    bridge = connect(model=(model := make_model()))
    trainer.rollout_servers, before = (second,), len(trainer.events)
    assert push(bridge, 4).draft_errors == ()
    calls = [call for call, _ in trainer.events[before:] if call.endswith("Sync")]
    assert calls == ["PrepareSync", "CompleteSync"]
    assert [rollout.policy_version for rollout in rollouts] == [None, 4]
    assert not isinstance(bridge.capture(), NullCapture)
    push(bridge, 8)
    deliver(bridge, model, batch((8,)))
    assert bridge.stats().accepted and 8 in trainer.tensors


@pytest.mark.parametrize("when", ["before", "between"])
def test_skip_unreachable_servers_leaves_out_gone_server(
    trainer: FakeTrainer, connect: Connect, rollouts: Rollouts, when: str
) -> None:
    dead, other = rollouts
    bridge = connect(rollout_servers=addresses(rollouts), skip_unreachable_servers=True)
    if when == "before":
        dead.stop()
    with bridge.sync(1) as window:
        window.push_policy()
        if when == "between":
            dead.stop()
    assert window.result is not None
    assert set(window.result.left_out) == {dead.address}
    assert "UNAVAILABLE" in window.result.left_out[dead.address]
    assert set(window.result.draft_versions) == {other.address}
    assert (other.policy_version, dead.policy_version) == (1, None)
    assert bridge.stats().servers_left_out == 1 and bridge.policy_version == 1
    # One that answers and refuses is an error all the same, and so is a fleet that is gone.
    other.faults.stage = "a switch"
    with pytest.raises(PolicySyncError, match="a switch"), bridge.sync(2) as window:
        window.push_policy()
    other.stop()
    with pytest.raises(PolicySyncError, match="UNAVAILABLE"), bridge.sync(2) as window:
        window.push_policy()
    assert bridge.policy_version == 1


def test_push_external_is_not_sent_if_a_server_is_gone(
    trainer: FakeTrainer, connect: Connect, rollouts: Rollouts
) -> None:
    """It waits for every server, also where unreachable ones are left out of a push."""
    dead, other = rollouts
    bridge = connect(rollout_servers=addresses(rollouts), skip_unreachable_servers=True)
    dead.stop()
    sent: list[int] = []
    with pytest.raises(PolicySyncError, match="not staged on 1 rollout"), bridge.sync(1) as window:
        window.push_external({}, lambda: sent.append(1))
    assert sent == [] and other.state.staged == [] and bridge.policy_version is None


def test_sync_misuse_refused(trainer: FakeTrainer, connect: Connect, rollouts: Rollouts) -> None:
    bridge = connect()
    with pytest.raises(RefusedError, match="rollout_servers"), bridge.sync(1) as window:
        window.push_policy()
    other = connect(rollout_servers=addresses(rollouts))
    with pytest.raises(RefusedError, match="push_policy"), other.sync(1) as window:
        window.push_policy()
        window.push_policy()
    with pytest.raises(RefusedError, match="open window"), other.sync(1), other.sync(2):
        pass
    with pytest.raises(RefusedError, match="disabled"), DisabledBridge().sync(1) as null_window:
        null_window.push_policy()


def test_policy_tensors_cast_floats_and_send_tied_ones_once() -> None:
    tied = make_model(tied=True)
    names = set(policy_tensors(tied, "bfloat16"))
    assert "model.embed_tokens.weight" in names and "lm_head.weight" not in names
    given = {"w": torch.ones(3), "count": torch.tensor(3), "empty": torch.empty(0)}
    cast = policy_tensors(given, "bfloat16")
    assert {k: v.dtype for k, v in cast.items()} == {
        "w": torch.bfloat16,
        "count": torch.int64,
        "empty": torch.bfloat16,
    }
    assert policy_tensors(given, "")["w"].dtype == torch.float32


def test_policy_tensors_push_untied_views_of_one_memory() -> None:
    """Tied is what has the address, the shape and the strides in common: the rest is pushed."""
    weight = torch.arange(9.0).reshape(3, 3)
    given = {"w": weight, "transposed": weight.T, "row": weight[0], "tied": weight}
    pushed = policy_tensors(given, "")
    assert pushed.keys() == {"w", "transposed", "row"}
    assert all(torch.equal(pushed[name], given[name]) for name in pushed)
