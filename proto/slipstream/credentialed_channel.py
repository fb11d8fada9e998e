"""A gRPC channel that shows credentials, and follows them when their files change."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import grpc

from slipstream.credentials import Shown

_Metadata = Sequence[tuple[str, str | bytes]]


class CredentialedChannel(grpc.Channel):
    """Connects again with new certificates, and sends the token of this instant with each call.

    gRPC's own channel keeps the certificates it was made with, and would be refused by the first
    server that restarts after theirs have expired. Calls that are under way stay on the connection
    before; it is closed at the change after the next one.

    Args:
        shown: the credentials.
        connect: opens a plain or a secure channel.
    """

    def __init__(
        self, shown: Shown, connect: Callable[[grpc.ChannelCredentials | None], grpc.Channel]
    ) -> None:
        self._shown = shown
        self._connect = connect
        self._lock = threading.Lock()
        self._closed = False
        self._generation, tls = shown.tls()
        self._channel = connect(tls)
        self._before: grpc.Channel | None = None

    def now(self) -> grpc.Channel:
        """The connection to use."""
        with self._lock:
            generation, tls = self._shown.tls()
            if generation != self._generation and not self._closed:
                if self._before is not None:
                    self._before.close()
                self._before, self._channel = self._channel, self._connect(tls)
                self._generation = generation
            return self._channel

    def with_token(self, metadata: _Metadata | None) -> _Metadata | None:
        """A call's metadata with the token, if there is one."""
        token = self._shown.token()
        return (
            metadata if token is None else (*(metadata or ()), ("authorization", f"Bearer {token}"))
        )

    def subscribe(self, callback: Callable[[Any], None], try_to_connect: bool = False) -> None:
        """gRPC's; of the connection of this instant."""
        self.now().subscribe(callback, try_to_connect=try_to_connect)

    def unsubscribe(self, callback: Callable[[Any], None]) -> None:
        """gRPC's."""
        self.now().unsubscribe(callback)

    def unary_unary(self, method: str, *arguments: Any, **options: Any) -> _Call:
        """gRPC's."""
        return _Call(self, lambda channel: channel.unary_unary(method, *arguments, **options))

    def unary_stream(self, method: str, *arguments: Any, **options: Any) -> _Call:
        """gRPC's."""
        return _Call(self, lambda channel: channel.unary_stream(method, *arguments, **options))

    def stream_unary(self, method: str, *arguments: Any, **options: Any) -> _Call:
        """gRPC's."""
        return _Call(self, lambda channel: channel.stream_unary(method, *arguments, **options))

    def stream_stream(self, method: str, *arguments: Any, **options: Any) -> _Call:
        """gRPC's."""
        return _Call(self, lambda channel: channel.stream_stream(method, *arguments, **options))

    def close(self) -> None:
        """Close every connection; calls under way fail."""
        with self._lock:
            self._closed = True
            if self._before is not None:
                self._before.close()
            self._channel.close()

    def __enter__(self) -> CredentialedChannel:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Call:
    """One method, whichever of the four shapes it has."""

    def __init__(self, owner: CredentialedChannel, build: Callable[[grpc.Channel], Any]) -> None:
        self._owner = owner
        self._build = build
        self._built: tuple[grpc.Channel, Any] | None = None

    def __call__(
        self, request: Any, timeout: Any = None, metadata: Any = None, **options: Any
    ) -> Any:
        return self._now()(
            request, timeout=timeout, metadata=self._owner.with_token(metadata), **options
        )

    def with_call(
        self, request: Any, timeout: Any = None, metadata: Any = None, **options: Any
    ) -> Any:
        return self._now().with_call(
            request, timeout=timeout, metadata=self._owner.with_token(metadata), **options
        )

    def future(
        self, request: Any, timeout: Any = None, metadata: Any = None, **options: Any
    ) -> Any:
        return self._now().future(
            request, timeout=timeout, metadata=self._owner.with_token(metadata), **options
        )

    def _now(self) -> Any:
        channel, built = self._owner.now(), self._built
        if built is None or built[0] is not channel:
            built = self._built = (channel, self._build(channel))
        return built[1]
