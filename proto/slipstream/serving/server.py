"""One gRPC server for both services, on ``grpc.aio``: lifecycle, health, and blocking work.

As a command, the health probe of a container (Kubernetes' own gRPC probes know no TLS):

    python -m slipstream.serving.server 127.0.0.1:50061 slipstream.v1.RolloutServer/ready
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
import threading
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Generator,
    Iterator,
    Sequence,
)
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from slipstream.client import OPTIONS, channel_options, join_address
from slipstream.errors import RefusedError, StatusCode, clean
from slipstream.serving.identity import Access
from slipstream.serving.limits import Guard

T = TypeVar("T")

MAX_CALLS = 4096
"""The most calls in progress at a time, those included that sent nothing yet."""

_START_SECONDS = 60.0


def _not_a_client_that_left(record: logging.LogRecord) -> bool:
    return not record.getMessage().startswith("ExecuteBatchError raised in core")


# gRPC logs a stack trace when a client leaves while it is answered; that is no handler's error.
logging.getLogger("grpc._cython.cygrpc").addFilter(_not_a_client_that_left)

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    *OPTIONS,
    # Per connection: a client that opens calls in a loop has them wait on its own side.
    ("grpc.max_concurrent_streams", 128),
    # A connection that never speaks HTTP/2 is closed, and so is one without calls for long.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 600_000),
    # Any number of pings. gRPC's client pings beyond keepalive, to measure the connection
    # (https://github.com/grpc/grpc-java/issues/5188); a server that counts those ends streams of
    # sound clients with "too many pings". gRPC bounds the replies that wait to be sent.
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
    # Without SO_REUSEPORT a second process on the port fails instead of taking every other
    # connection.
    ("grpc.so_reuseport", 0),
)


def server_options(keepalive_s: float) -> tuple[tuple[str, int], ...]:
    """Return ``SERVER_OPTIONS`` with another pause between pings.

    A client that vanished is noticed after one and a half such pauses.
    """
    others = {
        "grpc.keepalive_time_ms": round(1000 * keepalive_s),
        "grpc.keepalive_timeout_ms": round(500 * keepalive_s),
        "grpc.http2.ping_timeout_ms": round(500 * keepalive_s),
    }
    # Each once: gRPC takes the first of an option that is given twice.
    return tuple({**dict(SERVER_OPTIONS), **others}.items())


class Workers:
    """Threads for what would block the event loop. At most ``threads`` calls run at a time."""

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix=name)
        self._free = asyncio.Semaphore(threads)

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Return or raise what ``work(*args)`` does, computed on one of the threads.

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
            finally:
                # Its exception's traceback refers to this frame: both would wait for the cyclic
                # collector.
                del done

    async def iterate(self, generator: Generator[T, None, None]) -> AsyncGenerator[T, None]:
        """Yield a generator's items, each computed on one of the threads."""
        try:
            while (item := await self.run(next, generator, None)) is not None:
                yield item
        finally:
            await self.run(generator.close)

    def close(self) -> None:
        """Take no more work; what runs is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def blocking(requests: AsyncIterator[T], seconds: float) -> Iterator[T]:
    """Iterate over a call's requests in a worker's thread.

    Raises TimeoutError: ``seconds`` without one.
    """
    loop = asyncio.get_running_loop()

    async def receive() -> T | None:
        return await anext(requests, None)

    def items() -> Iterator[T]:
        while True:
            item = asyncio.run_coroutine_threadsafe(receive(), loop).result(seconds)
            if item is None:
                return
            yield item

    return items()


def header_of(request: Any) -> Any:
    """The header in a call's first request. Raises RefusedError: none, or there is no request."""
    found = "the end of the stream" if request is None else request.WhichOneof("kind")
    if found != "header":
        raise wrong_kind("header", found)
    return request.header


def wrong_kind(expected: str, found: str | None) -> RefusedError:
    """The refusal of a request that is not the one expected now."""
    return RefusedError(
        "kind", found or "nothing", expected, "send the header first, and only once"
    )


class LoopThread:
    """An event loop on a thread of its own, for a program that is not asyncio itself."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
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
    """``Check`` of the standard health service, which is what probes ask.

    grpc_health 1.85 has one that refuses an unknown name without saying which are known.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._serving = dict.fromkeys(names, False)

    def set(self, name: str, serving: bool) -> None:
        """Set a service's health. Call it only on the server's event loop."""
        self._serving[name] = serving

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802 (gRPC's name)
        name = request.service
        if name not in self._serving:
            raise RefusedError(
                "service",
                clean(name),
                sorted(self._serving),
                "ask for one of these",
                StatusCode.NOT_FOUND,
            )
        status = health_pb2.HealthCheckResponse.ServingStatus
        return health_pb2.HealthCheckResponse(
            status=status.SERVING if self._serving[name] else status.NOT_SERVING
        )


class GrpcServer:
    """A ``grpc.aio`` server with health and reflection. Made and used on one event loop.

    Attributes:
        grpc: the server to register the service with.
        health: at first, nothing is serving.
    """

    def __init__(
        self,
        guard: Guard,
        access: Access,
        service: str,
        more_health: Sequence[str] = (),
        *,
        keepalive_s: float = 20.0,
    ) -> None:
        self._access = access
        self._names = ("", service)
        self.grpc = grpc.aio.server(
            interceptors=(guard,),
            options=server_options(keepalive_s),
            maximum_concurrent_rpcs=MAX_CALLS,
        )
        self.health = Health((*self._names, *more_health))
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.grpc)
        names = (service, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.grpc)

    def bind(self, host: str, port: int, field: str) -> str:
        """Take the port; calls are answered from ``grpc.start()`` on.

        Raises RefusedError: the port cannot be had.
        """
        at, tls = join_address(host, port), self._access.tls
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
                "a free port, or 0",
                f"set another {field}, or stop what listens there",
            ) from error
        return join_address(host, found)

    def set_serving(self, serving: bool) -> None:
        """Set the health of the process and of its service."""
        for name in self._names:
            self.health.set(name, serving)

    async def stop(self, grace: float) -> None:
        """Listen no more; calls in progress are cancelled after ``grace`` seconds."""
        self.set_serving(False)
        await self.grpc.stop(grace)


TIMEOUT = 5.0
"""The seconds in which a live service answers."""


def stop_signals() -> Callable[[], bool]:
    """Catch SIGTERM and SIGINT from now on; the result says whether one came.

    The handlers take no lock: a ``threading.Event`` that one of them sets waits for itself where a
    second signal comes during the first, or where the main thread is about to wait for that event.
    """
    caught: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: caught.append(number))
    return lambda: bool(caught)


def serving(channel: grpc.Channel, service: str = "") -> bool:
    """Return whether a service answers SERVING. ``service`` empty: the process as a whole.

    Raises grpc.RpcError: it does not answer, or knows no such service.
    """
    request = health_pb2.HealthCheckRequest(service=service)
    answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def main(argv: Sequence[str] | None = None) -> int:
    """Return 0 only if it serves; else 1, and say on stderr what is the matter."""
    parser = argparse.ArgumentParser(
        prog="python -m slipstream.serving.server",
        description="Asks a service for its gRPC health.",
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
    tls, options = grpc.ssl_channel_credentials(*pem), channel_options(args.address)
    with (
        grpc.secure_channel(args.address, tls, options)
        if args.ca
        else grpc.insecure_channel(args.address, options)
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
