"""The guard: how long a client may leave an answer unread, or go on sending."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc
import pytest

from slipstream.errors import RefusedError, StatusCode
from slipstream.serving.identity import Access
from slipstream.serving.limits import Guard, Limit, read_within
from slipstream.serving.server import Workers, blocking


def test_guard_unread_answer_ends_call() -> None:
    async def answer() -> None:
        await read_within(0.01, asyncio.get_running_loop().create_future())

    with pytest.raises(RefusedError) as caught:
        asyncio.run(answer())
    assert caught.value.field == "server.message_timeout_s"
    assert caught.value.code is StatusCode.DEADLINE_EXCEEDED


def test_guard_call_cancelled_while_answer_is_read_ends() -> None:
    async def cancelled() -> bool:
        first, never = (asyncio.get_running_loop().create_future() for _ in range(2))

        async def answer() -> None:
            await read_within(1000.0, first)
            await read_within(1000.0, never)

        task = asyncio.create_task(answer())
        await asyncio.sleep(0)
        first.set_result(None)
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait({task}, timeout=10)
        return task.cancelled()

    assert asyncio.run(cancelled())


def test_guard_trickling_client_ends_at_call_deadline() -> None:
    """The work is in a thread, which a cancelled call waits for."""
    sent = []

    async def trickle() -> AsyncIterator[bytes]:
        for index in range(1000):
            sent.append(index)
            yield b"x"
            await asyncio.sleep(0.01)

    async def call() -> None:
        access = Access(None, {}, {})
        limits = {"/a/B": Limit(4, call_seconds=0.2)}
        guard = Guard(access, limits, Limit(4), message_seconds=100, calls_per_second=100)
        workers = Workers(1, "test")

        async def work(requests: AsyncIterator[bytes], _: object) -> int:
            return await workers.run(lambda items: len(list(items)), blocking(requests, 100))

        handler = grpc.stream_unary_rpc_method_handler(work)
        try:
            await guard._answer(handler, "/a/B", limits["/a/B"], trickle(), None)
        finally:
            workers.close()

    with pytest.raises(RefusedError) as caught:
        asyncio.run(call())
    assert caught.value.code is StatusCode.DEADLINE_EXCEEDED
    assert len(sent) < 1000
