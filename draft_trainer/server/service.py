"""The gRPC service: messages in, calls to the rooms behind it, messages out.

Synchronous gRPC on a thread pool, not asyncio: what a request does here is
checksums, tensor checks and locks shared with the training thread, all of which
would block an event loop; gRPC's C core still multiplexes the connections, and
the number of calls in progress is bounded by the pool.

The calls of the gRPC service that concern releases.

Registers the service so that StreamStates requests keep their payload out of protobuf.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import grpc
import torch

from draft_trainer.config import TrainerConfig
from draft_trainer.drafters import DraftShape
from draft_trainer.ingest.ingest import CreditWindow, Ingest
from draft_trainer.ingest.rings import Rings
from draft_trainer.ingest.run import Runs
from draft_trainer.releases.imports import MAX_ORIGIN_CHARACTERS, Imports
from draft_trainer.releases.publisher import Publisher, PublishResult, ServerOutcome
from draft_trainer.releases.registry import Registry, Retention
from draft_trainer.server.calls import MAX_IMPORT_SECONDS, check_text, chunks_after, first, refusals
from draft_trainer.server.status import Status, without_clock
from draft_trainer.server.stream import StateStream
from draft_trainer.state import GateResults
from slipstream.checksum import KINDS
from slipstream.errors import RefusedError
from slipstream.layers import encode_layers
from slipstream.tensors import SCHEMA_VERSION, Framed, check_schema, chunks_of, encode, unframe
from slipstream.v1 import console_pb2, release_pb2
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import draft_trainer_pb2_grpc as pb_grpc

# gRPC finds the handlers by the names in the .proto.
# ruff: noqa: N802


MAX_REASON_CHARACTERS = 1024


@dataclass(frozen=True)
class ReleaseRooms:
    """Who knows what about releases."""

    registry: Registry
    publisher: Publisher
    retention: Retention
    verdicts: GateResults
    imports: Imports


class ReleaseCalls(pb_grpc.DraftTrainerServicer):
    """The part of ``DraftTrainerService`` that looks at releases and moves them.

    Args:
        rooms: those who do it.
    """

    def __init__(self, rooms: ReleaseRooms) -> None:
        self._rooms = rooms

    def ListReleases(
        self, request: pb.ListReleasesRequest, context: grpc.ServicerContext
    ) -> pb.ListReleasesResponse:
        """See the .proto."""
        with refusals(context):
            uses = self._rooms.retention.uses()
            sound = [use.draft_version for use in uses if not use.damage]
            releases = [self._rooms.registry.get(version) for version in sound]
            return pb.ListReleasesResponse(releases=releases, uses=uses)

    def FetchRelease(
        self, request: pb.FetchReleaseRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.FetchReleaseResponse]:
        """See the .proto."""
        registry = self._rooms.registry
        with refusals(context), registry.using(request.draft_version):
            tensors = registry.tensors(request.draft_version)
            yield pb.FetchReleaseResponse(manifest=registry.get(request.draft_version))
            for chunk in chunks_of(tensors):
                yield pb.FetchReleaseResponse(chunk=chunk)

    def PromoteRelease(
        self, request: pb.PromoteReleaseRequest, context: grpc.ServicerContext
    ) -> pb.PublishResult:
        """See the .proto."""
        version = request.draft_version
        with refusals(context), self._rooms.registry.using(version):
            return result_message(self._rooms.publisher.promote(version, request.pin))

    def RollBackRelease(
        self, request: pb.RollBackReleaseRequest, context: grpc.ServicerContext
    ) -> pb.PublishResult:
        """See the .proto."""
        with refusals(context):
            check_text("reason", request.reason, MAX_REASON_CHARACTERS)
            return result_message(self._rooms.publisher.roll_back(request.reason))

    def PinRelease(
        self, request: pb.PinReleaseRequest, context: grpc.ServicerContext
    ) -> release_pb2.ReleaseUse:
        """See the .proto."""
        rooms, version = self._rooms, request.draft_version
        with refusals(context):
            rooms.registry.pin(version, request.pinned)
            return next(use for use in rooms.retention.uses() if use.draft_version == version)

    def ImportRelease(
        self, request_iterator: Iterator[pb.ImportReleaseRequest], context: grpc.ServicerContext
    ) -> pb.ImportReleaseResponse:
        """See the .proto."""
        with refusals(context):
            left = context.time_remaining()
            if left is None or left > MAX_IMPORT_SECONDS:
                # A client that stops sending would hold the one place for ever.
                raise RefusedError(
                    "deadline",
                    "none" if left is None else f"{left:.0f} s",
                    f"at most {MAX_IMPORT_SECONDS:.0f} s",
                    "call with a deadline",
                )
            header = first(request_iterator, "header").header
            check_text("origin", header.origin, MAX_ORIGIN_CHARACTERS)
            return self._rooms.imports.take(header, chunks_after(request_iterator))

    def ListVerdicts(
        self, request: pb.ListVerdictsRequest, context: grpc.ServicerContext
    ) -> pb.ListVerdictsResponse:
        """See the .proto."""
        return pb.ListVerdictsResponse(verdicts=self._rooms.verdicts.newest(request.newest))


def outcome_messages(published: PublishResult) -> list[pb.ServerOutcome]:
    """One per rollout server."""
    return [_outcome(address, outcome) for address, outcome in published.outcomes.items()]


def result_message(published: PublishResult) -> pb.PublishResult:
    """How a publish ended."""
    return pb.PublishResult(
        draft_version=published.draft_version, servers=outcome_messages(published)
    )


def _outcome(address: str, outcome: ServerOutcome) -> pb.ServerOutcome:
    return pb.ServerOutcome(
        address=address,
        committed=outcome.committed,
        error=outcome.error,
        state=outcome.state,
        commit_seconds=outcome.commit_seconds,
        stage_seconds=outcome.stage_seconds,
    )


# gRPC finds the handlers by the names in the .proto.
# ruff: noqa: N802


logger = logging.getLogger(__name__)

MAX_NAME_CHARACTERS = 256

_SHORTEST_INTERVAL, _LONGEST_INTERVAL = 0.1, 3600.0
_TICK = 1.0


class DraftTrainerService(ReleaseCalls):
    """See ``draft_trainer.proto``.

    Args:
        config: the trainer's.
        draft: configuration of the head that is trained.
        draft_vocab_ids: int32 [draft_vocab], ascending.
        runs: the current run and its sessions.
        ingest: decides the fate of samples.
        releases: looks at them and moves them.
        status: where the trainer stands.
        rings: of shared memory, for the sessions.
    """

    def __init__(
        self,
        config: TrainerConfig,
        draft: DraftShape,
        draft_vocab_ids: torch.Tensor,
        runs: Runs,
        ingest: Ingest,
        releases: ReleaseRooms,
        status: Status,
        rings: Rings,
    ) -> None:
        super().__init__(releases)
        self._config = config
        self._draft = draft
        self._draft_vocab_ids = draft_vocab_ids
        self._runs = runs
        self._ingest = ingest
        self._publisher = releases.publisher
        self._status = status
        self._rings = rings
        self._draining = threading.Event()
        self._streams: set[grpc.ServicerContext] = set()
        self._streams_lock = threading.Lock()

    def drain(self) -> None:
        """End every stream; the server is about to stop.

        A sample stream waits for its client, who may have nothing to send for
        minutes. What was not acknowledged the client sends again later.
        """
        self._draining.set()
        with self._streams_lock:
            for context in self._streams:
                context.cancel()

    def OpenRun(
        self, request: pb.OpenRunRequest, context: grpc.ServicerContext
    ) -> pb.OpenRunResponse:
        """See the .proto."""
        with refusals(context):
            for field, text in (
                ("run_id", request.run_id),
                ("client", request.client),
                ("policy.model_name", request.policy.model_name),
            ):
                check_text(field, text, MAX_NAME_CHARACTERS)
            check_schema(
                request.schema_version,
                "the client's",
                "install the same release of slipstream in the policy's image and in the trainer's",
            )
            session = self._runs.open(request)
        self._status.run_opened(session)
        return pb.OpenRunResponse(
            session_id=session.session_id,
            aux_layers=encode_layers(self._draft.aux_layer_ids),
            draft_vocab_ids=encode(self._draft_vocab_ids),
            num_speculative_tokens=self._config.publish.num_speculative_tokens,
            max_tokens_per_sample=self._ingest.expected.max_tokens,
            latest_policy_version=session.run.latest_policy_version,
            rollout_servers=self._publisher.addresses,
            schema_version=SCHEMA_VERSION,
            checksums=KINDS,
            shared_memory=self._rings.offer(session.session_id),
        )

    def StreamStates(
        self, request_iterator: Iterator[Framed], context: grpc.ServicerContext
    ) -> Iterator[pb.StreamStatesResponse]:
        """See the .proto."""
        limits = self._config.server
        with refusals(context):
            header = first((framed.request for framed in request_iterator), "header").header
            session = self._runs.enter_stream(header.session_id, limits.max_streams)
            try:
                self._enter(context)
                ring = self._rings.claim(session.session_id, header.transport)
                logger.info(
                    "%r streams states by %s",
                    *(session.client, "gRPC" if ring is None else "shared memory"),
                )
                window = CreditWindow(self._ingest.credit_bytes(limits.receive_window_bytes))
                stream = StateStream(
                    *(request_iterator, window, self._ingest, session.run, ring),
                    idle_seconds=limits.stream_idle_s,
                )
                yield from stream.responses()
            finally:
                self._leave(context)
                self._rings.release(session.session_id)
                self._runs.leave_stream(session.session_id)

    def AnnouncePolicy(
        self, request_iterator: Iterator[pb.AnnouncePolicyRequest], context: grpc.ServicerContext
    ) -> pb.AnnouncePolicyResponse:
        """See the .proto."""
        with refusals(context):
            header = first(request_iterator, "header").header
            run = self._runs.session(header.session_id).run
            run.register_policy(self._draft, header, chunks_after(request_iterator))
            self._status.policy_announced(run)
        return pb.AnnouncePolicyResponse(policy_version=header.policy_version)

    def PrepareSync(
        self, request: pb.PrepareSyncRequest, context: grpc.ServicerContext
    ) -> pb.PrepareSyncResponse:
        """See the .proto."""
        with refusals(context):
            self._runs.session(request.session_id)
            published = self._publisher.prepare()
        return pb.PrepareSyncResponse(
            draft_version=published.draft_version if published.changes else None,
            servers=outcome_messages(published),
        )

    def CompleteSync(
        self, request: pb.CompleteSyncRequest, context: grpc.ServicerContext
    ) -> pb.CompleteSyncResponse:
        """See the .proto. A session that is not open does not keep the policy from its commit."""
        with refusals(context):
            check_text("policy_stage_id", request.policy_stage_id, MAX_NAME_CHARACTERS)
            published = self._publisher.complete(request.policy_version, request.policy_stage_id)
        return pb.CompleteSyncResponse(result=result_message(published))

    def GetHistory(
        self, request: console_pb2.GetHistoryRequest, context: grpc.ServicerContext
    ) -> pb.History:
        """See the .proto."""
        return self._status.history()

    def WatchEvents(
        self, request: console_pb2.WatchEventsRequest, context: grpc.ServicerContext
    ) -> Iterator[console_pb2.Event]:
        """See the .proto."""
        events = self._status.events
        # Once only: a log that was begun anew numbers from 1 again.
        seen, newest = request.after, request.newest
        while True:
            for event in events.since(seen, newest):
                yield event
                seen = event.number
            newest = 0
            if not request.follow:
                return
            # A deadline, so that a client that went away is noticed.
            while not events.wait_beyond(seen, timeout=1.0):
                if not context.is_active() or self._draining.is_set():
                    return

    def GetStatus(
        self, request: pb.GetStatusRequest, context: grpc.ServicerContext
    ) -> pb.TrainerStatus:
        """See the .proto."""
        return self._status.read()

    def WatchStatus(
        self, request: pb.WatchStatusRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.TrainerStatus]:
        """See the .proto."""
        interval = max((request.min_interval_ms or 1000) / 1000.0, _SHORTEST_INTERVAL)
        interval = min(interval, _LONGEST_INTERVAL)
        shown = None
        while context.is_active() and not self._draining.is_set():
            status = self._status.read()
            if without_clock(status) != shown:
                shown = without_clock(status)
                yield status
            # In ticks: a client that leaves during a long interval frees its place.
            end = time.monotonic() + interval
            while context.is_active() and (left := end - time.monotonic()) > 0:
                if self._draining.wait(min(left, _TICK)):
                    return

    def _enter(self, context: grpc.ServicerContext) -> None:
        with self._streams_lock:
            if self._draining.is_set():
                raise RefusedError(
                    "StreamStates",
                    "a trainer that is shutting down",
                    "a running trainer",
                    "keep the unacknowledged samples and open the stream again later",
                    grpc.StatusCode.UNAVAILABLE,
                )
            self._streams.add(context)

    def _leave(self, context: grpc.ServicerContext) -> None:
        with self._streams_lock:
            self._streams.discard(context)


class _Registrar:
    """Takes the place of the server while the generated code registers its handlers."""

    def __init__(self, server: grpc.Server) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """The generated code registers everything twice; by name is enough."""

    def add_registered_method_handlers(
        self, service: str, handlers: dict[str, grpc.RpcMethodHandler]
    ) -> None:
        raw = grpc.stream_stream_rpc_method_handler(
            handlers["StreamStates"].stream_stream,
            request_deserializer=unframe,
            response_serializer=handlers["StreamStates"].response_serializer,
        )
        changed = {**handlers, "StreamStates": raw}
        generic = grpc.method_handlers_generic_handler(service, changed)
        self._server.add_generic_rpc_handlers((generic,))
        self._server.add_registered_method_handlers(service, changed)


def add_draft_trainer(servicer: pb_grpc.DraftTrainerServicer, server: grpc.Server) -> None:
    """As ``add_DraftTrainerServicer_to_server``; StreamStates gets ``framing.Framed`` requests."""
    pb_grpc.add_DraftTrainerServicer_to_server(servicer, _Registrar(server))
