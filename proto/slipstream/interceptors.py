"""Puts ``Access`` in front of every method of a gRPC server, synchronous or asyncio.

A call that is refused costs little: its requests are not read. Every shape of method can be
answered by a handler of streams, and only such a one need not wait for a request.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import grpc

from slipstream.access import Access
from slipstream.refusal import RefusedError, abort_with, trailing_metadata_of
from slipstream.roles import METHODS

_AUTHORIZATION = "authorization"
_Handler: TypeAlias = grpc.RpcMethodHandler


class AccessInterceptor(grpc.ServerInterceptor):
    """For ``grpc.server``, before every other. Install it unless ``access.anonymous``.

    Args:
        access: decides.
    """

    def __init__(self, access: Access) -> None:
        self._access = access

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], _Handler | None],
        details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """gRPC's hook."""
        handler, call = continuation(details), _Call(self._access, details)
        if handler is None or call.admitted():
            return handler

        def admit(context: grpc.ServicerContext) -> None:
            error = call.refusal(context)
            if error is not None:
                abort_with(error, context)

        def refuse(requests: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            admit(context)
            yield from ()

        if not self._access.by_certificate:
            return grpc.stream_stream_rpc_method_handler(refuse)
        behavior = _behavior(handler)

        def answer(request: Any, context: grpc.ServicerContext) -> Any:
            admit(context)
            return behavior(request, context)

        def stream(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            admit(context)
            yield from behavior(request, context)

        return _with_behavior(handler, stream if handler.response_streaming else answer)


class AioAccessInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """The same for ``grpc.aio.server``.

    Args:
        access: decides.
    """

    def __init__(self, access: Access) -> None:
        self._access = access

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]],
        details: grpc.HandlerCallDetails,
    ) -> _Handler | None:
        """gRPC's hook."""
        handler, call = await continuation(details), _Call(self._access, details)
        if handler is None or call.admitted():
            return handler

        async def admit(context: Any) -> None:
            error = call.refusal(context)
            if error is not None:
                await context.abort(error.code, error.for_wire(), trailing_metadata_of(error))

        async def refuse(requests: Any, context: Any) -> None:
            await admit(context)

        if not self._access.by_certificate:
            return grpc.stream_stream_rpc_method_handler(refuse)
        behavior = _behavior(handler)

        async def answer(request: Any, context: Any) -> Any:
            await admit(context)
            return await behavior(request, context)

        async def stream(request: Any, context: Any) -> AsyncIterator[Any]:
            await admit(context)
            async for response in behavior(request, context):
                yield response

        # Some handlers of streams write their answers themselves.
        yields = inspect.isasyncgenfunction(behavior)
        return _with_behavior(handler, stream if yields else answer)


class _Call:
    """One call, judged by its token first and by its caller's certificate when it begins."""

    def __init__(self, access: Access, details: grpc.HandlerCallDetails) -> None:
        self._access = access
        self._open = details.method in METHODS and METHODS[details.method] is None
        self._role = METHODS.get(details.method)
        found = [value for key, value in details.invocation_metadata or () if key == _AUTHORIZATION]
        # Of several, whoever added the second is not to be trusted with the first.
        self._authorization = found[0] if len(found) == 1 else (" " if found else None)

    def admitted(self) -> bool:
        """Whether no certificate is needed."""
        return self._open or self._access.judge(self._role, self._authorization) is None

    def refusal(self, context: Any) -> RefusedError | None:
        """Why the call may not be made, counted and logged; None where a certificate opens it."""
        names = certificate_names(context.auth_context())
        refused = self._access.judge(self._role, self._authorization, names)
        if refused is None:
            return None
        self._access.refusals.add(refused.reason, context.peer(), str(refused.error))
        return refused.error


def certificate_names(auth_context: Mapping[str, Sequence[bytes]]) -> frozenset[str]:
    """The names in a verified client certificate: its alternative names, else its common name."""
    for key in ("x509_subject_alternative_name", "x509_common_name"):
        found = frozenset(value.decode("utf-8", "replace") for value in auth_context.get(key, ()))
        if found:
            return found
    return frozenset()


def _behavior(handler: _Handler) -> Callable[..., Any]:
    found: Callable[..., Any] = (
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream
    )
    return found


def _with_behavior(handler: _Handler, behavior: Callable[..., Any]) -> _Handler:
    make = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[handler.request_streaming, handler.response_streaming]
    return make(behavior, handler.request_deserializer, handler.response_serializer)
