"""Streams of samples: credits, cuts, bounds, policy lag."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from draft_trainer.counters import by_label
from draft_trainer.server.app import TrainerServer
from slipstream.errors import RefusedError
from slipstream.v1 import draft_trainer_pb2 as pb
from tests.draft_trainer.rig import (
    Client,
    Stream,
    feeding,
    make_config,
    refusal,
    request_of,
    rollouts,
    running,
)


def test_stream_over_its_credit_is_ended(trainer: tuple[TrainerServer, Client]) -> None:
    _, client = trainer
    (message,) = rollouts(1, seed=50)
    with Stream(client) as stream:
        assert stream.credit == 1 << 17
        stream.put(request_of(message.repacked(sample_id="x" * (1 << 17))))
        error = refusal(lambda: list(stream.call))
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.field == "credit"
    assert f"{1 << 17} bytes of credit left" in error.found


def test_stream_credit_returns_with_every_ack(trainer: tuple[TrainerServer, Client]) -> None:
    _, client = trainer
    with Stream(client) as stream:
        for message in rollouts(100, seed=51):
            stream.send(message)
        assert stream.credit == 1 << 17


def test_stream_without_open_session_is_refused(
    trainer: tuple[TrainerServer, Client],
) -> None:
    _, client = trainer
    stream = Stream(client, session_id="nobody")
    error = refusal(lambda: next(stream.call))
    assert error.code is grpc.StatusCode.FAILED_PRECONDITION
    assert error.field == "session_id"
    assert "OpenRun" in error.next_step
    only_samples = [request_of(rollouts(1)[0])]
    error = refusal(lambda: list(client.stub.StreamStates(iter(only_samples), timeout=10)))
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert (error.field, error.found, error.expected) == ("kind", "batch", "header")


def test_stream_reopened_after_cut_acks_duplicates(
    trainer: tuple[TrainerServer, Client],
) -> None:
    server, client = trainer
    messages = rollouts(12, seed=60)
    before, counted = client.status(), by_label(server._counters.samples)
    with Stream(client) as stream:
        first = [stream.send(message) for message in messages[:7]]
    assert {ack.status for ack in first} == {pb.ACK_STATUS_ACCEPTED}
    acks = client.send(*messages)
    assert [ack.status for ack in acks[:7]] == [pb.ACK_STATUS_DUPLICATE] * 7
    assert [ack.status for ack in acks[7:]] == [pb.ACK_STATUS_ACCEPTED] * 5
    after = client.status()
    assert after.samples_accepted - before.samples_accepted == 12
    duplicates = by_label(server._counters.samples)["duplicate"]
    assert duplicates - counted.get("duplicate", 0) == 7


def test_replay_without_room_for_two_samples_is_refused(tmp_path: Path) -> None:
    # 32 tokens of four bf16 states of 16, in blocks of 4,800 bytes.
    config = make_config(
        tmp_path, server={"max_tokens_per_sample": 32}, replay={"capacity_bytes": 9599}
    )
    with pytest.raises(RefusedError) as refused:
        TrainerServer(config)
    assert (refused.value.field, refused.value.found) == ("replay.capacity_bytes", "9599")
    assert refused.value.expected.startswith("at least 9600, two samples of 32 tokens")
    assert not (tmp_path / "samples").exists()
    replay = config.replay.model_copy(update={"capacity_bytes": 9600})
    with feeding(config.model_copy(update={"replay": replay}), train=False) as (_, client):
        (ack,) = client.send(*rollouts(1))
        assert ack.status == pb.ACK_STATUS_ACCEPTED


def test_credit_suffices_for_a_sample_while_others_are_held(tmp_path: Path) -> None:
    """A stream keeps the credit that it began with."""
    config = make_config(
        tmp_path, server={"max_tokens_per_sample": 32}, replay={"capacity_bytes": 9600}
    )
    with feeding(config, train=False) as (server, client):
        held = server._store.reserve(9600 - 64)
        with Stream(client) as stream:
            assert stream.credit > 4800
            del held
            (sample,) = rollouts(1)
            assert stream.send(sample).status == pb.ACK_STATUS_ACCEPTED


def test_wanted_tokens_are_shared_by_the_streams(tmp_path: Path) -> None:
    """Before the first sample half of the store is counted in bfloat16, and told at once."""
    with feeding(make_config(tmp_path), train=False) as (server, client):
        half = 1 << 21
        with Stream(client) as first:
            # Tokens of 149 bytes, with what aligns the states.
            assert first.wanted_tokens == half * 2048 // (2048 * 149)
            with Stream(client) as second:
                assert second.wanted_tokens == first.wanted_tokens // 2
                told = next(first.call).acks
                assert (told.wanted_tokens, len(told.acks)) == (second.wanted_tokens, 0)
            told = next(first.call).acks
            assert told.wanted_tokens == first.wanted_tokens
            (sample,) = rollouts(1)
            first.send(sample)
            assert first.wanted_tokens == half * sample.tokens // sample.nbytes
            assert server.status.read().samples_accepted == 1


def test_old_rollout_with_new_teacher_is_accepted(
    tmp_path: Path,
) -> None:
    with running(make_config(tmp_path), train=False) as (_, client):
        client.open()
        for version in range(1, 10):
            client.announce(version)
        new, old = rollouts(1, seed=1, version=9), rollouts(1, seed=2, version=1)
        for sample in (*new, *old):
            sample.header.rollout_policy_version = 1
        acks = client.send(*new, *old)
    assert [ack.status for ack in acks] == [pb.ACK_STATUS_ACCEPTED, pb.ACK_STATUS_REFUSED]
    assert (acks[1].refusal.field, acks[1].refusal.found) == ("policy_version", "1, 8 behind")


def test_policy_lag(tmp_path: Path) -> None:
    with running(make_config(tmp_path), train=False) as (_, client):
        client.open()
        (early,) = rollouts(1, seed=9)
        (ack,) = client.send(early)
        assert (ack.refusal.field, ack.refusal.expected) == (
            "policy_version",
            "one of the announced versions []",
        )
        for version in (1, 2, 3, 4):
            client.announce(version)
        acks = client.send(*(rollouts(1, seed=v, version=v)[0] for v in (1, 2, 4, 5)))
        assert [ack.status for ack in acks] == [
            pb.ACK_STATUS_REFUSED,
            pb.ACK_STATUS_ACCEPTED,
            pb.ACK_STATUS_ACCEPTED,
            pb.ACK_STATUS_REFUSED,
        ]
        assert acks[0].refusal.found == "1, 3 behind"
        assert "at most 2 behind 4" in acks[0].refusal.expected
        assert "[2, 3, 4]" in acks[3].refusal.expected
        before = client.status()
        client.announce(5)
        # Version 2 is too old now: its one sample left the buffer.
        after = client.status()
        assert before.replay_bytes == 2 * after.replay_bytes > 0
        evicted = after.samples_evicted - before.samples_evicted
        assert evicted == before.samples_pending - after.samples_pending
