"""Policies through vLLM's own weight transfer: what is sent, to whom, and whose errors are told."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from policy_bridge import DisabledBridge, PolicySyncError, sync
from slipstream.errors import RefusedError
from slipstream.v1 import draft_trainer_pb2 as pb

from .conftest import Connect, Rollouts, addresses
from .doubles import DEADLINE, FakeTrainer


def test_push_external_send_error_reaches_caller(
    trainer: FakeTrainer, connect: Connect, rollouts: Rollouts
) -> None:
    def fails() -> None:
        raise RuntimeError("NCCL")

    bridge = connect(rollout_servers=addresses(rollouts), sync_seconds=0.2)
    with pytest.raises(RuntimeError, match="NCCL"), bridge.sync(6) as window:
        window.push_external({}, fails)
    with (
        DisabledBridge() as disabled,
        disabled.sync(1) as null,
        pytest.raises(RefusedError, match="disabled"),
    ):
        null.push_external({}, fails)


def test_push_external_reports_failed_commit_beside_send_error(
    trainer: FakeTrainer, connect: Connect, rollouts: Rollouts
) -> None:
    def waits() -> None:
        raise TimeoutError("nobody received")

    rollouts[0].engine.failure = RefusedError("commit", "a switch", "no switch", "turn it off")
    bridge = connect(rollout_servers=addresses(rollouts), sync_seconds=0.2)
    with pytest.raises(PolicySyncError, match="a switch") as raised, bridge.sync(6) as window:
        window.push_external({}, waits)
    assert set(raised.value.errors) == {rollouts[0].address}
    assert isinstance(raised.value.__context__, TimeoutError)


def test_push_external_waits_for_trainer_answer_after_transfer(
    trainer: FakeTrainer, connect: Connect, rollouts: Rollouts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its commits receive for longer than ``sync_seconds``; the bridge's own wait behind them."""
    monkeypatch.setattr(sync, "ANSWER_SECONDS", DEADLINE)
    received = threading.Event()
    for rollout in rollouts:
        rollout.engine.receive = lambda update: received.set()

    def complete(request: pb.CompleteSyncRequest) -> pb.PublishResult:
        assert received.wait(DEADLINE)
        return pb.PublishResult()

    trainer.on_complete = complete
    bridge = connect(rollout_servers=addresses(rollouts))
    with bridge.sync(6) as window:
        window.config = replace(window.config, sync_seconds=0.5)
        window.push_external({}, lambda: None)
    assert window.result is not None and window.result.draft_errors == ()
    assert window.result.draft_versions == dict.fromkeys(addresses(rollouts), 3)
    assert [rollout.policy_version for rollout in rollouts] == [6, 6]


def test_push_external_to_other_servers_refused_once(
    trainer: FakeTrainer, connect: Connect, rollouts: Rollouts
) -> None:
    """A group with a server that left would wait for it; one that joined is not in the group."""
    bridge = connect()
    sent: list[int] = []
    first = addresses(rollouts)[:1]
    for version, servers in ((1, addresses(rollouts)), (2, first), (3, addresses(rollouts))):
        trainer.rollout_servers = servers
        with bridge.sync(version) as window:
            if version > 1:
                with pytest.raises(RefusedError, match="initialise their weight-transfer"):
                    window.push_external({}, lambda: sent.append(0))
            window.push_external({}, lambda version=version: sent.append(version))  # type: ignore[misc]
    assert sent == [1, 2, 3]
    assert [rollout.policy_version for rollout in rollouts] == [3, 3]


def test_push_external_sends_while_servers_commit(
    trainer: FakeTrainer, connect: Connect, rollouts: Rollouts
) -> None:
    """Every commit waits for the weights, and the weights for every commit."""
    receiving = threading.Barrier(len(rollouts) + 1)
    updates: list[str] = []

    def receive(update: str) -> None:
        updates.append(update)
        receiving.wait(DEADLINE)

    for rollout in rollouts:
        rollout.engine.receive = receive
    bridge = connect(rollout_servers=addresses(rollouts), sync_seconds=0.2)
    with bridge.sync(6) as window:
        window.push_external({"names": ["w"]}, lambda: receiving.wait(DEADLINE))
        with pytest.raises(RefusedError, match=r"push_policy.*one per window"):
            window.push_policy()
    assert window.result is not None and window.result.policy_pushed
    assert updates == ['{"names": ["w"]}'] * 2
    assert [rollout.policy_version for rollout in rollouts] == [6, 6]
    assert all(rollout.policy == {} for rollout in rollouts)
