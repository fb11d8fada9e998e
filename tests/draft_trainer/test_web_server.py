"""The HTTP server's bounds: places, patience, a port that is taken."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPConnection

import pytest
from starlette.responses import PlainTextResponse

from draft_trainer.server import web as server
from draft_trainer.server.web import WebServer
from tests.draft_trainer.rig import open_to_all

DEADLINE = 60.0


answer = PlainTextResponse("ok")


@pytest.fixture
def web() -> Iterator[WebServer]:
    found = WebServer(answer, open_to_all(), "127.0.0.1", 0)
    yield found
    found.close(10.0)


def connected(web: WebServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", int(web.url.rpartition(":")[2])), DEADLINE)


def ask(web: WebServer) -> bytes:
    connection = HTTPConnection("127.0.0.1", int(web.url.rpartition(":")[2]), timeout=DEADLINE)
    connection.request("GET", "/")
    return connection.getresponse().read()


def test_web_slow_client_is_cut_off(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "CONNECTION_SECONDS", 0.2)
    # A reset, where it was cut off before it sent anything.
    with connected(web) as slow, suppress(ConnectionError):
        slow.sendall(b"GET / HT")
        assert slow.recv(1) == b""
    monkeypatch.setattr(server, "CONNECTION_SECONDS", 60.0)
    assert ask(web) == b"ok"


def test_web_connections_are_bounded(web: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 2)
    with connected(web) as first, connected(web) as second:
        for held in (first, second):
            held.sendall(b"GET / HT")
        with pytest.raises(OSError):
            ask(web)
        first.sendall(b"TP/1.0\r\n\r\n")
        assert first.recv(5) == b"HTTP/"
