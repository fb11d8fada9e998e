"""The limits themselves, with a clock of the test's."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import threading
import weakref
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace

import grpc
import pytest
import torch
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from rollout_server.control.draft_folder import check_finite
from slipstream.errors import Refusals, RefusedError
from slipstream.serving import limits as guards
from slipstream.serving import server as serving
from slipstream.serving.limits import CallRate, Guard, Limit, Unreadable, reader
from slipstream.tensors import _varint, unframe
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import release_pb2
from tests.draft_trainer.rig import open_to_all

pytestmark = pytest.mark.contract("hostile peers")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def guard(message_seconds: float = 60.0) -> Guard:
    return Guard(
        open_to_all(),
        {},
        Limit(1),
        message_seconds=message_seconds,
        calls_per_second=1e6,
    )


def refused(call: Callable[[], object]) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        call()
    return caught.value


def test_call_rate_limits_each_connection_separately() -> None:
    clock = Clock()
    rate = CallRate(10, clock)
    for _ in range(20):
        rate.spend("a")
    error = refused(lambda: rate.spend("a"))
    assert error.field == "server.calls_per_s"
    assert error.reason == release_pb2.REFUSAL_REASON_LIMIT
    rate.spend("b")
    clock.now += 0.1
    rate.spend("a")
    refused(lambda: rate.spend("a"))
    clock.now += 1000.0
    for _ in range(20):
        rate.spend("a")
    refused(lambda: rate.spend("a"))


def test_guard_place_is_freed_after_call() -> None:
    calls = guard()
    with calls.place("/s/M", 1):
        error = refused(lambda: calls.place("/s/M", 1).__enter__())
        assert error.field == "server.max_calls"
        assert error.reason == release_pb2.REFUSAL_REASON_BUSY
        with calls.place("/s/N", 1):
            pass
    with calls.place("/s/M", 1):
        pass


def test_refusals_counted_and_logged_once_a_minute(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    calls = Refusals(clock)
    code = grpc.StatusCode.INVALID_ARGUMENT
    with caplog.at_level(logging.WARNING):
        for _ in range(10_000):
            calls.note("/s/M", code, "client's\nforged line")
        assert len(caplog.messages) == 1
        clock.now = 61.0
        calls.note("/s/M", code, "again")
    assert calls.by_method == {("M", "INVALID_ARGUMENT"): 10_001}
    assert caplog.messages[1] == "M refused (INVALID_ARGUMENT), 10000 since the last line: 'again'"
    assert "\n" not in caplog.messages[0]


def test_unparsable_request_is_refused() -> None:
    read = reader(pb.OpenRunRequest.FromString, "/s/OpenRun", 100)
    assert read(pb.OpenRunRequest(run_id="r").SerializeToString()).run_id == "r"
    for data, expected in ((b"\xff\xff", "protobuf"), (bytes(101), "at most 100 bytes")):
        unreadable = read(data)
        assert isinstance(unreadable, Unreadable)
        assert unreadable.refusal.field == "OpenRun request"
        assert expected in unreadable.refusal.expected


UNREAD = (b"\x78\x01", b"\x79" + bytes(8), b"\x7d" + bytes(4))
"""Field 15 as a number, and of eight and four bytes."""


def test_frame_with_too_many_fields_refused_unparsed() -> None:
    assert refused(lambda: unframe(b"\x12\x00" * 17)).field == "request"
    batch = b"\x0a\x00" * (1 << 20)
    field = b"\x1a" + _varint(len(batch)) + batch
    half = b"\x1a" + _varint(len(batch) // 2) + batch[: len(batch) // 2]
    # Behind fields that are not read, and in parts.
    for data in (field, *(other + field for other in UNREAD), 3 * half):
        assert refused(lambda data=data: unframe(data)).field == "batch"
    with pytest.raises(DecodeError):
        unframe(b"\x7b" + field)  # A group, which no revision has.


def test_oldest_silent_call_gives_way_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(guards, "MAX_SILENT_CALLS", 2)

    async def main() -> None:
        calls = guard()
        silent: list[asyncio.Queue[str]] = [asyncio.Queue() for _ in range(3)]
        outcomes: asyncio.Queue[tuple[int, str | None]] = asyncio.Queue()

        async def requests(number: int) -> AsyncIterator[str]:
            while True:
                yield await silent[number].get()

        async def wait(number: int) -> None:
            try:
                await outcomes.put((number, await calls.first(requests(number))))
            except RefusedError as error:
                await outcomes.put((number, error.field))

        tasks = []
        for number in range(3):
            tasks.append(asyncio.create_task(wait(number)))
            await asyncio.sleep(0)
        async with asyncio.timeout(10):
            assert await outcomes.get() == (0, "server.max_calls")
            silent[2].put_nowait("sound")
            assert await outcomes.get() == (2, "sound")
            silent[1].put_nowait("late")
            assert await outcomes.get() == (1, "late")
            await asyncio.gather(*tasks)

    asyncio.run(main())


class Context:
    """The context of a call that may be aborted once."""

    def auth_context(self) -> dict[str, object]:
        return {}

    def peer(self) -> str:
        return "a client"

    def set_trailing_metadata(self, metadata: object) -> None:
        pass

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise grpc.aio.AbortError(f"{code}: {details}")


@pytest.mark.parametrize("unreadable", [True, False])
def test_refused_request_is_freed_with_its_call(unreadable: bool) -> None:
    """Not with the next run of the cyclic collector: a request has up to 64 MiB."""

    class Request:
        pass

    def parse(_: bytes) -> Request:
        request = Request()
        kept.append(weakref.ref(request))
        if unreadable:
            raise RefusedError("request", "damaged", "sound", "send it again")
        return request

    async def handle(request: Request, _: Context) -> None:
        raise RefusedError("field", "this", "that", "send that")

    async def main() -> None:
        method = grpc.unary_unary_rpc_method_handler(handle, request_deserializer=parse)

        async def continuation(_: object) -> grpc.RpcMethodHandler:
            return method

        details = SimpleNamespace(
            method="/slipstream.v1.DraftTrainer/OpenRun", invocation_metadata=()
        )
        answer = await guard().intercept_service(continuation, details)
        assert answer is not None

        async def requests() -> AsyncIterator[object]:
            yield answer.request_deserializer(b"")

        with pytest.raises(grpc.aio.AbortError, match="Next step: send"):
            await answer.stream_unary(requests(), Context())

    kept: list[weakref.ref[Request]] = []
    gc.disable()
    try:
        asyncio.run(main())
        assert [each() for each in kept] == [None]
    finally:
        gc.enable()


def test_message_timeout_ends_silent_stream() -> None:
    async def requests() -> AsyncIterator[int]:
        yield 1
        await asyncio.sleep(30.0)

    async def main() -> RefusedError:
        waiting = guards._readable(1, requests(), 0.05, math.inf)
        assert await anext(waiting) == 1
        assert await anext(waiting) == 1
        with pytest.raises(RefusedError) as caught:
            await anext(waiting)
        return caught.value

    error = asyncio.run(main())
    assert (error.field, error.code) == (
        "server.message_timeout_s",
        grpc.StatusCode.DEADLINE_EXCEEDED,
    )


def test_ended_stream_is_not_waited_for() -> None:
    async def requests() -> AsyncIterator[int]:
        return
        yield

    async def main() -> list[object]:
        ended = guards._readable(None, requests(), 600.0, math.inf)
        first = await guard(600.0).first(requests())
        return [first, await anext(ended, "over"), await anext(ended, "over")]

    assert asyncio.run(main()) == [None, "over", "over"]


def test_health_keeps_no_unknown_service_names() -> None:
    async def main() -> None:
        health = serving.Health(("", "known"))
        for number in range(100):
            with pytest.raises(RefusedError) as caught:
                await health.Check(health_pb2.HealthCheckRequest(service=f"x{number}"), None)
            assert caught.value.code is grpc.StatusCode.NOT_FOUND
        assert len(health._serving) == 2

    asyncio.run(main())


def test_cancelled_caller_waits_for_its_worker() -> None:
    begun, hold = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert hold.wait(30)

    async def main() -> None:
        workers = serving.Workers(1, "test")
        call = asyncio.create_task(workers.run(work))
        await asyncio.to_thread(begun.wait, 30)
        for _ in range(3):
            call.cancel()
            await asyncio.sleep(0.01)
        assert not call.done(), "what the caller holds is still in use"
        waiting = asyncio.create_task(workers.run(int))
        await asyncio.sleep(0.01)
        hold.set()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await waiting == 0
        workers.close()

    asyncio.run(main())


def test_worker_error_is_freed_without_gc() -> None:
    def work() -> None:
        raise RefusedError("name", "a", "b", "c")

    async def main() -> weakref.ref[RefusedError]:
        workers = serving.Workers(1, "test")
        try:
            await workers.run(work)
        except RefusedError as error:
            return weakref.ref(error)
        finally:
            workers.close()
        raise AssertionError("no error")

    gc.disable()
    try:
        assert asyncio.run(main())() is None
    finally:
        gc.enable()


def test_long_refusal_text_is_cut_for_trailers() -> None:
    error = RefusedError("name", "n" * 100_000, "≠" * 100_000, "send another one")
    sent = error.to_proto()
    assert len(sent.found) < 500 and sent.found.endswith("(100000 characters)")
    assert len(sent.expected.encode()) < 500
    assert len(error.for_wire().encode()) < 1600
    assert len(error.found) == 100_000, "whole where it stays on this machine"


def test_non_finite_float8_is_refused() -> None:
    values = torch.ones(4).to(torch.float8_e4m3fn)
    check_finite("w", values)
    bad = torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn)
    assert "1 of 2" in refused(lambda: check_finite("w", bad)).found
