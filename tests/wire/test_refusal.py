# ruff: noqa: N802
"""A refusal has the same texts and the same reason on both ends of a real gRPC call."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest
import torch

from slipstream.client import open_channel, stage
from slipstream.errors import (
    MAX_TEXT_BYTES,
    METADATA_KEY,
    RefusedError,
    abort_with,
    clean,
    failure_text,
    refused_from,
)
from slipstream.serving.server import SERVER_OPTIONS
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import draft_trainer_pb2_grpc as pb_grpc
from slipstream.v1 import release_pb2
from slipstream.v1 import rollout_server_pb2 as rollout_pb

REFUSAL = RefusedError(
    "policy.hidden_size",
    4096,
    "5120 (the draft's, naïve ≠)",
    "start the trainer with the right draft",
    grpc.StatusCode.FAILED_PRECONDITION,
    release_pb2.REFUSAL_REASON_SESSION,
)


HOSTILE = "\x1b[2Jwiped\n2026-01-01 INFO all is well\u202e" + "x" * 3000


class Refuser(pb_grpc.DraftTrainerServicer):
    def OpenRun(self, request, context):  # type: ignore[no-untyped-def]
        if request.run_id == "crash":
            raise KeyError("not a refusal")
        if request.run_id == "hostile":
            texts = dict.fromkeys(("field", "found", "expected", "next_step"), HOSTILE[:800])
            refusal = release_pb2.Refusal(**texts)
            context.set_trailing_metadata(((METADATA_KEY, refusal.SerializeToString()),))
            context.abort(grpc.StatusCode.ABORTED, HOSTILE)
        if request.run_id == "garbage":
            context.set_trailing_metadata(((METADATA_KEY, b"\xff\xff\xff"),))
            context.abort(grpc.StatusCode.ABORTED, HOSTILE)
        abort_with(REFUSAL, context)

    def StreamStates(self, requests, context):  # type: ignore[no-untyped-def]
        yield pb.StreamStatesResponse(credit=pb.Credit(bytes=1))
        abort_with(REFUSAL, context)


@pytest.fixture
def address() -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(2), options=SERVER_OPTIONS)
    pb_grpc.add_DraftTrainerServicer_to_server(Refuser(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait(10.0)


@pytest.fixture
def stub(address: str) -> Iterator[pb_grpc.DraftTrainerStub]:
    with open_channel(address) as channel:
        yield pb_grpc.DraftTrainerStub(channel)


def check(refusal: RefusedError | None) -> None:
    assert refusal is not None
    names = ("field", "found", "expected", "next_step", "code", "reason")
    assert all(getattr(refusal, name) == getattr(REFUSAL, name) for name in names)
    assert str(refusal) == str(REFUSAL)


def test_refusal_through_unary_call(stub: pb_grpc.DraftTrainerStub) -> None:
    with pytest.raises(grpc.RpcError) as failed:
        stub.OpenRun(pb.OpenRunRequest(run_id="r"), timeout=10.0)
    assert failed.value.details() == str(REFUSAL)
    check(refused_from(failed.value))


def test_refusal_through_stream_after_first_answer(stub: pb_grpc.DraftTrainerStub) -> None:
    responses = stub.StreamStates(iter([]), timeout=10.0)
    assert next(responses).credit.bytes == 1
    with pytest.raises(grpc.RpcError) as failed:
        next(responses)
    check(refused_from(failed.value))


def test_refusal_through_asyncio_client(address: str) -> None:
    async def refusal() -> RefusedError | None:
        async with grpc.aio.insecure_channel(address) as channel:
            with pytest.raises(grpc.RpcError) as failed:
                await pb_grpc.DraftTrainerStub(channel).OpenRun(
                    pb.OpenRunRequest(run_id="r"), timeout=10.0
                )
        return refused_from(failed.value)

    check(asyncio.run(refusal()))


def test_refusal_not_made_of_other_failures(stub: pb_grpc.DraftTrainerStub) -> None:
    with pytest.raises(grpc.RpcError) as failed:
        stub.OpenRun(pb.OpenRunRequest(run_id="crash"), timeout=10.0)
    assert failed.value.code() == grpc.StatusCode.UNKNOWN
    assert refused_from(failed.value) is None
    with open_channel("127.0.0.1:1") as channel, pytest.raises(grpc.RpcError) as absent:
        pb_grpc.DraftTrainerStub(channel).OpenRun(pb.OpenRunRequest(), timeout=5.0)
    assert refused_from(absent.value) is None


def test_refusal_as_message_and_pickled() -> None:
    check(RefusedError.from_proto(REFUSAL.to_proto(), REFUSAL.code))
    check(pickle.loads(pickle.dumps(REFUSAL)))  # noqa: S301 (what vLLM's worker RPC does)


def test_reason_of_a_later_version_is_none() -> None:
    message = REFUSAL.to_proto()
    message.MergeFromString(b"\x28\xe7\x07")  # Field 5, 999.
    assert message.reason == 999
    known = RefusedError.from_proto(message)
    assert known.reason == release_pb2.REFUSAL_REASON_UNSPECIFIED
    assert known.to_proto().field == REFUSAL.field


@pytest.mark.parametrize("text", [HOSTILE, "≠" * 3000, "\ud800", "", "plain"])
def test_clean_bounds_text_to_printable_line(text: str) -> None:
    kept = clean(text)
    assert kept.isprintable() and len(kept.encode()) <= MAX_TEXT_BYTES
    assert clean(kept) == kept
    assert text not in ("", "plain") or kept == text
    assert len(text) < 3000 or kept.endswith(f"({len(text)} characters)")


@pytest.mark.parametrize("run_id", ["hostile", "garbage"])
def test_hostile_server_text_is_one_printable_line(
    stub: pb_grpc.DraftTrainerStub, run_id: str
) -> None:
    with pytest.raises(grpc.RpcError) as failed:
        stub.OpenRun(pb.OpenRunRequest(run_id=run_id), timeout=10.0)
    refusal = refused_from(failed.value)
    assert (refusal is None) == (run_id == "garbage")
    told = failure_text(failed.value)
    assert told.isprintable() and len(told) < 5 * MAX_TEXT_BYTES
    assert "wiped" in told and "\\x1b" in told


def test_stage_server_asking_for_unoffered_tensor_refused() -> None:
    class Asks:
        def Stage(self, requests, timeout, metadata):  # type: ignore[no-untyped-def]
            next(requests)
            yield rollout_pb.StageResponse(needed=rollout_pb.StageNeeded(names=["w", HOSTILE]))

    offered = {"w": torch.zeros(2)}
    with pytest.raises(RefusedError) as caught:
        stage(Asks(), rollout_pb.StageHeader(stage_id="s"), offered, timeout=10.0)
    assert caught.value.field == "needed.names" and caught.value.found.isprintable()
