"""Client side of every connection: open a channel, and stage tensors on a rollout server.

Staging is here because the trainer stages drafts and the bridge stages policies, and neither may
import the other.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import grpc
import torch

from slipstream.errors import RefusedError, clean
from slipstream.serving.identity import NONE, ClientCredentials
from slipstream.serving.tls import Followed
from slipstream.tensors import chunks_of
from slipstream.v1 import rollout_server_pb2 as pb
from slipstream.v1 import rollout_server_pb2_grpc as pb_grpc

MAX_MESSAGE_BYTES = 64 << 20
"""Largest message either side takes: one sample of 2048 tokens at 32 KiB each."""

TRAINER = "slipstream-trainer"
"""The metadata key that names the trainer in its calls to rollout servers."""

OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A peer that is stopped or unplugged is noticed within half a minute.
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    # gRPC waits a minute for a ping without this, whatever the timeout above says.
    ("grpc.http2.ping_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
    # A restarted peer is found again within about two seconds, at another address too.
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``host:port``. Raises ValueError, saying what is wrong."""
    scheme, found, _ = address.partition("://")
    if found:
        raise ValueError(f"{address!r} begins with {scheme}://, which a gRPC address does not")
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is not of the form host:port")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """Undo ``split_address``; an IPv6 address may have its brackets already."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def channel_options(
    address: str, credentials: ClientCredentials = NONE
) -> list[tuple[str, int | str]]:
    """The options of a channel to ``host:port``: ``OPTIONS``, and what these arguments add."""
    options: list[tuple[str, int | str]] = [*OPTIONS]
    if address.startswith(("127.", "localhost:", "[::1]:")):
        # A proxy that the environment names cannot reach this machine's own addresses.
        options.append(("grpc.enable_http_proxy", 0))
    if credentials.server_name:
        options.append(("grpc.ssl_target_name_override", credentials.server_name))
    return options


def open_channel(
    address: str, *, credentials: ClientCredentials = NONE, own_connection: bool = False
) -> grpc.Channel:
    """A lazy channel to ``host:port``; connects on the first call.

    Raises:
        RefusedError: a file of ``credentials`` cannot be used, or its token would cross a network
            without TLS.
    """
    credentials.check_address(address, "address")
    options = channel_options(address, credentials)
    if own_connection:
        options.append(("grpc.use_local_subchannel_pool", 1))
    tls, token = credentials.tls(), credentials.token()
    if tls is None:
        channel = grpc.insecure_channel(address, options=options)
    else:
        channel = grpc.secure_channel(address, tls, options=options)
    return channel if token is None else _TokenChannel(channel, token)


class _TokenChannel(grpc.Channel):  # type: ignore[misc]
    """A channel that sends the token that is in its file when a call begins.

    Not an interceptor of gRPC's: that one looks a method up in the channel at every call, and on a
    closed channel this ends the process with a segmentation fault. Here it is looked up once.
    """

    def __init__(self, channel: grpc.Channel, token: Followed[str]) -> None:
        self._channel, self._token = channel, token

    def unary_unary(self, *args: Any, **named: Any) -> _TokenMethod:
        return _TokenMethod(self._channel.unary_unary(*args, **named), self._token)

    def unary_stream(self, *args: Any, **named: Any) -> _TokenMethod:
        return _TokenMethod(self._channel.unary_stream(*args, **named), self._token)

    def stream_unary(self, *args: Any, **named: Any) -> _TokenMethod:
        return _TokenMethod(self._channel.stream_unary(*args, **named), self._token)

    def stream_stream(self, *args: Any, **named: Any) -> _TokenMethod:
        return _TokenMethod(self._channel.stream_stream(*args, **named), self._token)

    def subscribe(self, *args: Any, **named: Any) -> None:
        self._channel.subscribe(*args, **named)

    def unsubscribe(self, *args: Any, **named: Any) -> None:
        self._channel.unsubscribe(*args, **named)

    def close(self) -> None:
        self._channel.close()

    def __enter__(self) -> _TokenChannel:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _TokenMethod:
    def __init__(self, method: Any, token: Followed[str]) -> None:
        self._method, self._token = method, token

    def __call__(self, request: Any, *, metadata: Any = None, **named: Any) -> Any:
        return self._method(request, metadata=self._with_token(metadata), **named)

    def future(self, request: Any, *, metadata: Any = None, **named: Any) -> Any:
        return self._method.future(request, metadata=self._with_token(metadata), **named)

    def _with_token(self, metadata: Any) -> tuple[tuple[str, str], ...]:
        return (*(metadata or ()), ("authorization", f"Bearer {self._token.now()}"))


def stage(
    stub: pb_grpc.RolloutServerStub,
    header: pb.StageHeader,
    tensors: Mapping[str, torch.Tensor],
    *,
    metadata: tuple[tuple[str, str], ...] = (),
    timeout: float,
) -> pb.StageResult:
    """Stage what ``header`` describes on one rollout server and wait until it holds it.

    Args:
        header: with the specs of ``tensors``; or, without any, with ``transfer_update``.
        tensors: by name.
        metadata: of the call.

    Raises:
        grpc.RpcError: refused (see ``slipstream.errors``), unreachable or too late.
        RefusedError: the server asks for a tensor that it was not offered.
    """
    needed: queue.SimpleQueue[Sequence[str] | None] = queue.SimpleQueue()

    def requests() -> Iterator[pb.StageRequest]:
        yield pb.StageRequest(header=header)
        # Longer than the call: its own deadline says better what happened.
        names = needed.get(timeout=2 * timeout)
        if names is None:
            return
        for chunk in chunks_of({name: tensors[name] for name in names}):
            yield pb.StageRequest(chunk=chunk)

    try:
        for response in stub.Stage(requests(), timeout=timeout, metadata=metadata):
            if response.WhichOneof("kind") == "needed":
                names = list(response.needed.names)
                unknown = next((name for name in names if name not in tensors), None)
                if unknown is not None:
                    raise RefusedError(
                        "needed.names", clean(unknown), "a name that was offered", "look at its log"
                    )
                needed.put(names)
            else:
                return response.staged
    finally:
        # Ends gRPC's request thread when the call fails before "needed".
        needed.put(None)
    raise ConnectionError(f"{header.stage_id}: the server ended the stage without a result")
