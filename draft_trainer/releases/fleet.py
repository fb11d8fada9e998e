"""The rollout servers: one client each, asked in parallel, every call with a deadline.

A server that cannot be reached is a value here (``Failure``), never an
exception: the trainer outlives its fleet.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

import grpc
import torch

from draft_trainer.releases.membership import Members, StaticMembers
from slipstream.channel import open_channel
from slipstream.credentials import NONE, ClientCredentials
from slipstream.refusal import RefusedError, refused_from
from slipstream.release_digest import digest_of_specs
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

    @property
    def sha256(self) -> bytes:
        """What a server that serves it says of itself."""
        return digest_of_specs(self.specs)


class RolloutClient:
    """One rollout server's control plane."""

    def __init__(
        self, address: str, timeouts: Timeouts, credentials: ClientCredentials = NONE
    ) -> None:
        self.address = address
        self.timeouts = timeouts
        self._channel = open_channel(address, credentials=credentials)
        self._stub = pb_grpc.RolloutServerStub(self._channel)

    def state(self, read_back: bool = False) -> pb.ServerState | Failure:
        """What it serves; with ``read_back`` its workers look into their memory for it."""
        request = pb.GetStateRequest(read_back=read_back)
        answer = self._call(lambda: self._stub.GetState(request, timeout=self.timeouts.state))
        return answer if isinstance(answer, Failure) else answer.value

    def stage(self, draft: DraftPayload, stage_id: str = "") -> Timed[pb.StageResult] | Failure:
        """Let it pull and verify a release while it generates, under its usual id or another."""
        return self._call(
            lambda: stage(
                self._stub,
                stage_id=stage_id or draft.stage_id,
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

    def set_speculation(self, enabled: bool) -> Timed[pb.CommitResponse] | Failure:
        """Turn drafting on or off between two steps."""
        request = pb.SetSpeculationRequest(enabled=enabled)
        return self._call(lambda: self._stub.SetSpeculation(request, timeout=self.timeouts.commit))

    def watch(self, interval_ms: int, timeout: float) -> Iterator[pb.AcceptanceReport]:
        """Acceptance counters as they move, for ``timeout`` seconds; ends early where it fails."""
        request = pb.WatchAcceptanceRequest(min_interval_ms=interval_ms)
        try:
            yield from self._stub.WatchAcceptance(request, timeout=timeout)
        except (grpc.RpcError, ValueError):
            return

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
    """The rollout servers there are now. Owns the clients and the threads that ask them.

    Args:
        members: their addresses, or who knows them.
        timeouts: of every call.
        on_states: told what every server answered, after each look at all of them.
        credentials: checked; shown to every server.
    """

    MAX_CALLS = 256
    """At a time; threads exist as calls do."""

    def __init__(
        self,
        members: Members | Sequence[str],
        timeouts: Timeouts,
        on_states: Callable[[Mapping[str, pb.ServerState | Failure]], None] = lambda states: None,
        credentials: ClientCredentials = NONE,
    ) -> None:
        self._on_states = on_states
        self._members = StaticMembers(members) if isinstance(members, Sequence) else members
        self.timeouts = timeouts
        self._credentials = credentials
        self._lock = threading.Lock()
        self._clients: dict[str, RolloutClient] = {}
        self._pool = ThreadPoolExecutor(self.MAX_CALLS, thread_name_prefix="fleet")
        self.refresh()

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of the servers that belong to the fleet."""
        with self._lock:
            return tuple(self._clients)

    def refresh(self) -> tuple[str, ...]:
        """Ask again who belongs to it; returns the addresses."""
        wanted = self._members.addresses()
        with self._lock:
            gone = [self._clients.pop(a) for a in list(self._clients) if a not in wanted]
            for address in wanted:
                if address not in self._clients:
                    self._clients[address] = self._connected(address)
        for client in gone:
            client.close()
        return wanted

    def client(self, address: str) -> RolloutClient:
        """One server. Of one that has left, a client whose calls all fail."""
        with self._lock:
            client = self._clients.get(address)
        if client is None:
            client = self._connected(address)
            client.close()
        return client

    def _connected(self, address: str) -> RolloutClient:
        return RolloutClient(address, self.timeouts, self._credentials)

    def each(
        self, ask: Callable[[RolloutClient], T], addresses: Iterable[str] | None = None
    ) -> dict[str, T]:
        """Ask servers in parallel and wait for all; every ``ask`` ends by its own deadlines."""
        chosen = self.addresses if addresses is None else tuple(addresses)
        futures = {a: self._pool.submit(ask, self.client(a)) for a in chosen}
        return {address: future.result() for address, future in futures.items()}

    def states(self, read_back: bool = False) -> dict[str, pb.ServerState | Failure]:
        """What every server serves now."""
        states = self.each(lambda client: client.state(read_back))
        self._on_states(states)
        return states

    def abort_strays(
        self, states: Mapping[str, pb.ServerState | Failure], staged: Collection[str] = ()
    ) -> None:
        """Abort drafts that wait on a server for nobody: each holds memory there.

        A trainer that died leaves them, and a connection that was cut before its abort.

        Args:
            states: the servers, as they answered.
            staged: ids that somebody will commit.
        """
        strays = {
            address: [i for i in state.staged if i.startswith("draft-") and i not in staged]
            for address, state in states.items()
            if not isinstance(state, Failure)
        }
        strays = {address: ids for address, ids in strays.items() if ids}
        if strays:
            self.each(lambda client: client.abort(strays[client.address]), strays)

    def close(self) -> None:
        """Close every channel, then end the threads (their calls fail at once)."""
        with self._lock:
            clients, self._clients = self._clients, {}
        for client in clients.values():
            client.close()
        self._pool.shutdown(wait=True, cancel_futures=True)
