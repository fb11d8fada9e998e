"""What stands before every call of the gRPC server: size, rate, number, and patience with clients.

Every method is registered as one that takes a stream: only so does its handler get to say how long
its one request may take, and that a request could not be read.

A call's requests, each waited for with a deadline; and the calls that sent nothing yet.

A handler of synchronous gRPC waits for its client on a thread of the pool, for ever: forty clients
that opened a call and sent nothing had all of them, and no other call was answered.

How many calls of each method the trainer answers at a time, how large and for how long.

The standard health service, which keeps nothing for names that nobody serves.

What every call of the service has in common: refusals, and streams of a header and chunks.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from draft_trainer.config import ServerConfig
from slipstream.errors import RefusedError, StatusCode, abort_with
from slipstream.serving import (
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
from slipstream.v1 import draft_trainer_pb2, tensor_pb2

MAX_IMPORT_SECONDS = 3600.0


class PatientRequests:
    """An iterator over requests that gives up. Owns one thread until ``close``.

    gRPC receives a message only when it is asked for it, and nothing is asked for ahead.

    Args:
        requests: gRPC's own iterator.
        seconds: longest wait for one.
        in_all: longest wait for all of them together.
    """

    def __init__(self, requests: Iterator[Any], seconds: float, in_all: float) -> None:
        self._requests = requests
        self._seconds = seconds
        self._end = time.monotonic() + in_all
        self._in_all = in_all
        self._wanted = threading.Semaphore(0)
        self._arrived: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ended = False
        self._closed = False
        threading.Thread(target=self._read, name="requests", daemon=True).start()

    def __iter__(self) -> PatientRequests:
        return self

    def __next__(self) -> Any:
        """The next request.

        Raises:
            RefusedError: it did not come in time, or cannot be read.
            grpc.RpcError: the call ended.
        """
        if self._ended:
            raise StopIteration
        left = self._end - time.monotonic()
        self._wanted.release()
        try:
            item = self._arrived.get(timeout=max(min(self._seconds, left), 0.0))
        except queue.Empty:
            raise silent(self._seconds if left > self._seconds else self._in_all) from None
        if item is None:
            self._ended = True
            raise StopIteration
        if isinstance(item, Exception):
            raise item
        return readable(item)

    def give_up(self, error: RefusedError) -> None:
        """Whoever waits for a request gets this error instead."""
        self._arrived.put(error)

    def close(self) -> None:
        """Ask for nothing more; the thread ends with the request that it waits for, or now."""
        self._closed = True
        self._wanted.release()

    def _read(self) -> None:
        while True:
            self._wanted.acquire()
            if self._closed:
                return
            try:
                item = next(self._requests, None)
            except grpc.RpcError as error:
                item = error
            self._arrived.put(item)
            if item is None or isinstance(item, grpc.RpcError):
                return


def readable(item: Any) -> Any:
    """A request. Raises RefusedError for one that could not be read."""
    if isinstance(item, Unreadable):
        raise item.refusal
    return item


class WaitingRoom:
    """Calls whose first request has not come yet. Where there are too many the oldest gives way:
    a client that means it sends its request at once. Thread-safe.

    Args:
        most: calls.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._waiting: OrderedDict[int, PatientRequests] = OrderedDict()

    def first(self, requests: PatientRequests) -> Any:
        """Its first request; None where there is none. Raises as ``PatientRequests``."""
        with self._lock:
            if len(self._waiting) >= self._most:
                _, oldest = self._waiting.popitem(last=False)
                oldest.give_up(
                    RefusedError(
                        "server.max_calls",
                        f"{self._most} calls that sent nothing yet",
                        "a request with the call",
                        "call again, and send at once",
                        StatusCode.RESOURCE_EXHAUSTED,
                    )
                )
            self._waiting[id(requests)] = requests
        try:
            return next(requests, None)
        finally:
            with self._lock:
                self._waiting.pop(id(requests), None)


@contextmanager
def refusals(context: grpc.ServicerContext) -> Iterator[None]:
    """Turn a RefusedError into the call's status."""
    try:
        yield
    except RefusedError as error:
        abort_with(error, context)


def check_text(field: str, text: str, most: int) -> None:
    """Raise RefusedError for a text of the client's that is longer than ``most`` characters, or
    that would forge a line of a log."""
    if not text.isprintable():
        raise RefusedError(
            field, repr(text[:64]), "one line of printable characters", "send it without the others"
        )
    if len(text) > most:
        raise RefusedError(
            field, f"{len(text)} characters", f"at most {most} characters", "send a shorter one"
        )


def first(requests: Iterator[Any], kind: str) -> Any:
    """The first request of a stream. Raises RefusedError: it is not of ``kind``, or missing."""
    request = next(requests, None)
    found = request.WhichOneof("kind") if request is not None else "the end of the stream"
    if found != kind:
        raise wrong_kind(kind, found)
    return request


def chunks_after(requests: Iterator[Any]) -> Iterator[tensor_pb2.TensorChunk]:
    """The chunks of the other requests. Raises RefusedError where one is something else."""
    for request in requests:
        if request.WhichOneof("kind") != "chunk":
            raise wrong_kind("chunk", request.WhichOneof("kind"))
        yield request.chunk


def wrong_kind(expected: str, found: str | None) -> RefusedError:
    """A message of a stream that is not the one that must come now."""
    return RefusedError(
        "kind", found or "nothing", expected, "send the header first, and only once"
    )


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


SERVICE = draft_trainer_pb2.DESCRIPTOR.services_by_name["DraftTrainer"].full_name

MAX_WATCHERS = 16
ANNOUNCE_SECONDS = 600.0
FETCH_SECONDS = 3600.0

_REFLECTION_SECONDS = 60.0
# A stream beyond server.max_streams is refused by that name.
_STREAMS_BEYOND = 8
# Of calls that take no time, over all methods together: beside the others' they find a thread.
_QUICK = 32


def limits_of(config: ServerConfig) -> dict[str, Limit]:
    """By method, ``/package.Service/Method``."""
    chunks, fleet = CHUNK_MESSAGE_BYTES, Limit(4)
    named = {
        "StreamStates": Limit(config.max_streams + _STREAMS_BEYOND, config.max_message_bytes),
        # Each holds the two matrices of its version until they are whole.
        "AnnouncePolicy": Limit(4, chunks, ANNOUNCE_SECONDS),
        "ImportRelease": Limit(2, chunks, MAX_IMPORT_SECONDS),
        "FetchRelease": Limit(8, call_seconds=FETCH_SECONDS),
        "WatchStatus": Limit(MAX_WATCHERS),
        "WatchEvents": Limit(MAX_WATCHERS),
        "PrepareSync": fleet,
        "CompleteSync": fleet,
        "PromoteRelease": fleet,
        "RollBackRelease": fleet,
    }
    found = {f"/{SERVICE}/{method}": limit for method, limit in named.items()}
    found[f"/{health.SERVICE_NAME}/Watch"] = Limit(MAX_WATCHERS)
    about = Limit(4, call_seconds=_REFLECTION_SECONDS)
    found[f"/{reflection.SERVICE_NAME}/ServerReflectionInfo"] = about
    return found


def admission(config: ServerConfig, refused: RefusedCalls) -> tuple[Admission, int]:
    """The interceptor, and how many threads all calls that it admits may need at once."""
    limits = limits_of(config)
    rate = CallRate(config.calls_per_s)
    made = Admission(limits, Limit(config.max_calls), config.message_timeout_s, rate, refused)
    return made, sum(limit.calls for limit in limits.values()) + MAX_WAITING + _QUICK


# ruff: noqa: N802


class Health(health.HealthServicer):  # type: ignore[misc]
    """As its base, which remembers for ever every name that was watched once.

    Args:
        names: of services whose health will be set.
    """

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._names = frozenset(names)

    def Watch(
        self, request: Any, context: grpc.ServicerContext, send_response_callback: Any = None
    ) -> Any:
        """gRPC's."""
        if request.service not in self._names:
            context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return super().Watch(request, context, send_response_callback)
