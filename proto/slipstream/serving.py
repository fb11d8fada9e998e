"""One gRPC server for both services, on ``grpc.aio``: the checks before a call, and its life.

``Guard`` is the one interceptor: identity and role, rate, size, number and silence of calls, and
refusals as statuses. ``Workers`` runs what blocks. ``GrpcServer`` listens, with TLS if there is a
certificate, answers health and reflection, and drains on ``stop``.

As a command, the health probe of a container (Kubernetes' own gRPC probes know no TLS):

    python -m slipstream.serving 127.0.0.1:50061 slipstream.v1.RolloutServer/ready
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import inspect
import logging
import sys
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Coroutine,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from slipstream.client import MAX_MESSAGE_BYTES, OPTIONS
from slipstream.errors import RefusedError, StatusCode, abort_with, clean
from slipstream.security import METHODS, Access, certificate_names
from slipstream.tensors import CHUNK_BYTES

logger = logging.getLogger(__name__)

T = TypeVar("T")

SMALL_MESSAGE_BYTES = 64 << 10
"""Largest request without tensors."""

CHUNK_MESSAGE_BYTES = CHUNK_BYTES + (1 << 20)
"""Largest request that carries a chunk, or names the tensors that will come."""

MAX_CALLS = 4096
"""Calls in progress at a time, those included that sent nothing yet."""

MAX_SILENT_CALLS = 1024
"""Calls whose first request has not come yet."""

MAX_WATCHERS = 64
"""Of health."""

REFLECTION_SECONDS = 60.0

LOG_SECONDS = 60.0
"""Between two lines about refusals of one kind."""

_PEERS = 4096
_START_SECONDS = 60.0

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *OPTIONS,
    # Of one connection: the calls of a client that opens them in a loop wait on its own side.
    ("grpc.max_concurrent_streams", 128),
    # A connection that never speaks HTTP/2 is closed, and so is one without calls for long.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 600_000),
    # A peer on a busy machine sends several pings at once. The default of two strikes would end its
    # idle stream with "too many pings".
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", 1_000),
    ("grpc.http2.max_ping_strikes", 8),
    # Without SO_REUSEPORT a second process on the port fails instead of taking every other
    # connection.
    ("grpc.so_reuseport", 0),
)


def server_options(max_message_bytes: int, keepalive_s: float) -> tuple[tuple[str, int], ...]:
    """``SERVER_OPTIONS`` with another largest message, and another pause between pings.

    A client that is gone without a word is noticed after one and a half such pauses.
    """
    return (
        *SERVER_OPTIONS,
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.keepalive_time_ms", round(1000 * keepalive_s)),
        ("grpc.keepalive_timeout_ms", round(500 * keepalive_s)),
        ("grpc.http2.ping_timeout_ms", round(500 * keepalive_s)),
    )


@dataclass(frozen=True)
class Limit:
    """What one method may cost.

    Attributes:
        calls: in progress at a time.
        message_bytes: of one request, serialized.
        call_seconds: within which all requests must have come and all answers been read; None: only
            the first request has a deadline.
        parse: bytes to a request, where it is not the method's own message.
    """

    calls: int
    message_bytes: int = SMALL_MESSAGE_BYTES
    call_seconds: float | None = None
    parse: Callable[[bytes], Any] | None = None


COMMON_LIMITS: Mapping[str, Limit] = {
    f"/{health.SERVICE_NAME}/Watch": Limit(MAX_WATCHERS),
    f"/{reflection.SERVICE_NAME}/ServerReflectionInfo": Limit(4, call_seconds=REFLECTION_SECONDS),
}


@dataclass(frozen=True)
class Unreadable:
    """In place of a request that cannot be read."""

    refusal: RefusedError


def reader(parse: Callable[[bytes], Any], method: str, most: int) -> Callable[[bytes], Any]:
    """``parse`` that answers ``Unreadable`` where gRPC would log a stack trace and say INTERNAL.

    Args:
        parse: bytes to a message; DecodeError or RefusedError.
        method: whose requests they are.
        most: bytes.
    """
    field = f"{_short(method)} request"

    def read(data: bytes) -> Any:
        if len(data) > most:
            return Unreadable(
                RefusedError(
                    field,
                    f"{len(data)} bytes",
                    f"at most {most} bytes",
                    "send less at a time",
                    StatusCode.RESOURCE_EXHAUSTED,
                )
            )
        try:
            return parse(data)
        except RefusedError as error:
            return Unreadable(error)
        except DecodeError:
            return Unreadable(
                RefusedError(
                    field,
                    f"{len(data)} bytes that are no such message",
                    "protobuf of slipstream.v1",
                    "look for a faulty link, or a client of another service",
                )
            )

    return read


class CallRate:
    """Bounds the calls of one connection: a client in an endless loop leaves time for the others.

    Two seconds' worth may come at once.

    Args:
        per_second: calls of one connection.
        clock: seconds.
    """

    def __init__(self, per_second: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._rate = per_second
        self._clock = clock
        self._left: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def spend(self, peer: str) -> None:
        """One more call. Raises RefusedError: too many."""
        most, now = 2 * self._rate, self._clock()
        left, then = self._left.pop(peer, (most, now))
        left = min(most, left + (now - then) * self._rate)
        self._left[peer] = (max(left - 1.0, 0.0), now)
        if len(self._left) > _PEERS:
            self._left.popitem(last=False)
        if left < 1.0:
            raise RefusedError(
                "server.calls_per_s",
                "more calls of one connection",
                f"at most {self._rate:g} a second",
                "look for a loop without a pause",
                StatusCode.RESOURCE_EXHAUSTED,
            )


class RefusedCalls:
    """Counts refused calls, and logs each kind at most once a minute, with how many there were.

    Thread-safe. A kind is a method and a status: what a client writes makes no new ones.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._counts: Counter[tuple[str, str]] = Counter()
        self._logged: dict[tuple[str, str], tuple[float, int]] = {}

    @property
    def counts(self) -> dict[tuple[str, str], int]:
        """By method and status."""
        with self._lock:
            return dict(self._counts)

    def note(self, method: str, code: StatusCode, text: str) -> None:
        """One more; ``text`` may hold what the client wrote."""
        kind, now = (_short(method), code.name), self._clock()
        with self._lock:
            self._counts[kind] += 1
            last, told = self._logged.get(kind, (now - LOG_SECONDS, 0))
            if now - last < LOG_SECONDS:
                return
            count = self._counts[kind]
            self._logged[kind] = (now, count)
        # repr: a line break in it would forge a line of the log.
        logger.warning("%s refused (%s), %d since the last line: %r", *kind, count - told, text)


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Stands before every call of a server; owns the bounds on what clients can hold.

    Every method is registered as one that takes and answers streams, and its handler as a
    coroutine: only so can the first request have a deadline, an unreadable one be refused by name,
    and a slow reader be timed out.

    Args:
        access: who may call.
        limits: by method, ``/package.Service/Method``, beside ``COMMON_LIMITS``.
        otherwise: of every other method.
        message_seconds: longest wait for a request.
        calls_per_second: of one connection.
        refused: counts and logs calls that were refused.
    """

    def __init__(
        self,
        access: Access,
        limits: Mapping[str, Limit],
        otherwise: Limit,
        *,
        message_seconds: float,
        calls_per_second: float,
        refused: RefusedCalls,
    ) -> None:
        self._access = access
        self._limits = {**COMMON_LIMITS, **limits}
        self._otherwise = otherwise
        self._seconds = message_seconds
        self._rate = CallRate(calls_per_second)
        self._refused = refused
        self._calls: Counter[str] = Counter()
        self._silent: OrderedDict[asyncio.Future[Any], None] = OrderedDict()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """gRPC's hook: the handler of one call."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        limit = self._limits.get(method, self._otherwise)
        authorization = _authorization(handler_call_details)

        async def answer(requests: AsyncIterator[Any], context: Any) -> Any:
            try:
                self._check_access(method, authorization, context)
            except RefusedError as error:
                # Counted by reason, and nothing of the call is read.
                await abort_with(error, context)
            try:
                self._rate.spend(context.peer())
                return await self._answer(handler, method, limit, requests, context)
            except NotImplementedError:
                refusal = RefusedError(
                    _short(method),
                    "a call",
                    "none: it is not implemented here",
                    "ask the reflection service what is",
                    StatusCode.UNIMPLEMENTED,
                )
            except RefusedError as error:
                refusal = error
            self._refused.note(method, refusal.code, str(refusal))
            await abort_with(refusal, context)

        parse = limit.parse or handler.request_deserializer or bytes
        read = reader(parse, method, limit.message_bytes)
        register = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        return register(answer, read, handler.response_serializer)

    def _check_access(self, method: str, authorization: str | None, context: Any) -> None:
        if method in METHODS and METHODS[method] is None:
            return
        role = METHODS.get(method)
        if self._access.judge(role, authorization) is None:
            return
        names = certificate_names(context.auth_context())
        refused = self._access.judge(role, authorization, names)
        if refused is not None:
            self._access.refusals.add(refused.reason, context.peer(), str(refused.error))
            raise refused.error

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
                    wait = None if limit.call_seconds is None else self._seconds
                    given: Any = _readable(first, requests, wait)
                elif first is None:
                    raise RefusedError(
                        "request", "none", "one", "send the request before ending the call"
                    )
                else:
                    given = readable(first)
                with self.place(method, limit.calls):
                    if not inspect.isasyncgenfunction(behavior):
                        return await behavior(given, context)
                    async with contextlib.aclosing(behavior(given, context)) as answers:
                        async for each in answers:
                            await context.write(each)
                    return None
        except TimeoutError:
            if not deadline.expired():
                raise
            assert limit.call_seconds is not None
            raise silent(limit.call_seconds) from None

    async def first(self, requests: AsyncIterator[T]) -> T | None:
        """The first request of a call; None where it ended without one.

        Where too many calls are silent the oldest one is refused: a client that means it sends its
        request at once.

        Raises:
            RefusedError: it did not come in time, or others are waited for.
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
            raise RefusedError(
                "server.max_calls",
                f"{MAX_SILENT_CALLS} calls that sent nothing yet",
                "a request with the call",
                "call again, and send at once",
                StatusCode.RESOURCE_EXHAUSTED,
            )
        if not waiting.done():
            raise silent(self._seconds)
        return waiting.result()

    @contextlib.contextmanager
    def place(self, method: str, most: int) -> Iterator[None]:
        """A place among the calls of a method. Raises RefusedError: ``most`` are in progress."""
        if self._calls[method] >= most:
            raise RefusedError(
                "server.max_calls",
                f"{most} calls of {_short(method)} in progress",
                f"at most {most}",
                "wait for one of them to end, then call again",
                StatusCode.RESOURCE_EXHAUSTED,
            )
        self._calls[method] += 1
        try:
            yield
        finally:
            self._calls[method] -= 1


def readable(item: Any) -> Any:
    """A request. Raises RefusedError for one that could not be read."""
    if isinstance(item, Unreadable):
        raise item.refusal
    return item


def silent(seconds: float) -> RefusedError:
    """The refusal of a client that leaves a call open and sends or reads nothing, or too little."""
    return RefusedError(
        "server.message_timeout_s",
        f"a call whose next message did not come in {seconds:g} s",
        "messages without pauses",
        "call again",
        StatusCode.DEADLINE_EXCEEDED,
    )


async def _next(requests: AsyncIterator[T]) -> T | None:
    return await anext(requests, None)


async def _readable(
    first: Any, requests: AsyncIterator[Any], seconds: float | None
) -> AsyncGenerator[Any, None]:
    item = first
    while item is not None:
        yield readable(item)
        try:
            item = await asyncio.wait_for(_next(requests), seconds)
        except TimeoutError:
            assert seconds is not None
            raise silent(seconds) from None


def _authorization(details: grpc.HandlerCallDetails) -> str | None:
    metadata = details.invocation_metadata or ()
    found = [value for key, value in metadata if key == "authorization"]
    # Of several none counts: one of them was added on the way.
    return found[0] if len(found) == 1 else (" " if found else None)


def _short(method: str) -> str:
    return method.rpartition("/")[2]


class Workers:
    """Threads for what would block the event loop. At most ``threads`` calls run at a time.

    Args:
        threads: most of them.
        name: prefix of their names.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._free = asyncio.Semaphore(threads)

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """What ``work(*args)`` returns or raises, computed on one of the threads.

        A cancelled caller goes on only when the work has ended: it may use what the caller holds.
        """
        async with self._free:
            done = asyncio.wrap_future(self._pool.submit(work, *args))
            try:
                return await asyncio.shield(done)
            except asyncio.CancelledError:
                while not done.done():
                    with contextlib.suppress(asyncio.CancelledError):
                        await asyncio.wait({done})
                if not done.cancelled():
                    done.exception()
                raise

    async def iterate(self, generator: Generator[T, None, None]) -> AsyncIterator[T]:
        """A generator's items, each computed on one of the threads."""
        try:
            while (item := await self.run(next, generator, None)) is not None:
                yield item
        finally:
            await self.run(generator.close)

    def close(self) -> None:
        """Take no more work; what runs is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def blocking(requests: AsyncIterator[T], seconds: float) -> Iterator[T]:
    """A call's requests for a worker's thread: each is received on this event loop.

    Args:
        requests: of the running call.
        seconds: longest wait for one, above the call's own deadlines; TimeoutError after it.
    """
    loop = asyncio.get_running_loop()

    def items() -> Iterator[T]:
        while True:
            item = asyncio.run_coroutine_threadsafe(_next(requests), loop).result(seconds)
            if item is None:
                return
            yield item

    return items()


class LoopThread:
    """An event loop on a thread of its own, for a program that is not asyncio itself.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start it."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Its result."""
        return self.submit(coroutine).result(_START_SECONDS)

    def close(self, timeout: float) -> bool:
        """End the loop and its thread; False if it did not end in ``timeout`` seconds."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        self._loop.close()
        return True


class Health(health_pb2_grpc.HealthServicer):
    """The standard health service. The stock one keeps a record of every name that is watched.

    Args:
        names: of the services whose health is set; "" is the whole process.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._serving = dict.fromkeys(names, False)
        self._changed = asyncio.Event()

    def set(self, name: str, serving: bool) -> None:
        """Tell all watchers. Only on the server's event loop."""
        if self._serving[name] != serving:
            self._serving[name] = serving
            self._changed.set()
            self._changed = asyncio.Event()

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802 (gRPC's name)
        """See health.proto."""
        return self._response(request.service)

    async def List(self, request: Any, context: Any) -> Any:  # noqa: N802
        """See health.proto."""
        statuses = {name: self._response(name) for name in self._serving}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """See health.proto."""
        told = None
        while True:
            changed, response = self._changed, self._response(request.service)
            if response != told:
                yield response
                told = response
            await changed.wait()

    def _response(self, name: str) -> Any:
        if name not in self._serving:
            raise RefusedError(
                "service",
                clean(name),
                f"one of {sorted(self._serving)}",
                "ask the reflection service for names",
                StatusCode.NOT_FOUND,
            )
        status = health_pb2.HealthCheckResponse.ServingStatus
        return health_pb2.HealthCheckResponse(
            status=status.SERVING if self._serving[name] else status.NOT_SERVING
        )


class GrpcServer:
    """A ``grpc.aio`` server with health and reflection. Made and used on one event loop.

    Args:
        guard: before every call.
        access: its certificate, if it has one.
        service: full name of the service; its health is reported under it and under "".
        more_health: other names whose health is set.
        max_message_bytes: largest message of any method.
        keepalive_s: between pings; a client that is gone without a word is noticed after one and a
            half such pauses.

    Attributes:
        grpc: to register the service with.
        health: nothing is serving yet.
    """

    def __init__(
        self,
        guard: Guard,
        access: Access,
        service: str,
        more_health: Sequence[str] = (),
        *,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        keepalive_s: float = 20.0,
    ) -> None:
        options = (
            *SERVER_OPTIONS,
            ("grpc.max_receive_message_length", max_message_bytes),
            ("grpc.keepalive_time_ms", round(1000 * keepalive_s)),
            ("grpc.keepalive_timeout_ms", round(500 * keepalive_s)),
            ("grpc.http2.ping_timeout_ms", round(500 * keepalive_s)),
        )
        self._access = access
        self._names = ("", service)
        self.grpc = grpc.aio.server(
            interceptors=(guard,), options=options, maximum_concurrent_rpcs=MAX_CALLS
        )
        self.health = Health((*self._names, *more_health))
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.grpc)
        names = (service, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.grpc)

    def bind(self, host: str, port: int, field: str) -> str:
        """Take the port; calls are answered from ``grpc.start()`` on.

        Args:
            host: name or address.
            port: 0 for a free one.
            field: the option that names the port, for the refusal.

        Returns:
            The address, ``host:port``.

        Raises:
            RefusedError: the port cannot be had.
        """
        host = f"[{host}]" if ":" in host and not host.startswith("[") else host
        at, tls = f"{host}:{port}", self._access.tls
        try:
            found = (
                self.grpc.add_insecure_port(at)
                if tls is None
                else self.grpc.add_secure_port(at, tls.grpc_credentials())
            )
        except RuntimeError as error:
            raise RefusedError(
                field,
                f"{at} in use ({error})",
                "a free port of this machine, or 0",
                f"stop what listens there, or set another {field}",
            ) from error
        return f"{host}:{found}"

    def set_serving(self, serving: bool) -> None:
        """Health of the process and of its service."""
        for name in self._names:
            self.health.set(name, serving)

    async def stop(self, grace: float) -> None:
        """Listen no more; calls in progress are cancelled after ``grace`` seconds."""
        self.set_serving(False)
        await self.grpc.stop(grace)


TIMEOUT = 5.0
"""Seconds within which a live service answers."""


def serving(channel: grpc.Channel, service: str = "", timeout: float = TIMEOUT) -> bool:
    """Whether it says SERVING. ``service`` empty: the process as a whole.

    Raises:
        grpc.RpcError: it does not answer, or knows no such service.
    """
    request = health_pb2.HealthCheckRequest(service=service)
    answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=timeout)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 only if it serves; 1, and what is the matter on stderr, if not."""
    parser = argparse.ArgumentParser(
        prog="python -m slipstream.serving", description="Asks a service for its gRPC health."
    )
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("service", nargs="?", default="", help="default: the process as a whole")
    # No token: health has no role.
    parser.add_argument("--ca", type=Path, help="PEM of the CA of its certificate; turns TLS on")
    parser.add_argument("--certificate", type=Path, help="PEM, where it asks for one")
    parser.add_argument("--key", type=Path, help="PEM of its private key")
    args = parser.parse_args(argv)
    try:
        pem = [p.read_bytes() if p else None for p in (args.ca, args.key, args.certificate)]
    except OSError as error:
        parser.error(str(error))
    tls = grpc.ssl_channel_credentials(*pem)
    with (
        grpc.secure_channel(args.address, tls) if args.ca else grpc.insecure_channel(args.address)
    ) as channel:
        try:
            if serving(channel, args.service):
                return 0
            print("not serving", file=sys.stderr)
        except grpc.RpcError as error:
            print(f"{error.code().name}: {error.details()}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
