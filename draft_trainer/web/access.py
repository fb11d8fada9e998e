"""The trainer's certificate and the role observe, for any HTTP server and any WSGI application."""

from __future__ import annotations

import base64
import binascii
import socket
import ssl
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from slipstream.access import Access
from slipstream.refusal import StatusCode
from slipstream.roles import Role
from slipstream.tls import TlsFiles

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIApplication, WSGIEnvironment

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

    def guarded(environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
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
