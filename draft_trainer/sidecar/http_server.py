"""A small HTTP server for read-only pages: the trainer's certificate, the observe role, bounds.

Around any WSGI application: /metrics and the web page are two of them behind one of these.
"""

from __future__ import annotations

import socket
import threading
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from draft_trainer.sidecar.http_access import connection_environ, observed, secured
from slipstream.access import Access
from slipstream.refusal import RefusedError

if TYPE_CHECKING:
    from _typeshed.wsgi import WSGIApplication

MAX_CONNECTIONS = 32
_SILENT_SECONDS = 10.0


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
        connection = secured(request, client_address, self._access)
        if connection is not None:
            with connection:
                super().finish_request(connection, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away in the middle is nobody's error."""


class _Handler(WSGIRequestHandler):
    timeout = _SILENT_SECONDS

    def get_environ(self) -> dict[str, Any]:
        return super().get_environ() | connection_environ(self.connection, self.client_address)

    def address_string(self) -> str:
        # Not looked up in DNS, which may hang.
        return str(self.client_address[0])

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not logged."""
