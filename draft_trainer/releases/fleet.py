"""The rollout servers: one client each, asked in parallel, every call with a deadline.

A server that cannot be reached is a value here (``Failure``), never an
exception: the trainer outlives its fleet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

import grpc
import torch

from slipstream.channel import open_channel
from slipstream.refusal import RefusedError, refused_from
from slipstream.staging import stage
from slipstream.v1 import rollout_server_pb2 as pb
from slipstream.v1 import rollout_server_pb2_grpc as pb_grpc
from slipstream.v1 import tensor_pb2

T = TypeVar("T")

UNKNOWN_FATE = frozenset(
    {
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.UNKNOWN,
    }
)
"""Codes after which the server may or may not have done what it was told."""


@dataclass(frozen=True)
class Timeouts:
    """Seconds a call may take."""

    state: float
    stage: float
    commit: float


@dataclass(frozen=True)
class Failure:
    """Why a server did not do what it was asked."""

    text: str
    code: grpc.StatusCode

    @property
    def unknown_fate(self) -> bool:
        """The answer was lost: only a read-back tells what happened."""
        return self.code in UNKNOWN_FATE


@dataclass(frozen=True)
class Timed(Generic[T]):
    """What a server answered, and the seconds from call to answer."""

    value: T
    seconds: float


@dataclass(frozen=True)
class DraftPayload:
    """One release, ready to stage: its tensors (CPU, any shape) with their specs."""

    version: int
    trained_against_policy_version: int | None
    tensors: Mapping[str, torch.Tensor]
    specs: Sequence[tensor_pb2.TensorSpec]

    @property
    def stage_id(self) -> str:
        """The name it is committed or aborted by."""
        return f"draft-{self.version}"


class RolloutClient:
    """One rollout server's control plane."""

    def __init__(self, address: str, timeouts: Timeouts) -> None:
        self.address = address
        self.timeouts = timeouts
        self._channel = open_channel(address)
        self._stub = pb_grpc.RolloutServerStub(self._channel)

    def state(self) -> pb.ServerState | Failure:
        """What it serves."""
        answer = self._call(
            lambda: self._stub.GetState(pb.GetStateRequest(), timeout=self.timeouts.state)
        )
        return answer if isinstance(answer, Failure) else answer.value

    def stage(self, draft: DraftPayload) -> Timed[pb.StageResult] | Failure:
        """Let it pull and verify a release while it generates."""
        return self._call(
            lambda: stage(
                self._stub,
                stage_id=draft.stage_id,
                kind=pb.STAGE_KIND_DRAFT,
                version=draft.version,
                tensors=draft.tensors,
                specs=draft.specs,
                trained_against_policy_version=draft.trained_against_policy_version,
                timeout=self.timeouts.stage,
            )
        )

    def commit(self, stage_ids: Sequence[str]) -> Timed[pb.CommitResponse] | Failure:
        """Make the named stages live in one worker call."""
        request = pb.CommitRequest(stage_ids=stage_ids)
        return self._call(lambda: self._stub.Commit(request, timeout=self.timeouts.commit))

    def abort(self, stage_ids: Sequence[str]) -> Failure | None:
        """Forget stages. Idempotent."""
        request = pb.AbortRequest(stage_ids=stage_ids)
        answer = self._call(lambda: self._stub.Abort(request, timeout=self.timeouts.state))
        return answer if isinstance(answer, Failure) else None

    def roll_back(self) -> Timed[pb.CommitResponse] | Failure:
        """Back to the draft it served before."""
        return self._call(
            lambda: self._stub.RollBack(pb.RollBackRequest(), timeout=self.timeouts.commit)
        )

    def close(self) -> None:
        """Give up the connection; calls in flight fail."""
        self._channel.close()

    def _call(self, call: Callable[[], T]) -> Timed[T] | Failure:
        started = time.monotonic()
        try:
            return Timed(call(), time.monotonic() - started)
        except grpc.RpcError as error:
            refusal = refused_from(error)
            # A call object carries its status; a bare RpcError (channel closed) does not.
            code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNAVAILABLE
            details = error.details() if isinstance(error, grpc.Call) else str(error)
            text = str(refusal) if refusal is not None else f"{code.name}: {details}"
            return Failure(f"{self.address}: {text}", code)
        except (RefusedError, ConnectionError, ValueError) as error:
            # ValueError: grpc's answer to a call on a closed channel.
            return Failure(f"{self.address}: {error}", grpc.StatusCode.UNAVAILABLE)


class Fleet:
    """All rollout servers of the configuration. Owns the clients and the threads that ask them."""

    def __init__(self, addresses: Sequence[str], timeouts: Timeouts) -> None:
        self.addresses = tuple(addresses)
        self.timeouts = timeouts
        self._clients = {address: RolloutClient(address, timeouts) for address in addresses}
        # Room for a policy commit on every server while another publish is staging.
        self._pool = ThreadPoolExecutor(max(1, 3 * len(addresses)), thread_name_prefix="fleet")

    def each(
        self, ask: Callable[[RolloutClient], T], addresses: Iterable[str] | None = None
    ) -> dict[str, T]:
        """Ask servers in parallel and wait for all; every ``ask`` ends by its own deadlines."""
        chosen = self.addresses if addresses is None else tuple(addresses)
        futures = {a: self._pool.submit(ask, self._clients[a]) for a in chosen}
        return {address: future.result() for address, future in futures.items()}

    def states(self) -> dict[str, pb.ServerState | Failure]:
        """What every server serves now."""
        return self.each(lambda client: client.state())

    def close(self) -> None:
        """Close every channel, then end the threads (their calls fail at once)."""
        for client in self._clients.values():
            client.close()
        self._pool.shutdown(wait=True, cancel_futures=True)
