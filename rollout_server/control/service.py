"""The rollout server's gRPC service: stages, commits, state and acceptance.

Runs inside the event loop of vLLM's API server, on ``slipstream.serving``. A stage's memory is
bounded: capacity in the store is reserved before the first byte, and a tensor leaves the heap as
soon as it is complete and verified.
"""

# ruff: noqa: N802 (gRPC's names)

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import grpc

from rollout_server.control.acceptance_counts import AcceptanceGuard
from rollout_server.control.changes import Description, Result
from rollout_server.control.control import ACCEPTANCE, DRAFT, POLICY, RolloutControl, Weights
from rollout_server.control.draft_folder import Expected
from rollout_server.control.shared import SharedRegistry
from rollout_server.control.stages import WeightSource
from rollout_server.control.upload import BYTES_PER_SECOND, Upload
from slipstream.client import TRAINER
from slipstream.economics.arithmetic import check_rates
from slipstream.errors import RefusedError, StatusCode, clean
from slipstream.readiness import not_ready_text
from slipstream.serving.identity import Access
from slipstream.serving.limits import CHUNK_MESSAGE_BYTES, Guard, Limit
from slipstream.serving.server import GrpcServer, Workers, header_of
from slipstream.v1 import rollout_server_pb2 as pb
from slipstream.v1 import rollout_server_pb2_grpc as pb_grpc

if TYPE_CHECKING:
    from rollout_server.vllm.served import Served

logger = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["RolloutServer"].full_name

READY_SERVICE = f"{SERVICE}/ready"
"""Health of this name says whether requests should be sent here (``RolloutControl.not_ready``)."""

MAX_ID_CHARACTERS = 256

MESSAGE_SECONDS = 30.0
"""Longest wait for a request; a stage's chunks have their own."""

CALLS_PER_SECOND = 500.0
"""The bounds of one connection."""

CHUNK_SECONDS = 60.0
"""Longest wait for a client's next message while it stages. A stage takes at most this and what
its bytes take at ``BYTES_PER_SECOND``: it reserves capacity of the store at its start, and a byte a
minute would hold it for ever."""

LIMITS: Mapping[str, Limit] = {
    f"/{SERVICE}/Stage": Limit(32, CHUNK_MESSAGE_BYTES),
    f"/{SERVICE}/Commit": Limit(8),
    f"/{SERVICE}/RollBack": Limit(8),
    f"/{SERVICE}/SetSpeculation": Limit(8),
    f"/{SERVICE}/WatchAcceptance": Limit(64),
}
_OTHER_CALLS = Limit(64)
_WORKERS = 4
_IDLE_SECONDS = 5.0
_POLL_SECONDS = 0.05
_HEALTH_SECONDS = 0.5
_GRACE_SECONDS = 2.0
_KINDS = {
    pb.STAGE_KIND_DRAFT: DRAFT,
    pb.STAGE_KIND_POLICY: POLICY,
    pb.STAGE_KIND_POLICY_EXTERNAL: POLICY,
}


def kind_of(header: pb.StageHeader) -> str:
    """``DRAFT`` or ``POLICY``. Raises RefusedError for anything else, or without an id."""
    if header.kind not in _KINDS:
        raise RefusedError("kind", header.kind, "one that StageKind names", "say what it replaces")
    if not header.stage_id:
        raise RefusedError("stage_id", "empty", "a name such as draft-7", "choose one")
    if len(header.stage_id) > MAX_ID_CHARACTERS or not header.stage_id.isprintable():
        # It is in every ServerState and in the log.
        raise RefusedError(
            "stage_id",
            f"{len(header.stage_id)} characters: {clean(header.stage_id, 64)}",
            f"at most {MAX_ID_CHARACTERS} printable ones",
            "choose a name such as draft-7",
        )
    return _KINDS[header.kind]


def expected_of(rates: Sequence[float]) -> tuple[float, ...]:
    """Return a draft's expected acceptance by position; empty: not known. Raises RefusedError."""
    return check_rates(rates) if rates else ()


def transfer_of(header: pb.StageHeader) -> str:
    """Return the weight-transfer engine's update. Raises RefusedError: not that, or tensors."""
    if header.tensors:
        found, step = f"{len(header.tensors)} tensors", "stage a policy of tensors by its own kind"
        raise RefusedError("tensors", found, "none: they come by vLLM's engine", step)
    try:
        update = json.loads(header.transfer_update)
    except (ValueError, RecursionError):
        update = None
    if not isinstance(update, dict | list):
        raise RefusedError(
            "transfer_update",
            clean(header.transfer_update, 64),
            "a JSON object, or a list of one for each worker",
            "give what vLLM's update_weights takes",
        )
    return header.transfer_update


def refuse_shared(found: Description, served: Served) -> None:
    """Refuse to stage where a swap would write into the verifier, or leave half of the draft.

    Raises:
        RefusedError: draft and verifier share memory that a stage replaces (see ``vllm_patches``),
            or vLLM keeps tensors of the draft that a swap does not know how to replace.
    """
    follows = set(served.follows_policy)
    shared = [name for name in found.shared if not follows & set(name.split("."))]
    if shared:
        raise RefusedError(
            "draft parameters in the verifier's memory",
            ", ".join(shared),
            f"none but {' and '.join(served.follows_policy)}",
            "restart the server with a draft whose checkpoint has its own lm_head",
            grpc.StatusCode.FAILED_PRECONDITION,
        )
    if found.derived:
        raise RefusedError(
            "draft tensors beside the parameters",
            ", ".join(found.derived),
            "none: vLLM derives them from the checkpoint when it loads it, and would go on with "
            "those of the draft before",
            "serve a draft of a kind that can be swapped, or restart the server to change this one",
            grpc.StatusCode.FAILED_PRECONDITION,
        )


class RolloutService(pb_grpc.RolloutServerServicer):
    """Translates between messages and ``RolloutControl``; ``Guard`` makes refusals statuses."""

    def __init__(
        self,
        control: RolloutControl,
        expected: Mapping[str, Expected],
        served: Served,
        shared: SharedRegistry,
    ) -> None:
        self._control = control
        self._served = served
        self._expected = expected
        self.shared = shared
        self.workers = Workers(_WORKERS, "stage")
        self._not_prepared = self._not_shared = ""

    async def Stage(
        self, request_iterator: AsyncIterator[pb.StageRequest], context: Any
    ) -> AsyncIterator[pb.StageResponse]:
        start = time.perf_counter()
        header = header_of(await _next(request_iterator))
        kind = kind_of(header)
        self._control.check_claim(_trainer(context), claims=kind == DRAFT)
        if header.kind == pb.STAGE_KIND_POLICY_EXTERNAL:
            await self._stage_transfer(header)
            yield pb.StageResponse(needed=pb.StageNeeded())
            seconds = time.perf_counter() - start
            yield pb.StageResponse(staged=pb.StageResult(stage_id=header.stage_id, seconds=seconds))
            return
        weights, upload = await self._begin(header, kind)
        not_shared = ""
        if upload is None:
            yield pb.StageResponse(needed=pb.StageNeeded())
        else:
            with upload.opened():
                not_shared = await self._read_shared(header, kind, upload)
                yield pb.StageResponse(needed=pb.StageNeeded(names=list(upload.missing)))
                await _received(request_iterator, upload)
            self._control.add_stage(weights)
        staged = await self._prepared(weights, start)
        staged.not_shared = not_shared
        staged.bytes_received = 0 if upload is None else upload.bytes_received
        yield pb.StageResponse(staged=staged)

    async def _begin(self, header: pb.StageHeader, kind: str) -> tuple[Weights, Upload | None]:
        """Check what is to be staged before anything of it is sent; no upload: it is held."""
        against = None
        if header.HasField("trained_against_policy_version") and kind == DRAFT:
            against = header.trained_against_policy_version
        store = self._control.store
        accepted = expected_of(header.expected_acceptance) if kind == DRAFT else ()
        tensors = self._expected[kind].check(header.tensors)
        folder = store.new_folder()
        weights = Weights.of(
            kind, header.version, tensors, folder, header.stage_id, against, accepted
        )
        if kind == POLICY:
            # Before its capacity is reserved, and what is refused above aborts nothing.
            await self._control.abort_other_policies(header.stage_id)
        held = self._control.already_staged(weights)
        if held is not None:
            return held, None
        refuse_shared(await self._control.engine.describe(), self._served)
        return weights, Upload(tensors, weights, store, self.workers)

    async def _read_shared(self, header: pb.StageHeader, kind: str, upload: Upload) -> str:
        """Read what is missing from shared storage; why the rest has to be sent."""
        if not header.shared_folder or kind != DRAFT or not upload.missing:
            return ""
        not_shared = await self.shared.fill(upload, header.shared_folder)
        if not_shared not in ("", self._not_shared):
            self._not_shared = not_shared
            logger.warning("draft %d is sent, not read there: %s", header.version, not_shared)
        return not_shared

    async def _prepared(self, weights: Weights, start: float) -> pb.StageResult:
        not_prepared = await self._control.prepare(weights)
        seconds = time.perf_counter() - start
        if not_prepared not in ("", self._not_prepared):
            # Once, because it is usually as true of every draft that follows.
            self._not_prepared = not_prepared
            logger.warning(
                "draft %s is not prepared, so its commit takes longer: %s",
                weights.version,
                not_prepared,
            )
        return pb.StageResult(stage_id=weights.stage_id, seconds=seconds, not_prepared=not_prepared)

    async def _stage_transfer(self, header: pb.StageHeader) -> None:
        """Hold a policy that vLLM's weight-transfer engine will receive inside the commit."""
        transfer = transfer_of(header)
        refuse_shared(await self._control.engine.describe(), self._served)
        wrong = await self._control.engine.check_transfer(transfer)
        if wrong:
            raise RefusedError(
                "transfer_update",
                clean(wrong),
                "what this server's weight-transfer engine takes",
                "see --weight-transfer-config and vLLM's update_weights",
                StatusCode.FAILED_PRECONDITION,
            )
        await self._control.abort_other_policies(header.stage_id)
        source = WeightSource(transfer=transfer)
        self._control.add_stage(Weights(POLICY, header.version, source, header.stage_id))

    async def Commit(self, request: pb.CommitRequest, context: Any) -> pb.CommitResponse:
        self._control.check_claim(_trainer(context))
        return await self._committed(self._control.commit(request.stage_ids))

    async def RollBack(self, request: pb.RollBackRequest, context: Any) -> pb.CommitResponse:
        self._control.check_claim(_trainer(context))
        return await self._committed(self._control.roll_back())

    async def SetSpeculation(
        self, request: pb.SetSpeculationRequest, context: Any
    ) -> pb.CommitResponse:
        self._control.check_claim(_trainer(context))
        return await self._committed(self._control.set_speculation(request.enabled))

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        trainer, told = _trainer(context), request.HasField("fleet_draft")
        self._control.check_claim(trainer, claims=told)
        if told:
            self._control.left_out(request.fleet_draft, trainer)
        if request.stage_ids:
            await self._control.abort(list(request.stage_ids))
        return pb.AbortResponse()

    async def GetState(self, request: pb.GetStateRequest, context: Any) -> pb.ServerState:
        self._control.heard(_trainer(context))
        if request.read_back:
            await self._control.read_back()
        return self._control.state()

    async def WatchAcceptance(
        self, request: pb.WatchAcceptanceRequest, context: Any
    ) -> AsyncIterator[pb.AcceptanceReport]:
        interval, trainer = (request.min_interval_ms or 1000) / 1000, _trainer(context)
        while True:
            # Before the report: what changes while it is sent, or in the pause, is reported next.
            changed = self._control.tracker.changed
            yield self._report()
            left = interval
            while left > 0:
                # A trainer that watches is there, however long it asks nothing else.
                self._control.heard(trainer)
                await asyncio.sleep(min(left, _IDLE_SECONDS))
                left -= _IDLE_SECONDS
            # Cancelled by gRPC when the client leaves or the server stops.
            while not changed.is_set():
                self._control.heard(trainer)
                with suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), _IDLE_SECONDS)

    def _report(self) -> pb.AcceptanceReport:
        tracker = self._control.tracker
        return pb.AcceptanceReport(
            state=self._control.state(), counters=tracker.counters().values(), pairs=tracker.pairs()
        )

    async def _committed(self, change: Awaitable[Result]) -> pb.CommitResponse:
        took = await change
        return pb.CommitResponse(
            state=self._control.state(), seconds=took.seconds, worker_seconds=took.worker_seconds
        )


def _trainer(context: Any) -> str:
    """Return the trainer that calls; empty for a bridge and for people."""
    for key, value in context.invocation_metadata() or ():
        if key == TRAINER:
            return clean(str(value), 64)
    return ""


async def _received(requests: AsyncIterator[pb.StageRequest], upload: Upload) -> None:
    """Take a stage's chunks until nothing is missing. Raises RefusedError as ``Upload.feed``."""
    end = time.perf_counter() + CHUNK_SECONDS + upload.needed_bytes / BYTES_PER_SECOND
    while upload.missing:
        request = await _next(requests, end - time.perf_counter())
        if request is None:
            await upload.finish()
        elif request.WhichOneof("kind") != "chunk":
            raise RefusedError("kind", "another header", "a chunk", "open a stream per stage")
        else:
            await upload.feed(request.chunk)


async def _next(
    requests: AsyncIterator[pb.StageRequest], left: float = CHUNK_SECONDS
) -> pb.StageRequest | None:
    """The client's next message; None at its end.

    Raises:
        RefusedError: it sent nothing for ``CHUNK_SECONDS``, or too little until now.
    """
    try:
        return await asyncio.wait_for(anext(requests, None), max(min(left, CHUNK_SECONDS), 0.0))
    except TimeoutError as error:
        slow = left < CHUNK_SECONDS
        raise RefusedError(
            "stream",
            f"less than {BYTES_PER_SECOND} bytes a second"
            if slow
            else f"nothing for {CHUNK_SECONDS:.0f} s",
            "the next chunk",
            "stage again",
            grpc.StatusCode.DEADLINE_EXCEEDED,
        ) from error


class ControlServer:
    """Starts, watches and stops the gRPC server of the control plane.

    Health is SERVING from the moment the OpenAI API answers until the engine dies, cannot be
    trusted any more, or the server stops; ``READY_SERVICE`` only while the control plane has no
    reason against it, too.
    """

    def __init__(
        self,
        service: RolloutService,
        control: RolloutControl,
        guard: AcceptanceGuard,
        http_started: Callable[[], bool],
        announce: Callable[[], None],
        access: Access,
    ) -> None:
        self._service = service
        self._control = control
        self._guard = guard
        self._http_started = http_started
        self._announce = announce
        before = Guard(
            access,
            LIMITS,
            _OTHER_CALLS,
            message_seconds=MESSAGE_SECONDS,
            calls_per_second=CALLS_PER_SECOND,
        )
        self._server = GrpcServer(before, access, SERVICE, (READY_SERVICE,))
        pb_grpc.add_RolloutServerServicer_to_server(service, self._server.grpc)
        self._watch: asyncio.Task[None] | None = None
        self.port = 0

    async def start(self, host: str, port: int) -> None:
        """Listen. Raises RefusedError: the port was taken meanwhile."""
        address = self._server.bind(host, port, "--control-port")
        self.port = int(address.rpartition(":")[2])
        await self._server.grpc.start()
        self._watch = asyncio.get_running_loop().create_task(self._watch_over())

    async def stop(self) -> None:
        """Stop listening; ends calls that are under way after a moment."""
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.wait({self._watch})
        self._set_health(serving=False)
        await self._control.close()
        await self._server.stop(_GRACE_SECONDS)

    async def _watch_over(self) -> None:
        while not self._http_started():
            await asyncio.sleep(_POLL_SECONDS)
        self._set_health(serving=True)
        self._announce()
        while self._control.engine.is_alive() and not self._control.untrusted.is_set():
            self._look_at_acceptance()
            self._server.health.set(READY_SERVICE, not self._control.not_ready)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._control.untrusted.wait(), _HEALTH_SECONDS)
        self._set_health(serving=False)
        if self._control.untrusted.is_set():
            logger.critical("the weights in memory are unknown; stopping rather than serving them")
            os.kill(os.getpid(), signal.SIGTERM)

    def _look_at_acceptance(self) -> None:
        control, before = self._control, self._control.not_ready
        found = self._guard.check(control.live[DRAFT].version or 0, control.commits[DRAFT])
        control.report(ACCEPTANCE, found)
        if control.not_ready != before:
            text = not_ready_text(control.not_ready)
            logger.warning("%s", f"not ready: {text}" if text else "ready again")

    def _set_health(self, serving: bool) -> None:
        self._server.set_serving(serving)
        self._server.health.set(READY_SERVICE, serving and not self._control.not_ready)
