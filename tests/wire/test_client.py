"""Channels whose calls carry a token."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from slipstream.client import open_channel
from slipstream.security import ClientCredentials
from slipstream.v1 import rollout_server_pb2 as pb
from slipstream.v1 import rollout_server_pb2_grpc as pb_grpc
from tests.security.certificates import write_token


def test_a_call_on_a_closed_channel_is_an_error_and_no_crash(tmp_path: Path) -> None:
    """gRPC's own interceptors end the process here."""
    token = write_token(tmp_path / "token", "observe" * 8)
    with open_channel("127.0.0.1:1", credentials=ClientCredentials(token_file=token)) as channel:
        stub = pb_grpc.RolloutServerStub(channel)
        with pytest.raises(grpc.RpcError):
            stub.GetState(pb.GetStateRequest(), timeout=1)
    for call in (
        lambda: stub.GetState(pb.GetStateRequest(), timeout=1),
        lambda: stub.GetState.future(pb.GetStateRequest(), timeout=1),
        lambda: stub.WatchAcceptance(pb.WatchAcceptanceRequest(), timeout=1),
        lambda: stub.Stage(iter([]), timeout=1),
    ):
        with pytest.raises(ValueError, match="closed"):
            call()
