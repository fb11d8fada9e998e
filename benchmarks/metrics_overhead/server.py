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

import rollout_server.app
import rollout_server.step_costs
from rollout_server.app import AcceptanceStatLogger, ControlPlaneEndpoint
from rollout_server.cli import main
from rollout_server.metrics import RolloutCollector
from rollout_server.runtime import API

ROUTE = "/measure"
LOOK_SECONDS = 0.8


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
    """What is to be turned, and what the server has done."""

    engine_client: Any = None
    on = True
    record: Any = None
    collector: Any = None
    tokens = 0
    drafts = 0
    record_seconds = 0.0
    record_calls = 0


async def _turn(request: Request) -> Response:
    """The work done before and after turning: what turning takes is in neither slice."""
    before = _done()
    on = request.query_params["on"] == "1"
    if _Measuring.collector is None:
        [_Measuring.collector] = [
            c for c in REGISTRY._collector_to_names if isinstance(c, RolloutCollector)
        ]
        _Measuring.record = AcceptanceStatLogger.record
        AcceptanceStatLogger.record = _step  # type: ignore[method-assign, assignment]
    if on != _Measuring.on and API.cost_watch is not None:
        _Measuring.on = on
        if on:
            REGISTRY.register(_Measuring.collector)
            API.cost_watch.start()
        else:
            REGISTRY.unregister(_Measuring.collector)
            await API.cost_watch.stop()
        call = _Measuring.engine_client.engine_core.call_utility_async
        await call("slipstream_step_sums", on)
    return JSONResponse({"before": before, "after": _done()})


async def _spent(_: Request) -> Response:
    """What counting took since the first turn, and what a scrape takes."""
    alone = CollectorRegistry()
    alone.register(_Measuring.collector)
    scrapes = []
    for _scrape in range(20):
        began = time.thread_time()
        generate_latest(alone)
        scrapes.append(time.thread_time() - began)
    return JSONResponse(
        {
            "record_seconds": _Measuring.record_seconds,
            "record_calls": _Measuring.record_calls,
            "exposition_seconds": statistics.median(scrapes),
        }
    )


def _done() -> dict[str, float]:
    return {
        "seconds": time.perf_counter(),
        "tokens": _Measuring.tokens,
        "drafts": _Measuring.drafts,
    }


def _step(
    logger: AcceptanceStatLogger,
    scheduler_stats: Any,
    iteration_stats: Any,
    *args: Any,
    **named: Any,
) -> None:
    """An engine step: counted for the benchmark whether it is measured or not."""
    if scheduler_stats is not None and scheduler_stats.spec_decoding_stats is not None:
        _Measuring.drafts += scheduler_stats.spec_decoding_stats.num_drafts
    if iteration_stats is not None:
        _Measuring.tokens += iteration_stats.num_generation_tokens
    if _Measuring.on:
        # Of this thread: the engine takes the core in between.
        began = time.thread_time()
        _Measuring.record(logger, scheduler_stats, iteration_stats, *args, **named)
        _Measuring.record_seconds += time.thread_time() - began
        _Measuring.record_calls += 1


if __name__ == "__main__":
    rollout_server.app.ControlPlaneEndpoint = _Endpoint  # type: ignore[misc]
    # One look in every slice: twice as many as a server that is not turned off and on.
    rollout_server.step_costs.LOOK_SECONDS = LOOK_SECONDS
    sys.exit(main())
