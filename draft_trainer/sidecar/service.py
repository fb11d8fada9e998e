"""The gRPC service: messages in, calls to the rooms behind it, messages out.

Synchronous gRPC on a thread pool, not asyncio: what a request does here is
checksums, tensor checks and locks shared with the training thread, all of which
would block an event loop; gRPC's C core still multiplexes the connections, and
the number of calls in progress is bounded by the pool.
"""

# gRPC finds the handlers by the names in the .proto.
# ruff: noqa: N802

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import torch

from draft_trainer.config import TrainerConfig
from draft_trainer.eagle3.head_config import HeadConfig
from draft_trainer.feed.announce import announce
from draft_trainer.feed.ingest import CreditWindow, Ingest
from draft_trainer.feed.session import Runs
from draft_trainer.releases.commits import Outcome, Published
from draft_trainer.releases.publisher import Publisher
from draft_trainer.releases.registry import Registry
from draft_trainer.sidecar.status import Status
from slipstream.layers import encode_layers
from slipstream.refusal import RefusedError, abort_with
from slipstream.tensors import chunks_of, encode
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import draft_trainer_pb2_grpc as pb_grpc
from slipstream.v1 import tensor_pb2

MAX_WATCHERS = 16


class DraftTrainerService(pb_grpc.DraftTrainerServicer):
    """See ``draft_trainer.proto``.

    Args:
        config: the trainer's.
        draft: configuration of the head that is trained.
        draft_vocab_ids: int32 [draft_vocab], ascending.
        runs: the current run and its sessions.
        ingest: decides the fate of samples.
        publisher: moves the fleet.
        registry: the releases.
        status: where the trainer stands.
    """

    def __init__(
        self,
        config: TrainerConfig,
        draft: HeadConfig,
        draft_vocab_ids: torch.Tensor,
        runs: Runs,
        ingest: Ingest,
        publisher: Publisher,
        registry: Registry,
        status: Status,
    ) -> None:
        self._config = config
        self._draft = draft
        self._draft_vocab_ids = draft_vocab_ids
        self._runs = runs
        self._ingest = ingest
        self._publisher = publisher
        self._registry = registry
        self._status = status
        self._draining = threading.Event()
        self._streams: set[grpc.ServicerContext] = set()
        self._streams_lock = threading.Lock()
        self._watchers = threading.BoundedSemaphore(MAX_WATCHERS)

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
        with _refusals(context):
            session = self._runs.open(request)
        return pb.OpenRunResponse(
            session_id=session.session_id,
            aux_layers=encode_layers(self._draft.aux_layer_ids),
            draft_vocab_ids=encode(self._draft_vocab_ids),
            num_speculative_tokens=self._config.publish.num_speculative_tokens,
            max_tokens_per_sample=self._ingest.expected.max_tokens,
            latest_policy_version=session.run.latest_policy_version,
            rollout_servers=self._config.publish.rollout_servers,
        )

    def StreamStates(
        self, request_iterator: Iterator[pb.StreamStatesRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.StreamStatesResponse]:
        """See the .proto."""
        limits = self._config.server
        with _refusals(context):
            header = _first(request_iterator, "header")
            session = self._runs.enter_stream(header.header.session_id, limits.max_streams)
            try:
                self._enter(context)
                window = CreditWindow(limits.receive_window_bytes)
                yield pb.StreamStatesResponse(credit=pb.Credit(bytes=window.left))
                for request in request_iterator:
                    if request.WhichOneof("kind") != "sample":
                        raise _wrong_kind("sample", request.WhichOneof("kind"))
                    size = request.sample.ByteSize()
                    window.spend(size)
                    ack = self._ingest.take(session.run, request.sample)
                    yield pb.StreamStatesResponse(ack=ack)
                    window.give_back(size)
                    yield pb.StreamStatesResponse(credit=pb.Credit(bytes=size))
            finally:
                self._leave(context)
                self._runs.leave_stream()

    def AnnouncePolicy(
        self, request_iterator: Iterator[pb.AnnouncePolicyRequest], context: grpc.ServicerContext
    ) -> pb.AnnouncePolicyResponse:
        """See the .proto."""
        with _refusals(context):
            header = _first(request_iterator, "header").header
            run = self._runs.session(header.session_id).run
            announce(run, self._draft, header, _chunks(request_iterator))
            self._status.policy_announced(run)
        return pb.AnnouncePolicyResponse(policy_version=header.policy_version)

    def PrepareSync(
        self, request: pb.PrepareSyncRequest, context: grpc.ServicerContext
    ) -> pb.PrepareSyncResponse:
        """See the .proto."""
        with _refusals(context):
            self._runs.session(request.session_id)
            published = self._publisher.prepare()
        return pb.PrepareSyncResponse(
            draft_version=published.draft_version if published.changes else None,
            servers=_outcomes(published),
        )

    def CompleteSync(
        self, request: pb.CompleteSyncRequest, context: grpc.ServicerContext
    ) -> pb.CompleteSyncResponse:
        """See the .proto. A session that is not open does not keep the policy from its commit."""
        with _refusals(context):
            published = self._publisher.complete(request.policy_version, request.policy_stage_id)
        return pb.CompleteSyncResponse(result=_result(published))

    def ListReleases(
        self, request: pb.ListReleasesRequest, context: grpc.ServicerContext
    ) -> pb.ListReleasesResponse:
        """See the .proto."""
        with _refusals(context):
            return pb.ListReleasesResponse(releases=self._registry.list())

    def FetchRelease(
        self, request: pb.FetchReleaseRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.FetchReleaseResponse]:
        """See the .proto."""
        with _refusals(context):
            tensors = self._registry.tensors(request.draft_version)
            yield pb.FetchReleaseResponse(manifest=self._registry.get(request.draft_version))
            for chunk in chunks_of(tensors):
                yield pb.FetchReleaseResponse(chunk=chunk)

    def PromoteRelease(
        self, request: pb.PromoteReleaseRequest, context: grpc.ServicerContext
    ) -> pb.PublishResult:
        """See the .proto."""
        with _refusals(context):
            return _result(self._publisher.promote(request.draft_version, request.pin))

    def RollBackRelease(
        self, request: pb.RollBackReleaseRequest, context: grpc.ServicerContext
    ) -> pb.PublishResult:
        """See the .proto."""
        with _refusals(context):
            return _result(self._publisher.roll_back(request.reason))

    def GetStatus(
        self, request: pb.GetStatusRequest, context: grpc.ServicerContext
    ) -> pb.TrainerStatus:
        """See the .proto."""
        return self._status.read()[0]

    def WatchStatus(
        self, request: pb.WatchStatusRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.TrainerStatus]:
        """See the .proto."""
        interval = (request.min_interval_ms or 1000) / 1000.0
        with _refusals(context):
            if not self._watchers.acquire(blocking=False):
                raise RefusedError(
                    "WatchStatus",
                    f"{MAX_WATCHERS} watchers",
                    f"at most {MAX_WATCHERS}",
                    "watch from fewer places, or scrape the metrics",
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                )
        try:
            while context.is_active() and not self._draining.is_set():
                status, revision = self._status.read()
                yield status
                self._draining.wait(interval)
                # A deadline, so that a client that went away is noticed.
                while context.is_active() and not self._draining.is_set():
                    if self._status.wait_beyond(revision, timeout=1.0):
                        break
        finally:
            self._watchers.release()

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


@contextmanager
def _refusals(context: grpc.ServicerContext) -> Iterator[None]:
    """Turn a RefusedError into the call's status."""
    try:
        yield
    except RefusedError as error:
        abort_with(error, context)


def _first(requests: Iterator, kind: str):  # type: ignore[no-untyped-def]
    request = next(requests, None)
    found = request.WhichOneof("kind") if request is not None else "the end of the stream"
    if found != kind:
        raise _wrong_kind(kind, found)
    return request


def _chunks(requests: Iterator[pb.AnnouncePolicyRequest]) -> Iterator[tensor_pb2.TensorChunk]:
    for request in requests:
        if request.WhichOneof("kind") != "chunk":
            raise _wrong_kind("chunk", request.WhichOneof("kind"))
        yield request.chunk


def _wrong_kind(expected: str, found: str | None) -> RefusedError:
    return RefusedError(
        "kind", found or "nothing", expected, "send the header first, and only once"
    )


def _outcomes(published: Published) -> list[pb.ServerOutcome]:
    return [_outcome(address, outcome) for address, outcome in published.outcomes.items()]


def _outcome(address: str, outcome: Outcome) -> pb.ServerOutcome:
    return pb.ServerOutcome(
        address=address,
        committed=outcome.committed,
        error=outcome.error,
        state=outcome.state,
        commit_seconds=outcome.commit_seconds,
        stage_seconds=outcome.stage_seconds,
    )


def _result(published: Published) -> pb.PublishResult:
    return pb.PublishResult(draft_version=published.draft_version, servers=_outcomes(published))
