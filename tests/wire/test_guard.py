"""The guard: how long a client may leave an answer unread."""

from __future__ import annotations

import asyncio

import pytest

from slipstream.errors import RefusedError, StatusCode
from slipstream.guard import read_within


def test_an_answer_that_is_never_read_ends_the_call() -> None:
    async def answer() -> None:
        await read_within(0.01, asyncio.get_running_loop().create_future())

    with pytest.raises(RefusedError) as caught:
        asyncio.run(answer())
    assert caught.value.field == "server.message_timeout_s"
    assert caught.value.code is StatusCode.DEADLINE_EXCEEDED


def test_a_call_that_is_cancelled_as_its_answer_is_read_ends() -> None:
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
