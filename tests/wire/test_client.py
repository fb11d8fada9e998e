"""Channels: calls that carry a token, and connections that stay."""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from slipstream.client import open_channel
from slipstream.errors import RefusedError
from slipstream.serving import server as serving
from slipstream.serving.identity import ClientCredentials, open_access
from slipstream.v1 import rollout_server_pb2 as pb
from slipstream.v1 import rollout_server_pb2_grpc as pb_grpc
from tests.security.certificates import write_token


def test_call_on_closed_channel_raises(tmp_path: Path) -> None:
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


def test_host_with_one_remote_address_is_not_loopback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither serves it without TLS and tokens, nor sends it a token readable."""
    kind = (socket.AF_INET, socket.SOCK_STREAM, 0, "")
    found = [(*kind, (address, 0)) for address in ("127.0.0.1", "192.0.2.7")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(RefusedError, match="host: found mixed without TLS"):
        open_access(str, "mixed", tokens={}, names={})
    token = write_token(tmp_path / "token", "observe" * 8)
    with pytest.raises(RefusedError, match="with a token and without TLS"):
        ClientCredentials(token_file=token).check_address("mixed:1", "trainer")
    del found[1]
    assert open_access(str, "mixed", tokens={}, names={}).open
    ClientCredentials(token_file=token).check_address("mixed:1", "trainer")


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment names one that does not answer."""
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "no_grpc_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("proxy")
def test_health_check_of_localhost_ignores_proxy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert serving.main([f"127.0.0.1:{port}"]) == 1
    finally:
        server.stop(None)
    assert "UNIMPLEMENTED" in capsys.readouterr().err


@pytest.mark.usefixtures("proxy")
def test_channel_to_localhost_ignores_proxy() -> None:
    server = grpc.server(ThreadPoolExecutor(1))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        for host in ("127.0.0.1", "localhost"):
            with open_channel(f"{host}:{port}") as channel, pytest.raises(grpc.RpcError) as answer:
                pb_grpc.RolloutServerStub(channel).GetState(pb.GetStateRequest(), timeout=20)
            assert answer.value.code() == grpc.StatusCode.UNIMPLEMENTED
    finally:
        server.stop(None)


SETTINGS, PING, GOAWAY = 4, 6, 7
ACK = 1


def test_server_accepts_frequent_pings() -> None:
    """gRPC's own client pings beyond keepalive, to measure the connection."""

    async def main() -> list[int]:
        server = grpc.aio.server(options=serving.server_options(20.0))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        seen: list[int] = []
        try:
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(SETTINGS, b""))
            writer.write(_frame(PING, bytes(8)))
            while GOAWAY not in seen and len(seen) < 50:
                head = await asyncio.wait_for(reader.readexactly(9), 10)
                await reader.readexactly(int.from_bytes(head[:3], "big"))
                if head[3] == GOAWAY or (head[3] == PING and head[4] == ACK):
                    seen.append(head[3])
                    writer.write(_frame(PING, bytes(8)))
        finally:
            writer.close()
            await server.stop(0)
        return seen

    assert asyncio.run(main()) == [PING] * 50


def _frame(kind: int, payload: bytes) -> bytes:
    """An HTTP/2 frame of stream 0."""
    return len(payload).to_bytes(3, "big") + bytes([kind, 0, 0, 0, 0, 0]) + payload
