"""The one place where an HTTP request enters, as a WSGI application: GET and HEAD, nothing else.

What is asked for is looked up in a table; no part of a request is ever put into an answer.

The trainer's certificate and the role observe, for any HTTP server and any WSGI application.

The trainer's HTTP server, put together: what is found under which path.

What a GET answers: bytes with their type and their ETag, made at most once a second.

Serves a WSGI application over HTTP with a bound on everything a client can hold.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any, Protocol

from google.protobuf import json_format
from google.protobuf.message import Message

from slipstream.errors import StatusCode
from slipstream.security import Access, Role, TlsFiles

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse as WsgiStart
    from _typeshed.wsgi import WSGIApplication, WSGIEnvironment
import contextlib
import logging
import sys
from socketserver import ThreadingMixIn
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app

from draft_trainer.server.status import Status
from slipstream.errors import RefusedError
from slipstream.v1 import console_pb2

JSON = "application/json"


@dataclass(frozen=True)
class Document:
    """One answer.

    Args:
        content_type: with the charset.
        body: whole.
        etag: changes with the body.
    """

    content_type: str
    body: bytes
    etag: str

    @classmethod
    def of(cls, content_type: str, body: bytes) -> Document:
        """With the ETag that belongs to it."""
        return cls(content_type, body, f'"{hashlib.sha256(body).hexdigest()[:20]}"')


class Asset:
    """A file of this package: read once."""

    def __init__(self, name: str, content_type: str) -> None:
        file = resources.files("draft_trainer.server") / "assets" / name
        self._document = Document.of(f"{content_type}; charset=utf-8", file.read_bytes())

    def read(self) -> Document:
        """The file."""
        return self._document


class Facts:
    """A message as JSON, made anew at most once in ``SECONDS``, however many ask. Thread-safe.

    Args:
        message: makes it.
    """

    SECONDS = 1.0

    def __init__(self, message: Callable[[], Message]) -> None:
        self._message = message
        self._lock = threading.Lock()
        self._made = float("-inf")
        self._document = Document.of(JSON, b"")

    def read(self) -> Document:
        """The newest, up to ``SECONDS`` old."""
        with self._lock:
            if time.monotonic() - self._made >= self.SECONDS:
                text = json_format.MessageToJson(
                    self._message(),
                    preserving_proto_field_name=True,
                    always_print_fields_with_no_presence=True,
                    indent=None,
                )
                self._document = Document.of(JSON, text.encode())
                self._made = time.monotonic()
            return self._document


StartResponse = Callable[..., Any]
Environ = dict[str, Any]
Wsgi = Callable[[Environ, StartResponse], Iterable[bytes]]

HEADERS = (
    ("Cache-Control", "no-cache"),
    (
        "Content-Security-Policy",
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)


class Route(Protocol):
    """What answers a path."""

    def read(self) -> Document:
        """The answer now."""
        ...


class WebApp:
    """See the module. Thread-safe as far as its routes are.

    Args:
        routes: by exact path.
        metrics: a WSGI application of its own for ``/metrics``: it negotiates the format.
    """

    def __init__(self, routes: Mapping[str, Route], metrics: Wsgi) -> None:
        self._routes = dict(routes)
        self._metrics = metrics

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """WSGI."""
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        if method not in ("GET", "HEAD"):
            return _text(start_response, "405 Method Not Allowed", ("Allow", "GET, HEAD"))
        if path == "/metrics":
            body = self._metrics({**environ, "REQUEST_METHOD": "GET"}, start_response)
            return body if method == "GET" else ()
        route = self._routes.get(path)
        if route is None:
            return _text(start_response, "404 Not Found")
        document = route.read()
        headers = [*HEADERS, ("ETag", document.etag)]
        if environ.get("HTTP_IF_NONE_MATCH") == document.etag:
            start_response("304 Not Modified", headers)
            return ()
        length = ("Content-Length", str(len(document.body)))
        start_response("200 OK", [*headers, ("Content-Type", document.content_type), length])
        return (document.body,) if method == "GET" else ()


def _text(start_response: StartResponse, status: str, *more: tuple[str, str]) -> Iterable[bytes]:
    body = f"{status}\n".encode()
    kind = ("Content-Type", "text/plain; charset=utf-8")
    start_response(status, [*HEADERS, kind, ("Content-Length", str(len(body))), *more])
    return (body,)


_NAMES = "slipstream.certificate_names"
_UNAUTHORIZED, _FORBIDDEN = "401 Unauthorized", "403 Forbidden"


def observed(app: WSGIApplication, access: Access) -> WSGIApplication:
    """``app`` for those alone who have the role observe.

    By ``Authorization: Bearer TOKEN``, as Prometheus sends it; by HTTP's Basic with the token as
    password, for which browsers ask; or by a client certificate.

    Args:
        app: what is guarded.
        access: decides.
    """

    def guarded(environ: WSGIEnvironment, start: WsgiStart) -> Iterable[bytes]:
        shown = _as_bearer(environ.get("HTTP_AUTHORIZATION"))
        refused = access.judge(Role.OBSERVE, shown, environ.get(_NAMES, frozenset()))
        if refused is None:
            return app(environ, start)
        peer = f"{environ.get('REMOTE_ADDR', '')}:{environ.get('REMOTE_PORT', '')}"
        access.refusals.add(refused.reason, peer, str(refused.error))
        body = f"{refused.error}\n".encode()
        unknown = refused.error.code is StatusCode.UNAUTHENTICATED
        headers = [
            ("Content-Type", "text/plain; charset=utf-8"),
            ("Content-Length", str(len(body))),
            ("WWW-Authenticate", 'Basic realm="slipstream", charset="UTF-8"'),
            ("WWW-Authenticate", 'Bearer realm="slipstream"'),
        ]
        start(_UNAUTHORIZED if unknown else _FORBIDDEN, headers)
        return [body]

    return guarded


def secured(request: socket.socket, tls: TlsFiles) -> ssl.SSLSocket:
    """A connection behind the certificate of this instant, before its handshake.

    Args:
        request: accepted; taken over.
        tls: the certificate.
    """
    return tls.context().wrap_socket(request, server_side=True, do_handshake_on_connect=False)


def shaken(connection: ssl.SSLSocket, client_address: Any, access: Access) -> bool:
    """Whether there was a handshake. In the connection's own thread: it waits for the client.

    Args:
        connection: with a timeout.
        client_address: of ``accept``.
        access: where a handshake that fails is counted.
    """
    try:
        connection.do_handshake()
    except OSError as error:
        reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
        peer = f"{client_address[0]}:{client_address[1]}"
        access.refusals.add("tls", peer, f"no TLS with it ({reason})")
        return False
    return True


def connection_environ(connection: Any, client_address: Any) -> dict[str, Any]:
    """What ``observed`` needs in the WSGI environment beside the usual."""
    environ: dict[str, Any] = {"REMOTE_PORT": str(client_address[1])}
    if isinstance(connection, ssl.SSLSocket):
        environ["wsgi.url_scheme"] = "https"
        environ[_NAMES] = _names_of(connection.getpeercert() or {})
    return environ


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
    """As ``interceptors.certificate_names``."""
    others = frozenset(value for _, value in certificate.get("subjectAltName", ()))
    common = (pair for entry in certificate.get("subject", ()) for pair in entry)
    return others or frozenset(value for key, value in common if key == "commonName")


logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 32
"""At a time; further ones are closed at once."""

CONNECTION_SECONDS = 20.0
"""From accept to the last byte. A client that sends or reads a byte at a time is cut off."""

SILENCE_SECONDS = 5.0


class _Handler(WSGIRequestHandler):
    timeout = SILENCE_SECONDS
    server_version = "draft-trainer"
    sys_version = ""

    def get_environ(self) -> dict[str, Any]:
        """With what the connection says of its client."""
        return super().get_environ() | connection_environ(self.connection, self.client_address)

    def address_string(self) -> str:
        """Without a name service: a look-up could take seconds."""
        return str(self.client_address[0])

    def log_message(self, format: str, *values: Any) -> None:
        """Scrapes every few seconds are nobody's news."""
        logger.debug("%s " + format, self.address_string(), *values)


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = MAX_CONNECTIONS

    def __init__(self, access: Access, host: str, port: int) -> None:
        self._access = access
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._lock = threading.Lock()
        self._open: dict[socket.socket, float] = {}
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """As WSGIServer's, without asking a name service who this host is."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """On a thread of its own, where there is a place left."""
        with self._lock:
            full = len(self._open) >= MAX_CONNECTIONS
            if not full:
                self._open[request] = time.monotonic() + CONNECTION_SECONDS
        if full:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answer, behind the certificate of this instant if there is one."""
        tls = self._access.tls
        if tls is None:
            super().finish_request(request, client_address)
            return
        request.settimeout(SILENCE_SECONDS)
        with secured(request, tls) as connection:
            with self._lock:
                # It took the socket over; the bound on its time goes with it.
                self._open[connection] = self._open.pop(request, time.monotonic())
            try:
                if shaken(connection, client_address, self._access):
                    super().finish_request(connection, client_address)
            finally:
                with self._lock:
                    self._open.pop(connection, None)

    def shutdown_request(self, request: Any) -> None:
        """Ends every connection, however it went."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Between two requests, and every half second."""
        now = time.monotonic()
        with self._lock:
            late = [request for request, until in self._open.items() if until < now]
        for request in late:
            _cut(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away or is too slow is nobody's error; the rest is ours."""
        ours = not isinstance(sys.exc_info()[1], OSError)
        level = logging.ERROR if ours else logging.DEBUG
        logger.log(level, "a request of %s ended early", client_address[0], exc_info=True)


class WebServer:
    """Owns the port, one thread, and one more for each connection.

    Args:
        app: answers.
        access: the certificate.
        host: address to listen on.
        port: 0 for a free one.

    Raises:
        RefusedError: the port cannot be had.
    """

    def __init__(self, app: Wsgi, access: Access, host: str, port: int) -> None:
        try:
            self._server = _Server(access, host, port)
        except OSError as error:
            raise RefusedError(
                "server.metrics_port",
                f"{host}:{port} ({error.strerror or error})",
                "a free port of this machine, or 0",
                "stop what listens there, or set another server.metrics_port",
            ) from error
        self._server.set_app(app)
        name = f"[{host}]" if ":" in host else host
        scheme = "http" if access.tls is None else "https"
        self.url = f"{scheme}://{name}:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="web", daemon=True)
        self._thread.start()

    def close(self, timeout: float) -> None:
        """Stop serving and free the port."""
        stopper = threading.Thread(target=self._server.shutdown, daemon=True)
        stopper.start()
        stopper.join(timeout)
        self._server.server_close()
        self._thread.join(timeout)


def _cut(request: Any) -> None:
    # It may have ended meanwhile.
    with contextlib.suppress(OSError):
        # Not TLS's own: its thread is in the middle of it.
        socket.socket.shutdown(request, socket.SHUT_RDWR)


EVENTS_SHOWN = 200


def serve_console(
    status: Status, metrics: CollectorRegistry, access: Access, host: str, port: int
) -> WebServer:
    """``/metrics``, the page, and ``/api/status``, ``/api/history``, ``/api/events``.

    Args:
        status: the facts.
        metrics: what is scraped.
        access: who may look.
        host: address to listen on.
        port: 0 for a free one.

    Raises:
        RefusedError: the port cannot be had.
    """
    ProcessCollector(registry=metrics)
    routes: dict[str, Route] = {
        "/": Asset("index.html", "text/html"),
        "/console.js": Asset("console.js", "text/javascript"),
        "/plots.js": Asset("plots.js", "text/javascript"),
        "/console.css": Asset("console.css", "text/css"),
        "/icon.svg": Asset("icon.svg", "image/svg+xml"),
        "/api/status": Facts(status.read),
        "/api/history": Facts(status.history),
        "/api/events": Facts(
            lambda: console_pb2.Events(events=status.events.since(0, EVENTS_SHOWN))
        ),
    }
    app = observed(WebApp(routes, make_wsgi_app(metrics)), access)
    return WebServer(app, access, host, port)
