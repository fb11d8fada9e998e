"""A policy version on the wire: the bytes that protobuf would write, with pauses."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draft_trainer.ingest.policies import receive_matrices
from policy_bridge import session as announce
from slipstream.errors import RefusedError
from slipstream.tensors import frame_chunk
from slipstream.v1 import draft_trainer_pb2 as pb
from tests.gpu.shortages import shortage

from . import doubles
from .conftest import Connect, batch, deliver, ship, sync
from .doubles import DEADLINE, FakeTrainer


@pytest.mark.parametrize("size", [0, 1, 127, 128, 70_000])
@pytest.mark.parametrize("offset", [0, 5, 1 << 40])
def test_a_framed_chunk_is_what_protobuf_reads(size: int, offset: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    data = data[:size]
    chunk = pb.AnnouncePolicyRequest.FromString(frame_chunk("a.b", offset, memoryview(data))).chunk
    assert (chunk.name, chunk.offset, chunk.data) == ("a.b", offset, data)


def test_announced_version_of_many_blocks_arrives(
    trainer: FakeTrainer,
    connect: Connect,
    model: torch.nn.Module,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(announce, "BLOCK_BYTES", 100)
    embed = model.get_input_embeddings().weight
    bridge = connect(version=1)
    trainer.wait_for(lambda: 1 in trainer.tensors)
    assert torch.equal(trainer.tensors[1]["embed_tokens.weight"], embed)
    assert bridge.stats().last_error == ""


def test_close_ends_a_hash_that_has_begun(
    trainer: FakeTrainer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, given_up = threading.Event(), threading.Event()

    def endless(contents: Mapping[str, memoryview]) -> Iterator[tuple[str, int, memoryview]]:
        while not given_up.is_set():
            begun.set()
            yield next(iter(contents)), 0, memoryview(b"")

    monkeypatch.setattr(announce, "_blocks", endless)
    bridge = connect(version=1)
    assert begun.wait(DEADLINE)
    try:
        bridge.close()
    finally:
        given_up.set()
    assert bridge.stats().last_error == "" and trainer.tensors == {}


def test_frozen_matrices_are_copied_and_hashed_once(
    trainer: FakeTrainer,
    connect: Connect,
    model: torch.nn.Module,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashed: list[str] = []
    blocks = announce._blocks

    def noting(contents: Mapping[str, memoryview]) -> Iterator[tuple[str, int, memoryview]]:
        hashed.extend(contents)
        return blocks(contents)

    monkeypatch.setattr(announce, "_blocks", noting)
    embed, head = model.get_input_embeddings().weight, model.lm_head.weight
    embed.requires_grad_(False)
    bridge = connect(version=1)
    trainer.wait_for(lambda: 1 in trainer.tensors)
    assert sorted(set(hashed)) == ["embed_tokens.weight", "lm_head.weight"]
    hashed.clear()
    # Trained matrices every time: some optimizers write past their version counter.
    head.data.mul_(2.0)
    sync(bridge, 2)
    trainer.wait_for(lambda: 2 in trainer.tensors)
    assert set(hashed) == {"lm_head.weight"}
    assert torch.equal(trainer.tensors[2]["lm_head.weight"], head[trainer.vocab_ids])
    assert torch.equal(trainer.tensors[2]["embed_tokens.weight"], embed)
    hashed.clear()
    # Merging adapters writes into frozen weights.
    with torch.no_grad():
        embed.mul_(3.0)
    sync(bridge, 3)
    trainer.wait_for(lambda: 3 in trainer.tensors)
    assert "embed_tokens.weight" in hashed
    assert torch.equal(trainer.tensors[3]["embed_tokens.weight"], embed)


def test_of_a_trained_matrix_only_changes_are_sent(
    trainer: FakeTrainer, connect: Connect, model: torch.nn.Module
) -> None:
    embed, head = model.get_input_embeddings().weight, model.lm_head.weight
    bridge = connect(version=1)

    def announced(version: int, row: slice) -> int:
        with torch.no_grad():
            embed[row] = version + 7.0
        sync(bridge, version)
        trainer.wait_for(lambda: version in trainer.tensors)
        assert torch.equal(trainer.tensors[version]["embed_tokens.weight"], embed)
        assert bridge.stats().last_error == ""
        return trainer.chunk_bytes[version]

    trainer.wait_for(lambda: 1 in trainer.tensors)
    whole = embed.nbytes + head[trainer.vocab_ids].nbytes
    assert trainer.chunk_bytes[1] == whole
    assert announced(2, slice(3, 20)) <= 1.1 * embed[3:20].nbytes
    assert announced(3, slice(None)) <= embed.nbytes + 16
    # A trainer that has let go of what they are changes of gets everything.
    trainer.tensors.clear()
    assert announced(4, slice(5, 6)) == whole


@pytest.mark.parametrize("block_bytes", [100, 1 << 20])
@pytest.mark.parametrize("rows", [slice(3, 20), slice(None)])
def test_trainer_that_knows_no_bases_gets_whole_tensors(
    trainer: FakeTrainer,
    connect: Connect,
    model: torch.nn.Module,
    monkeypatch: pytest.MonkeyPatch,
    block_bytes: int,
    rows: slice,
) -> None:
    """It ignores the field, and takes each difference for the tensor's own bytes."""
    refused: list[str] = []

    def receive(specs: Any, bases: Any, chunks: Any, held: Any) -> dict[str, torch.Tensor]:
        try:
            return receive_matrices(specs, {}, chunks, held)
        except RefusedError as error:
            refused.append(error.field)
            raise

    monkeypatch.setattr(doubles, "receive_matrices", receive)
    monkeypatch.setattr(announce, "BLOCK_BYTES", block_bytes)
    embed, head = model.get_input_embeddings().weight, model.lm_head.weight
    bridge = connect(version=1)
    trainer.wait_for(lambda: 1 in trainer.tensors)
    with torch.no_grad():
        embed[rows] = 7.0
    sync(bridge, 2)
    trainer.wait_for(lambda: 2 in trainer.tensors)
    assert len(refused) == 1 and refused[0].startswith("embed_tokens.weight")
    assert torch.equal(trainer.tensors[2]["embed_tokens.weight"], embed)
    assert trainer.chunk_bytes[2] == embed.nbytes + head[trainer.vocab_ids].nbytes
    assert bridge.stats().last_error == ""


def test_lead_that_passes_to_another_process(
    trainer: FakeTrainer, connect: Connect, model: torch.nn.Module
) -> None:
    """Each has announced a version with matrices before one that it leaves to the other."""
    first, second = (connect(seed=seed) for seed in range(2))
    for version in range(1, 5):
        lead, other = (first, second) if version % 2 else (second, first)
        sync(other, version, lead=False)
        sync(lead, version)
        trainer.wait_for(lambda version=version: version in trainer.tensors)
        deliver(other, model, batch((9, 7), seed=version))
        assert other.stats().last_error == "" and other.stats().shed == {}
    assert first.stats().accepted == second.stats().accepted == 4


def test_only_the_lead_announces(
    trainer: FakeTrainer, connect: Connect, model: torch.nn.Module
) -> None:
    data = batch((9, 7))
    lead, other = (connect(seed=seed) for seed in range(2))
    sync(other, 1, lead=False)
    ship(other, model, data)
    trainer.wait_for(lambda: ("refused", 1) in trainer.events)
    assert trainer.samples == {} and trainer.tensors == {}
    # Nothing was copied from its policy either.
    assert other._matrices is not None and other._matrices._slots == []
    sync(lead, 1)
    assert other.flush(DEADLINE)
    assert len(trainer.samples) == 2
    assert trainer.chunks_sent[1] == {"embed_tokens.weight", "lm_head.weight"}
    assert other.stats().last_error == ""


def test_late_samples_of_refused_version_are_shed(
    trainer: FakeTrainer, connect: Connect, model: torch.nn.Module
) -> None:
    trainer.refuse_announcements = [RefusedError("tensors", "one", "another", "use it")]
    bridge, data = connect(version=1), batch((9, 7))
    with torch.no_grad(), bridge.capture() as window:
        model(data["input_ids"])
        window.ship(**data)
        trainer.wait_for(lambda: not trainer.refuse_announcements)
        sync(bridge, 2)
        trainer.wait_for(lambda: 2 in trainer.tensors)
    # They come when a newer version is known.
    assert bridge.flush(DEADLINE)
    assert bridge.stats().shed == {"policy_not_announced": 2}
    assert trainer.received == []


def test_samples_before_late_lead_announcement_are_shed(
    trainer: FakeTrainer, connect: Connect, model: torch.nn.Module
) -> None:
    lead, other = (connect(seed=seed, announce_seconds=0.5) for seed in range(2))
    sync(other, 1, lead=False)
    deliver(other, model, batch((9, 7)))
    assert other.stats().shed == {"policy_refused": 2}
    assert "lead" in other.stats().last_error
    sync(lead, 1)
    trainer.wait_for(lambda: 1 in trainer.tensors)
    deliver(other, model, batch((9, 7)))
    assert other.stats().shed == {"policy_refused": 2}
    assert len(trainer.samples) == 2


def test_version_never_announced_does_not_block_next(
    trainer: FakeTrainer, connect: Connect, model: torch.nn.Module
) -> None:
    lead, other = (connect(seed=seed, announce_seconds=0.5) for seed in range(2))
    sync(other, 1, lead=False)
    deliver(other, model, batch((9, 7)))
    asked = trainer.events.count(("refused", 1))
    sync(other, 2, lead=False)
    deliver(other, model, batch((9, 7)))
    assert other.stats().shed == {"policy_refused": 4}
    assert trainer.events.count(("refused", 1)) == asked
    sync(lead, 3)
    trainer.wait_for(lambda: 3 in trainer.tensors)
    sync(other, 3, lead=False)
    deliver(other, model, batch((9, 7)))
    assert other.stats().accepted == 2 and trainer.events.count(("refused", 1)) == asked


def test_wait_for_lead_begins_with_first_sample(
    trainer: FakeTrainer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep)
    monkeypatch.setattr(announce, "time", clock)
    other = connect()
    assert other._connection is not None and other._connection.session is not None
    sync(other, 1, lead=False)
    announcer = other._connection._announcer
    assert announcer.due() is None and announcer.due(0) is None and announcer.due(2) is None
    assert announcer.due(1) == 1
    # However long ago its window ended.
    now[0] += 100.0
    assert announcer.awaits_lead(1, 60.0)
    now[0] += 59.0
    assert announcer.awaits_lead(1, 60.0)
    now[0] += 1.0
    assert not announcer.awaits_lead(1, 60.0)
    # A trainer that comes back after the wait has had no time to hear from the lead.
    announcer.open_session(other._connection.session, forget=False)
    assert announcer.awaits_lead(1, 60.0)


def test_sync_out_of_device_memory_skips_capture_of_version(
    trainer: FakeTrainer, connect: Connect, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise shortage("page-locked")

    bridge = connect(strict=True)
    with monkeypatch.context() as patched:
        patched.setattr(announce.PolicyMatrices, "snapshot", full)
        sync(bridge, 1)
    ship(bridge, model, batch((9, 7)))
    stats = bridge.stats()
    assert stats.captures_skipped == 1 and "memory" in stats.capture_off_reason
    sync(bridge, 2)
    deliver(bridge, model, batch((9, 7)))
    assert bridge.stats().accepted == 2
