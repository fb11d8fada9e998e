"""The rollout servers: one client each, asked in parallel, every call with a deadline.

A server that cannot be reached is a value here (``Failure``), never an
exception: the trainer outlives its fleet.

Who belongs to the fleet: a list, a DNS name, a file that somebody keeps, or others who know.

A name service that does not answer says nothing about the fleet, so the last
answer stands until there is another.

No draft proposes for a policy that it is further behind than configured.

Off before the policy goes live, on again after a draft has gone live that is fresh
enough: what is in between costs speed, the other way round would be rollouts with a
draft that nobody wanted to serve.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import grpc
import torch

from slipstream.client import open_channel, stage
from slipstream.errors import RefusedError, refused_from
from slipstream.security import NONE, ClientCredentials
from slipstream.tensors import digest_of_specs
from slipstream.v1 import rollout_server_pb2 as pb
from slipstream.v1 import rollout_server_pb2_grpc as pb_grpc
from slipstream.v1 import tensor_pb2

logger = logging.getLogger(__name__)

DNS, FILE = "dns:", "file:"


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``host:port``. Raises ValueError: it is none."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"not an address of the form host:port: {address!r}")
    return host, int(port)


class Members(Protocol):
    """Asked before every publish and at every round of the reconciler. Thread-safe."""

    def addresses(self) -> tuple[str, ...]:
        """``host:port`` of every control plane, each once. Never raises."""
        ...


class StaticMembers:
    """A list that does not change."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._addresses = tuple(addresses)

    def addresses(self) -> tuple[str, ...]:
        """The list."""
        return self._addresses


class LookedUpMembers:
    """Whoever a look-up names now: a DNS name's addresses, a file's lines.

    Args:
        name: for the log.
        look_up: answers ``host:port`` strings; OSError (``socket.gaierror`` too) or
            ValueError where it cannot.
    """

    def __init__(self, name: str, look_up: Callable[[], Sequence[str]]) -> None:
        self._name = name
        self._look_up = look_up
        self._known: tuple[str, ...] = ()
        self._failed = False

    def addresses(self) -> tuple[str, ...]:
        """As of the last look-up that succeeded."""
        try:
            self._known = tuple(dict.fromkeys(self._look_up()))
            self._failed = False
        except (OSError, ValueError) as error:
            if not self._failed:
                logger.warning("%s: %s; keeping %s", self._name, error, list(self._known))
            self._failed = True
        return self._known


class UnionMembers:
    """All of several."""

    def __init__(self, parts: Sequence[Members]) -> None:
        self._parts = tuple(parts)

    def addresses(self) -> tuple[str, ...]:
        """Each address once."""
        return tuple(dict.fromkeys(a for part in self._parts for a in part.addresses()))


def members_of(entries: Sequence[str]) -> Members:
    """Members as ``publish.rollout_servers`` names them.

    ``host:port``, ``dns:name:port`` or ``file:path``. Raises ValueError: none of these.
    """
    parts: list[Members] = []
    for entry in entries:
        if entry.startswith(DNS):
            name, port = split_address(entry.removeprefix(DNS))
            parts.append(LookedUpMembers(entry, _dns(name, port)))
        elif entry.startswith(FILE):
            if entry == FILE:
                raise ValueError("file: without a path")
            parts.append(LookedUpMembers(entry, _file(Path(entry.removeprefix(FILE)))))
        else:
            split_address(entry)
            parts.append(StaticMembers([entry]))
    return UnionMembers(parts)


def _dns(name: str, port: int) -> Callable[[], Sequence[str]]:
    """Every address of a name, as a Kubernetes headless service answers."""

    def look_up() -> list[str]:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        hosts = sorted({str(entry[4][0]) for entry in found})
        return [f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in hosts]

    return look_up


def _file(path: Path) -> Callable[[], Sequence[str]]:
    """A ``host:port`` a line, as ``rollout-server fleet`` keeps them; an empty file is nobody.

    Whoever writes it replaces it as a whole: half a file would be half a fleet.
    """

    def look_up() -> list[str]:
        addresses = path.read_text(encoding="utf-8").split()
        for address in addresses:
            split_address(address)
        return addresses

    return look_up


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


class DraftLag:
    """Decides which servers speculate, where a limit is set; otherwise leaves them alone.

    Args:
        max_lag: policy versions that a draft may be behind; 0 for no limit.
    """

    def __init__(self, max_lag: int) -> None:
        self.max_lag = max_lag
        self._policy_version: int | None = None

    def policy_synced(self, policy_version: int) -> None:
        """Remember the newest policy, for servers whose policy the framework syncs itself."""
        self._policy_version = policy_version

    def fresh(self, state: pb.ServerState, policy_version: int | None = None) -> bool:
        """Whether a server's draft may propose for ``policy_version`` (the one it has now).

        A draft that was trained against no policy version yet (release 0) counts as
        trained against version 0; a policy without a version yet has no lag.
        """
        if policy_version is None:
            policy_version = (
                state.policy_version if state.HasField("policy_version") else self._policy_version
            )
        if policy_version is None:
            return True
        return policy_version - state.trained_against_policy_version <= self.max_lag

    def before_policy(self, client: RolloutClient, policy_version: int) -> Failure | None:
        """Turn speculation off where the draft that is live will be too old for this policy."""
        state = client.state()
        if isinstance(state, Failure):
            return state
        if state.speculation_enabled and not self.fresh(state, policy_version):
            return self._set(client, state, enabled=False)
        return None

    def apply(self, client: RolloutClient, state: pb.ServerState) -> Failure | None:
        """Bring a server's speculation in line with what it serves."""
        wanted = self.fresh(state)
        if not self.max_lag or state.speculation_enabled == wanted:
            return None
        return self._set(client, state, enabled=wanted)

    @staticmethod
    def _set(client: RolloutClient, state: pb.ServerState, enabled: bool) -> Failure | None:
        answer = client.set_speculation(enabled)
        if isinstance(answer, Failure):
            return answer
        logger.warning(
            "%s: speculation %s: draft %d was trained against policy version %d",
            client.address,
            "on" if enabled else "off",
            state.draft_version,
            state.trained_against_policy_version,
        )
        return None
