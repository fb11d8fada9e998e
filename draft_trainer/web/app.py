"""The one place where an HTTP request enters, as a WSGI application: GET and HEAD, nothing else.

What is asked for is looked up in a table; no part of a request is ever put into an answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from draft_trainer.web.document import Document

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
