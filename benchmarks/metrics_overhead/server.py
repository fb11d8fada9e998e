"""``rollout-server``, with a route that turns Slipstream's measuring off and on while it runs.

Off is as if Slipstream had no metrics: steps are not timed, nobody asks for them, nothing is
counted by draft version or exposed; vLLM's own metrics stay. One process for both, because two
differ by more than what is measured.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, generate_latest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

import rollout_server.endpoint
from rollout_server.cli import main
from rollout_server.endpoint import ControlPlaneEndpoint
from rollout_server.process import API

ROUTE = "/measure"


class _Endpoint(ControlPlaneEndpoint):
    """vLLM's endpoint plug-in, with one more route."""

    def attach_router(self, app: Any) -> None:
        super().attach_router(app)
        app.router.routes.insert(0, Route(ROUTE, _turn, methods=["POST"]))
        app.router.routes.insert(0, Route(ROUTE, _spent, methods=["GET"]))

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        await super().init_state(engine_client, state, args)
        _Measuring.engine_client = engine_client


class _Measuring:
    """What is to be turned."""

    engine_client: Any = None
    on = True
    record: Any = None
    collector: Any = None
    record_seconds = 0.0
    record_calls = 0


async def _turn(request: Request) -> Response:
    from rollout_server.acceptance import AcceptanceStatLogger
    from rollout_server.metrics import RolloutCollector

    if _Measuring.collector is None:
        [_Measuring.collector] = [
            c for c in REGISTRY._collector_to_names if isinstance(c, RolloutCollector)
        ]
    on = request.query_params["on"] == "1"
    if on == _Measuring.on or API.cost_watch is None:
        return Response()
    _Measuring.on = on
    if on:
        AcceptanceStatLogger.record = _timed  # type: ignore[method-assign]
        REGISTRY.register(_Measuring.collector)
        API.cost_watch.start()
    else:
        _Measuring.record = _Measuring.record or AcceptanceStatLogger.record
        AcceptanceStatLogger.record = _nothing  # type: ignore[method-assign]
        REGISTRY.unregister(_Measuring.collector)
        await API.cost_watch.stop()
    call = _Measuring.engine_client.engine_core.call_utility_async
    await call("slipstream_step_sums", on)
    return Response()


async def _spent(request: Request) -> Response:
    """What counting took since measuring was first turned on again, and what a scrape takes."""
    alone = CollectorRegistry()
    alone.register(_Measuring.collector)
    scrapes = []
    for _ in range(20):
        began = time.perf_counter()
        generate_latest(alone)
        scrapes.append(time.perf_counter() - began)
    return JSONResponse(
        {
            "record_seconds": _Measuring.record_seconds,
            "record_calls": _Measuring.record_calls,
            "exposition_seconds": statistics.median(scrapes),
        }
    )


def _timed(*args: Any, **named: Any) -> None:
    began = time.perf_counter()
    _Measuring.record(*args, **named)
    _Measuring.record_seconds += time.perf_counter() - began
    _Measuring.record_calls += 1


def _nothing(*args: object, **named: object) -> None:
    """Counts nothing."""


if __name__ == "__main__":
    rollout_server.endpoint.ControlPlaneEndpoint = _Endpoint  # type: ignore[misc]
    sys.exit(main())
