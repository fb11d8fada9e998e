"""Owns the control plane's gRPC server inside the API server's event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from rollout_server.admission import SERVICE, Admission
from rollout_server.control import RolloutControl
from rollout_server.engine import Engine
from rollout_server.readiness import ACCEPTANCE, AcceptanceGuard
from rollout_server.weights import DRAFT
from slipstream.access import Access
from slipstream.channel import SERVER_OPTIONS
from slipstream.interceptors import AioAccessInterceptor
from slipstream.limits import RefusedCalls
from slipstream.refusal import RefusedError
from slipstream.v1 import rollout_server_pb2_grpc as pb_grpc

READY_SERVICE = "slipstream.v1.RolloutServer/ready"
"""Health of this name says whether requests should be sent here (``readiness``)."""


MAX_CALLS = 4096
"""Calls in progress at a time, those included that sent nothing yet."""

_POLL_SECONDS = 0.05
_HEALTH_SECONDS = 0.5
_GRACE_SECONDS = 2.0

logger = logging.getLogger(__name__)


class ControlServer:
    """Starts, watches over and stops the gRPC server.

    Health is SERVING from the moment the OpenAI API answers until the engine dies,
    is not to be trusted, or the server stops. Of ``READY_SERVICE`` only while, beside
    that, nothing speaks against sending requests here.

    Args:
        service: the servicer.
        control: watched for an engine that cannot be trusted.
        engine: watched for death.
        guard: watches acceptance.
        http_started: whether the OpenAI API accepts requests.
        announce: called once when everything is ready.
        access: who may call.
    """

    def __init__(
        self,
        service: pb_grpc.RolloutServerServicer,
        control: RolloutControl,
        engine: Engine,
        guard: AcceptanceGuard,
        http_started: Callable[[], bool],
        announce: Callable[[], None],
        access: Access,
    ) -> None:
        self._control = control
        self._engine = engine
        self._guard = guard
        self._http_started = http_started
        self._announce = announce
        self._health = health.aio.HealthServicer()
        self._access = access
        self.refused_calls = RefusedCalls()
        guards = [] if access.anonymous else [AioAccessInterceptor(access)]
        self._server = grpc.aio.server(
            interceptors=(*guards, Admission(self.refused_calls)),
            options=SERVER_OPTIONS,
            maximum_concurrent_rpcs=MAX_CALLS,
        )
        pb_grpc.add_RolloutServerServicer_to_server(service, self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        self._watch: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Listen. Raises RefusedError: the port was taken meanwhile."""
        await self._set_health(serving=False)
        try:
            at, tls = f"{host}:{port}", self._access.tls
            self.port = (
                self._server.add_insecure_port(at)
                if tls is None
                else self._server.add_secure_port(at, tls.grpc_credentials())
            )
        except RuntimeError as error:
            raise RefusedError(
                "--control-port", f"{host}:{port} in use", "a free port", "choose another port"
            ) from error
        await self._server.start()
        self._watch = asyncio.get_running_loop().create_task(self._watch_over())

    async def stop(self) -> None:
        """Stop listening; ends calls that are under way after a moment."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch})
        await self._set_health(serving=False)
        await self._control.close()
        await self._server.stop(_GRACE_SECONDS)

    async def _watch_over(self) -> None:
        while not self._http_started():
            await asyncio.sleep(_POLL_SECONDS)
        await self._set_health(serving=True)
        self._announce()
        while self._engine.is_alive() and not self._control.untrusted.is_set():
            self._look_at_acceptance()
            await self._set_ready(not self._control.readiness.reason)
            await asyncio.sleep(_HEALTH_SECONDS)
        await self._set_health(serving=False)
        if self._control.untrusted.is_set():
            logger.critical("the weights in memory are unknown; stopping rather than serving them")
            os.kill(os.getpid(), signal.SIGTERM)

    def _look_at_acceptance(self) -> None:
        control, before = self._control, self._control.readiness.reason
        found = self._guard.check(control.live[DRAFT].version or 0, control.commits[DRAFT])
        control.readiness.say(ACCEPTANCE, found)
        if control.readiness.reason != before:
            logger.warning("not ready: %s", control.readiness.reason or "no longer so")

    async def _set_ready(self, ready: bool) -> None:
        status = health_pb2.HealthCheckResponse.ServingStatus
        await self._health.set(READY_SERVICE, status.SERVING if ready else status.NOT_SERVING)

    async def _set_health(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse.ServingStatus
        value = status.SERVING if serving else status.NOT_SERVING
        for name in ("", SERVICE):
            await self._health.set(name, value)
        await self._set_ready(serving and not self._control.readiness.reason)
