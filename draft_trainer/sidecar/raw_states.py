"""Registers the service so that StreamStates requests keep their payload out of protobuf."""

from __future__ import annotations

from typing import Any

import grpc

from slipstream.framing import unframe
from slipstream.v1 import draft_trainer_pb2_grpc as pb_grpc


class _Registrar:
    """Takes the place of the server while the generated code registers its handlers."""

    def __init__(self, server: grpc.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """The generated code registers everything twice; by name is enough."""

    def add_registered_method_handlers(
        self, service: str, handlers: dict[str, grpc.RpcMethodHandler]
    ) -> None:
        raw = grpc.stream_stream_rpc_method_handler(
            handlers["StreamStates"].stream_stream,
            request_deserializer=unframe,
            response_serializer=handlers["StreamStates"].response_serializer,
        )
        changed = {**handlers, "StreamStates": raw}
        generic = grpc.method_handlers_generic_handler(service, changed)
        self._server.add_generic_rpc_handlers((generic,))
        self._server.add_registered_method_handlers(service, changed)


def add_draft_trainer(servicer: pb_grpc.DraftTrainerServicer, server: grpc.Server) -> None:
    """As ``add_DraftTrainerServicer_to_server``; StreamStates gets ``framing.Framed`` requests."""
    pb_grpc.add_DraftTrainerServicer_to_server(servicer, _Registrar(server))
