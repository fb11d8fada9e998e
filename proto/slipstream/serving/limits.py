"""Checks before every call of a server: identity, rate, size, concurrency and idle time.

``Guard`` is the one interceptor of both services. What a client may hold is bounded here, and a
refusal becomes a status that says what to do.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha import reflection

from slipstream.errors import RefusedError, StatusCode, abort_with
from slipstream.serving.identity import METHODS, Access, certificate_names
from slipstream.tensors import CHUNK_BYTES
from slipstream.v1 import release_pb2

T = TypeVar("T")

SMALL_MESSAGE_BYTES = 64 << 10
"""Largest request without tensors."""

CHUNK_MESSAGE_BYTES = CHUNK_BYTES + (1 << 20)
"""Largest request that carries a chunk, or names the tensors that will come."""

MAX_SILENT_CALLS = 1024
"""The most calls whose first request has not come yet."""

REFLECTION_SECONDS = 60.0

_PEERS = 4096


@dataclass(frozen=True)
class Limit:
    """The bounds on the calls of one method.

    Attributes:
        calls: most calls in progress at a time.
        message_bytes: most bytes of one request, serialized.
        call_seconds: time in which all requests must have come and all answers been read; None:
            only the first request has a deadline, and the reading of each answer.
        parse: bytes to a request, where it is not the method's own message.
    """

    calls: int
    message_bytes: int = SMALL_MESSAGE_BYTES
    call_seconds: float | None = None
    parse: Callable[[bytes], Any] | None = None


COMMON_LIMITS: Mapping[str, Limit] = {
    f"/{reflection.SERVICE_NAME}/ServerReflectionInfo": Limit(4, call_seconds=REFLECTION_SECONDS),
}


@dataclass(frozen=True)
class Unreadable:
    """A stand-in for a request that cannot be read."""

    refusal: RefusedError


def reader(parse: Callable[[bytes], Any], method: str, most: int) -> Callable[[bytes], Any]:
    """Wrap ``parse`` to return ``Unreadable`` where gRPC would log a stack trace and answer
    INTERNAL."""
    field = f"{_short(method)} request"

    def read(data: bytes) -> Any:
        found = f"{len(data)} bytes"
        try:
            if len(data) > most:
                expected, code = f"at most {most} bytes", StatusCode.RESOURCE_EXHAUSTED
                raise RefusedError(field, found, expected, "send less at a time", code)
            return parse(data)
        except RefusedError as error:
            return Unreadable(error)
        except DecodeError:
            next_step = "look for a faulty link, or a client of another service"
            return Unreadable(RefusedError(field, found, "protobuf of slipstream.v1", next_step))

    return read


class CallRate:
    """Bounds the calls of each connection, so that a client in an endless loop leaves time for
    others. Two seconds' worth may come at once.
    """

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = per_second
        self._clock = clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def spend(self, peer: str) -> None:
        """Count one more call. Raises RefusedError: too many."""
        most, now = 2 * self._rate, self._clock()
        left, then = self._left.pop(peer, (most, now))
        left = min(most, left + (now - then) * self._rate)
        self._left[peer] = (max(left - 1.0, 0.0), now)
        if len(self._left) > _PEERS:
            self._left.popitem(last=False)
        if left < 1.0:
            expected, code = f"at most {self._rate:g} a second", StatusCode.RESOURCE_EXHAUSTED
            next_step = "look for a loop without a pause"
            field, reason = "server.calls_per_s", release_pb2.REFUSAL_REASON_LIMIT
            raise RefusedError(field, "more calls", expected, next_step, code, reason)


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """An interceptor of every call of a server; owns the bounds on what clients can hold.

    Every method is registered as one of streams, with a coroutine as its handler: only so can the
    first request have a deadline, an unreadable one be refused by name, and a slow reader be timed
    out.
    """

    def __init__(
        self,
        access: Access,
        limits: Mapping[str, Limit],
        otherwise: Limit,
        *,
        message_seconds: float,
        calls_per_second: float,
    ) -> None:
        self._access = access
        self._limits = {**COMMON_LIMITS, **limits}
        self._otherwise = otherwise
        self._seconds = message_seconds
        self._rate = CallRate(calls_per_second)
        self._calls: Counter[str] = Counter()
        self._silent: OrderedDict[asyncio.Future[Any], None] = OrderedDict()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        limit = self._limits.get(method, self._otherwise)
        authorization = _authorization(handler_call_details)

        async def answer(requests: AsyncIterator[Any], context: Any) -> Any:
            if method not in METHODS or METHODS[method] is not None:
                names = certificate_names(context.auth_context())
                role = METHODS.get(method)
                denied = self._access.judge(role, authorization, names, context.peer())
                if denied is not None:
                    # Nothing of the call is read.
                    await abort_with(denied.error, context)
            try:
                self._rate.spend(context.peer())
                return await self._answer(handler, method, limit, requests, context)
            except NotImplementedError:
                next_step, code = "ask the reflection service", StatusCode.UNIMPLEMENTED
                refusal = RefusedError(_short(method), "a call", "none", next_step, code)
            except RefusedError as error:
                # With its traceback, this frame and the error would refer to each other, and keep
                # the request until the cyclic collector runs.
                refusal = error.with_traceback(None)
            self._access.refusals.note(method, refusal.code, str(refusal))
            await abort_with(refusal, context)

        parse = limit.parse or handler.request_deserializer or bytes
        read = reader(parse, method, limit.message_bytes)
        register = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return register(answer, read, handler.response_serializer)

    async def _answer(
        self,
        handler: grpc.RpcMethodHandler,
        method: str,
        limit: Limit,
        requests: AsyncIterator[Any],
        context: Any,
    ) -> Any:
        behavior = (
            handler.unary_unary
            or handler.unary_stream
            or handler.stream_unary
            or handler.stream_stream
        )
        deadline = asyncio.timeout(limit.call_seconds)
        try:
            async with deadline:
                first = await self.first(requests)
                if handler.request_streaming:
                    # Work in a thread outlives its cancelled call while it still reads requests.
                    given: Any = _readable(first, requests, self._seconds, deadline.when())
                elif first is None:
                    raise RefusedError("request", "none", "one", "send it before ending the call")
                else:
                    given = readable(first)
                with self.place(method, limit.calls):
                    if not inspect.isasyncgenfunction(behavior):
                        return await behavior(given, context)
                    seconds = self._seconds if limit.call_seconds is None else None
                    async with contextlib.aclosing(behavior(given, context)) as answers:
                        async for each in answers:
                            await read_within(seconds, context.write(each))
                    return None
        except TimeoutError:
            if not deadline.expired():
                raise
            assert limit.call_seconds is not None
            raise silent(limit.call_seconds) from None

    async def first(self, requests: AsyncIterator[T]) -> T | None:
        """Wait for the first request of a call; None if the call ended without one.

        Raises RefusedError: it did not come in time, or too many calls are silent and this is the
        oldest of them.
        """
        if len(self._silent) >= MAX_SILENT_CALLS:
            self._silent.popitem(last=False)[0].cancel()
        waiting = asyncio.ensure_future(_next(requests))
        self._silent[waiting] = None
        try:
            await asyncio.wait({waiting}, timeout=self._seconds)
        finally:
            self._silent.pop(waiting, None)
            refused = waiting.cancelled()
            waiting.cancel()
        if refused:
            raise _busy(f"{MAX_SILENT_CALLS} silent calls", "a request at once", "call again")
        if not waiting.done():
            raise silent(self._seconds)
        return waiting.result()

    @contextlib.contextmanager
    def place(self, method: str, most: int) -> Iterator[None]:
        """Take a place among the calls of a method. Raises RefusedError: ``most`` are running."""
        if self._calls[method] >= most:
            found = f"{most} calls of {_short(method)} in progress"
            raise _busy(found, f"at most {most}", "call later")
        self._calls[method] += 1
        try:
            yield
        finally:
            self._calls[method] -= 1


def readable(item: Any) -> Any:
    """Return a request. Raises RefusedError for one that could not be read."""
    if isinstance(item, Unreadable):
        raise item.refusal
    return item


def silent(seconds: float) -> RefusedError:
    """The refusal of a client that leaves a call open and sends or reads nothing, or too slowly."""
    found = f"a call whose next message did not come in {seconds:g} s"
    expected, code = "messages without pauses", StatusCode.DEADLINE_EXCEEDED
    field, reason = "server.message_timeout_s", release_pb2.REFUSAL_REASON_LIMIT
    return RefusedError(field, found, expected, "call again", code, reason)


def _busy(found: str, expected: str, next_step: str) -> RefusedError:
    code, reason = StatusCode.RESOURCE_EXHAUSTED, release_pb2.REFUSAL_REASON_BUSY
    return RefusedError("server.max_calls", found, expected, next_step, code, reason)


async def read_within(seconds: float | None, writing: Awaitable[None]) -> None:
    """Write an answer, which waits for a client that has not read earlier ones.

    Raises RefusedError: it has not read them for ``seconds``.
    """
    try:
        # Not wait_for: before Python 3.12 it may keep a cancellation to itself.
        async with asyncio.timeout(seconds):
            await writing
    except TimeoutError:
        assert seconds is not None
        raise silent(seconds) from None


async def _next(requests: AsyncIterator[T]) -> T | None:
    return await anext(requests, None)


async def _readable(
    first: Any, requests: AsyncIterator[Any], seconds: float, until: float | None
) -> AsyncGenerator[Any, None]:
    """Yield the requests; one may take ``seconds``, and all must come by ``until``, in loop time.

    If ``until`` is None, a call may be silent for any time.
    """
    clock = asyncio.get_running_loop().time
    item = first
    while item is not None:
        yield readable(item)
        left = None if until is None else min(seconds, until - clock())
        try:
            item = await asyncio.wait_for(_next(requests), left)
        except TimeoutError:
            raise silent(seconds) from None


def _authorization(details: grpc.HandlerCallDetails) -> str | None:
    metadata = details.invocation_metadata or ()
    found = [value for key, value in metadata if key == "authorization"]
    # If there are several, none counts: one of them was added on the way.
    return found[0] if len(found) == 1 else (" " if found else None)


def _short(method: str) -> str:
    return method.rpartition("/")[2]
