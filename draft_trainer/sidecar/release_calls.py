"""The calls of the gRPC service that concern releases."""

# gRPC finds the handlers by the names in the .proto.
# ruff: noqa: N802

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import grpc

from draft_trainer.releases.commits import Outcome, Published
from draft_trainer.releases.imports import MAX_ORIGIN_CHARACTERS, Imports
from draft_trainer.releases.publisher import Publisher
from draft_trainer.releases.registry import Registry
from draft_trainer.releases.retention import Retention
from draft_trainer.releases.verdicts import VerdictLog
from draft_trainer.sidecar.refusals import check_text, chunks_after, first, refusals
from slipstream.refusal import RefusedError, StatusCode
from slipstream.tensors import chunks_of
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import draft_trainer_pb2_grpc as pb_grpc
from slipstream.v1 import release_pb2

MAX_IMPORT_SECONDS = 3600.0
MAX_REASON_CHARACTERS = 1024


@dataclass(frozen=True)
class ReleaseRooms:
    """Who knows what about releases."""

    registry: Registry
    publisher: Publisher
    retention: Retention
    verdicts: VerdictLog
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
            try:
                rooms.registry.pin(version, request.pinned)
            except OSError as error:
                raise RefusedError(
                    "draft.registry",
                    str(error),
                    "a folder that can be written",
                    "check its owner, its mode and the free space",
                    StatusCode.RESOURCE_EXHAUSTED,
                ) from error
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


def outcome_messages(published: Published) -> list[pb.ServerOutcome]:
    """One per rollout server."""
    return [_outcome(address, outcome) for address, outcome in published.outcomes.items()]


def result_message(published: Published) -> pb.PublishResult:
    """How a publish ended."""
    return pb.PublishResult(
        draft_version=published.draft_version, servers=outcome_messages(published)
    )


def _outcome(address: str, outcome: Outcome) -> pb.ServerOutcome:
    return pb.ServerOutcome(
        address=address,
        committed=outcome.committed,
        error=outcome.error,
        state=outcome.state,
        commit_seconds=outcome.commit_seconds,
        stage_seconds=outcome.stage_seconds,
    )
