"""The gRPC face of the control plane (``RolloutServer`` of rollout_server.proto)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from typing import NoReturn, TypeVar

import grpc

from rollout_server.acceptance_tracker import AcceptanceTracker
from rollout_server.content_store import ContentStore
from rollout_server.control import Committed, RolloutControl
from rollout_server.engine import Engine
from rollout_server.layout_check import Expected
from rollout_server.staging import Upload, kind_of, refuse_shared, weights_of
from rollout_server.state_message import StateMessage
from rollout_server.weights import DRAFT
from slipstream.refusal import RefusedError, trailing_metadata_of
from slipstream.v1 import rollout_server_pb2 as pb
from slipstream.v1 import rollout_server_pb2_grpc as pb_grpc

CHUNK_SECONDS = 60.0
"""Longest wait for a client's next message while it stages."""

STAGE_BYTES_PER_SECOND = 8 << 20
"""A stage takes ``CHUNK_SECONDS`` and what its bytes take at this rate, at most: it has room in the
store from its start on, and a byte a minute would keep it there for ever."""

_IDLE_SECONDS = 5.0
_T = TypeVar("_T")


class RolloutService(pb_grpc.RolloutServerServicer):
    """Translates between messages and ``RolloutControl``; refusals become statuses.

    Args:
        control: the state.
        engine: asked about shared memory before a stage is taken.
        store: where staged tensors go.
        tracker: acceptance counters.
        expected: what a stage must look like, by kind.
        state: builds ``ServerState``.
    """

    def __init__(
        self,
        control: RolloutControl,
        engine: Engine,
        store: ContentStore,
        tracker: AcceptanceTracker,
        expected: dict[str, Expected],
        state: StateMessage,
    ) -> None:
        self._control = control
        self._engine = engine
        self._store = store
        self._tracker = tracker
        self._expected = expected
        self._state = state

    async def Stage(  # noqa: N802 (gRPC's name)
        self, request_iterator: AsyncIterator[pb.StageRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.StageResponse]:
        start = time.perf_counter()
        try:
            header = await _header(request_iterator)
            kind = kind_of(header)
            weights = weights_of(
                kind,
                header.version,
                header.tensors,
                self._store,
                stage_id=header.stage_id,
                trained_against=header.trained_against_policy_version
                if kind == DRAFT and header.HasField("trained_against_policy_version")
                else None,
            )
            held = self._control.already_staged(weights)
            upload = Upload(header.tensors, self._expected[kind], self._store)
            if not held:
                refuse_shared((await self._engine.describe()).shared)
            end = start + CHUNK_SECONDS + upload.needed_bytes / STAGE_BYTES_PER_SECOND
            with upload.opened():
                yield pb.StageResponse(needed=pb.StageNeeded(names=upload.needed))
                while not upload.complete:
                    request = await _next(request_iterator, end - time.perf_counter())
                    if request is None:
                        await upload.finish()
                    elif request.WhichOneof("kind") != "chunk":
                        raise RefusedError(
                            "kind", "another header", "a chunk", "open a stream per stage"
                        )
                    else:
                        await upload.feed(request.chunk)
                self._control.add_stage(weights)
                upload.keep()
            staged = time.perf_counter()
            not_prepared = await self._control.prepare(weights)
        except RefusedError as error:
            await _abort(context, error)
        end = time.perf_counter()
        yield pb.StageResponse(
            staged=pb.StageResult(
                stage_id=header.stage_id,
                bytes_received=upload.bytes_received,
                seconds=end - start,
                prepare_seconds=end - staged,
                not_prepared=not_prepared,
            )
        )

    async def Commit(  # noqa: N802
        self, request: pb.CommitRequest, context: grpc.aio.ServicerContext
    ) -> pb.CommitResponse:
        return await self._answer(self._control.commit(request.stage_ids), context)

    async def RollBack(  # noqa: N802
        self, request: pb.RollBackRequest, context: grpc.aio.ServicerContext
    ) -> pb.CommitResponse:
        return await self._answer(self._control.roll_back(), context)

    async def SetSpeculation(  # noqa: N802
        self, request: pb.SetSpeculationRequest, context: grpc.aio.ServicerContext
    ) -> pb.CommitResponse:
        return await self._answer(self._control.set_speculation(request.enabled), context)

    async def Abort(  # noqa: N802
        self, request: pb.AbortRequest, context: grpc.aio.ServicerContext
    ) -> pb.AbortResponse:
        self._control.abort(request.stage_ids)
        return pb.AbortResponse()

    async def GetState(  # noqa: N802
        self, request: pb.GetStateRequest, context: grpc.aio.ServicerContext
    ) -> pb.ServerState:
        if request.read_back:
            try:
                await self._control.read_back()
            except RefusedError as error:
                await _abort(context, error)
        return self._state.build()

    async def WatchAcceptance(  # noqa: N802
        self, request: pb.WatchAcceptanceRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.AcceptanceReport]:
        interval = (request.min_interval_ms or 1000) / 1000
        while True:
            yield self._report()
            await asyncio.sleep(interval)
            # Cancelled by gRPC when the client leaves or the server stops.
            while not await self._tracker.changed(_IDLE_SECONDS):
                pass

    def _report(self) -> pb.AcceptanceReport:
        return pb.AcceptanceReport(
            state=self._state.build(),
            counters=[
                pb.AcceptanceCounters(
                    draft_version=version,
                    drafts=counters.drafts,
                    draft_tokens=counters.draft_tokens,
                    accepted_tokens=counters.accepted_tokens,
                    accepted_per_position=counters.accepted_per_position,
                )
                for version, counters in self._tracker.counters().items()
            ],
        )

    async def _answer(
        self, change: Awaitable[Committed], context: grpc.aio.ServicerContext
    ) -> pb.CommitResponse:
        try:
            took = await change
        except RefusedError as error:
            await _abort(context, error)
        return pb.CommitResponse(
            state=self._state.build(), seconds=took.seconds, worker_seconds=took.worker_seconds
        )


async def _header(requests: AsyncIterator[pb.StageRequest]) -> pb.StageHeader:
    first = await _next(requests)
    if first is None or first.WhichOneof("kind") != "header":
        raise RefusedError(
            "kind",
            "nothing" if first is None else first.WhichOneof("kind"),
            "a header as the first message",
            "send StageHeader first",
        )
    return first.header


async def _next(requests: AsyncIterator[_T], left: float = CHUNK_SECONDS) -> _T | None:
    """The client's next message; None at its end.

    Args:
        left: seconds that the whole stage may still take.

    Raises:
        RefusedError: it sent nothing for ``CHUNK_SECONDS``, or too little until now.
    """
    try:
        return await asyncio.wait_for(anext(requests, None), max(min(left, CHUNK_SECONDS), 0.0))
    except TimeoutError as error:
        slow = left < CHUNK_SECONDS
        raise RefusedError(
            "stream",
            f"less than {STAGE_BYTES_PER_SECOND} bytes a second"
            if slow
            else f"nothing for {CHUNK_SECONDS:.0f} s",
            "the next chunk",
            "stage again",
            grpc.StatusCode.DEADLINE_EXCEEDED,
        ) from error


async def _abort(context: grpc.aio.ServicerContext, error: RefusedError) -> NoReturn:
    await context.abort(error.code, error.for_wire(), trailing_metadata_of(error))
    raise AssertionError("abort returned")
