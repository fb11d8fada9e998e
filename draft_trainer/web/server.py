"""Serves a WSGI application over HTTP with a bound on everything a client can hold."""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
import time
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from draft_trainer.web.access import connection_environ, secured, shaken
from draft_trainer.web.app import Wsgi
from slipstream.access import Access
from slipstream.refusal import RefusedError

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
