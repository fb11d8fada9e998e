"""The trainer's gRPC service: translates messages to calls of the other modules and back.

Every method is a coroutine on the server's event loop; what blocks (checks, SQLite, files, calls to
rollout servers) runs on the app's workers. ``Guard`` turns a RefusedError into a status.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import torch
from grpc.aio import ServicerContext

from draft_trainer.config import ServerConfig, TrainerConfig
from draft_trainer.drafters import DraftShape
from draft_trainer.ingest.ingest import Ingest
from draft_trainer.ingest.run import Runs, Session
from draft_trainer.releases.imports import MAX_ORIGIN_CHARACTERS, Imports
from draft_trainer.releases.publisher import Publisher, PublishResult
from draft_trainer.releases.registry import Registry
from draft_trainer.server.status import Status
from draft_trainer.server.stream import StateStream
from slipstream.client import MAX_MESSAGE_BYTES
from slipstream.errors import RefusedError, StatusCode, clean
from slipstream.serving.limits import CHUNK_MESSAGE_BYTES, Limit
from slipstream.serving.server import Workers, blocking, header_of, wrong_kind
from slipstream.tensors import SCHEMA_VERSION, Framed, check_schema, chunks_of, unframe
from slipstream.v1 import console_pb2, draft_trainer_pb2, tensor_pb2
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import draft_trainer_pb2_grpc as pb_grpc

# gRPC finds the handlers by the names in the .proto.
# ruff: noqa: N802

logger = logging.getLogger(__name__)

SERVICE = draft_trainer_pb2.DESCRIPTOR.services_by_name["DraftTrainer"].full_name

MAX_NAME_CHARACTERS = 256
MAX_REASON_CHARACTERS = 1024
MAX_WATCHERS = 16
ANNOUNCE_SECONDS = 600.0
IMPORT_SECONDS = 3600.0
FETCH_SECONDS = 3600.0
ANSWER_SECONDS = 1.0
"""The part of a caller's deadline that is left for the answer to travel."""

# So many streams beyond server.max_streams are admitted, to be refused by that name.
_STREAMS_BEYOND = 8
_EVENT_SECONDS = 0.25
_QUICK_WORKERS = 8


def limits_of(config: ServerConfig) -> dict[str, Limit]:
    """Return the limits of each method, by ``/package.Service/Method``."""
    chunks, fleet = CHUNK_MESSAGE_BYTES, Limit(4)
    streams = config.max_streams + _STREAMS_BEYOND
    named = {
        # Parsed by hand, to keep the payload out of protobuf.
        "StreamStates": Limit(streams, MAX_MESSAGE_BYTES, parse=unframe),
        # Each call holds the two matrices of its version until they are complete.
        "AnnouncePolicy": Limit(4, chunks, ANNOUNCE_SECONDS),
        "ImportRelease": Limit(1, chunks, IMPORT_SECONDS),
        "FetchRelease": Limit(8, call_seconds=FETCH_SECONDS),
        "WatchEvents": Limit(MAX_WATCHERS),
        "PrepareSync": fleet,
        "CompleteSync": fleet,
        "PromoteRelease": fleet,
        "RollBackRelease": fleet,
    }
    return {f"/{SERVICE}/{method}": limit for method, limit in named.items()}


def workers_for(config: ServerConfig) -> int:
    """Return the number of threads: one for every admitted slow call, and some for quick ones."""
    limits = limits_of(config).items()
    slow = sum(limit.calls for method, limit in limits if "/Watch" not in method)
    return slow + _QUICK_WORKERS


@dataclass(eq=False)
class DraftTrainerService(pb_grpc.DraftTrainerServicer):
    """See ``draft_trainer.proto``. Used on one event loop."""

    config: TrainerConfig
    draft: DraftShape
    draft_vocab_ids: torch.Tensor
    runs: Runs
    ingest: Ingest
    registry: Registry
    publisher: Publisher
    imports: Imports
    status: Status
    workers: Workers
    window_bytes: int
    """Credit of a stream: room for a sample at least."""
    _draining: asyncio.Event = field(default_factory=asyncio.Event)
    _streams: set[StateStream] = field(default_factory=set)

    def drain(self) -> None:
        """End every stream and watch; the server is about to stop.

        A sample stream waits for its client, who may have nothing to send for minutes. The client
        sends again later what was not acknowledged.
        """
        self._draining.set()
        for stream in self._streams:
            stream.end()

    async def OpenRun(
        self, request: pb.OpenRunRequest, context: ServicerContext
    ) -> pb.OpenRunResponse:
        for name, text in (
            ("run_id", request.run_id),
            ("client", request.client),
            ("policy.model_name", request.policy.model_name),
        ):
            check_text(name, text, MAX_NAME_CHARACTERS)
        check_schema(
            request.schema_version,
            "the client's",
            "install the same release of slipstream in the policy's image and in the trainer's",
        )
        return await self.workers.run(self._open_run, request)

    def _open_run(self, request: pb.OpenRunRequest) -> pb.OpenRunResponse:
        session = self.runs.open(request)
        self.status.run_opened(session)
        return pb.OpenRunResponse(
            session_id=session.session_id,
            aux_layers=self.draft.aux_layer_ids,
            draft_vocab_ids=self.draft_vocab_ids.tolist(),
            max_tokens_per_sample=self.ingest.expected.max_tokens,
            latest_policy_version=session.run.latest_policy_version,
            rollout_servers=self.publisher.fleet.refresh(),
            schema_version=SCHEMA_VERSION,
        )

    async def StreamStates(
        self, request_iterator: AsyncIterator[Framed], context: ServicerContext
    ) -> AsyncIterator[pb.StreamStatesResponse]:
        limits = self.config.server
        first = await anext(request_iterator, None)
        header = header_of(None if first is None else first.request)
        with self.runs.stream(header.session_id, limits.max_streams) as session:
            credit = await self.workers.run(self.ingest.credit_bytes, self.window_bytes)
            # Nothing is awaited from here until the stream is where ``drain`` finds it.
            if self._draining.is_set():
                raise RefusedError(
                    "StreamStates",
                    "a trainer that is shutting down",
                    "a running trainer",
                    "keep the unacknowledged samples and open the stream again later",
                    StatusCode.UNAVAILABLE,
                )
            file, inline_because = self.ingest.open_file(header)
            stream = StateStream(
                request_iterator,
                credit,
                self.ingest,
                session,
                file,
                inline_because=inline_because,
                idle_seconds=limits.stream_idle_s,
                workers=self.workers,
            )
            logger.info("%r streams states by %s", session.client, stream.transport)
            self._streams.add(stream)
            try:
                async with aclosing(stream.responses()) as responses:
                    async for response in responses:
                        yield response
            finally:
                self._streams.discard(stream)

    async def AnnouncePolicy(
        self, request_iterator: AsyncIterator[pb.AnnouncePolicyRequest], context: ServicerContext
    ) -> pb.AnnouncePolicyResponse:
        header = header_of(await anext(request_iterator, None))
        session = self.runs.session(header.session_id)
        chunks = _chunks(self._blocking(request_iterator))
        await self.workers.run(self._announce, session, header, chunks)
        return pb.AnnouncePolicyResponse(
            policy_version=header.policy_version,
            history=session.run.history if session.joined else None,
        )

    def _announce(
        self,
        session: Session,
        header: pb.AnnouncePolicyHeader,
        chunks: Iterator[tensor_pb2.TensorChunk],
    ) -> None:
        if self.runs.announce(session, header, chunks):
            self.status.run_resumed(session)
        self.status.policy_announced(session.run)

    async def PrepareSync(
        self, request: pb.PrepareSyncRequest, context: ServicerContext
    ) -> pb.PublishResult:
        self.runs.session(request.session_id)
        return result_message(await self.workers.run(self.publisher.prepare, answer_by(context)))

    async def CompleteSync(
        self, request: pb.CompleteSyncRequest, context: ServicerContext
    ) -> pb.PublishResult:
        """See the .proto. The policy's commit does not depend on an open session."""
        check_text("policy_stage_id", request.policy_stage_id, MAX_NAME_CHARACTERS)
        published = await self.workers.run(
            self.publisher.complete, request.policy_version, request.policy_stage_id
        )
        return result_message(published)

    async def ListReleases(
        self, request: pb.ListReleasesRequest, context: ServicerContext
    ) -> pb.ListReleasesResponse:
        releases, uses = await self.workers.run(self.registry.uses)
        return pb.ListReleasesResponse(releases=releases, uses=uses)

    async def FetchRelease(
        self, request: pb.FetchReleaseRequest, context: ServicerContext
    ) -> AsyncIterator[pb.FetchReleaseResponse]:
        async with aclosing(self.workers.iterate(self._release(request.draft_version))) as parts:
            async for part in parts:
                yield part

    def _release(self, version: int) -> Generator[pb.FetchReleaseResponse, None, None]:
        with self.registry.using(version):
            tensors = self.registry.tensors(version)
            yield pb.FetchReleaseResponse(manifest=self.registry.get(version))
            for chunk in chunks_of(tensors):
                yield pb.FetchReleaseResponse(chunk=chunk)

    async def PromoteRelease(
        self, request: pb.PromoteReleaseRequest, context: ServicerContext
    ) -> pb.PublishResult:
        return await self.workers.run(self._promote, request, answer_by(context))

    def _promote(self, request: pb.PromoteReleaseRequest, until: float) -> pb.PublishResult:
        with self.registry.using(request.draft_version):
            published = self.publisher.promote(request.draft_version, request.pin, until)
            return result_message(published)

    async def RollBackRelease(
        self, request: pb.RollBackReleaseRequest, context: ServicerContext
    ) -> pb.PublishResult:
        check_text("reason", request.reason, MAX_REASON_CHARACTERS)
        roll_back, until = self.publisher.roll_back, answer_by(context)
        published = await self.workers.run(roll_back, request.reason, None, until)
        return result_message(published)

    async def ImportRelease(
        self, request_iterator: AsyncIterator[pb.ImportReleaseRequest], context: ServicerContext
    ) -> pb.ImportReleaseResponse:
        header = header_of(await anext(request_iterator, None))
        check_text("origin", header.origin, MAX_ORIGIN_CHARACTERS)
        chunks = _chunks(self._blocking(request_iterator))
        return await self.workers.run(self.imports.take, header, chunks)

    async def GetHistory(
        self, request: console_pb2.GetHistoryRequest, context: ServicerContext
    ) -> pb.History:
        return await self.workers.run(self.status.history)

    async def WatchEvents(
        self, request: console_pb2.WatchEventsRequest, context: ServicerContext
    ) -> AsyncIterator[console_pb2.Event]:
        events = self.status.events
        # Read once: a new log numbers from 1 again.
        seen, newest, last = request.after, request.newest, not request.follow
        known = None
        while True:
            if known != events.newest:
                known = events.newest
                for event in await self.workers.run(events.since, seen, newest):
                    yield event
                    seen = event.number
            newest = 0
            if last:
                return
            # Look once more after draining began: the trainer's stop is an event.
            last = await self._drained_within(_EVENT_SECONDS)

    async def GetStatus(
        self, request: pb.GetStatusRequest, context: ServicerContext
    ) -> pb.TrainerStatus:
        return await self.workers.run(self.status.read)

    async def _drained_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._draining.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def _blocking(self, requests: AsyncIterator[Any]) -> Iterator[Any]:
        return blocking(requests, 2 * self.config.server.message_timeout_s)


def answer_by(context: ServicerContext) -> float:
    """Return the monotonic time until which a refusal still reaches the caller.

    A call begun later would take effect although it looks failed, and again with the next try.
    """
    remaining = context.time_remaining()
    return math.inf if remaining is None else time.monotonic() + remaining - ANSWER_SECONDS


def check_text(name: str, text: str, most: int) -> None:
    """Raise RefusedError for a client's text of more than ``most`` characters, or that is not one
    printable line, with which it could forge a line of a log."""
    if not text.isprintable():
        wanted = "one line of printable characters"
        raise RefusedError(name, clean(text, 128), wanted, "remove the other characters")
    if len(text) > most:
        raise RefusedError(
            name, f"{len(text)} characters", f"at most {most} characters", "send a shorter one"
        )


def _chunks(requests: Iterator[Any]) -> Iterator[tensor_pb2.TensorChunk]:
    """Yield the chunks of the remaining requests. Raises RefusedError if one has no chunk."""
    for request in requests:
        if request.WhichOneof("kind") != "chunk":
            raise wrong_kind("chunk", request.WhichOneof("kind"))
        yield request.chunk


def result_message(published: PublishResult) -> pb.PublishResult:
    """Return the message that says how a publish ended."""
    servers = [
        pb.ServerOutcome(
            address=address,
            committed=outcome.committed,
            error=outcome.error,
            state=outcome.state,
            commit_seconds=outcome.commit_seconds,
            stage_seconds=outcome.stage_seconds,
        )
        for address, outcome in published.outcomes.items()
    ]
    return pb.PublishResult(draft_version=published.draft_version, servers=servers)
