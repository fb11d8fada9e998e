"""Every method of a service, called with raw bytes; a method that is added later is among them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import grpc
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from slipstream.client import OPTIONS
from slipstream.errors import METADATA_KEY
from slipstream.v1 import draft_trainer_pb2, rollout_server_pb2

UNTYPED = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
"""Status codes of a server that did not expect what it was sent."""

_CALLS = 400
_ANSWERS = 16


@dataclass(frozen=True)
class Method:
    """One of them.

    Attributes:
        path: as gRPC names it.
        request: its class.
        response: its class.
        endless: whether it answers one request for as long as its client likes.
    """

    path: str
    request: type[Message]
    response: type[Message]
    endless: bool

    @property
    def name(self) -> str:
        """Without the service."""
        return self.path.rpartition("/")[2]


def methods_of(service: ServiceDescriptor) -> list[Method]:
    """List a service's methods in the order of the .proto."""
    return [
        Method(
            f"/{service.full_name}/{method.name}",
            GetMessageClass(method.input_type),
            GetMessageClass(method.output_type),
            method.server_streaming and not method.client_streaming,
        )
        for method in service.methods
    ]


_BESIDE = [
    *methods_of(health_pb2.DESCRIPTOR.services_by_name["Health"]),
    *methods_of(reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]),
]

TRAINER = methods_of(draft_trainer_pb2.DESCRIPTOR.services_by_name["DraftTrainer"]) + _BESIDE
ROLLOUT = methods_of(rollout_server_pb2.DESCRIPTOR.services_by_name["RolloutServer"]) + _BESIDE


class Caller:
    """Calls one server; its connection is a new one every so often, as rates are a connection's.

    Args:
        address: host:port.
        seconds: deadline of a call.

    Attributes:
        untyped: method and text of calls that ended in ``UNTYPED`` without a refusal.
    """

    def __init__(self, address: str, seconds: float = 20.0) -> None:
        self._address = address
        self._seconds = seconds
        self._left = 0
        self._channel: grpc.Channel | None = None
        self.untyped: list[str] = []

    def call(self, method: Method, messages: Iterable[bytes]) -> None:
        """Send them all, read a few answers, and look at the status."""
        call = self._connection().stream_stream(method.path)(iter(messages), timeout=self._seconds)
        most = 1 if method.endless else _ANSWERS
        try:
            for number, _ in enumerate(call, 1):
                if number >= most:
                    call.cancel()
                    return
        except grpc.RpcError as error:
            keys = [key for key, _ in error.trailing_metadata() or ()]
            if error.code() in UNTYPED and METADATA_KEY not in keys:
                text = f"{method.path}: {error.code().name} {error.details()!r:.300}"
                self.untyped.append(text)

    def close(self) -> None:
        """End the connection."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _connection(self) -> grpc.Channel:
        if self._left <= 0:
            self.close()
            self._left = _CALLS
        if self._channel is None:
            options = (*OPTIONS, ("grpc.use_local_subchannel_pool", 1))
            self._channel = grpc.insecure_channel(self._address, options=options)
        self._left -= 1
        return self._channel
