"""Samples over the wire: every bad one is refused by name and the stream goes on."""

from __future__ import annotations

import zlib
from collections.abc import Callable

import grpc
import pytest
import torch

from draft_trainer.ingest.teacher import TeacherCheck
from draft_trainer.server.app import TrainerServer
from slipstream.sample import Sample
from slipstream.v1 import draft_trainer_pb2 as pb
from tests.draft_trainer.rig import Client, rollouts
from tests.draft_trainer.synthetic import HIDDEN, VOCAB

T = 16
Mutation = Callable[[Sample], Sample]


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def changed(**tensors: torch.Tensor) -> Mutation:
    """Other tensors of the same shapes."""
    return lambda sample: sample.repacked(**tensors)


def poisoned(name: str, value: float) -> Mutation:
    def mutate(sample: Sample) -> Sample:
        getattr(sample, name).view(-1)[3] = value
        return sample

    return mutate


def field(path: str, value: object) -> Mutation:
    """Another value in the header."""

    def mutate(sample: Sample) -> Sample:
        *owners, name = path.split(".")
        message = sample.header
        for owner in owners:
            message = getattr(message, owner)
        setattr(message, name, value)
        return sample

    return mutate


def biased(bias: dict[int, float]) -> Mutation:
    def mutate(sample: Sample) -> Sample:
        sample.header.sampling.logit_bias.update(bias)
        return sample

    return mutate


def mask_byte(sample: Sample) -> Sample:
    sample.block[sample.layout.mask_at + 5] = 2
    return sample


ZERO = torch.zeros(T)
STEPS = torch.arange(T, dtype=torch.int32)
NONE = torch.zeros(T, dtype=torch.bool)

BAD: list[tuple[str, Mutation, str, str]] = [
    ("sample_id", field("sample_id", ""), "0 characters", "256"),
    ("sample_id", field("sample_id", "x" * 257), "257 characters", "256"),
    ("temperature", field("temperature", 0.0), "0.0", "> 0"),
    ("temperature", field("temperature", float("nan")), "nan", "> 0"),
    ("prompt", field("prompt", b"short"), "5 bytes", "16"),
    ("rollout_policy_version", field("rollout_policy_version", 2), "2", "at most 1"),
    ("sampling.top_p", field("sampling.top_p", 1.5), "1.5", "1]"),
    ("sampling.frequency_penalty", field("sampling.frequency_penalty", float("nan")), "nan", "2]"),
    ("sampling.logit_bias", biased({VOCAB: 1.0}), "1 of them", f"below {VOCAB}"),
    ("sampling.logit_bias", biased({1: float("inf")}), "1 of them", "finite"),
    ("packed.hidden_size", field("packed.hidden_size", HIDDEN + 1), f"{HIDDEN + 1}", f"{HIDDEN}"),
    ("token_ids", changed(token_ids=STEPS + VOCAB - 8), f"{VOCAB + 7}", f"{VOCAB - 1}"),
    ("token_ids", changed(token_ids=STEPS - 1), "-1", f"0 to {VOCAB - 1}"),
    ("positions", changed(positions=STEPS * 2), "2 after 0 at token 1", "rise by 1"),
    ("positions", changed(positions=STEPS - 1), "-1", "2^31"),
    (
        "segment_ids",
        changed(segment_ids=ints(*([0] * 4), *([1] * 4), *([0] * 8))),
        "segment 0 in separate runs",
        "one contiguous run",
    ),
    ("loss_mask", mask_byte, "a byte above 1", "0 or 1"),
    ("loss_mask", changed(loss_mask=NONE), "no true", "target"),
    ("loss_mask", changed(loss_mask=STEPS < 2), "no true", "at least one target"),
    ("sampled_logprobs", changed(sampled_logprobs=ZERO + 0.5), "0.5", "at most 0"),
    ("sampled_logprobs", poisoned("sampled_logprobs", float("-inf")), "1 of 16 values", "finite"),
]


@pytest.mark.parametrize(("field", "mutate", "found", "expected"), BAD)
def test_bad_sample_is_refused_and_stream_goes_on(
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
    good = good.repacked(sample_id=request.node.name)
    bad = mutate(bad)
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


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_overflow_of_states_names_the_type_they_were_sent_in(
    trainer: tuple[TrainerServer, Client], dtype: torch.dtype
) -> None:
    """A policy in bfloat16 is right where its states are beyond float16."""
    _, client = trainer
    sample = rollouts(1, seed=int(dtype == torch.float16) + 900)[0].repacked(dtype=dtype)
    sample.aux.view(-1)[3] = float("inf")
    (ack,) = client.send(sample)
    assert ack.refusal.field == "aux_hidden_states" and "1 of " in ack.refusal.found
    assert ('states_dtype = "bfloat16"' in ack.refusal.next_step) == (dtype == torch.float16)


def test_refused_sample_id_may_be_sent_again(
    trainer: tuple[TrainerServer, Client],
) -> None:
    _, client = trainer
    (good,) = rollouts(1, seed=31)
    acks = client.send(good.repacked(temperature=-1.0), good, good)
    assert [ack.status for ack in acks] == [
        pb.ACK_STATUS_REFUSED,
        pb.ACK_STATUS_ACCEPTED,
        pb.ACK_STATUS_DUPLICATE,
    ]


def test_ingest_error_frees_the_reserved_space(
    trainer: tuple[TrainerServer, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also while something keeps the error, as a future does that is part of a cycle."""
    server, client = trainer
    (sample,) = rollouts(1, seed=32)
    kept: list[BaseException] = []

    def fail(*_: object) -> None:
        try:
            raise ValueError("the first")
        except ValueError:
            kept.append(RuntimeError("nobody thought of it"))
            raise kept[-1]  # noqa: B904

    before = server._store.credit_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(TeacherCheck, "check", fail)
        with pytest.raises(grpc.RpcError, match="nobody thought of it"):
            client.send(sample)
    assert kept and server._store.credit_bytes() == before
    assert client.send(sample)[0].status == pb.ACK_STATUS_ACCEPTED


def test_every_states_dtype_is_accepted(trainer: tuple[TrainerServer, Client]) -> None:
    _, client = trainer
    for number, dtype in enumerate((torch.bfloat16, torch.float16, torch.float32)):
        (sample,) = rollouts(1, seed=40 + number)
        assert client.send(sample.repacked(dtype=dtype))[0].status == pb.ACK_STATUS_ACCEPTED
