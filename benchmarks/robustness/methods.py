"""Every method of a service, found in its descriptor: one that is added later is among them."""

from __future__ import annotations

from dataclasses import dataclass

from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from slipstream.v1 import draft_trainer_pb2, rollout_server_pb2


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
    """In the order of the .proto."""
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
