# ruff: noqa: N802
"""A refusal is the same four texts on both ends of a real gRPC call."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest

from slipstream.client import open_channel
from slipstream.errors import RefusedError, abort_with, refused_from
from slipstream.serving import SERVER_OPTIONS
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import draft_trainer_pb2_grpc as pb_grpc

REFUSAL = RefusedError(
    "policy.hidden_size",
    4096,
    "5120 (the draft's, naïve ≠)",
    "start the trainer with the right draft",
    grpc.StatusCode.FAILED_PRECONDITION,
)


class Refuser(pb_grpc.DraftTrainerServicer):
    def OpenRun(self, request, context):  # type: ignore[no-untyped-def]
        if request.run_id == "crash":
            raise KeyError("not a refusal")
        abort_with(REFUSAL, context)

    def StreamStates(self, requests, context):  # type: ignore[no-untyped-def]
        yield pb.StreamStatesResponse(credit=pb.Credit(bytes=1))
        abort_with(REFUSAL, context)


@pytest.fixture
def stub() -> Iterator[pb_grpc.DraftTrainerStub]:
    server = grpc.server(futures.ThreadPoolExecutor(2), options=SERVER_OPTIONS)
    pb_grpc.add_DraftTrainerServicer_to_server(Refuser(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    with open_channel(f"127.0.0.1:{port}") as channel:
        yield pb_grpc.DraftTrainerStub(channel)
    server.stop(None).wait(10.0)


def check(refusal: RefusedError | None) -> None:
    assert refusal is not None
    names = ("field", "found", "expected", "next_step", "code")
    assert all(getattr(refusal, name) == getattr(REFUSAL, name) for name in names)
    assert str(refusal) == str(REFUSAL)


def test_through_a_unary_call(stub: pb_grpc.DraftTrainerStub) -> None:
    with pytest.raises(grpc.RpcError) as failed:
        stub.OpenRun(pb.OpenRunRequest(run_id="r"), timeout=10.0)
    assert failed.value.details() == str(REFUSAL)
    check(refused_from(failed.value))


def test_through_a_stream_after_its_first_answer(stub: pb_grpc.DraftTrainerStub) -> None:
    responses = stub.StreamStates(iter([]), timeout=10.0)
    assert next(responses).credit.bytes == 1
    with pytest.raises(grpc.RpcError) as failed:
        next(responses)
    check(refused_from(failed.value))


async def _aio_refusal(port: int) -> RefusedError | None:
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            await pb_grpc.DraftTrainerStub(channel).OpenRun(
                pb.OpenRunRequest(run_id="r"), timeout=10.0
            )
        except grpc.RpcError as error:
            return refused_from(error)
    return None


def test_through_an_asyncio_client() -> None:
    import asyncio

    server = grpc.server(futures.ThreadPoolExecutor(2), options=SERVER_OPTIONS)
    pb_grpc.add_DraftTrainerServicer_to_server(Refuser(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    check(asyncio.run(_aio_refusal(port)))
    server.stop(None).wait(10.0)


def test_other_failures_are_not_refusals(stub: pb_grpc.DraftTrainerStub) -> None:
    with pytest.raises(grpc.RpcError) as failed:
        stub.OpenRun(pb.OpenRunRequest(run_id="crash"), timeout=10.0)
    assert failed.value.code() == grpc.StatusCode.UNKNOWN
    assert refused_from(failed.value) is None
    with open_channel("127.0.0.1:1") as channel, pytest.raises(grpc.RpcError) as absent:
        pb_grpc.DraftTrainerStub(channel).OpenRun(pb.OpenRunRequest(), timeout=5.0)
    assert refused_from(absent.value) is None


def test_as_a_message_and_across_a_process_boundary() -> None:
    check(RefusedError.from_proto(REFUSAL.to_proto(), REFUSAL.code))
    check(pickle.loads(pickle.dumps(REFUSAL)))  # noqa: S301 (what vLLM's worker RPC does)
