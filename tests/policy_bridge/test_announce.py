"""A policy version on the wire: the bytes that protobuf would write, with pauses."""

from __future__ import annotations

import hashlib

import pytest
import torch

from policy_bridge import session as announce
from policy_bridge.session import BLOCK_BYTES
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
    specs = announce._specs_of(tensors)
    assert specs == [spec_of(name, tensor) for name, tensor in tensors.items()]
    assert specs[0].sha256 == hashlib.sha256(bytes_of(tensors["x"])).digest()


@pytest.mark.parametrize(("blocks", "pause"), [(1, 0.0), (20, 0.004), (1000, 0.001)])
def test_there_is_a_pause_after_each_block_and_a_bound_on_all(
    monkeypatch: pytest.MonkeyPatch, blocks: int, pause: float
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(announce, "BLOCK_BYTES", 64)
    monkeypatch.setattr(announce.time, "sleep", slept.append)
    announce._specs_of({"x": torch.zeros(64 * (blocks - 1) + 1, dtype=torch.bool)})
    assert slept == pytest.approx([pause] * blocks)


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
