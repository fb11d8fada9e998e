"""Round trips by both transports, and everything that makes one of them fall back or refuse."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import torch

from draft_trainer.server import stream
from draft_trainer.server.app import TrainerServer
from draft_trainer.server.stream import StateStream
from policy_bridge.outbox import file_bytes
from slipstream import tensors as framing
from slipstream.client import MAX_MESSAGE_BYTES
from slipstream.shm import HEADER_BYTES, SharedFile
from slipstream.tensors import Bytes
from tests.draft_trainer.rig import Client, feeding, make_config
from tests.draft_trainer.synthetic import VOCAB, Policy
from tests.waiting import until

from .rig import Sender, assert_same, deliver, kept, samples, sending


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    """A directory that stands for /dev/shm."""
    folder = tmp_path / "shm"
    folder.mkdir()
    return folder


@pytest.fixture
def trainer(tmp_path: Path, memory: Path) -> Iterator[tuple[TrainerServer, Client]]:
    config = make_config(tmp_path, server={"shared_memory": str(memory), "max_streams": 3})
    with feeding(config, train=False) as (server, client):
        yield server, client
    assert list(memory.iterdir()) == []


Trainer = tuple[TrainerServer, Client]


@pytest.mark.parametrize("transport", ["shared_memory", "grpc"])
def test_sample_longer_than_a_message_arrives(
    tmp_path: Path, memory: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "MAX_PIECES", 8)  # fewer than those of a sample
    tokens = MAX_MESSAGE_BYTES // 140
    config = make_config(
        tmp_path,
        server={"shared_memory": str(memory), "max_tokens_per_sample": tokens},
        replay={"capacity_bytes": 4 * MAX_MESSAGE_BYTES},
    )
    ids = torch.randint(VOCAB, (tokens,), generator=torch.Generator().manual_seed(0))
    long = Policy().sample(ids, "long")
    long = long.repacked(aux=long.aux.bfloat16(), final_hidden=long.final_hidden.bfloat16())
    assert long.nbytes > MAX_MESSAGE_BYTES
    settings = {"transport": transport, "shared_memory": str(memory)}
    with feeding(config, train=False) as (server, _):
        sent = deliver(server.address, [long, *samples(2)], outbox_bytes=1 << 28, **settings)
        assert (sent.accepted, sent.transport) == (3, transport)
        assert_same(kept(server)["long"], long)


@pytest.mark.parametrize("transport", ["auto", "shared_memory", "grpc"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_transport_keeps_bits_of_every_tensor(
    trainer: Trainer, memory: Path, transport: str, dtype: torch.dtype
) -> None:
    server, client = trainer
    sent = samples(100, seed=1, dtype=dtype)
    stats = deliver(server.address, sent, transport=transport, shared_memory=str(memory))
    assert (stats.accepted, stats.refused, stats.duplicate) == (100, 0, 0)
    assert stats.transport == ("grpc" if transport == "grpc" else "shared_memory")
    assert stats.transport_reason == ('transport = "grpc"' if transport == "grpc" else "")
    found = kept(server)
    assert len(found) == 100
    for sample in sent:
        assert_same(found[sample.sample_id], sample)
    assert client.status().samples_accepted == 100


@pytest.mark.parametrize("why", ["elsewhere", "nonce", "off", "not_there"])
def test_transport_falls_back_to_grpc_without_shared_memory(
    tmp_path: Path, memory: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    directory = {"off": "", "not_there": str(tmp_path / "nowhere")}.get(why, str(memory))
    config = make_config(tmp_path, server={"shared_memory": directory})
    seen = str(tmp_path) if why == "elsewhere" else str(memory)
    if why == "nonce":
        # Another file of the same name, as a container with a /dev/shm of its own might have.
        create = SharedFile.create.__func__  # type: ignore[attr-defined]

        def other(cls: type[SharedFile], folder: Path, nbytes: int) -> SharedFile:
            file = create(cls, folder, nbytes)
            file.nonce = bytes(16)
            return file

        monkeypatch.setattr(SharedFile, "create", classmethod(other))
    with feeding(config, train=False) as (server, _):
        stats = deliver(server.address, samples(5), shared_memory=seen)
        assert (stats.accepted, stats.transport) == (5, "grpc")
        wanted = {
            "elsewhere": "No such file",
            "nonce": "nonce",
            "off": "server.shared_memory",
            "not_there": "No such file",
        }
        assert wanted[why] in stats.transport_reason
    assert list(memory.iterdir()) == []


def is_open(sender: Sender, memory: Path) -> bool:
    """Return whether the trainer has opened the file that blocks are written to now."""
    return sender.outbox._blocks.file.name != "" and list(memory.iterdir()) == []


def cut(sender: Sender) -> None:
    """Truncate the file that blocks are written to now."""
    os.ftruncate(sender.outbox._blocks.file._descriptor, HEADER_BYTES)


def test_file_truncated_between_samples_loses_none(trainer: Trainer, memory: Path) -> None:
    server, client = trainer
    sent = samples(40, seed=2)
    with sending(server.address, shared_memory=str(memory)) as sender:
        sender.send(*sent[:20])
        sender.flush()
        assert sender.stats().transport == "shared_memory"
        cut(sender)
        sender.send(*sent[20:])
        sender.flush()
        stats = sender.stats()
        assert (stats.accepted, stats.refused, stats.shed) == (40, 0, {})
        assert (stats.connects, stats.transport) == (1, "grpc")
        assert "as it was made" in stats.transport_reason
    found = kept(server)
    for sample in sent:
        assert_same(found[sample.sample_id], sample)
    assert client.status().samples_refused == 0


def test_grown_outbox_has_larger_file_with_next_stream(trainer: Trainer, memory: Path) -> None:
    server, _ = trainer
    sent = samples(40, seed=4)
    with sending(server.address, shared_memory=str(memory), outbox_bytes=1 << 20) as sender:
        sender.send(*sent[:20])
        sender.flush()
        assert sender.outbox._blocks.file.nbytes == file_bytes(1 << 20)
        sender.outbox.grow(1 << 22)
        until(lambda: not sender.outbox.outgrown and is_open(sender, memory))
        assert sender.outbox._blocks.file.nbytes == file_bytes(1 << 22)
        sender.send(*sent[20:])
        sender.flush()
        stats = sender.stats()
        assert (stats.accepted, stats.refused, stats.shed) == (40, 0, {})
        assert (stats.connects, stats.transport, stats.last_error) == (2, "shared_memory", "")
    found = kept(server)
    for sample in sent:
        assert_same(found[sample.sample_id], sample)


def test_file_truncated_during_read_loses_its_blocks_only(
    trainer: Trainer, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = trainer
    sent = samples(20, seed=3)
    read, reads = SharedFile.read_into, []

    def cut_then_read(self: SharedFile, offset: int, block: Bytes) -> None:
        reads.append(self)
        if len(reads) == 5:
            # The bridge has looked, and written; the trainer has looked and reads.
            cut(sender)
        read(self, offset, block)

    monkeypatch.setattr(SharedFile, "read_into", cut_then_read)
    with sending(server.address, shared_memory=str(memory)) as sender:
        # The stream has its file by then: what is put before is moved, and read for that.
        sender.send(*samples(1, seed=9))
        sender.flush()
        reads.clear()
        with sender.outbox._changed:
            sender.send(*sent[:10])
        sender.flush()
        stats = sender.stats()
        assert (stats.accepted, stats.refused) == (5, 0)
        assert stats.shed == {"shared_memory_lost": 6}
        assert "ends at byte" in stats.transport_reason
        sender.send(*sent[10:])
        sender.flush()
        assert sender.stats().accepted == 15
    # The trainer refused them by name, and the bridge looked for them in its own file.
    refused = client.status().refused_by_field
    assert set(refused) == {"shared_memory"}


def test_corrupted_byte_refused_and_stream_continues(
    trainer: Trainer, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = trainer
    sent = samples(20, seed=3)
    write = SharedFile.write

    def corrupt(self: SharedFile, offset: int, block: Bytes) -> None:
        if self.name and block.tobytes() == sent[7].block.numpy().tobytes():
            block = block.copy()
            block[400] ^= 1
        write(self, offset, block)

    monkeypatch.setattr(SharedFile, "write", corrupt)
    with sending(server.address, shared_memory=str(memory)) as sender:
        # A sample that is written before that can go inline.
        until(lambda: is_open(sender, memory))
        sender.send(*sent)
        sender.flush()
        stats = sender.stats()
    assert (stats.accepted, stats.refused, stats.connects) == (19, 1, 1)
    assert dict(stats.refused_by_field) == {"packed.checksum": 1}
    assert kept(server).keys() == {s.sample_id for s in sent} - {sent[7].sample_id}
    assert client.status().samples_refused == 1


def test_block_sent_in_pieces_is_reassembled(
    trainer: Trainer, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = trainer
    sent = samples(12, seed=8)
    sent[7].final_hidden[3, 2] = float("nan")
    monkeypatch.setattr(framing, "PIECE_BYTES", 192)
    stats = deliver(server.address, sent, transport="grpc", shared_memory=str(memory))
    assert (stats.accepted, stats.connects) == (11, 1)
    assert dict(stats.refused_by_field) == {"final_hidden_state": 1}
    found = kept(server)
    for sample in sent[:7] + sent[8:]:
        assert_same(found[sample.sample_id], sample)


@pytest.mark.parametrize("transport", ["shared_memory", "grpc"])
def test_non_finite_states_refused_by_field(trainer: Trainer, memory: Path, transport: str) -> None:
    server, _ = trainer
    sent = samples(6, seed=4)
    for sample, value in zip(sent, (float("nan"), float("inf"), -float("inf")), strict=False):
        sample.final_hidden[3, 2] = value
    sent[3].aux[0, 0] = -float("nan")
    sent[4].sampled_logits[1] = float("nan")
    stats = deliver(server.address, sent, transport=transport, shared_memory=str(memory))
    assert stats.accepted == 1
    assert dict(stats.refused_by_field) == {
        "final_hidden_state": 3,
        "aux_hidden_states": 1,
        "sampled_logits": 1,
    }


def test_stream_ended_by_trainer_is_reported_and_reopened(
    trainer: Trainer, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, _ = trainer

    async def nothing(self: StateStream) -> AsyncIterator[object]:
        for response in ():
            yield response

    monkeypatch.setattr(StateStream, "responses", nothing)
    with sending(server.address, shared_memory=str(memory)) as sender:
        sender.send(*samples(3))
        until(lambda: "the trainer ended" in sender.stats().last_error)
        assert "StreamStates" in sender.stats().last_error
        monkeypatch.undo()
        sender.flush()
        assert sender.stats().accepted == 3
