"""What stands before every call of the control plane: size, rate, number, and patience.

Every method is registered as one that takes a stream: only so does its handler get to say how long
its one request may take, and that a request could not be read.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import contextmanager
from typing import Any, NoReturn

import grpc

from slipstream.limits import (
    CHUNK_MESSAGE_BYTES,
    CallRate,
    Limit,
    Places,
    RefusedCalls,
    Unreadable,
    not_implemented,
    reader,
    silent,
)
from slipstream.refusal import RefusedError, trailing_metadata_of
from slipstream.v1 import rollout_server_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["RolloutServer"].full_name

MESSAGE_SECONDS = 30.0
"""Longest wait for a request; a stage's chunks have their own."""

CALLS_PER_SECOND = 500.0
"""Of one connection."""

_STAGES, _CHANGES, _WATCHERS, _OTHERS = 32, 8, 64, 64

LIMITS: Mapping[str, Limit] = {
    f"/{SERVICE}/Stage": Limit(_STAGES, CHUNK_MESSAGE_BYTES),
    f"/{SERVICE}/Commit": Limit(_CHANGES),
    f"/{SERVICE}/RollBack": Limit(_CHANGES),
    f"/{SERVICE}/SetSpeculation": Limit(_CHANGES),
    f"/{SERVICE}/WatchAcceptance": Limit(_WATCHERS),
}


class Admission(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """The next interceptor after access: who may not call waits for nothing and takes no place.

    Args:
        refused: is told of every call that ended with an error.
        limits: by method, ``/package.Service/Method``.
        seconds: longest wait for a request.
    """

    def __init__(
        self,
        refused: RefusedCalls,
        limits: Mapping[str, Limit] = LIMITS,
        seconds: float | None = None,
    ) -> None:
        self._refused = refused
        self._limits = limits
        self._seconds = seconds or MESSAGE_SECONDS
        self._places = Places()
        self._rate = CallRate(CALLS_PER_SECOND)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """gRPC's: the handler of one call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        limit = self._limits.get(method, Limit(_OTHERS))
        behavior = (
            handler.unary_unary
            or handler.unary_stream
            or handler.stream_unary
            or handler.stream_stream
        )

        async def argument(requests: AsyncIterator[Any], context: Any) -> Any:
            self._rate.spend(context.peer())
            try:
                first = await asyncio.wait_for(anext(requests, None), self._seconds)
            except TimeoutError as error:
                raise silent(self._seconds) from error
            if handler.request_streaming:
                return _readable(first, requests)
            if first is None:
                raise RefusedError(
                    "request", "none", "one", "send the request before ending the call"
                )
            if isinstance(first, Unreadable):
                raise first.refusal
            return first

        async def answer(requests: AsyncIterator[Any], context: Any) -> Any:
            with self._noted(method, context):
                try:
                    given = await argument(requests, context)
                    with self._places.taken(method, limit.calls):
                        return await behavior(given, context)
                except NotImplementedError:
                    await _abort(context, not_implemented(method))
                except RefusedError as error:
                    await _abort(context, error)

        async def answers(requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
            with self._noted(method, context):
                try:
                    given = await argument(requests, context)
                    with self._places.taken(method, limit.calls):
                        async for each in behavior(given, context):
                            yield each
                except RefusedError as error:
                    await _abort(context, error)

        read = reader(handler.request_deserializer or bytes, method, limit.message_bytes)
        if handler.response_streaming:
            # Some write their answers themselves instead.
            yields = inspect.isasyncgenfunction(behavior)
            return grpc.stream_stream_rpc_method_handler(
                answers if yields else answer, read, handler.response_serializer
            )
        return grpc.stream_unary_rpc_method_handler(answer, read, handler.response_serializer)

    @contextmanager
    def _noted(self, method: str, context: Any) -> Any:
        try:
            yield
        finally:
            code = _code_of(context)
            if code is not None:
                self._refused.note(method, code, context.details() or "")


async def _readable(first: Any, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    item = first
    while item is not None:
        if isinstance(item, Unreadable):
            raise item.refusal
        yield item
        item = await anext(requests, None)


def _code_of(context: Any) -> grpc.StatusCode | None:
    """The error that the call ended with; None where it did not."""
    code = context.code()
    if not isinstance(code, grpc.StatusCode):
        # gRPC's own number.
        code = next((each for each in grpc.StatusCode if each.value[0] == code), None)
    return None if code is grpc.StatusCode.OK else code


async def _abort(context: Any, error: RefusedError) -> NoReturn:
    await context.abort(error.code, error.for_wire(), trailing_metadata_of(error))
    raise AssertionError("abort returned")
