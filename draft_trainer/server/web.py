"""The trainer's HTTP port: ``/metrics``, the page, and the page's data as JSON.

GET and HEAD alone. An answer holds no part of its request but a host name that is refused.
Everything that a client can hold is bounded: connections, their time, the size of a request.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import ipaddress
import logging
import re
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import uvicorn
from google.protobuf import json_format
from google.protobuf.message import Message
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from draft_trainer.server.status import Status
from slipstream.errors import RefusedError, StatusCode
from slipstream.serving.identity import Access, Role
from slipstream.v1 import console_pb2

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 32
"""Most connections at a time; further ones are closed at once."""

CONNECTION_SECONDS = 20.0
"""Longest life of a connection, from the handshake to the last byte: a client that sends or reads
a byte at a time is cut off."""

HANDSHAKE_SECONDS = 5.0
FACTS_SECONDS = 1.0
"""Least time between two collections of the facts, for any number of viewers."""

ASSETS = Path(__file__).with_name("assets")
EVENTS_SHOWN = 200
_REQUEST_BYTES = 16 << 10
_CONTENT_POLICY = (
    b"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    b"img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_NAMES = "slipstream.certificate_names"
_PRIVATE = (".localhost", ".local", ".internal", ".svc")
"""Top-level names that public DNS does not have."""


def serve_web(
    status: Status, metrics: CollectorRegistry, access: Access, host: str, port: int
) -> WebServer:
    """Serve ``/metrics``, the page, ``/api/status``, ``/api/history`` and ``/api/events``.

    Raises:
        RefusedError: the port cannot be bound.
    """
    ProcessCollector(registry=metrics)

    def scraped(request: Request) -> Response:
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(metrics), headers={"Content-Type": content_type})

    def events() -> console_pb2.Events:
        return console_pb2.Events(events=status.events.since(0, EVENTS_SHOWN))

    routes: list[BaseRoute] = [
        Route("/api/status", _facts(status.read)),
        Route("/api/history", _facts(status.history)),
        Route("/api/events", _facts(events)),
        Route("/metrics", scraped),
        Mount("/", StaticFiles(directory=ASSETS, html=True)),
    ]
    return WebServer(Guarded(Starlette(routes=routes), access), access, host, port)


class Guarded:
    """ASGI middleware: checks the host's name, the role and the method; adds security headers.

    The role, observe, comes by ``Authorization: Bearer TOKEN``, as Prometheus sends it; by HTTP's
    Basic with the token as password, for which browsers ask; or by a client certificate.
    """

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access
        self._headers = [
            (b"cache-control", b"no-cache"),
            (b"content-security-policy", _CONTENT_POLICY),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
            (b"cross-origin-resource-policy", b"same-origin"),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, as ASGI calls it."""

        async def with_headers(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *self._headers]
            await send(message)

        app = self._refusal(Request(scope)) or self._app
        await app(scope, receive, with_headers)

    def _refusal(self, request: Request) -> Response | None:
        host = request.headers.get("host", "")
        if self._access.anonymous and not is_private(host):
            # DNS rebinding: a site whose name resolves to this address must not read the facts.
            shown = host if re.fullmatch(r"[\w.:\[\]-]{1,255}", host, re.ASCII) else "another name"
            error = RefusedError(
                "Host",
                shown,
                "localhost, an address or a name of this network",
                "use one of these, or give the trainer tokens (access.observe_tokens)",
            )
            return PlainTextResponse(f"{error}\n", 421)
        shown_token = _as_bearer(request.headers.get("authorization"))
        names = request.scope.get(_NAMES, frozenset())
        client = request.client
        peer = "" if client is None else f"{client.host}:{client.port}"
        denied = self._access.judge(Role.OBSERVE, shown_token, names, peer)
        if denied is None:
            if request.method in ("GET", "HEAD"):
                return None
            return PlainTextResponse("405 Method Not Allowed\n", 405, {"Allow": "GET, HEAD"})
        unknown = denied.error.code is StatusCode.UNAUTHENTICATED
        answer = PlainTextResponse(f"{denied.error}\n", 401 if unknown else 403)
        for scheme in ('Basic realm="slipstream", charset="UTF-8"', 'Bearer realm="slipstream"'):
            answer.headers.append("WWW-Authenticate", scheme)
        return answer


def is_private(host: str) -> bool:
    """Return whether a Host header names an address, this machine, or what public DNS cannot have.

    Args:
        host: with or without a port; empty where there is none.
    """
    name = re.sub(r":\d*$", "", host).strip("[]").rstrip(".").lower()
    try:
        ipaddress.ip_address(name)
        return True
    except ValueError:
        own = socket.gethostname().lower()
        return "." not in name or name.endswith(_PRIVATE) or name == own


class WebServer:
    """Owns the port and the thread that serves it.

    Raises:
        RefusedError: the port cannot be bound.
    """

    def __init__(self, app: ASGIApp, access: Access, host: str, port: int) -> None:
        host = host.removeprefix("[").removesuffix("]")
        self._listener = _Listener(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._listener.bind((host, port))
            self._listener.listen(MAX_CONNECTIONS)
        except OSError as error:
            self._listener.close()
            raise RefusedError(
                "server.metrics_port",
                f"{host}:{port} ({error.strerror or error})",
                "a free port of this machine, or 0",
                "stop what listens there, or set another server.metrics_port",
            ) from error
        config = uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            # Requests that cannot be parsed are the client's error.
            log_level="error",
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=_REQUEST_BYTES,
            timeout_graceful_shutdown=1,
        )
        config.load()
        config.ssl = None if access.tls is None else _tls(access)
        self._server = uvicorn.Server(config)
        name = f"[{host}]" if ":" in host else host
        scheme = "http" if access.tls is None else "https"
        self.url = f"{scheme}://{name}:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run, name="web", daemon=True)
        self._thread.start()

    def close(self, timeout: float) -> None:
        """Stop serving and free the port."""
        self._server.should_exit = True
        self._thread.join(timeout)
        self._listener.close()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=_Loop) as runner:
            runner.run(self._server.serve(sockets=[self._listener]))


class _Listener(socket.socket):
    """Closes what it accepts beyond ``MAX_CONNECTIONS``, before any handshake."""

    def __init__(self, family: int) -> None:
        super().__init__(family, socket.SOCK_STREAM)
        self._open: list[socket.socket] = []

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection for asyncio. Raises ConnectionAbortedError: there are too many."""
        connection, address = super().accept()
        self._open = [each for each in self._open if each.fileno() >= 0]
        if len(self._open) >= MAX_CONNECTIONS:
            connection.close()
            raise ConnectionAbortedError("too many connections")
        self._open.append(connection)
        return connection, address


class _Loop(asyncio.SelectorEventLoop):
    async def create_server(self, *args: Any, **options: Any) -> asyncio.Server:
        """Bound the time of TLS handshakes, which uvicorn has no option for."""
        if options.get("ssl"):
            options["ssl_handshake_timeout"] = HANDSHAKE_SECONDS
        return await super().create_server(*args, **options)


class _Protocol(H11Protocol):
    def connection_made(self, transport: Any) -> None:
        """Bound the connection's time, and note the names in the client's certificate."""
        super().connection_made(transport)
        names = _names_of(transport.get_extra_info("peercert") or {})
        app = self.app

        async def named(scope: Any, receive: Any, send: Any) -> None:
            await app({**scope, _NAMES: names}, receive, send)

        self.app = named
        self._deadline = self.loop.call_later(CONNECTION_SECONDS, transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        """Cancel the bound of a connection that ended."""
        self._deadline.cancel()
        super().connection_lost(exc)


def _tls(access: Access) -> ssl.SSLContext:
    """Return a context that reads the certificate anew for each connection and counts failures."""
    tls = access.tls
    assert tls is not None

    class Counted(ssl.SSLObject):
        def do_handshake(self) -> None:
            """Do one round trip of the handshake; count its failure."""
            try:
                super().do_handshake()
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                raise
            except ssl.SSLError as error:
                access.refusals.denied(
                    "tls", "a client of the web port", f"no TLS ({error.reason})"
                )
                raise

    def current(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
        connection.context = tls.context()

    context = tls.context()
    context.sslobject_class = Counted
    context.sni_callback = current  # type: ignore[assignment]
    return context


def _facts(message: Callable[[], Message]) -> Callable[[Request], Response]:
    lock = threading.Lock()
    made, body = float("-inf"), b""

    def answer(request: Request) -> Response:
        nonlocal made, body
        with lock:
            if time.monotonic() - made >= FACTS_SECONDS:
                body = json_format.MessageToJson(
                    message(),
                    preserving_proto_field_name=True,
                    always_print_fields_with_no_presence=True,
                    indent=None,
                ).encode()
                made = time.monotonic()
            return Response(body, headers={"Content-Type": "application/json"})

    return answer


def _as_bearer(authorization: str | None) -> str | None:
    scheme, _, value = (authorization or "").partition(" ")
    if scheme.lower() != "basic":
        return authorization
    try:
        decoded = base64.b64decode(value, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return authorization
    return f"Bearer {decoded.partition(':')[2]}"


def _names_of(certificate: Any) -> Collection[str]:
    """Return a certificate's names, as ``serving.identity`` reads them of a gRPC client's."""
    others = frozenset(value for _, value in certificate.get("subjectAltName", ()))
    common = (pair for entry in certificate.get("subject", ()) for pair in entry)
    return others or frozenset(value for key, value in common if key == "commonName")
