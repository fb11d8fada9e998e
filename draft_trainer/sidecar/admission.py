"""What stands before every call of the gRPC server: size, rate, number, and patience with clients.

Every method is registered as one that takes a stream: only so does its handler get to say how long
its one request may take, and that a request could not be read.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import grpc

from draft_trainer.sidecar.patience import PatientRequests, WaitingRoom, readable
from draft_trainer.sidecar.refusals import refusals
from slipstream.limits import CallRate, Limit, Places, RefusedCalls, not_implemented, reader
from slipstream.refusal import RefusedError

MAX_WAITING = 64
"""Calls whose first request has not come yet."""


class Admission(grpc.ServerInterceptor):
    """The next interceptor after access: who may not call waits for nothing and takes no place.

    Args:
        limits: by method, ``/package.Service/Method``.
        otherwise: of every other method.
        seconds: longest wait for a request.
        rate: of one connection's calls.
        refused: is told of every call that ended with an error.
    """

    def __init__(
        self,
        limits: Mapping[str, Limit],
        otherwise: Limit,
        seconds: float,
        rate: CallRate,
        refused: RefusedCalls,
    ) -> None:
        self._limits = limits
        self._otherwise = otherwise
        self._seconds = seconds
        self._rate = rate
        self._refused = refused
        self._places = Places()
        self._waiting = WaitingRoom(MAX_WAITING)

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """gRPC's: the handler of one call."""
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        limit = self._limits.get(method, self._otherwise)
        behavior = (
            handler.unary_unary
            or handler.unary_stream
            or handler.stream_unary
            or handler.stream_stream
        )

        def answer(requests: Iterator[Any], context: grpc.ServicerContext) -> Any:
            with self._admitted(method, limit, requests, context, handler) as given:
                return behavior(given, context)

        def answers(requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
            with self._admitted(method, limit, requests, context, handler) as given:
                yield from behavior(given, context)

        read = reader(handler.request_deserializer or bytes, method, limit.message_bytes)
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(answers, read, handler.response_serializer)
        return grpc.stream_unary_rpc_method_handler(answer, read, handler.response_serializer)

    @contextmanager
    def _admitted(
        self,
        method: str,
        limit: Limit,
        requests: Iterator[Any],
        context: grpc.ServicerContext,
        handler: grpc.RpcMethodHandler,
    ) -> Iterator[Any]:
        """What the handler is called with: its request, or all of them."""
        bounded = limit.call_seconds is not None and handler.response_streaming
        reaper = threading.Timer(limit.call_seconds or 0.0, context.cancel) if bounded else None
        patient = PatientRequests(requests, self._seconds, limit.call_seconds or float("inf"))
        try:
            with refusals(context), _implemented(method):
                self._rate.spend(context.peer())
                first = self._waiting.first(patient)
                if first is None and not handler.request_streaming:
                    raise RefusedError(
                        "request", "none", "one", "send the request before ending the call"
                    )
                with self._places.taken(method, limit.calls):
                    if reaper is not None:
                        reaper.daemon = True
                        reaper.start()
                    if not handler.request_streaming:
                        patient.close()
                        yield first
                    elif limit.call_seconds is not None:
                        yield chain(() if first is None else (first,), patient)
                    else:
                        # Its handler has its own patience; a thread's hop a message is dear.
                        patient.close()
                        yield chain(() if first is None else (first,), map(readable, requests))
        finally:
            patient.close()
            if reaper is not None:
                reaper.cancel()
            code = context.code()
            if isinstance(code, grpc.StatusCode) and code is not grpc.StatusCode.OK:
                details = context.details() or b""
                text = details.decode() if isinstance(details, bytes) else details
                self._refused.note(method, code, text)


@contextmanager
def _implemented(method: str) -> Iterator[None]:
    try:
        yield
    except NotImplementedError as error:
        raise not_implemented(method) from error
