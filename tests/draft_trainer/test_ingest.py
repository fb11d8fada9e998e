"""Samples over the wire: every bad one is refused by name and the stream goes on."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator

import pytest
import torch

from draft_trainer.server.app import TrainerServer
from slipstream.tensors import encode
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import tensor_pb2
from tests.draft_trainer.rig import Client, make_config, rollouts, running
from tests.draft_trainer.synthetic import HIDDEN, VOCAB

T = 16
Mutation = Callable[[pb.VerifierStates], object]


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[TrainerServer, Client]]:
    config = make_config(
        tmp_path_factory.mktemp("ingest"),
        server={"max_tokens_per_sample": 32, "receive_window_bytes": 1 << 17},
    )
    with running(config, train=False) as (server, client):
        client.open()
        client.announce(1)
        yield server, client


def replace(field: str, tensor: torch.Tensor) -> Mutation:
    return lambda message: getattr(message, field).CopyFrom(encode(tensor))


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def poisoned(field: str, shape: tuple[int, ...], value: float) -> Mutation:
    tensor = torch.zeros(shape)
    tensor.view(-1)[3] = value
    return replace(field, tensor)


def flip_a_byte(message: pb.VerifierStates) -> None:
    data = bytearray(message.aux_hidden_states.data)
    data[7] ^= 1
    message.aux_hidden_states.data = bytes(data)


def set_field(field: str, value: object) -> Mutation:
    return lambda message: setattr(message, field, value)


def layers(ids: list[int], convention: int) -> Mutation:
    message = tensor_pb2.AuxLayers(ids=ids, convention=convention)  # type: ignore[arg-type]
    return lambda states: states.aux_layers.CopyFrom(message)


AFTER = tensor_pb2.LAYER_ID_CONVENTION_AFTER_LAYERS
OUTPUT = tensor_pb2.LAYER_ID_CONVENTION_LAYER_OUTPUT
ZERO = torch.zeros(T)
STEPS = torch.arange(T, dtype=torch.int32)

BAD: list[tuple[str, Mutation, str, str]] = [
    ("sample_id", set_field("sample_id", ""), "0 characters", "256"),
    ("sample_id", set_field("sample_id", "x" * 257), "257 characters", "256"),
    ("policy_version", set_field("policy_version", 2), "2", "[1]"),
    ("temperature", set_field("temperature", 0.0), "0.0", "> 0"),
    ("temperature", set_field("temperature", float("nan")), "nan", "> 0"),
    ("aux_layers.convention", layers([2, 4, 5], 0), "0", "AFTER_LAYERS"),
    ("aux_layers", layers([1, 4, 5], AFTER), "[1, 4, 5]", "[2, 4, 5]"),
    ("aux_layers", layers([2, 4, 5], OUTPUT), "[3, 5, 6]", "[2, 4, 5]"),
    ("aux_layers.ids", layers([4, 2, 5], AFTER), "[4, 2, 5]", "ascending"),
    ("token_ids.dtype", replace("token_ids", STEPS.long()), "INT64", "INT32"),
    ("token_ids.shape", replace("token_ids", STEPS[None]), "[1, 16]", "['T']"),
    ("token_ids", replace("token_ids", ints(1, 2)), "2 tokens", "3 to 32"),
    ("token_ids", replace("token_ids", torch.zeros(33).int()), "33 tokens", "3 to 32"),
    ("token_ids", replace("token_ids", STEPS + VOCAB - 8), f"{VOCAB + 7}", f"{VOCAB - 1}"),
    ("token_ids", replace("token_ids", STEPS - 1), "-1", f"0 to {VOCAB - 1}"),
    ("positions.shape", replace("positions", STEPS[:-1]), "[15]", "[16]"),
    ("positions", replace("positions", STEPS * 2), "2 after 0 at token 1", "rise by 1"),
    ("positions", replace("positions", STEPS - 1), "-1", "2^31"),
    ("segment_ids.shape", replace("segment_ids", STEPS[:4]), "[4]", "[16]"),
    (
        "segment_ids",
        replace("segment_ids", ints(*([0] * 4), *([1] * 4), *([0] * 8))),
        "comes back",
        "side by side",
    ),
    ("loss_mask.dtype", replace("loss_mask", STEPS), "INT32", "BOOL"),
    ("loss_mask", replace("loss_mask", torch.zeros(T, dtype=torch.bool)), "no true", "target"),
    ("loss_mask", replace("loss_mask", STEPS < 2), "no true", "at least one target"),
    ("aux_hidden_states.dtype", replace("aux_hidden_states", STEPS), "INT32", "BFLOAT16"),
    (
        "aux_hidden_states.shape",
        replace("aux_hidden_states", torch.zeros(T, 2 * HIDDEN)),
        f"[16, {2 * HIDDEN}]",
        f"[16, {3 * HIDDEN}]",
    ),
    (
        "aux_hidden_states",
        poisoned("aux_hidden_states", (T, 3 * HIDDEN), float("nan")),
        "1 of 768 values are not finite",
        "finite",
    ),
    ("aux_hidden_states.crc32", flip_a_byte, "0x", "0x"),
    (
        "final_hidden_state.shape",
        replace("final_hidden_state", torch.zeros(T, HIDDEN + 1)),
        f"[16, {HIDDEN + 1}]",
        f"[16, {HIDDEN}]",
    ),
    (
        "final_hidden_state.dtype",
        replace("final_hidden_state", torch.zeros(T, HIDDEN, dtype=torch.bfloat16)),
        "BFLOAT16",
        "FLOAT32",
    ),
    (
        "final_hidden_state",
        poisoned("final_hidden_state", (T, HIDDEN), float("inf")),
        "1 of 256 values are not finite",
        "finite",
    ),
    ("sampled_logprobs", replace("sampled_logprobs", ZERO + 0.5), "0.5", "at most 0"),
    (
        "sampled_logprobs",
        poisoned("sampled_logprobs", (T,), float("-inf")),
        "1 of 16 values are not finite",
        "finite",
    ),
    ("sampled_logits.shape", replace("sampled_logits", ZERO[:3]), "[3]", "[16]"),
    ("sampled_logits", poisoned("sampled_logits", (T,), float("nan")), "1 of 16", "finite"),
]


@pytest.mark.parametrize(("field", "mutate", "found", "expected"), BAD)
def test_bad_sample_is_refused_by_name_and_the_stream_goes_on(
    trainer: tuple[TrainerServer, Client],
    request: pytest.FixtureRequest,
    field: str,
    mutate: Mutation,
    found: str,
    expected: str,
) -> None:
    _, client = trainer
    bad, good = rollouts(2, seed=zlib.crc32(request.node.name.encode()))
    # The first rollout of a seed has 16 tokens.
    good.sample_id = request.node.name
    mutate(bad)
    before = client.status()
    refused, accepted = client.send(bad, good)
    assert refused.status == pb.ACK_STATUS_REFUSED
    assert refused.sample_id == bad.sample_id
    assert refused.refusal.field == field
    assert found in refused.refusal.found
    assert expected in refused.refusal.expected
    assert refused.refusal.next_step
    assert accepted.status == pb.ACK_STATUS_ACCEPTED
    after = client.status()
    assert after.samples_refused == before.samples_refused + 1
    assert after.samples_accepted == before.samples_accepted + 1


def test_refused_id_may_be_sent_again_once_it_is_right(
    trainer: tuple[TrainerServer, Client],
) -> None:
    _, client = trainer
    (good,) = rollouts(1, seed=31)
    bad = pb.VerifierStates()
    bad.CopyFrom(good)
    bad.temperature = -1.0
    acks = client.send(bad, good, good)
    assert [ack.status for ack in acks] == [
        pb.ACK_STATUS_REFUSED,
        pb.ACK_STATUS_ACCEPTED,
        pb.ACK_STATUS_DUPLICATE,
    ]


def test_every_state_dtype_is_taken(trainer: tuple[TrainerServer, Client]) -> None:
    _, client = trainer
    for number, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
        (message,) = rollouts(1, seed=40 + number)
        message.aux_hidden_states.CopyFrom(encode(torch.ones(T, 3 * HIDDEN, dtype=dtype)))
        message.final_hidden_state.CopyFrom(encode(torch.ones(T, HIDDEN, dtype=dtype)))
        assert client.send(message)[0].status == pb.ACK_STATUS_ACCEPTED
