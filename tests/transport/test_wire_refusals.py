"""Bad messages of the packed kind, batches, and another schema version; by name, at both ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from draft_trainer.server.app import TrainerServer
from policy_bridge.session import decode_session
from slipstream.errors import RefusedError
from slipstream.sample import Sample
from slipstream.shm import SharedFile
from slipstream.tensors import SCHEMA_VERSION
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import tensor_pb2
from tests.draft_trainer.rig import (
    DEADLINE,
    SPEC,
    Client,
    Stream,
    feeding,
    make_config,
    refusal,
    request_of,
)

from .rig import samples


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TrainerServer, Client]]:
    memory = tmp_path_factory.mktemp("memory")
    config = make_config(tmp_path_factory.mktemp("refusals"), server={"shared_memory": str(memory)})
    with feeding(config, train=False) as (server, client):
        yield server, client


def memory_of(server: TrainerServer) -> Path:
    """The directory of its clients' files."""
    return Path(server._config.server.shared_memory)


def request(*given: Sample, seed: int = 0) -> pb.StreamStatesRequest:
    """A batch whose blocks are in its payload."""
    made, payload = pb.StreamStatesRequest(), b""
    for sample in given or samples(3, seed):
        one = request_of(sample)
        one.batch.samples[0].packed.span.offset = len(payload)
        made.batch.MergeFrom(one.batch)
        payload += one.payload
    made.payload = payload
    return made


def answers(client: Client, *sent: pb.StreamStatesRequest) -> list[pb.Ack]:
    """The acknowledgements; credit comes back in full."""
    acks: list[pb.Ack] = []
    with Stream(client) as stream:
        expected = sum(len(each.batch.samples) for each in sent)
        for each in sent:
            stream.put(each)
        credit = 0
        while len(acks) < expected:
            response = next(stream.call)
            assert response.WhichOneof("kind") == "acks"
            acks += response.acks.acks
            credit += response.acks.credit_bytes
        assert credit == sum(each.ByteSize() for each in sent)
    return acks


def test_batch_samples_are_acknowledged_in_order(
    trainer: tuple[TrainerServer, Client],
) -> None:
    _, client = trainer
    first, second = request(seed=1), request(*samples(3, 1)[:1], *samples(2, 2))
    acks = answers(client, first, second)
    assert [ack.sample_id for ack in acks] == [
        sample.sample_id for each in (first, second) for sample in each.batch.samples
    ]
    accepted, duplicate = pb.ACK_STATUS_ACCEPTED, pb.ACK_STATUS_DUPLICATE
    assert [ack.status for ack in acks] == [accepted] * 3 + [duplicate] + [accepted] * 2


Damage = Callable[[pb.VerifierStates], object]


def damaged(field: str, value: object) -> Damage:
    def change(message: pb.VerifierStates) -> None:
        owner = message.packed
        *path, name = field.split(".")
        for part in path:
            owner = getattr(owner, part)
        setattr(owner, name, value)

    return change


BAD: list[tuple[Damage, str, str]] = [
    (damaged("tokens", 2), "packed.tokens", "3 to"),
    (damaged("tokens", 1 << 30), "packed.tokens", "3 to"),
    (damaged("tokens", 21), "packed.span.bytes", "for 21 tokens"),
    (damaged("states_dtype", tensor_pb2.DTYPE_INT32), "packed.states_dtype", "BFLOAT16"),
    (damaged("states_dtype", tensor_pb2.DTYPE_FLOAT32), "packed.span.bytes", "for 16 tokens"),
    (damaged("span.bytes", 64), "packed.span.bytes", "for 16 tokens"),
    (damaged("span.offset", 1 << 40), "packed.span", "within [0, "),
    (damaged("span.offset", (1 << 64) - 64), "packed.span", "within [0, "),
    (damaged("span.memory", 0), "packed.span.memory", "MEMORY_PAYLOAD"),
    (damaged("span.memory", 2), "packed.span.memory", "no file"),
    (damaged("checksum", 5), "packed.checksum", "0x"),
    (lambda m: m.aux_layers.append(7), "aux_layers", "[2, 4, 5]"),
    (lambda m: setattr(m, "policy_version", 9), "policy_version", "[1]"),
]


@pytest.mark.parametrize(("damage", "field", "expected"), BAD)
def test_bad_sample_header_refused_by_field_others_accepted(
    trainer: tuple[TrainerServer, Client],
    pytestconfig: pytest.Config,
    damage: Damage,
    field: str,
    expected: str,
) -> None:
    _, client = trainer
    seed = 100 + next(n for n, bad in enumerate(BAD) if bad[0] is damage)
    # The first rollout of a seed has 16 tokens.
    sent = request(seed=seed)
    damage(sent.batch.samples[0])
    refused, *others = answers(client, sent)
    assert refused.status == pb.ACK_STATUS_REFUSED
    assert refused.refusal.field == field
    assert expected in refused.refusal.expected
    assert refused.refusal.next_step
    assert [ack.status for ack in others] == [pb.ACK_STATUS_ACCEPTED] * 2


@pytest.mark.parametrize("offset", [0, 4032, (1 << 16) - 64, 1 << 40])
def test_span_outside_shared_file_refused(
    trainer: tuple[TrainerServer, Client], tmp_path: Path, offset: int
) -> None:
    server, client = trainer
    sent = request(seed=200 + offset % 97)
    span = sent.batch.samples[0].packed.span
    span.memory, span.offset = pb.MEMORY_FILE, offset
    client.open()
    file = SharedFile.create(memory_of(server), 1 << 16)
    named = pb.SharedMemory(name=file.name, bytes=file.nbytes, nonce=file.nonce)
    header = pb.StreamHeader(session_id=client.session_id, shared_memory=named)
    requests = [pb.StreamStatesRequest(header=header), sent]
    call = client.stub.StreamStates(iter(requests), timeout=DEADLINE)
    credit = next(call).credit
    assert credit.bytes > 0 and credit.inline_because == ""
    refused, *others = next(each.acks.acks for each in call if each.acks.acks)
    assert refused.refusal.field == "packed.span"
    assert "within [4096, 65536)" in refused.refusal.expected
    assert [ack.status for ack in others] == [pb.ACK_STATUS_ACCEPTED] * 2
    file.remove_name()


@pytest.mark.parametrize("version", [0, 1, SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
def test_client_of_other_schema_version_refused(
    trainer: tuple[TrainerServer, Client], version: int
) -> None:
    _, client = trainer
    opening = pb.OpenRunRequest(run_id="run", policy=SPEC, schema_version=version)
    error = refusal(lambda: client.stub.OpenRun(opening, timeout=DEADLINE))
    assert error.code is grpc.StatusCode.FAILED_PRECONDITION
    assert (error.field, error.found) == ("schema_version", f"{version or 1} (the client's)")
    assert error.expected == str(SCHEMA_VERSION)
    assert "same release" in error.next_step


@pytest.mark.parametrize("version", [0, 1, SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
def test_trainer_of_other_schema_version_refused(version: int) -> None:
    response = pb.OpenRunResponse(session_id="s", schema_version=version)
    with pytest.raises(RefusedError, match="same release") as refused:
        decode_session(response, None)  # type: ignore[arg-type]
    assert refused.value.found == f"{version or 1} (the trainer's)"
