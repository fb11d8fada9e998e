"""The trainer's HTTP server, put together: what is found under which path."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.registry import Collector

from draft_trainer.sidecar.status import Status
from draft_trainer.web.access import observed
from draft_trainer.web.app import Route, WebApp
from draft_trainer.web.document import Asset, Facts
from draft_trainer.web.server import WebServer
from slipstream.access import Access
from slipstream.v1 import console_pb2

EVENTS_SHOWN = 200


def serve_console(
    status: Status, metrics: Collector, access: Access, host: str, port: int
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
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    ProcessCollector(registry=registry)
    routes: dict[str, Route] = {
        "/": Asset("index.html", "text/html"),
        "/console.js": Asset("console.js", "text/javascript"),
        "/plots.js": Asset("plots.js", "text/javascript"),
        "/console.css": Asset("console.css", "text/css"),
        "/icon.svg": Asset("icon.svg", "image/svg+xml"),
        "/api/status": Facts(lambda: status.read()[0]),
        "/api/history": Facts(status.history),
        "/api/events": Facts(
            lambda: console_pb2.Events(events=status.events.after(0, EVENTS_SHOWN))
        ),
    }
    app = observed(WebApp(routes, make_wsgi_app(registry)), access)
    return WebServer(app, access, host, port)
