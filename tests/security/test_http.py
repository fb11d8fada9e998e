"""The HTTP server: the observe role by token, password and certificate, and TLS that rotates."""

from __future__ import annotations

import base64
import http.client
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import PlainTextResponse

from draft_trainer.server.web import Guarded, WebServer
from slipstream.serving.identity import Access, Role, TokenFiles
from slipstream.serving.tls import TlsFiles, TlsPaths
from tests.security.certificates import HOUR, Authority, Pair, write_token
from tests.waiting import until

pytestmark = pytest.mark.contract("hostile peers")

TOKENS = {role: role.value * 8 for role in Role}
DEADLINE = 60.0


page = PlainTextResponse("facts")


@contextmanager
def serving(access: Access) -> Iterator[WebServer]:
    server = WebServer(Guarded(page, access), access, "127.0.0.1", 0)
    yield server
    server.close(DEADLINE)


def access_for(tmp_path: Path, *roles: Role, tls: TlsFiles | None = None, **names: Any) -> Access:
    files = {role: [write_token(tmp_path / role, TOKENS[role])] for role in roles}
    return Access(tls, TokenFiles(files, "{role}"), {Role(k): v for k, v in names.items()})


def get(server: WebServer, authorization: str = "", context: Any = None) -> tuple[int, str]:
    host, port = server.url.partition("://")[2].split(":")
    connection: http.client.HTTPConnection
    if context is None:
        connection = http.client.HTTPConnection(host, int(port), timeout=DEADLINE)
    else:
        connection = http.client.HTTPSConnection(host, int(port), timeout=DEADLINE, context=context)
    headers = {"Authorization": authorization} if authorization else {}
    connection.request("GET", "/metrics", headers=headers)
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response.status, text


def test_http_tokens(tmp_path: Path) -> None:
    access = access_for(tmp_path, Role.OBSERVE, Role.FEED)
    observe = TOKENS[Role.OBSERVE]
    with serving(access) as server:
        assert server.url.startswith("http://127.0.0.1:")
        assert get(server, f"Bearer {observe}") == (200, "facts")
        assert get(server, f"bearer {TOKENS[Role.FEED]}") == (200, "facts")
        password = base64.b64encode(f"anybody:{observe}".encode()).decode()
        assert get(server, f"Basic {password}") == (200, "facts")
        for wrong in ("", "Bearer", "Bearer x", "Basic !!", "Basic eDp5", f"Token {observe}"):
            status, text = get(server, wrong)
            assert status == 401, wrong
            assert "the role observe" in text and observe not in text
        assert access.refusals.by_reason == {"no_credentials": 1, "unknown_token": 5}


def test_http_open_without_access_rules() -> None:
    with serving(Access(None, TokenFiles({}, ""), {})) as server:
        assert get(server) == (200, "facts")


def trusting(authority: Authority, pair: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(authority.path))
    context.verify_flags |= ssl.VERIFY_X509_STRICT  # as by default from Python 3.13 on
    if pair is not None:
        context.load_cert_chain(pair.certificate, pair.key)
    return context


def tls_of(pair: Pair, ca: Path | None = None) -> TlsFiles:
    return TlsFiles(TlsPaths(pair.certificate, pair.key, ca), lambda name: name)


def test_http_tls_and_certificate_rotation(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "pki")
    pair = authority.sign("server")
    access = access_for(tmp_path, Role.OBSERVE, tls=tls_of(pair))
    token = f"Bearer {TOKENS[Role.OBSERVE]}"
    with serving(access) as server:
        assert server.url.startswith("https://")
        assert get(server, token, trusting(authority)) == (200, "facts")
        assert get(server, "", trusting(authority))[0] == 401
        other = Authority(tmp_path / "other")
        with pytest.raises(ssl.SSLCertVerificationError):
            get(server, token, trusting(other))
        made = other.sign("new")
        pair.certificate.write_bytes(made.certificate.read_bytes())
        pair.key.write_bytes(made.key.read_bytes())
        assert get(server, token, trusting(other)) == (200, "facts")
        # Plain text to a TLS port, and a bad rotation: counted, logged, served on.
        with pytest.raises((http.client.HTTPException, OSError)):
            get(server, token)
        expired = other.sign("expired", ends=-HOUR / 2)
        pair.certificate.write_bytes(expired.certificate.read_bytes())
        assert get(server, token, trusting(other)) == (200, "facts")
        until(lambda: access.refusals.by_reason["tls"] >= 1)


def test_http_client_certificates(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "pki")
    tls = tls_of(authority.sign("server"), authority.path)
    access = access_for(tmp_path, tls=tls, observe=["prometheus.example"])
    with serving(access) as server:
        good = authority.sign("a", hosts=("prometheus.example",), client=True)
        other = authority.sign("b", hosts=("other.example",), client=True)
        assert get(server, "", trusting(authority, good)) == (200, "facts")
        assert get(server, "", trusting(authority, other))[0] == 401
        with pytest.raises((http.client.HTTPException, OSError)):
            get(server, "", trusting(authority))
        strange = Authority(tmp_path / "other").sign("c", client=True)
        with pytest.raises((http.client.HTTPException, OSError)):
            get(server, "", trusting(authority, strange))
        # The client may know of its failed handshake before the server has counted it.
        expected = {"unknown_certificate": 1, "tls": 2}
        until(lambda: access.refusals.by_reason == expected)


def test_http_slow_tls_handshake_is_cut_off(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "pki")
    access = access_for(tmp_path, Role.OBSERVE, tls=tls_of(authority.sign("server")))
    with serving(access) as server:
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        with socket.create_connection(address, DEADLINE) as slow:
            slow.sendall(b"\x16\x03\x01")
            assert slow.recv(1) == b""
        token = f"Bearer {TOKENS[Role.OBSERVE]}"
        assert get(server, token, trusting(authority)) == (200, "facts")
