"""A rollout server without vLLM: the real wire, the .proto's rules, and faults on demand."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc
import torch

from examples.arithmetic_grpo.processes import free_port
from slipstream.errors import RefusedError, abort_with
from slipstream.serving import SERVER_OPTIONS
from slipstream.tensors import ChunkAssembler, digest_of_specs, spec_of
from slipstream.v1 import rollout_server_pb2 as pb
from slipstream.v1 import rollout_server_pb2_grpc as pb_grpc

# ruff: noqa: N802


@dataclass
class Staged:
    """What a stage holds."""

    kind: int
    version: int
    against: int | None
    tensors: dict[str, torch.Tensor]


@dataclass
class Faults:
    """What goes wrong. Each entry is used once where it is a list.

    Args:
        stage: refuse to stage.
        commit: refuse commits that name one of these stage ids.
        lose_answer: commit, then fail the call as if the connection had gone.
        drop: the same without the commit: "keep" the stages, or "forget" them as a restart does.
        roll_back: refuse to roll back.
        die: cut every connection at the next commit, before or after it is done.
        evil: refuse to stage with this text.
        waits: what "Stage" or "Commit" wait for before they do anything.
    """

    stage: bool = False
    commit: set[str] = field(default_factory=set)
    lose_answer: bool = False
    drop: str = ""
    roll_back: bool = False
    die: str = ""
    evil: str = ""
    waits: dict[str, threading.Event] = field(default_factory=dict)


class RolloutDouble(pb_grpc.RolloutServerServicer):
    """See ``rollout_server.proto``. Counts the calls of each method in ``calls``."""

    def __init__(self, port: int = 0, like: RolloutDouble | None = None) -> None:
        """Listens at once. ``like`` another one: that one was only cut off."""
        self.faults = Faults()
        self.calls: list[tuple[str, tuple[str, ...]]] = []
        self.live: dict[str, torch.Tensor] = {}
        self.state = pb.ServerState(
            num_speculative_tokens=3, draft_sample_method="probabilistic", speculation_enabled=True
        )
        self.bytes_received = 0
        self._staged: dict[str, Staged] = {}
        self._content: dict[bytes, torch.Tensor] = {}
        self._before: tuple[int, dict[str, torch.Tensor]] | None = None
        if like is not None:
            self.state.CopyFrom(like.state)
            self.live, self._before = like.live, like._before
        self._lock = threading.Lock()
        self._counters: dict[int, pb.AcceptanceCounters] = {}
        self._moved = threading.Condition(self._lock)
        self.watched = threading.Event()
        """Somebody was told the counters: what is drafted from now on is growth to them."""
        self._server = grpc.server(ThreadPoolExecutor(8), options=SERVER_OPTIONS)
        pb_grpc.add_RolloutServerServicer_to_server(self, self._server)
        # Not one of the system's: a server that is back finds its port free. Nor one of those that
        # services have chosen and listen on later.
        port = port or free_port(range(28_000, 32_000))
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        self.address = f"127.0.0.1:{self.port}"
        self._server.start()

    def stop(self) -> None:
        """As if the process ended: calls in progress are cut."""
        self._server.stop(grace=None).wait(5)

    def draft(self, drafts: int, accepted_per_position: Sequence[int]) -> None:
        """As if the live draft had proposed and been verified so often."""
        with self._moved:
            version = self.state.draft_version
            none = [0] * len(accepted_per_position)
            fresh = pb.AcceptanceCounters(
                draft_version=version, tried_per_position=none, accepted_per_position=none
            )
            counters = self._counters.setdefault(version, fresh)
            counters.drafts += drafts
            counters.draft_tokens += drafts * len(accepted_per_position)
            counters.accepted_tokens += sum(accepted_per_position)
            for place, count in enumerate(accepted_per_position):
                counters.tried_per_position[place] += drafts
                counters.accepted_per_position[place] += count
            self._moved.notify_all()

    def commits(self) -> list[tuple[str, ...]]:
        """The stage ids of every commit call, sorted within a call."""
        with self._lock:
            return [ids for name, ids in self.calls if name == "Commit"]

    def stage_policy(self, stage_id: str, version: int) -> None:
        """What the bridge does before CompleteSync."""
        with self._lock:
            self._staged[stage_id] = Staged(pb.STAGE_KIND_POLICY, version, None, {})

    def Stage(
        self, request_iterator: Iterator[pb.StageRequest], context: grpc.ServicerContext
    ) -> Iterator[pb.StageResponse]:
        started = time.monotonic()
        header = next(request_iterator).header
        self._arrives("Stage", [header.stage_id])
        if self.faults.evil:
            abort_with(RefusedError(*[self.faults.evil] * 4), context)
        if self.faults.stage:
            error = RefusedError("tensors", "a wrong shape", "the model's", "fix the draft")
            abort_with(error, context)
        with self._lock:
            held = {
                s.name: self._content[s.sha256] for s in header.tensors if s.sha256 in self._content
            }
        missing = [spec for spec in header.tensors if spec.name not in held]
        yield pb.StageResponse(needed=pb.StageNeeded(names=[spec.name for spec in missing]))
        assembler = ChunkAssembler(missing, 1 << 30)
        try:
            for request in request_iterator:
                assembler.feed(request.chunk)
            tensors = held | assembler.finish()
        except RefusedError as error:
            abort_with(error, context)
        with self._lock:
            self.bytes_received += assembler.bytes_received
            self._content |= {spec.sha256: tensors[spec.name] for spec in header.tensors}
            known = header.HasField("trained_against_policy_version")
            self._staged[header.stage_id] = Staged(
                header.kind,
                header.version,
                header.trained_against_policy_version if known else None,
                tensors,
            )
        yield pb.StageResponse(
            staged=pb.StageResult(
                stage_id=header.stage_id,
                bytes_received=assembler.bytes_received,
                seconds=time.monotonic() - started,
            )
        )

    def Commit(self, request: pb.CommitRequest, context: grpc.ServicerContext) -> pb.CommitResponse:
        self._arrives("Commit", sorted(request.stage_ids))
        if self.faults.die == "before":
            self._die(context)
        if self.faults.drop:
            with self._lock:
                if self.faults.drop == "forget":
                    self._staged.clear()
            context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")
        bad = self.faults.commit & set(request.stage_ids)
        if bad:
            error = RefusedError("stage", sorted(bad), "weights that load", "look at the log")
            abort_with(error, context)
        with self._lock:
            unknown = [i for i in request.stage_ids if i not in self._staged]
            if not unknown:
                for stage_id in request.stage_ids:
                    self._apply(self._staged.pop(stage_id))
        if unknown:
            code = grpc.StatusCode.NOT_FOUND
            error = RefusedError("stage_ids", unknown, "staged ids", "stage first", code)
            abort_with(error, context)
        if self.faults.die == "after":
            self._die(context)
        if self.faults.lose_answer:
            context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")
        return pb.CommitResponse(state=self._state(), seconds=0.001, worker_seconds=0.001)

    def _die(self, context: grpc.ServicerContext) -> None:
        self._server.stop(grace=None)
        context.abort(grpc.StatusCode.UNAVAILABLE, "killed")

    def Abort(self, request: pb.AbortRequest, context: grpc.ServicerContext) -> pb.AbortResponse:
        self._note("Abort", sorted(request.stage_ids))
        with self._lock:
            for stage_id in request.stage_ids:
                self._staged.pop(stage_id, None)
        return pb.AbortResponse()

    def RollBack(
        self, request: pb.RollBackRequest, context: grpc.ServicerContext
    ) -> pb.CommitResponse:
        self._note("RollBack", [])
        with self._lock:
            before = self._before
            if before is not None and not self.faults.roll_back:
                self.state.draft_version, self.live = before
                self.state.not_ready = ""
                self._digest()
                self.state.ClearField("previous_draft_version")
                self._before = None
        if before is None or self.faults.roll_back:
            code = grpc.StatusCode.FAILED_PRECONDITION
            error = RefusedError("draft", "nothing", "a draft served before", "stage one", code)
            abort_with(error, context)
        return pb.CommitResponse(state=self._state())

    def GetState(
        self, request: pb.GetStateRequest, context: grpc.ServicerContext
    ) -> pb.ServerState:
        return self._state()

    def WatchAcceptance(
        self, request: pb.WatchAcceptanceRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.AcceptanceReport]:
        said = None
        while context.is_active():
            with self._moved:
                drafts = sum(c.drafts for c in self._counters.values())
                if drafts == said:
                    self._moved.wait(0.2)
                    continue
                # A stream of a fleet before, which ends, reads on.
                if said is None:
                    self.watched.set()
                said = drafts
                report = pb.AcceptanceReport(state=self.state, counters=self._counters.values())
            yield report

    def Expect(self, request: pb.ExpectRequest, context: grpc.ServicerContext) -> pb.ServerState:
        self._note("Expect", [str(request.draft_version)])
        with self._lock:
            expected = (request.draft_version, request.draft_sha256)
            served = (self.state.draft_version, self.state.draft_sha256) == expected
            text = f"serves draft {self.state.draft_version}, the fleet {expected[0]}"
            self.state.not_ready = "" if served else text
        return self._state()

    def _arrives(self, name: str, ids: list[str]) -> None:
        # Read before the call is recorded: a test that waits for the record may change the faults.
        go_on = self.faults.waits.get(name)
        self._note(name, ids)
        if go_on is not None:
            assert go_on.wait(120)

    def _note(self, name: str, ids: list[str]) -> None:
        with self._lock:
            self.calls.append((name, tuple(ids)))

    def _apply(self, staged: Staged) -> None:
        if staged.kind == pb.STAGE_KIND_POLICY:
            self.state.policy_version = staged.version
            self.state.policy_commits += 1
            return
        self._before = (self.state.draft_version, self.live)
        self.state.previous_draft_version = self.state.draft_version
        self.state.draft_version = staged.version
        self.state.draft_commits += 1
        self.state.not_ready = ""
        self.live = staged.tensors
        self.state.ClearField("trained_against_policy_version")
        if staged.against is not None:
            self.state.trained_against_policy_version = staged.against
        self._digest()

    def _digest(self) -> None:
        specs = (spec_of(name, tensor) for name, tensor in self.live.items())
        self.state.draft_sha256 = digest_of_specs(specs)

    def _state(self) -> pb.ServerState:
        with self._lock:
            state = pb.ServerState()
            state.CopyFrom(self.state)
            del state.staged[:]
            state.staged.extend(sorted(self._staged))
            return state
