"""A trainer that is absent, hung, killed or restarted: nothing waits for it, nothing is lost."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from policy_bridge import PolicyBridge
from policy_bridge.capture import NullCapture
from slipstream.errors import RefusedError
from slipstream.shm import SharedFile
from slipstream.v1 import release_pb2
from tests.waiting import until

from .conftest import Connect, batch, deliver, make_model, ship, sync
from .doubles import DEADLINE, FakeTrainer


def killed_with_three_unacknowledged(
    trainer: FakeTrainer, connect: Connect
) -> tuple[int, PolicyBridge, Qwen3ForCausalLM, dict[str, Tensor]]:
    """The port of a trainer that was killed when it had received three samples, and who sent."""
    model, data = make_model(), batch((10,) * 3)
    trainer.ack = False
    server = trainer.serve()
    bridge = connect(server.address, model=model, version=1)
    ship(bridge, model, data)
    trainer.wait_for(lambda: len(trainer.received) == 3)
    server.kill()
    return server.port, bridge, model, data


def test_trainer_restart_resends_unacknowledged_ids(trainer: FakeTrainer, connect: Connect) -> None:
    port, bridge, *_ = killed_with_three_unacknowledged(trainer, connect)
    trainer.ack = True
    with trainer.serve(port):
        assert bridge.flush(DEADLINE)
    assert trainer.received[:3] == trainer.received[3:]
    until(lambda: bridge.stats().resent_samples == 3)
    stats = bridge.stats()
    assert (stats.duplicate, stats.accepted, stats.resent_samples) == (3, 0, 3)
    assert stats.connects == trainer.sessions == 2
    assert stats.shed == {}


def test_trainer_restart_empty_gets_policy_and_samples_again(
    trainer: FakeTrainer, connect: Connect
) -> None:
    """Killed and restarted empty: the policy is announced anew, unacknowledged samples come."""
    port, bridge, model, data = killed_with_three_unacknowledged(trainer, connect)
    fresh = FakeTrainer()
    with fresh.serve(port):
        assert bridge.flush(DEADLINE)
        sync(bridge, 2)
        deliver(bridge, model, data)
    assert fresh.received[:3] == trainer.received
    assert fresh.chunks_sent[1] == {"lm_head.weight", "embed_tokens.weight"}
    assert bridge.stats().accepted == 6
    assert bridge.stats().shed == {}


def test_busy_trainer_announcement_is_retried(trainer: FakeTrainer, connect: Connect) -> None:
    busy = RefusedError("calls", 4, 4, "wait", reason=release_pb2.REFUSAL_REASON_BUSY)
    trainer.refuse_announcements = [busy, busy, busy]
    model = make_model()
    bridge = connect(model=model, version=1, strict=True)
    ship(bridge, model, batch((10,) * 3))
    trainer.wait_for(lambda: trainer.events.count(("AnnouncePolicy", -1)) >= 2)
    assert not isinstance(bridge.capture(), NullCapture)
    assert bridge.flush(DEADLINE)
    stats = bridge.stats()
    assert (stats.accepted, stats.shed) == (3, {})
    assert trainer.refuse_announcements == []
    # On the stream that it has; no window is refused meanwhile.
    assert (stats.connects, stats.last_error) == (1, "")


def test_lost_stream_file_freed_before_next_is_created(
    trainer: FakeTrainer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second stream has a file too, with shared memory for only one at a time."""
    create, files = SharedFile.create, list[weakref.ref[SharedFile]]()

    def one_at_a_time(directory: Path, nbytes: int) -> SharedFile:
        if any(file() is not None for file in files):
            raise RefusedError(str(directory), "no space", f"{nbytes} bytes", "make room")
        file = create(directory, nbytes)
        files.append(weakref.ref(file))
        return file

    monkeypatch.setattr(SharedFile, "create", one_at_a_time)
    port, bridge, *_ = killed_with_three_unacknowledged(trainer, connect)
    trainer.ack = True
    with trainer.serve(port):
        assert bridge.flush(DEADLINE)
        assert bridge.stats().transport_reason == "it is a double", "which it says of a file"
    assert trainer.received[:3] == trainer.received[3:] and len(files) == 2


def test_stream_without_answers_is_reopened(trainer: FakeTrainer, connect: Connect) -> None:
    model = make_model()
    trainer.ack = False
    bridge = connect(model=model, stall_seconds=0.3, version=1)
    ship(bridge, model, batch((10,)))
    trainer.wait_for(lambda: len(trainer.received) == 1)
    trainer.ack = True
    assert bridge.flush(DEADLINE)
    assert len(set(trainer.received)) == 1
    assert "does not answer" in bridge.stats().last_error


def test_stream_without_first_credit_is_reopened(trainer: FakeTrainer, connect: Connect) -> None:
    model = make_model()
    trainer.hang.add("StreamStates")
    bridge = connect(model=model, stall_seconds=0.3, version=1)
    ship(bridge, model, batch((10, 10)))
    trainer.wait_for(lambda: trainer.events.count(("StreamStates", -1)) >= 2)
    assert "does not answer" in bridge.stats().last_error
    trainer.hang.clear()
    trainer.release.set()
    assert bridge.flush(DEADLINE)
    assert bridge.stats().shed == {}
    assert len(trainer.samples) == 2


def test_draft_changed_at_restart_sheds_old_samples(trainer: FakeTrainer, connect: Connect) -> None:
    port, bridge, model, data = killed_with_three_unacknowledged(trainer, connect)
    other = FakeTrainer(layers=(1, 3, 6))
    with other.serve(port):
        assert bridge.flush(DEADLINE)
        assert bridge.stats().shed == {"draft_changed": 3}
        other.wait_for(lambda: other.sessions == 1)
        assert isinstance(bridge.capture(), NullCapture)
        sync(bridge, 2)
        deliver(bridge, model, data)
    assert {tuple(s.header.aux_layers) for s in other.samples.values()} == {(1, 3, 6)}


def test_absent_trainer_gives_null_windows_until_it_comes(
    trainer: FakeTrainer, connect: Connect
) -> None:
    model, data = make_model(), batch((10,) * 3)
    server = trainer.serve()
    server.kill()
    bridge = connect(server.address, model=model, wait=False)
    with bridge.sync(1) as window:
        pass
    assert window.result is not None and "not reached" in window.result.draft_errors[0]
    assert isinstance(bridge.capture(), NullCapture)
    ship(bridge, model, data)
    assert bridge.stats().captures_skipped == 2
    assert not bridge.stats().connected
    with trainer.serve(server.port):
        assert bridge.wait_connected(DEADLINE)
        # Nobody copied version 1's matrices while no trainer said which rows it wants.
        assert isinstance(bridge.capture(), NullCapture)
        sync(bridge, 2)
        deliver(bridge, model, data)
    assert len(trainer.samples) == 3


def test_resumed_job_before_trainer_begins_below_known_version(
    trainer: FakeTrainer, connect: Connect
) -> None:
    """Its first version is announced, so that no sample is trained with the earlier job's."""
    model, data = make_model(), batch((8,))
    with trainer.serve() as server, connect(server.address, model=model) as before:
        sync(before, 7)
        trainer.wait_for(lambda: 7 in trainer.tensors)
    bridge = connect(server.address, model=model, wait=False, connect_seconds=0.05, version=3)
    with trainer.serve(server.port):
        assert bridge.wait_connected(DEADLINE)
        for version in (4, 5, 7):
            sync(bridge, version)
            deliver(bridge, model, data)
            assert bridge.stats().capture_off_reason == ""
    assert [sample.policy_version for sample in trainer.samples.values()] == [4, 5, 7]
    assert trainer.history == 1 and sorted(trainer.tensors) == [4, 5, 7]


def test_rank_that_follows_asks_before_its_first_sample(
    trainer: FakeTrainer, connect: Connect
) -> None:
    """The version may be known from the job that this one resumes."""
    model, data = make_model(), batch((8,))
    with trainer.serve() as server, connect(server.address, model=model) as before:
        sync(before, 7)
        trainer.wait_for(lambda: 7 in trainer.tensors)
        rank = connect(server.address, model=model)
        sync(rank, 6, lead=False)
        ship(rank, model, data)
        trainer.wait_for(lambda: ("refused", 6) in trainer.events)
        assert trainer.samples == {}


def test_process_names_its_history_when_it_connects_again(
    trainer: FakeTrainer, connect: Connect
) -> None:
    model = make_model()
    trainer.history = 3
    with trainer.serve() as server:
        bridge = connect(server.address, model=model, version=1)
        trainer.wait_for(lambda: 1 in trainer.tensors)
        assert trainer.joined == {"s1"}
        port = server.port
    with trainer.serve(port):
        trainer.wait_for(lambda: "s2" in trainer.joined)
        until(lambda: bridge.stats().connected)


def test_resumed_job_at_known_version_compares_matrices(
    trainer: FakeTrainer, connect: Connect
) -> None:
    model, data = make_model(), batch((8,))
    connect(model=model, version=7)
    trainer.wait_for(lambda: 7 in trainer.tensors)
    same = connect(model=model, version=7)
    deliver(same, model, data)
    assert (same.stats().accepted, same.stats().announced) == (1, 1)
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)
    assert trainer.history == 0
    other = connect(model=model, version=7)
    deliver(other, model, data)
    assert other.stats().last_error == "" and len(trainer.samples) == 2
    assert trainer.history == 1
    assert torch.equal(trainer.tensors[7]["lm_head.weight"], model.lm_head.weight[::2])


@pytest.mark.parametrize("first", ["old", "new"])
def test_states_captured_before_draft_changed_are_shed(
    trainer: FakeTrainer, connect: Connect, first: str
) -> None:
    # The message names the session's layers: states of other ones would train under their names.
    model, data = make_model(), batch((10, 7))
    with trainer.serve() as server:
        port = server.port
        bridge = connect(server.address, model=model, version=1)
        window = bridge.capture()
        window.__enter__()
        with torch.no_grad():
            model(data["input_ids"])
            window.ship(**data)
    other = FakeTrainer(layers=(1, 3, 6))
    with other.serve(port):
        other.wait_for(lambda: other.sessions == 1)
        assert bridge.wait_connected(DEADLINE)
        sync(bridge, 2)
        if first == "new":
            # The trainer is told of version 2, and with it the bridge no more waits for version 1.
            ship(bridge, model, data)
            other.wait_for(lambda: len(other.samples) == 2)
        window.__exit__(None, None, None)
        if first == "old":
            ship(bridge, model, data)
        assert bridge.flush(DEADLINE)
        assert bridge.stats().shed == {"draft_changed": 2}
        assert bridge.stats().accepted == 2
        assert bridge.stats().refused == 0
    assert {s.policy_version for s in other.samples.values()} == {2}


def test_samples_that_fit_draft_are_sent_behind_others(
    trainer: FakeTrainer, connect: Connect
) -> None:
    # Both wait in the outbox when the first is looked at: they must not travel together.
    bridge = connect(model=(model := make_model()))
    trainer.hang.add("AnnouncePolicy")
    sync(bridge, 1)
    ship(bridge, model, batch((10, 7, 9, 8)))
    assert bridge._copier.wait_idle(DEADLINE)
    held = bridge._outbox._held
    with bridge._outbox._changed:
        for name in list(held)[1::2]:
            held[name].header.aux_layers[:] = (1, 3, 6)
    trainer.hang.clear()
    trainer.release.set()
    assert bridge.flush(DEADLINE)
    assert bridge.stats().shed == {"draft_changed": 2}
    assert bridge.stats().accepted == len(trainer.samples) == 2


def test_slow_trainer_skips_versions_between(trainer: FakeTrainer, connect: Connect) -> None:
    """A version stays while it is announced; given up are those that wait behind it."""
    model = make_model()
    trainer.hang = {"AnnouncePolicy"}
    bridge = connect(model=model)
    for version in range(1, 6):
        sync(bridge, version)
        ship(bridge, model, batch((10, 12)))
        trainer.wait_for(lambda: ("AnnouncePolicy", -1) in trainer.events)
    trainer.release.set()
    assert bridge.flush(DEADLINE)
    assert sorted(trainer.tensors) == [1, 5]
    assert sorted(s.policy_version for s in trainer.samples.values()) == [1, 1, 5, 5]
    assert bridge.stats().shed == {"policy_not_announced": 6}


def test_hung_trainer_snapshots_reuse_memory(trainer: FakeTrainer, connect: Connect) -> None:
    model = make_model()
    trainer.hang = {"AnnouncePolicy"}
    bridge = connect(model=model, version=1)
    trainer.wait_for(lambda: ("AnnouncePolicy", -1) in trainer.events)
    assert bridge._matrices is not None
    used = set()
    for version in range(2, 12):
        sync(bridge, version)
        used |= {memory.data_ptr() for _, memory in bridge._matrices._slots}
    # Two matrices of the version that is being announced, of the newest, and of the next one.
    assert len(used) <= 6
    trainer.release.set()
