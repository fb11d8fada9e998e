"""Puts ``Access`` in front of every method of a gRPC server, synchronous or asyncio.

A call that is refused costs no parsing: its request is not read as a message.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from typing import Any, TypeAlias

import grpc

from slipstream.access import Access, Refused
from slipstream.refusal import abort_with, trailing_metadata_of
from slipstream.roles import METHODS

_AUTHORIZATION = "authorization"
_Handler: TypeAlias = grpc.RpcMethodHandler


class AccessInterceptor(grpc.ServerInterceptor):
    """For ``grpc.server``. Install it unless ``access.anonymous``.

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
        handler = continuation(details)
        if handler is None or _is_open(details.method):
            return handler
        authorization = _authorization_of(details)
        if _judged(self._access, details.method, authorization) is None:
            return handler
        judge = functools.partial(_judged, self._access, details.method, authorization)
        return _guarded(handler, self._access, lambda inner: self._behind(inner, judge, handler))

    def _behind(
        self, inner: Callable[..., Any], judge: Callable[[Collection[str]], Any], handler: _Handler
    ) -> Callable[..., Any]:
        def admit(context: grpc.ServicerContext) -> None:
            refused = judge(certificate_names(context.auth_context()))
            if refused is not None:
                self._access.refusals.add(refused.reason, context.peer(), str(refused.error))
                abort_with(refused.error, context)

        def answer(request: Any, context: grpc.ServicerContext) -> Any:
            admit(context)
            return inner(request, context)

        def stream(request: Any, context: grpc.ServicerContext) -> Iterator[Any]:
            admit(context)
            yield from inner(request, context)

        return stream if handler.response_streaming else answer


class AioAccessInterceptor(grpc.aio.ServerInterceptor):
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
        handler = await continuation(details)
        if handler is None or _is_open(details.method):
            return handler
        authorization = _authorization_of(details)
        if _judged(self._access, details.method, authorization) is None:
            return handler
        judge = functools.partial(_judged, self._access, details.method, authorization)
        return _guarded(handler, self._access, lambda inner: self._behind(inner, judge, handler))

    def _behind(
        self, inner: Callable[..., Any], judge: Callable[[Collection[str]], Any], handler: _Handler
    ) -> Callable[..., Any]:
        async def admit(context: grpc.aio.ServicerContext) -> None:
            refused = judge(certificate_names(context.auth_context()))
            if refused is not None:
                self._access.refusals.add(refused.reason, context.peer(), str(refused.error))
                error = refused.error
                await context.abort(error.code, str(error), trailing_metadata_of(error))

        async def answer(request: Any, context: grpc.aio.ServicerContext) -> Any:
            await admit(context)
            return await inner(request, context)

        async def stream(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
            await admit(context)
            async for response in inner(request, context):
                yield response

        return stream if handler.response_streaming else answer


def certificate_names(auth_context: Any) -> frozenset[str]:
    """The names in a verified client certificate: its alternative names, else its common name."""
    for key in ("x509_subject_alternative_name", "x509_common_name"):
        found = frozenset(value.decode("utf-8", "replace") for value in auth_context.get(key, ()))
        if found:
            return found
    return frozenset()


def _is_open(method: str) -> bool:
    return method in METHODS and METHODS[method] is None


def _judged(
    access: Access, method: str, authorization: str | None, names: Collection[str] = ()
) -> Refused | None:
    return access.judge(METHODS.get(method), authorization, names)


def _authorization_of(details: grpc.HandlerCallDetails) -> str | None:
    found = [value for key, value in details.invocation_metadata or () if key == _AUTHORIZATION]
    # Of several, whoever added the second is not to be trusted with the first.
    return found[0] if len(found) == 1 else (" " if found else None)


def _guarded(
    handler: _Handler, access: Access, behind: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> _Handler:
    """``handler`` behind a check at the call, where the caller's certificate is known.

    Without certificates that open anything the check can only refuse, and the bytes of a request
    are left as they are.
    """
    kind = _KINDS[handler.request_streaming, handler.response_streaming]
    return kind.make(
        behind(kind.behaviour(handler)),
        request_deserializer=handler.request_deserializer if access.by_certificate else None,
        response_serializer=handler.response_serializer,
    )


class _Kind:
    def __init__(self, make: Callable[..., _Handler], name: str) -> None:
        self.make = make
        self._name = name

    def behaviour(self, handler: _Handler) -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(handler, self._name)
        return found


_KINDS = {
    (False, False): _Kind(grpc.unary_unary_rpc_method_handler, "unary_unary"),
    (False, True): _Kind(grpc.unary_stream_rpc_method_handler, "unary_stream"),
    (True, False): _Kind(grpc.stream_unary_rpc_method_handler, "stream_unary"),
    (True, True): _Kind(grpc.stream_stream_rpc_method_handler, "stream_stream"),
}
