"""A small HTTP server for read-only pages: the trainer's certificate, the observe role, bounds.

Around any WSGI application: /metrics and the web page are two of them behind one of these.
"""

from __future__ import annotations

import base64
import binascii
import socket
import ssl
import threading
from collections.abc import Collection, Iterable
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from slipstream.access import Access
from slipstream.refusal import RefusedError, StatusCode
from slipstream.roles import Role

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

MAX_CONNECTIONS = 32
_SILENT_SECONDS = 10.0
_NAMES = "slipstream.certificate_names"
_STATUS = {StatusCode.UNAUTHENTICATED: "401 Unauthorized"}


class HttpServer:
    """Serves an application until ``close``. Owns one thread, and one for each connection.

    Args:
        app: answers GET requests.
        host: address to listen on; ``check_exposure`` has allowed it.
        port: 0 for a free one.
        access: certificate, and who has the role observe.
        port_key: option of the port, for the refusal.

    Raises:
        RefusedError: the port cannot be had.
    """

    def __init__(
        self, app: WSGIApplication, host: str, port: int, access: Access, port_key: str
    ) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            # Some Pythons let HTTP servers share a port silently; a plain socket does not.
            with socket.socket(family) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
            self._server = _Server((host, port), family, access)
        except OSError as error:
            raise RefusedError(
                port_key,
                f"{host}:{port} ({error.strerror or error})",
                "a free port of this machine, or 0",
                f"stop what listens there, or set another {port_key}",
            ) from error
        self._server.set_app(observed(app, access))
        scheme = "http" if access.tls is None else "https"
        name = f"[{host}]" if ":" in host else host
        self.url = f"{scheme}://{name}:{self._server.server_port}"
        """Without a path or a final slash."""
        self._thread = threading.Thread(target=self._server.serve_forever, name="http", daemon=True)
        self._thread.start()

    def close(self, timeout: float) -> None:
        """Stop serving and free the port; waits for ``timeout`` seconds at most."""
        stopper = threading.Thread(target=self._server.shutdown, daemon=True)
        stopper.start()
        stopper.join(timeout)
        self._server.server_close()
        self._thread.join(timeout)


def observed(app: WSGIApplication, access: Access) -> WSGIApplication:
    """``app`` for those alone who have the role observe.

    By ``Authorization: Bearer TOKEN``, as Prometheus sends it; by HTTP's Basic with the token as
    password, for which browsers ask; or by a client certificate.
    """

    def guarded(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        shown = _as_bearer(environ.get("HTTP_AUTHORIZATION"))
        refused = access.judge(Role.OBSERVE, shown, environ.get(_NAMES, frozenset()))
        if refused is None:
            return app(environ, start)
        peer = f"{environ.get('REMOTE_ADDR', '')}:{environ.get('REMOTE_PORT', '')}"
        access.refusals.add(refused.reason, peer, str(refused.error))
        body = f"{refused.error}\n".encode()
        headers = [
            ("Content-Type", "text/plain; charset=utf-8"),
            ("Content-Length", str(len(body))),
            ("WWW-Authenticate", 'Basic realm="slipstream", charset="UTF-8"'),
            ("WWW-Authenticate", 'Bearer realm="slipstream"'),
        ]
        start(_STATUS.get(refused.error.code, "403 Forbidden"), headers)
        return [body]

    return guarded


def _as_bearer(authorization: str | None) -> str | None:
    scheme, _, value = (authorization or "").partition(" ")
    if scheme.lower() != "basic":
        return authorization
    try:
        decoded = base64.b64decode(value, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return authorization
    return f"Bearer {decoded.partition(':')[2]}"


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    block_on_close = False
    # With the usual five, a sixth client at once waited seconds for the kernel to try again.
    request_queue_size = 2 * MAX_CONNECTIONS

    def __init__(
        self, address: tuple[str, int], family: socket.AddressFamily, access: Access
    ) -> None:
        self.address_family = family
        self._access = access
        self._free = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__(address, _Handler)

    def server_bind(self) -> None:
        """Bind without asking DNS for the address's name, which may hang."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def finish_request(self, request: Any, client_address: Any) -> None:
        request.settimeout(_SILENT_SECONDS)
        if self._access.tls is None:
            super().finish_request(request, client_address)
            return
        try:
            # In the connection's own thread: whoever is slow keeps nobody else waiting.
            secured = self._access.tls.context().wrap_socket(request, server_side=True)
        except OSError as error:
            reason = getattr(error, "reason", None) or getattr(error, "strerror", None) or error
            self._access.refusals.add(
                "tls", f"{client_address[0]}:{client_address[1]}", f"no TLS with it ({reason})"
            )
            return
        with secured:
            super().finish_request(secured, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away in the middle is nobody's error."""


class _Handler(WSGIRequestHandler):
    timeout = _SILENT_SECONDS

    def get_environ(self) -> dict[str, Any]:
        environ = super().get_environ()
        environ["REMOTE_PORT"] = str(self.client_address[1])
        if isinstance(self.connection, ssl.SSLSocket):
            environ["wsgi.url_scheme"] = "https"
            environ[_NAMES] = _names_of(self.connection.getpeercert() or {})
        return environ

    def address_string(self) -> str:
        # Not looked up in DNS, which may hang.
        return str(self.client_address[0])

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""


def _names_of(certificate: Any) -> Collection[str]:
    """As ``interceptors.certificate_names``."""
    others = frozenset(value for _, value in certificate.get("subjectAltName", ()))
    common = (pair for entry in certificate.get("subject", ()) for pair in entry)
    return others or frozenset(value for key, value in common if key == "commonName")
