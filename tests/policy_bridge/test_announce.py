"""A policy version on the wire: the bytes that protobuf would write, at a pace."""

from __future__ import annotations

import hashlib

import pytest
import torch

from policy_bridge import session as announce
from policy_bridge.session import BLOCK_BYTES, Pace, Session
from slipstream.client import open_channel
from slipstream.tensors import bytes_of, frame_chunk, spec_of
from slipstream.v1 import draft_trainer_pb2 as pb

from .conftest import Connect
from .doubles import FakeTrainer


@pytest.mark.parametrize("size", [0, 1, 127, 128, 70_000])
@pytest.mark.parametrize("offset", [0, 5, 1 << 40])
def test_a_framed_chunk_is_what_protobuf_reads(size: int, offset: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    data = data[:size]
    chunk = pb.AnnouncePolicyRequest.FromString(frame_chunk("a.b", offset, memoryview(data))).chunk
    assert (chunk.name, chunk.offset, chunk.data) == ("a.b", offset, data)


def test_matrices_of_many_blocks_are_hashed_whole() -> None:
    rows = BLOCK_BYTES // 1024 + 3
    tensors = {"x": torch.randn(rows, 512).bfloat16(), "y": torch.randn(3, 4), "z": torch.empty(0)}
    specs = announce._specs_of(tensors, 0.01)
    assert specs == [spec_of(name, tensor) for name, tensor in tensors.items()]
    assert specs[0].sha256 == hashlib.sha256(bytes_of(tensors["x"])).digest()


def test_pauses_are_in_proportion_to_the_work_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    # When it begins, then before and after each of the two pauses.
    used = iter([0.0, 0.001, 0.001, 0.101, 0.101, 0.0, 9.0, 9.0])
    monkeypatch.setattr(announce.time, "thread_time", lambda: next(used))
    monkeypatch.setattr(announce.time, "sleep", slept.append)
    pace = Pace(20 * BLOCK_BYTES, most_seconds=10.0)
    pace.rest()
    pace.rest()
    Pace(BLOCK_BYTES, most_seconds=10.0).rest()
    assert slept == pytest.approx([0.049, 0.5, 0.0])


def test_pauses_are_bounded_by_the_time_between_syncs(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that the one after the next finds this version known: nothing is shed for want of it."""
    bounds: list[float] = []

    class Noted(Pace):
        def __init__(self, nbytes: int, most_seconds: float) -> None:
            bounds.append(most_seconds)
            super().__init__(nbytes, most_seconds)

    clock = iter([100.0, 100.4])
    monkeypatch.setattr(announce, "Pace", Noted)
    monkeypatch.setattr(announce.time, "monotonic", lambda: next(clock))
    session = Session("s", (1,), torch.arange(4), 16, None, ())
    tensors = {"lm_head.weight": torch.ones(4, 4), "embed_tokens.weight": torch.ones(4, 4)}
    with open_channel("127.0.0.1:1") as channel:
        announcer = announce.Announcer(channel)
        announcer.open_session(session, forget=False)
        monkeypatch.setattr(announcer, "_call", lambda requests, timeout: list(requests))
        for version in (1, 2):
            announcer.offer(announce.PolicySnapshot(version, tensors))
            announcer.announce(version, 60.0)
    # Hashing and sending: a second each at first, then an eighth of the interval.
    assert bounds == pytest.approx([1.0, 1.0, 0.05, 0.05])


def test_a_version_of_many_blocks_arrives(
    trainer: FakeTrainer,
    connect: Connect,
    model: torch.nn.Module,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(announce, "BLOCK_BYTES", 100)
    embed = model.get_input_embeddings().weight
    with trainer.serve() as server:
        bridge = connect(server.address, version=1)
        trainer.wait_for(lambda: 1 in trainer.tensors)
        assert torch.equal(trainer.tensors[1]["embed_tokens.weight"], embed)
        assert bridge.stats().last_error == ""
