"""One rollout server: what the trainer asks of it, and a release ready to be staged there.

A server that cannot be reached is a value here (``Failure``), never an exception: the trainer
outlives its fleet. What servers send is checked here, where it arrives: texts are bounded and
cleaned, and a figure that is no finite number is refused by name, and nothing else with it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import grpc
import torch

from draft_trainer.config import PublishConfig
from slipstream.client import TRAINER, open_channel, stage
from slipstream.errors import RefusedError, clean, failure_text
from slipstream.serving.identity import NONE, ClientCredentials
from slipstream.tensors import digest_of_specs
from slipstream.v1 import rollout_server_pb2 as pb
from slipstream.v1 import rollout_server_pb2_grpc as pb_grpc
from slipstream.v1 import tensor_pb2

logger = logging.getLogger(__name__)

T = TypeVar("T")

FIGURES = ("engine_seconds", "speed_up")
"""Fields of a server's state that it measures of itself."""

MAX_STAGED = 64
"""Stages that are read of one server's state; a server holds one or two."""

MAX_REASONS, MAX_WORKERS = 16, 64
"""Reasons against a server that are read of its state, and workers that are read of a reason."""

POLICY_SECONDS = 200.0
"""Deadline of a commit with a policy, which may be received within it. Above what a server gives
its workers for it (120 s, and 60 s for the step before): its own answer says what became of it."""

UNKNOWN_FATE = ("DEADLINE_EXCEEDED", "UNAVAILABLE", "CANCELLED", "UNKNOWN")
"""Codes after which the server may or may not have done what it was asked."""


@dataclass(frozen=True)
class Failure:
    """A server's reason for not doing what it was asked."""

    text: str
    code: grpc.StatusCode

    @property
    def unknown_fate(self) -> bool:
        """The answer was lost: only a read-back tells what happened."""
        return self.code.name in UNKNOWN_FATE


@dataclass(frozen=True)
class DraftPayload:
    """One release, ready to stage: its tensors (CPU, any shape) with their specs, its folder below
    ``publish.shared_registry``, where that is set, and the gate's acceptance by position."""

    version: int
    trained_against_policy_version: int | None
    tensors: Mapping[str, torch.Tensor]
    specs: Sequence[tensor_pb2.TensorSpec]
    shared_folder: str = ""
    expected_acceptance: Sequence[float] = ()

    @property
    def stage_id(self) -> str:
        """The name it is committed or aborted by."""
        return f"draft-{self.version}"

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @cached_property
    def sha256(self) -> bytes:
        """``ServerState.draft_sha256`` of a server that serves it."""
        return digest_of_specs(self.specs)

    @property
    def on_the_fleet(self) -> pb.FleetDraft:
        """The message to a server that lacks it while the fleet serves it."""
        return pb.FleetDraft(version=self.version, sha256=self.sha256)


class RolloutClient:
    """One rollout server's control plane."""

    def __init__(
        self,
        address: str,
        config: PublishConfig,
        credentials: ClientCredentials = NONE,
        trainer: str = "",
    ) -> None:
        self.address = address
        self._who = ((TRAINER, trainer),) if trainer else ()
        self._config = config
        self._channel = open_channel(address, credentials=credentials)
        self._stub = pb_grpc.RolloutServerStub(self._channel)
        self._refused: set[str] = set()

    def state(self, read_back: bool = False) -> pb.ServerState | Failure:
        """Ask what it serves; with ``read_back`` its workers look into their memory for it."""
        request = pb.GetStateRequest(read_back=read_back)
        answer = self._ask(self._stub.GetState, request, self._config.state_timeout_s)
        return answer if isinstance(answer, Failure) else self._checked(answer)

    def stage(self, draft: DraftPayload, stage_id: str = "") -> pb.StageResult | Failure:
        """Let it take and verify a release while it generates, under its usual id or another."""
        header = _header(draft, stage_id or draft.stage_id)
        seconds, began = self._config.stage_timeout_s, time.monotonic()
        answer = self._call(
            lambda: stage(self._stub, header, draft.tensors, metadata=self._who, timeout=seconds)
        )
        if not isinstance(answer, Failure):
            answer.seconds = time.monotonic() - began
            answer.bytes_received = min(answer.bytes_received, draft.nbytes)
        return answer

    def commit(
        self, stage_ids: Sequence[str], with_policy: bool = False
    ) -> pb.ServerState | Failure:
        """Make the named stages live in one worker call; the state after it.

        With ``with_policy`` one of them is a policy, which may be received within the call.
        """
        request, seconds = pb.CommitRequest(stage_ids=stage_ids), self._config.commit_timeout_s
        if with_policy:
            seconds = max(seconds, POLICY_SECONDS)
        return self._changed(self._stub.Commit, request, seconds)

    def abort(
        self, stage_ids: Sequence[str], instead: pb.FleetDraft | None = None
    ) -> Failure | None:
        """Forget stages; ``instead``: without this draft it is not ready. Idempotent."""
        request = pb.AbortRequest(stage_ids=stage_ids, fleet_draft=instead)
        answer = self._ask(self._stub.Abort, request, self._config.state_timeout_s)
        return answer if isinstance(answer, Failure) else None

    def roll_back(self) -> pb.ServerState | Failure:
        """Back to the draft it served before; the state after it."""
        seconds = self._config.commit_timeout_s
        return self._changed(self._stub.RollBack, pb.RollBackRequest(), seconds)

    def watch(self, interval_ms: int, timeout: float) -> Iterator[pb.AcceptanceReport]:
        """Acceptance counters as they move, for ``timeout`` seconds; ends early where it fails."""
        request = pb.WatchAcceptanceRequest(min_interval_ms=interval_ms)
        try:
            for report in self._stub.WatchAcceptance(request, timeout=timeout, metadata=self._who):
                self._checked(report.state)
                yield report
        except (grpc.RpcError, ValueError):
            return

    def close(self) -> None:
        """Give up the connection; calls in flight fail."""
        self._channel.close()

    def _changed(
        self, method: Callable[..., Any], request: object, timeout: float
    ) -> pb.ServerState | Failure:
        answer = self._ask(method, request, timeout)
        return answer if isinstance(answer, Failure) else self._checked(answer.state)

    def _checked(self, state: pb.ServerState) -> pb.ServerState:
        """Clean a state in place; a figure is refused once until a usable one has come."""
        refused = set()
        for name in FIGURES:
            value = getattr(state, name)
            if math.isfinite(value) and value >= 0:
                continue
            state.ClearField(name)  # type: ignore[arg-type]
            refused.add(name)
            if name not in self._refused:
                expected = "a finite number, 0 or more"
                next_step = "nothing is decided by it; restart that server if it does not recover"
                error = RefusedError(f"{self.address}: {name}", value, expected, next_step)
                logger.warning("%s", error)
        self._refused = refused
        return cleaned(state)

    def _ask(self, method: Callable[..., Any], request: object, timeout: float) -> Any:
        return self._call(lambda: method(request, timeout=timeout, metadata=self._who))

    def _call(self, call: Callable[[], T | Failure]) -> T | Failure:
        try:
            return call()
        except grpc.RpcError as error:
            # A call object carries its status; a bare RpcError (channel closed) does not.
            code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNAVAILABLE
            return Failure(f"{self.address}: {failure_text(error)}", code)
        except (RefusedError, ConnectionError, ValueError) as error:
            # ValueError: grpc's answer to a call on a closed channel.
            return Failure(f"{self.address}: {error}", grpc.StatusCode.UNAVAILABLE)


def _header(draft: DraftPayload, stage_id: str) -> pb.StageHeader:
    return pb.StageHeader(
        stage_id=stage_id,
        kind=pb.STAGE_KIND_DRAFT,
        version=draft.version,
        trained_against_policy_version=draft.trained_against_policy_version,
        tensors=draft.specs,
        shared_folder=draft.shared_folder,
        expected_acceptance=draft.expected_acceptance,
    )


def drafts_wanted(state: pb.ServerState) -> bool:
    """Return whether nobody turned drafting off; where no length pays there are no drafts."""
    return state.speculation_wanted or state.speculation_enabled


def cleaned(state: pb.ServerState) -> pb.ServerState:
    """A server's state with its texts bounded and on one line each, in place."""
    for name in ("draft_sample_method", "draft_kind", "trainer"):
        setattr(state, name, clean(getattr(state, name)))
    # One byte more than a checksum has: a longer one stays another than every release's.
    state.draft_sha256 = state.draft_sha256[:33]
    state.DiscardUnknownFields()
    del state.staged[MAX_STAGED:]
    for held in state.staged:
        held.stage_id = clean(held.stage_id)
    del state.not_ready[MAX_REASONS:]
    for reason in state.not_ready:
        del reason.workers[MAX_WORKERS:]
        if not math.isfinite(reason.acceptance_length):
            reason.ClearField("acceptance_length")
    return state
