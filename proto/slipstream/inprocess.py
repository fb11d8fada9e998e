"""Calls within one process: ``LocalServer`` and ``LocalChannel`` take gRPC's place below the stubs.

Handlers, guard, stubs, messages, statuses and deadlines are those of a service that listens; no
port is opened and no gRPC thread runs. A message crosses as its serialized bytes, so that neither
side holds an object of the other. An address is ``in-process:N``.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc

from slipstream.errors import StatusCode

logger = logging.getLogger(__name__)

HOST = "in-process"

AHEAD = 16
"""Messages of a call that wait for the other side."""

Metadata = Sequence[tuple[str, str | bytes]]

_servers: dict[str, LocalServer] = {}
_lock = threading.Lock()
_numbers = itertools.count(1)


def is_in_process(address: str) -> bool:
    """Whether an address is a ``LocalServer``'s, of this process or of another."""
    return address.startswith(f"{HOST}:")


class LocalServer:
    """The part of ``grpc.aio.Server`` that a service needs. Made and used on one event loop.

    Args:
        guard: stands before every call.
    """

    def __init__(self, guard: grpc.aio.ServerInterceptor) -> None:
        self._guard = guard
        self._handlers: list[grpc.GenericRpcHandler] = []
        self._loop = asyncio.get_running_loop()
        self._calls: set[asyncio.Task[None]] = set()
        self.address = f"{HOST}:{next(_numbers)}"

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Serve what these know."""
        self._handlers += handlers

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        """Nothing: generated code gives the same ones as generic handlers."""

    async def start(self) -> None:
        """Take calls."""
        with _lock:
            _servers[self.address] = self

    async def stop(self, grace: float) -> None:
        """Take no more calls; those in progress are cancelled after ``grace`` seconds."""
        with _lock:
            _servers.pop(self.address, None)
        # Calls that were taken before that begin now, so that none is left without an end.
        await asyncio.sleep(0)
        if self._calls:
            await asyncio.wait(self._calls, timeout=grace)
        for task in self._calls:
            task.cancel()
        if self._calls:
            await asyncio.wait(self._calls)

    def begin(self, call: LocalCall) -> None:
        """Serve a call, from any thread. Raises LookupError: it takes none any more."""
        with _lock:
            if _servers.get(self.address) is not self:
                raise LookupError(self.address)
            self._loop.call_soon_threadsafe(self._begin, call)

    def soon(self, function: Callable[..., object], *arguments: object) -> None:
        """Call a function on the event loop, unless that is closed."""
        # RuntimeError: it is closed, so the server stopped and every call of it has ended.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(function, *arguments)

    def _begin(self, call: LocalCall) -> None:
        task = asyncio.ensure_future(call.serve(self._guard, self._find))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        task.add_done_callback(call.ended)
        call.task = task

    async def _find(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        found = (handler.service(details) for handler in self._handlers)
        return next((one for one in found if one is not None), None)


class LocalCall(grpc.RpcError, grpc.Call):  # type: ignore[misc]
    """One call: what its caller reads, and the error that it ends with, as gRPC's own.

    Args:
        server: None: there is none of this address.
        path: ``/package.Service/Method``.
        requests: serialized; several are taken by a thread of the call's own, each as it is read.
        read: bytes to an answer.
        timeout: seconds until DEADLINE_EXCEEDED; None: no deadline.
        metadata: of the caller.
    """

    def __init__(
        self,
        server: LocalServer | None,
        path: str,
        requests: bytes | Iterator[bytes],
        read: Callable[[bytes], Any],
        timeout: float | None,
        metadata: Metadata,
    ) -> None:
        super().__init__()
        self._server = server
        self._call = _Details(path, tuple(metadata))
        self._requests = requests
        self._read = read
        self._timeout = timeout
        self._status: tuple[grpc.StatusCode, str] = (StatusCode.UNKNOWN, "")
        self._trailing: Metadata = ()
        self._done: Future[None] = Future()
        self._answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._given: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._asked = threading.Semaphore(0)
        self._unread = asyncio.Semaphore(AHEAD)
        self.task: asyncio.Task[None] | None = None
        try:
            if server is None:
                raise LookupError(path)
            server.begin(self)
        except LookupError:
            self._end(StatusCode.UNAVAILABLE, "no server of this address in this process")

    # On the event loop.

    async def serve(self, guard: Any, find: Any) -> None:
        """Answer it."""
        async with asyncio.timeout(self._timeout) as self._deadline:
            handler = await guard.intercept_service(find, self._call)
            if handler is None:
                raise _AbortedError(StatusCode.UNIMPLEMENTED, "Method not found!")
            context = _Context(self, handler.response_serializer or bytes)
            if isinstance(self._requests, bytes):
                self._given.put_nowait(self._requests)
                self._given.put_nowait(None)
            else:
                give = partial(self._give, self._requests)
                threading.Thread(target=give, name="slipstream-requests", daemon=True).start()
            behavior = handler.stream_stream or handler.stream_unary
            answer = await behavior(self._taken(handler.request_deserializer or bytes), context)
            if not handler.response_streaming:
                await context.write(answer)

    async def write(self, data: bytes) -> None:
        """Hand an answer over; waits while ``AHEAD`` of them are unread."""
        await self._unread.acquire()
        self._answers.put(data)

    def ended(self, task: asyncio.Task[None]) -> None:
        """Its task is done."""
        error = None if task.cancelled() else task.exception()
        if task.cancelled():
            self._end(StatusCode.CANCELLED, "the call was cancelled")
        elif isinstance(error, _AbortedError):
            self._trailing = error.trailing
            self._end(error.code, error.details)
        elif isinstance(error, TimeoutError) and self._deadline.expired():
            self._end(StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")
        elif error is not None:
            logger.error("%s ended with an error", self._call.method, exc_info=error)
            self._end(StatusCode.UNKNOWN, f"{type(error).__name__}: {error}")
        else:
            self._end(StatusCode.OK, "")

    async def _taken(self, read: Callable[[bytes], Any]) -> AsyncIterator[Any]:
        while True:
            self._asked.release()
            if (data := await self._given.get()) is None:
                return
            yield read(data)

    # On the call's own thread.

    def _give(self, requests: Iterator[bytes]) -> None:
        """Hand requests over, each when it is asked for."""
        assert self._server is not None
        whole = False
        try:
            while True:
                self._asked.acquire()
                if self._done.done() or (data := next(requests, None)) is None:
                    break
                self._server.soon(self._given.put_nowait, data)
            whole = True
        finally:
            # An iterator that raises ends the call, as in gRPC.
            self._server.soon(self._given.put_nowait, None) if whole else self.cancel()

    # On the caller's threads.

    def __iter__(self) -> LocalCall:
        return self

    def __next__(self) -> Any:
        if (data := self._answers.get()) is not None:
            assert self._server is not None
            self._server.soon(self._unread.release)
            return self._read(data)
        self._answers.put(None)
        if self.code() is StatusCode.OK:
            raise StopIteration
        raise self

    def result(self, timeout: float | None = None) -> Any:
        """The answer of a call that has one. Raises itself where there is none."""
        self._done.result(timeout)
        return next(self)

    def done(self) -> bool:
        """Whether it has ended."""
        return self._done.done()

    def is_active(self) -> bool:
        """Whether it has not."""
        return not self._done.done()

    def cancel(self) -> bool:
        """End it with CANCELLED, unless it has ended. Whether it had not."""
        if self._server is not None:
            self._server.soon(lambda: self.task.cancel() if self.task is not None else None)
        return self.is_active()

    def code(self) -> grpc.StatusCode:
        """How it ended; waits for that."""
        self._done.result()
        return self._status[0]

    def details(self) -> str:
        """The other side's text; waits for the end."""
        self._done.result()
        return self._status[1]

    def trailing_metadata(self) -> Metadata:
        """Of the end; waits for that."""
        self._done.result()
        return self._trailing

    def initial_metadata(self) -> Metadata:
        """None."""
        return ()

    def time_remaining(self) -> float | None:
        """The timeout that it was given."""
        return self._timeout

    def add_callback(self, callback: Callable[[], None]) -> bool:
        """Call it at the end. False, and not called: it has ended."""
        if self._done.done():
            return False
        self._done.add_done_callback(lambda _: callback())
        return True

    def __str__(self) -> str:
        return f"{self._call.method}: {self._status[0].name}: {self._status[1]}"

    def _end(self, code: grpc.StatusCode, details: str) -> None:
        self._status = (code, details)
        self._done.set_result(None)
        self._answers.put(None)
        # The thread of the requests finds that the call has ended.
        self._asked.release()


class LocalChannel(grpc.Channel):  # type: ignore[misc]
    """Calls to the ``LocalServer`` of an address, which may start later or again. Thread-safe."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._calls: set[LocalCall] = set()
        self._closed = False

    def unary_unary(self, path: str, *serializers: Any, **named: Any) -> _Method:
        return _Method(self, path, True, True, *serializers, **named)

    def unary_stream(self, path: str, *serializers: Any, **named: Any) -> _Method:
        return _Method(self, path, True, False, *serializers, **named)

    def stream_unary(self, path: str, *serializers: Any, **named: Any) -> _Method:
        return _Method(self, path, False, True, *serializers, **named)

    def stream_stream(self, path: str, *serializers: Any, **named: Any) -> _Method:
        return _Method(self, path, False, False, *serializers, **named)

    def begin(self, path: str, *arguments: Any) -> LocalCall:
        """A new call. Raises ValueError: the channel is closed, as gRPC does."""
        with self._lock:
            if self._closed:
                raise ValueError("Cannot invoke RPC on closed channel!")
            call = LocalCall(_servers.get(self._address), path, *arguments)
            self._calls.add(call)
        if not call.add_callback(lambda: self._calls.discard(call)):
            self._calls.discard(call)
        return call

    def subscribe(self, callback: Any, try_to_connect: bool | None = False) -> None:
        """Tell that it is ready: there is nothing to connect."""
        callback(grpc.ChannelConnectivity.READY)

    def unsubscribe(self, callback: Any) -> None:
        """Nothing."""

    def close(self) -> None:
        """Cancel its calls; later ones raise ValueError."""
        with self._lock:
            self._closed = True
            calls = [*self._calls]
        for call in calls:
            call.cancel()

    def __enter__(self) -> LocalChannel:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Method:
    """One method of a channel, with the arguments of gRPC's multi-callables."""

    def __init__(
        self,
        channel: LocalChannel,
        path: str,
        one_request: bool,
        one_answer: bool,
        request_serializer: Callable[[Any], bytes] | None = None,
        response_deserializer: Callable[[bytes], Any] | None = None,
        **_: object,
    ) -> None:
        self._channel, self._path = channel, path
        self._one_request, self._one_answer = one_request, one_answer
        self._write, self._read = request_serializer or bytes, response_deserializer or bytes

    def __call__(self, request: Any, **named: Any) -> Any:
        call = self.future(request, **named)
        return call.result() if self._one_answer else call

    def future(
        self,
        request: Any,
        timeout: float | None = None,
        metadata: Metadata | None = None,
        **_: object,
    ) -> LocalCall:
        write = self._write
        requests = write(request) if self._one_request else map(write, request)
        return self._channel.begin(self._path, requests, self._read, timeout, metadata or ())


@dataclass(frozen=True)
class _Details:
    """``grpc.HandlerCallDetails``."""

    method: str
    invocation_metadata: Metadata


@dataclass
class _Context:
    """What the guard uses of ``grpc.aio.ServicerContext``."""

    call: LocalCall
    serialize: Callable[[Any], bytes]
    trailing: Metadata = ()

    def auth_context(self) -> dict[str, list[bytes]]:
        return {}

    def peer(self) -> str:
        return HOST

    def set_trailing_metadata(self, metadata: Metadata) -> None:
        self.trailing = tuple(metadata)

    async def write(self, message: Any) -> None:
        await self.call.write(self.serialize(message))

    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        raise _AbortedError(code, details, self.trailing)


class _AbortedError(Exception):
    """A handler ended its call."""

    def __init__(self, code: grpc.StatusCode, details: str, trailing: Metadata = ()) -> None:
        super().__init__(details)
        self.code, self.details, self.trailing = code, details, trailing
