"""A service reached within the process answers as it does through gRPC: every case runs on both."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

import grpc
import pytest

from slipstream.client import open_channel
from slipstream.errors import RefusedError, StatusCode, refused_from
from slipstream.guard import Guard, Limit
from slipstream.inprocess import AHEAD
from slipstream.security import open_to_all
from slipstream.serving import GrpcServer, LoopThread, serving
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import draft_trainer_pb2_grpc as pb_grpc

# ruff: noqa: N802

SERVICE = "slipstream.v1.DraftTrainer"
LONG = 30.0
REFUSAL = RefusedError("a field", "this", "that", "do something", StatusCode.FAILED_PRECONDITION)


class Service(pb_grpc.DraftTrainerServicer):
    """Methods of the trainer's service with a behavior of the test's."""

    def __init__(self) -> None:
        self.answered = 0
        self.names: list[str] = []
        self.begun, self.cancelled = threading.Event(), threading.Event()

    async def PrepareSync(self, request: pb.PrepareSyncRequest, context: object) -> object:
        return pb.PrepareSyncResponse(draft_version=request.policy_version)

    async def OpenRun(self, request: pb.OpenRunRequest, context: object) -> object:
        if request.run_id == "refused":
            raise REFUSAL
        if request.run_id == "bug":
            raise ZeroDivisionError("a mistake")
        self.begun.set()
        try:
            await asyncio.sleep(10 * LONG)
        finally:
            self.cancelled.set()

    async def AnnouncePolicy(self, requests: AsyncIterator[object], context: object) -> object:
        self.names = [request.header.session_id async for request in requests]  # type: ignore[attr-defined]
        return pb.AnnouncePolicyResponse()

    async def WatchStatus(
        self, request: pb.WatchStatusRequest, context: object
    ) -> AsyncIterator[pb.TrainerStatus]:
        for number in range(1000):
            self.answered = number
            yield pb.TrainerStatus(train_steps=number)

    async def StreamStates(
        self, requests: AsyncIterator[pb.StreamStatesRequest], context: object
    ) -> AsyncIterator[pb.StreamStatesResponse]:
        async for request in requests:
            if request.header.session_id == "end":
                return
            yield pb.StreamStatesResponse(
                credit=pb.Credit(inline_because=request.header.session_id)
            )


@dataclass
class Running:
    """A service that takes calls, and a channel to it."""

    in_process: bool
    loop: LoopThread = field(default_factory=lambda: LoopThread("service"))
    service: Service = field(default_factory=Service)

    def __post_init__(self) -> None:
        self.address = self.loop.run(self._start())
        self.channel = open_channel(self.address)
        self.stub = pb_grpc.DraftTrainerStub(self.channel)

    async def _start(self) -> str:
        limits = {f"/{SERVICE}/OpenRun": Limit(2)}
        how = {"message_seconds": LONG, "calls_per_second": 1e6}
        guard = Guard(open_to_all(), limits, Limit(64), **how)
        self.server = GrpcServer(guard, open_to_all(), SERVICE, in_process=self.in_process)
        pb_grpc.add_DraftTrainerServicer_to_server(self.service, self.server.grpc)
        address = self.server.bind("127.0.0.1", 0, "server.port")
        await self.server.grpc.start()
        self.server.set_serving(True)
        return address

    def stop(self) -> None:
        self.loop.run(self.server.stop(0.0))


@pytest.fixture(params=[False, True], ids=["grpc", "in-process"])
def running(request: pytest.FixtureRequest) -> Iterator[Running]:
    found = Running(request.param)
    yield found
    found.channel.close()
    found.stop()
    assert found.loop.close(LONG)


def failure(call: object) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as caught:
        call()  # type: ignore[operator]
    return caught.value


def opened(name: str) -> pb.OpenRunRequest:
    return pb.OpenRunRequest(run_id=name)


def states(*names: str) -> Iterator[pb.StreamStatesRequest]:
    return (pb.StreamStatesRequest(header=pb.StreamHeader(session_id=name)) for name in names)


def test_one_request_has_one_answer(running: Running) -> None:
    answer = running.stub.PrepareSync(pb.PrepareSyncRequest(policy_version=7), timeout=LONG)
    assert answer == pb.PrepareSyncResponse(draft_version=7)
    assert serving(running.channel, SERVICE)


def test_a_refusal_arrives_whole(running: Running) -> None:
    error = failure(lambda: running.stub.OpenRun(opened("refused"), timeout=LONG))
    refusal = refused_from(error)
    assert refusal is not None and str(refusal) == str(REFUSAL)
    assert refusal.code is error.code() is StatusCode.FAILED_PRECONDITION  # type: ignore[attr-defined]
    assert error.details() == str(REFUSAL)  # type: ignore[attr-defined]


def test_a_mistake_of_the_service_is_a_status(
    running: Running, caplog: pytest.LogCaptureFixture
) -> None:
    error = failure(lambda: running.stub.OpenRun(opened("bug"), timeout=LONG))
    assert error.code() is StatusCode.UNKNOWN  # type: ignore[attr-defined]
    assert "a mistake" in error.details()  # type: ignore[attr-defined]
    assert "ZeroDivisionError" in caplog.text


def test_a_deadline_ends_the_call_on_both_sides(running: Running) -> None:
    for seconds in (0.2, 2.0, 20.0):
        error = failure(lambda: running.stub.OpenRun(opened("waits"), timeout=seconds))  # noqa: B023
        assert error.code() is StatusCode.DEADLINE_EXCEEDED  # type: ignore[attr-defined]
        # On a busy machine it may pass before the call has arrived.
        if running.service.begun.is_set():
            break
    assert running.service.cancelled.wait(LONG)


def test_a_call_that_is_begun_ends_later(running: Running) -> None:
    waits = running.stub.OpenRun.future(opened("waits"), timeout=10 * LONG)
    done = running.stub.PrepareSync.future(pb.PrepareSyncRequest(policy_version=3), timeout=LONG)
    assert done.result() == pb.PrepareSyncResponse(draft_version=3) and done.done()
    assert done.code() is StatusCode.OK and not waits.done()
    waits.cancel()
    assert waits.code() is StatusCode.CANCELLED and waits.done()


def test_what_the_guard_refuses_is_refused(running: Running) -> None:
    waits = [running.stub.OpenRun.future(opened("waits"), timeout=10 * LONG) for _ in range(3)]
    codes = queue.SimpleQueue[grpc.StatusCode]()
    for call in waits:
        # False: it has ended already.
        if not call.add_callback(lambda call=call: codes.put(call.code())):
            codes.put(call.code())
    assert codes.get(timeout=LONG) is StatusCode.RESOURCE_EXHAUSTED
    large = opened("x" * (1 << 20))
    error = refused_from(failure(lambda: running.stub.OpenRun(large, timeout=LONG)))
    assert error is not None and error.field == "OpenRun request"
    unknown = running.channel.unary_unary(f"/{SERVICE}/Nothing")
    error = failure(lambda: unknown(b"", timeout=LONG))
    assert error.code() is StatusCode.UNIMPLEMENTED  # type: ignore[attr-defined]


def test_many_requests_have_one_answer(running: Running) -> None:
    requests = (
        pb.AnnouncePolicyRequest(header=pb.AnnouncePolicyHeader(session_id=str(i)))
        for i in range(300)
    )
    assert running.stub.AnnouncePolicy(requests, timeout=LONG) == pb.AnnouncePolicyResponse()
    assert running.service.names == [str(i) for i in range(300)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_requests_that_fail_end_the_call(running: Running) -> None:
    def requests() -> Iterator[pb.AnnouncePolicyRequest]:
        yield pb.AnnouncePolicyRequest()
        raise OSError("the disk")

    call = running.stub.AnnouncePolicy
    ended = {StatusCode.UNKNOWN, StatusCode.CANCELLED}
    assert failure(lambda: call(requests(), timeout=LONG)).code() in ended  # type: ignore[attr-defined]


def test_one_request_has_many_answers_in_order(running: Running) -> None:
    answers = running.stub.WatchStatus(pb.WatchStatusRequest(), timeout=LONG)
    assert [answer.train_steps for answer in answers] == [*range(1000)]
    assert answers.code() is StatusCode.OK


def test_a_slow_reader_holds_the_service_back() -> None:
    running = Running(in_process=True)
    answers = running.stub.WatchStatus(pb.WatchStatusRequest(), timeout=LONG)
    for number in range(100):
        assert next(answers).train_steps == number
        # It has made those that were read, those that are unread, and the one that waits.
        assert running.service.answered <= number + AHEAD + 1
    answers.cancel()
    assert answers.code() is StatusCode.CANCELLED
    running.stop()
    assert running.loop.close(LONG)


def test_requests_and_answers_alternate(running: Running) -> None:
    given: queue.SimpleQueue[pb.StreamStatesRequest | None] = queue.SimpleQueue()
    call = running.stub.StreamStates(iter(given.get, None), timeout=LONG)
    for name in ("a", "b", "c"):
        given.put(next(states(name)))
        assert next(call).credit.inline_because == name
    given.put(next(states("end")))
    assert [*call] == [] and call.code() is StatusCode.OK
    given.put(None)


@pytest.mark.parametrize("how", ["cancel", "close", "stop"])
def test_an_open_stream_ends_with_its_call_its_channel_and_its_server(
    running: Running, how: str
) -> None:
    given: queue.SimpleQueue[pb.StreamStatesRequest | None] = queue.SimpleQueue()
    call = running.stub.StreamStates(iter(given.get, None))
    given.put(next(states("a")))
    next(call)
    if how == "cancel":
        call.cancel()
    elif how == "close":
        running.channel.close()
    else:
        running.stop()
    failure(lambda: next(call))
    given.put(None)
    codes = {StatusCode.CANCELLED}
    # gRPC's server cuts the connection where one in the process tells the call.
    assert call.code() in (codes | {StatusCode.UNAVAILABLE} if how == "stop" else codes)
    if how == "close":
        with pytest.raises(ValueError, match="closed channel"):
            running.stub.PrepareSync(pb.PrepareSyncRequest(), timeout=LONG)
    if how == "stop":
        error = failure(lambda: running.stub.PrepareSync(pb.PrepareSyncRequest(), timeout=LONG))
        assert error.code() is StatusCode.UNAVAILABLE  # type: ignore[attr-defined]


def test_calls_while_the_server_stops_all_end() -> None:
    running = Running(in_process=True)
    codes: list[grpc.StatusCode] = []

    def ask() -> None:
        code = StatusCode.OK
        while code is StatusCode.OK:
            call = running.stub.PrepareSync.future(pb.PrepareSyncRequest())
            code = call.code()
            codes.append(code)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    running.stop()
    for thread in threads:
        thread.join(LONG)
        assert not thread.is_alive()
    assert running.loop.close(LONG)
    assert set(codes) - {StatusCode.OK} <= {StatusCode.UNAVAILABLE, StatusCode.CANCELLED}


def test_an_address_without_a_server_is_unavailable() -> None:
    with open_channel("in-process:999999") as channel:
        error = failure(lambda: serving(channel))
    assert error.code() is StatusCode.UNAVAILABLE  # type: ignore[attr-defined]
