"""Round trips by both transports, and everything that makes one of them fall back or refuse."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from draft_trainer.kernels.library import using_kernels
from draft_trainer.server.app import TrainerServer
from policy_bridge.connection import Placement
from slipstream import tensors as framing
from slipstream.shm import RingFile
from slipstream.tensors import through_float8
from slipstream.v1 import draft_trainer_pb2 as pb
from tests.draft_trainer.rig import Client, make_config, running

from .rig import assert_same, kept, samples, sending, with_tensors

RING = 1 << 16


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """A directory that stands for /dev/shm."""
    folder = tmp_path / "shm"
    folder.mkdir()
    return folder


@pytest.fixture
def trainer(tmp_path: Path, memory: Path) -> Iterator[tuple[TrainerServer, Client]]:
    config = make_config(
        tmp_path, server={"shared_memory": str(memory), "ring_bytes": RING, "max_streams": 3}
    )
    with running(config, train=False) as (server, client):
        client.open()
        client.announce(1)
        yield server, client
    assert list(memory.iterdir()) == []


Trainer = tuple[TrainerServer, Client]


@pytest.mark.parametrize("transport", ["auto", "shared_memory", "grpc"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_tensor_arrives_with_its_bits(
    trainer: Trainer, memory: Path, transport: str, dtype: torch.dtype
) -> None:
    server, client = trainer
    sent = samples(100, seed=1, dtype=dtype)
    with sending(server.address, transport=transport, shared_memory=str(memory)) as sender:
        sender.send(*sent)
        sender.flush()
        stats = sender.stats()
    assert (stats.accepted, stats.refused, stats.duplicate) == (100, 0, 0)
    assert stats.transport == ("grpc" if transport == "grpc" else "shared_memory")
    assert stats.transport_reason == ('transport = "grpc"' if transport == "grpc" else "")
    found = kept(server)
    assert len(found) == 100
    for sample in sent:
        assert_same(found[sample.sample_id], sample)
    # 100 samples of about 2 KiB went many times round a ring of 64 KiB.
    assert sum(sample.layout.nbytes for sample in sent) > 3 * RING
    assert client.status().samples_accepted == 100


def test_the_ring_has_no_name_while_it_is_used(trainer: Trainer, memory: Path) -> None:
    server, _ = trainer
    with sending(server.address, shared_memory=str(memory)) as sender:
        sender.send(*samples(1))
        sender.flush()
        assert sender.stats().transport == "shared_memory"
        # What may be left was offered to the client that only announced the policy.
        assert len(list(memory.iterdir())) <= 1


def test_a_sample_larger_than_the_ring_goes_by_grpc(trainer: Trainer, memory: Path) -> None:
    server, _ = trainer
    (long,) = samples(1)
    times = 40
    short_one = long.tensors
    long = with_tensors(
        long,
        token_ids=short_one.token_ids.repeat(times),
        positions=torch.arange(times * len(short_one.positions), dtype=torch.int32),
        segment_ids=short_one.segment_ids.repeat(times),
        loss_mask=short_one.loss_mask.repeat(times),
        aux=short_one.aux.repeat(times, 1),
        final=short_one.final.repeat(times, 1),
        sampled_logprobs=short_one.sampled_logprobs.repeat(times),
        sampled_logits=short_one.sampled_logits.repeat(times),
    )
    assert long.layout.nbytes > RING
    short = samples(3, seed=5)
    with sending(server.address, shared_memory=str(memory)) as sender:
        sender.send(short[0], long, *short[1:])
        sender.flush()
        assert sender.stats().transport == "shared_memory"
        assert sender.stats().accepted == 4
    found = kept(server)
    for sample in (long, *short):
        assert_same(found[sample.sample_id], sample)


@pytest.mark.parametrize("why", ["elsewhere", "nonce", "off", "not_there"])
def test_without_the_same_memory_states_go_by_grpc(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    directory = {"off": "", "not_there": str(tmp_path / "nowhere")}.get(why, str(memory))
    config = make_config(tmp_path, server={"shared_memory": directory, "ring_bytes": RING})
    seen = str(tmp_path) if why == "elsewhere" else str(memory)
    if why == "nonce":
        # Another file of the same name, as a container with a /dev/shm of its own might have.
        create = RingFile.create.__func__  # type: ignore[attr-defined]

        def other(cls: type[RingFile], folder: Path, nbytes: int) -> RingFile:
            ring = create(cls, folder, nbytes)
            ring.nonce = bytes(16)
            return ring

        monkeypatch.setattr(RingFile, "create", classmethod(other))
    with running(config, train=False) as (server, client):
        client.open()
        client.announce(1)
        with sending(server.address, shared_memory=seen) as sender:
            sender.send(*samples(5))
            sender.flush()
            stats = sender.stats()
        assert (stats.accepted, stats.transport) == (5, "grpc")
        wanted = {
            "elsewhere": "No such file",
            "nonce": "nonce",
            "off": "server.shared_memory is off",
            "not_there": "No such file",
        }
        assert wanted[why] in stats.transport_reason
    assert list(memory.iterdir()) == []


def test_a_truncated_ring_ends_the_stream_and_loses_nothing(
    trainer: Trainer, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = trainer
    rings: list[RingFile] = []
    attach = RingFile.attach.__func__  # type: ignore[attr-defined]

    def remember(cls: type[RingFile], *args: object) -> RingFile:
        rings.append(attach(cls, *args))
        return rings[-1]

    monkeypatch.setattr(RingFile, "attach", classmethod(remember))
    sent = samples(40, seed=2)
    with sending(server.address, shared_memory=str(memory)) as sender:
        sender.send(*sent[:20])
        sender.flush()
        os.ftruncate(rings[0]._descriptor, 4096)
        sender.send(*sent[20:])
        sender.flush()
        stats = sender.stats()
    assert len(rings) == 1
    assert (stats.accepted, stats.refused, stats.transport) == (40, 0, "grpc")
    assert "as it was made" in stats.transport_reason
    found = kept(server)
    for sample in sent:
        assert_same(found[sample.sample_id], sample)


@pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="needs a C compiler")
def test_a_ring_that_is_truncated_while_it_is_read_costs_no_process(
    trainer: Trainer, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = trainer
    check, cut = RingFile.check, []

    def check_then_cut(self: RingFile) -> None:
        check(self)
        # The bridge has looked, and written; now the trainer has looked.
        cut.append(self)
        if len(cut) == 2:
            os.ftruncate(self._descriptor, 4096)

    monkeypatch.setattr(RingFile, "check", check_then_cut)
    (sent,) = samples(1, seed=3)
    with using_kernels("on"), sending(server.address, shared_memory=str(memory)) as sender:
        sender.send(sent)
        sender.flush()
        stats = sender.stats()
    assert len(cut) == 2 and cut[0] is not cut[1]
    assert (stats.accepted, stats.refused, stats.transport) == (1, 0, "grpc")
    assert "less while it was read" in stats.transport_reason
    assert_same(kept(server)[sent.sample_id], sent)


@pytest.mark.parametrize("transport", ["shared_memory", "grpc"])
def test_a_corrupted_byte_is_refused_and_the_stream_goes_on(
    trainer: Trainer, memory: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    server, client = trainer
    sent = samples(20, seed=3)
    place = Placement.place

    def corrupt(self: Placement, sample, *given):  # type: ignore[no-untyped-def]
        placed = place(self, sample, *given)
        if placed is not None and sample.sample_id == sent[7].sample_id:
            if placed.payload:
                placed.payload[0][400] ^= 1
            else:
                assert self._ring is not None
                self._ring.span(self._placed[sample.sample_id] + 400, 1)[0] ^= 1
        return placed

    monkeypatch.setattr(Placement, "place", corrupt)
    with sending(server.address, transport=transport, shared_memory=str(memory)) as sender:
        sender.send(*sent)
        sender.flush()
        stats = sender.stats()
    assert (stats.accepted, stats.refused, stats.connects) == (19, 1, 1)
    assert dict(stats.refused_by_field) == {"packed.checksum": 1}
    assert kept(server).keys() == {s.sample_id for s in sent} - {sent[7].sample_id}
    assert client.status().samples_refused == 1


def test_a_block_in_pieces_is_one_again(
    trainer: Trainer, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = trainer
    sent = samples(12, seed=8)
    sent[7].tensors.final[3, 2] = float("nan")
    monkeypatch.setattr(framing, "PIECE_BYTES", 192)
    with sending(server.address, transport="grpc", shared_memory=str(memory)) as sender:
        sender.send(*sent)
        sender.flush()
        stats = sender.stats()
    assert (stats.accepted, stats.connects) == (11, 1)
    assert dict(stats.refused_by_field) == {"final_hidden_state": 1}
    found = kept(server)
    for sample in sent[:7] + sent[8:]:
        assert_same(found[sample.sample_id], sample)


@pytest.mark.parametrize("transport", ["shared_memory", "grpc"])
def test_states_that_are_not_finite_are_refused_by_field(
    trainer: Trainer, memory: Path, transport: str
) -> None:
    server, _ = trainer
    sent = samples(6, seed=4)
    for sample, value in zip(sent, (float("nan"), float("inf"), -float("inf")), strict=False):
        sample.tensors.final[3, 2] = value
    sent[3].tensors.aux[0, 0] = -float("nan")
    sent[4].tensors.sampled_logits[1] = float("nan")
    with sending(server.address, transport=transport, shared_memory=str(memory)) as sender:
        sender.send(*sent)
        sender.flush()
        stats = sender.stats()
    assert stats.accepted == 1
    assert dict(stats.refused_by_field) == {
        "final_hidden_state": 3,
        "aux_hidden_states": 1,
        "sampled_logits": 1,
    }


@pytest.mark.parametrize("transport", ["shared_memory", "grpc"])
def test_float8_states_arrive_as_bfloat16(trainer: Trainer, memory: Path, transport: str) -> None:
    server, _ = trainer
    sent = samples(10, seed=6)
    settings = {"transport": transport, "shared_memory": str(memory)}
    with sending(server.address, states_dtype="float8_e4m3", **settings) as sender:
        sender.send(*sent)
        sender.flush()
        stats = sender.stats()
    assert (stats.accepted, stats.transport) == (10, transport)
    found = kept(server)
    for sample in sent:
        tensors, hidden = sample.tensors, sample.layout.hidden_size
        decoded = with_tensors(
            sample,
            aux=through_float8(tensors.aux, hidden),
            final=through_float8(tensors.final, hidden),
        )
        assert_same(found[sample.sample_id], decoded)
    assert sum(s.in_float8().layout.nbytes for s in sent) < sum(s.layout.nbytes for s in sent)


def test_duplicates_within_a_batch_and_over_streams_are_recognised(
    trainer: Trainer, memory: Path
) -> None:
    server, client = trainer
    sent = samples(10, seed=7)
    for _ in range(2):
        with sending(server.address, shared_memory=str(memory)) as sender:
            sender.send(*sent)
            sender.flush()
    status = client.status()
    assert (status.samples_accepted, status.samples_duplicate) == (10, 10)


def test_rings_are_bounded_and_offered_ones_give_way(trainer: Trainer, memory: Path) -> None:
    server, client = trainer
    offers = [client.open().shared_memory for _ in range(5)]
    assert {path.name for path in memory.iterdir()} == {offer.name for offer in offers[2:]}
    for offer in offers:
        assert (offer.bytes, len(offer.nonce)) == (RING + 4096, 16)
        assert offer.absent_because == ""
    for path in memory.iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
    assert pb.TRANSPORT_SHARED_MEMORY == 2
    del server
