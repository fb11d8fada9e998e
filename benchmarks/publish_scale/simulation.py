"""The real publisher over servers in memory and a network in virtual time.

One thread runs everything as events: a call runs at once, adds what it takes to its own time, and
ends at that time. What is simulated is the network and the servers; who stages from whom, quorums,
intents and roll backs are the product's.

Seconds of a stage: round trips, bytes / min(stream, hashing, the sender's link / its receivers, the
receiver's link), the last tensor / hashing, preparing. A sender's share is that of all its
receivers even while it has fewer. Calls of the trainer begin one after the other, as far apart as
its interpreter takes for each: it runs one thread at a time.
"""

from __future__ import annotations

import heapq
import itertools
import random
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import torch

from benchmarks.publish_faults.rig import write_releases
from draft_trainer.config import PublishConfig
from draft_trainer.counters import Counters
from draft_trainer.releases.client import DraftPayload, Failure
from draft_trainer.releases.fleet import Calls, Fleet, Quorum
from draft_trainer.releases.publisher import Publisher
from draft_trainer.releases.reconcile import Reconciler
from draft_trainer.releases.registry import open_pointer
from draft_trainer.releases.spread import FAN_OUT, SEEDS
from draft_trainer.releases.watch import AcceptanceWatch
from slipstream.client import Progress
from slipstream.v1 import rollout_server_pb2 as pb

GIGABIT = 1e9 / 8


@dataclass(frozen=True)
class Network:
    """What things take, in seconds and bytes a second.

    Attributes:
        draft_bytes: of the release.
        tensors: it has; each is a call of its own.
        link: of every machine.
        stream: of one connection; the link where it is not less.
        hashing: of one server, while the next bytes arrive.
        prepare: of a standby copy.
        round_trip: within a region.
        commit: of a commit on a server.
        state_seconds, stage_seconds, commit_seconds: of the trainer's interpreter for one call.
        regions: servers are dealt to them in turn; the trainer is in the first.
        far_round_trip, far_stream: between regions.
    """

    draft_bytes: float = 0.8e9
    tensors: int = 15
    link: float = 25 * GIGABIT
    stream: float = 25 * GIGABIT
    hashing: float = 1.5e9
    prepare: float = 0.05
    round_trip: float = 0.0005
    commit: float = 0.03
    state_seconds: float = 0.00035
    stage_seconds: float = 0.00042
    commit_seconds: float = 0.0003
    regions: int = 1
    far_round_trip: float = 0.08
    far_stream: float = 5 * GIGABIT


@dataclass
class Server:
    """One of them.

    Attributes:
        region: number of it.
        dies_at: virtual time; infinite for most.
        back_at: when it answers again, with what it was started with.
        slow: factor on what its own work and link take.
        live: release that it serves.
        held: bytes that an attempt before left there.
        staged: releases that wait for a commit, by number.
    """

    region: int
    dies_at: float = float("inf")
    back_at: float = float("inf")
    slow: float = 1.0
    live: int = 0
    live_sha256: bytes = b""
    held: float = 0.0
    staged: dict[int, bytes] = field(default_factory=dict)
    not_ready: str = ""

    def restarted(self, now: float) -> None:
        """Forget what a process that died forgets, once it is back."""
        if self.back_at <= now:
            self.dies_at = self.back_at = float("inf")
            self.live, self.live_sha256, self.held, self.not_ready = 0, b"?", 0.0, ""
            self.staged.clear()

    def down(self, begin: float, end: float | None = None) -> bool:
        """Whether it is not there at an instant, or all of the time."""
        return self.dies_at <= (begin if end is None else end) and begin < self.back_at


class World:
    """Virtual time, and what happens in it."""

    def __init__(self, network: Network, servers: int, threads: int) -> None:
        self.network = network
        self.servers = {
            f"10.{n >> 16}.{n >> 8 & 255}.{n & 255}:50061": Server(n % network.regions)
            for n in range(servers)
        }
        self.now = 0.0
        self.local = 0.0
        self._threads = threads
        self._interpreter_free = 0.0
        self._waiting: deque[tuple[VirtualCalls, str, Callable[[], Any]]] = deque()
        self._events: list[tuple[float, int, VirtualCalls, str, Any]] = []
        self._numbers = itertools.count()
        self.calls = 0

    def submit(self, calls: VirtualCalls, name: str, call: Callable[[], Any]) -> None:
        """Begin a call as soon as a thread is free."""
        self._waiting.append((calls, name, call))
        self._begin()

    def step(self, until: float = float("inf")) -> bool:
        """The next event; False where there is none before ``until``."""
        if not self._events or self._events[0][0] > until:
            self.now = max(self.now, until if until < float("inf") else self.now)
            return False
        self.now, _, calls, name, answer = heapq.heappop(self._events)
        self._threads += 1
        calls.ended.append((name, answer))
        self._begin()
        return True

    def _begin(self) -> None:
        while self._threads and self._waiting:
            calls, name, call = self._waiting.popleft()
            self._threads -= 1
            self.calls += 1
            self.local = max(self.now, self._interpreter_free)
            answer = call()
            event = (self.local, next(self._numbers), calls, name, answer)
            heapq.heappush(self._events, event)

    def interpret(self, seconds: float) -> None:
        """The trainer's interpreter works for the call that begins; no other one does meanwhile."""
        self._interpreter_free = self.local = max(self.local, self._interpreter_free) + seconds


class VirtualCalls(Calls[Any]):
    """``Calls`` without threads."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.ended: deque[tuple[str, Any]] = deque()

    def start(self, name: str, call: Callable[[], Any]) -> None:
        self._world.submit(self, name, call)

    def next(self, quorum: Quorum | None = None) -> tuple[str, Any] | None:
        until = float("inf")
        if quorum is not None:
            quorum.clock = lambda: self._world.now
            until = quorum.over_at
        while not self.ended:
            if not self._world.step(until):
                return None
        return self.ended.popleft()


class Client:
    """``RolloutClient`` of a server in memory."""

    def __init__(self, address: str, world: World) -> None:
        self.address = address
        self._world = world
        self._server = world.servers[address]

    def state(self, read_back: bool = False) -> pb.ServerState | Failure:
        self._world.interpret(self._world.network.state_seconds)
        return self._answer(0.0) or self._state()

    def stage(
        self,
        draft: DraftPayload,
        stage_id: str = "",
        *,
        sources: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> pb.StageResult | Failure:
        progress = progress or Progress()
        answer = self.pull(draft, sources, progress)
        if not isinstance(answer, Failure) or answer.code != grpc.StatusCode.ABORTED:
            return answer
        world, network = self._world, self._world.network
        missing = network.draft_bytes - self._server.held
        world.local += missing / self._rate(0, network.link / SEEDS)
        progress.sent, self._server.held = round(missing), network.draft_bytes
        return self._hold(draft, 0.0)

    def pull(
        self, draft: DraftPayload, sources: Sequence[str], progress: Progress
    ) -> pb.StageResult | Failure:
        world, server, network = self._world, self._server, self._world.network
        world.interpret(network.stage_seconds)
        if (failure := self._answer(0.0)) is not None:
            return failure
        failed, fetched = [], 0.0
        for address in sources:
            source = world.servers[address]
            missing = network.draft_bytes - server.held
            if missing <= 0:
                break
            if source.down(world.local):
                failed.append(address)
                world.local += self._round_trip(source)
                continue
            rate = self._rate(source.region, network.link / FAN_OUT / source.slow)
            seconds = missing / rate + network.tensors * self._round_trip(source)
            if source.down(world.local, world.local + seconds):
                seconds = source.dies_at - world.local
                failed.append(address)
            arrived = min(missing, seconds * rate)
            fetched, server.held = fetched + arrived, server.held + arrived
            world.local += seconds
        progress.failed = tuple(failed)
        if network.draft_bytes - server.held > 1:
            return Failure("the sources did not give it", grpc.StatusCode.ABORTED)
        return self._hold(draft, fetched)

    def _hold(self, draft: DraftPayload, fetched: float) -> pb.StageResult | Failure:
        # Hashing goes on while the next tensor arrives, and a tensor of the last is left over.
        network, server = self._world.network, self._server
        own = network.draft_bytes / network.tensors / network.hashing + network.prepare
        begin = self._world.local
        if (failure := self._answer(own * server.slow, begin)) is not None:
            server.held = 0.0
            return failure
        server.staged[draft.version] = draft.sha256
        return pb.StageResult(seconds=self._world.local - begin, bytes_from_sources=round(fetched))

    def commit(self, stage_ids: list[str]) -> pb.ServerState | Failure:
        server, network = self._server, self._world.network
        self._world.interpret(network.commit_seconds)
        if (failure := self._answer(network.commit * server.slow)) is not None:
            return failure
        version = int(stage_ids[0].split("-")[1])
        sha256 = server.staged.pop(version, b"")
        if not sha256:
            return Failure(f"{self.address}: {stage_ids[0]} is not staged", grpc.StatusCode.ABORTED)
        server.live, server.live_sha256, server.held, server.not_ready = version, sha256, 0.0, ""
        return self._state()

    def abort(self, stage_ids: list[str]) -> Failure | None:
        self._server.staged.clear()
        return self._answer(0.0)

    def expect(self, version: int, sha256: bytes) -> Failure | None:
        if self._server.live != version:
            self._server.not_ready = f"serves draft {self._server.live}"
        return self._answer(0.0)

    def close(self) -> None: ...

    def _answer(self, seconds: float, begin: float | None = None) -> Failure | None:
        """Let a call take its time; why it has no answer, if it has none."""
        world = self._world
        begin = world.local if begin is None else begin
        self._server.restarted(begin)
        world.local += seconds + self._round_trip(Server(0))
        if self._server.down(begin) or self._server.down(begin, world.local):
            return Failure(f"{self.address}: connection refused", grpc.StatusCode.UNAVAILABLE)
        return None

    def _state(self) -> pb.ServerState:
        server = self._server
        return pb.ServerState(
            draft_version=server.live,
            draft_sha256=server.live_sha256,
            not_ready=server.not_ready,
            num_speculative_tokens=3,
            speculation_enabled=True,
            fetches=True,
        )

    def _round_trip(self, other: Server) -> float:
        near = other.region == self._server.region
        return self._world.network.round_trip if near else self._world.network.far_round_trip

    def _rate(self, region: int, share: float) -> float:
        network = self._world.network
        stream = network.stream if region == self._server.region else network.far_stream
        return min(stream, share, network.hashing, network.link / self._server.slow)


class VirtualFleet(Fleet):
    """``Fleet`` of servers in memory."""

    def __init__(self, world: World, config: PublishConfig) -> None:
        self._world = world
        super().__init__(config)

    def refresh(self) -> tuple[str, ...]:
        for address in self._world.servers:
            if address not in self._clients:
                self._clients[address] = Client(address, self._world)  # type: ignore[assignment]
        return tuple(self._clients)

    def calls(self) -> Calls[Any]:
        return VirtualCalls(self._world)


def fail_at_random(world: World, share: float, within: float, back: float, seed: int) -> None:
    """Have servers die at random instants of the next ``within`` seconds.

    Args:
        world: whose.
        share: of the servers.
        within: virtual seconds.
        back: seconds after which each answers again, without what was staged.
        seed: of chance.
    """
    chance = random.Random(seed)
    for address in chance.sample(sorted(world.servers), round(share * len(world.servers))):
        server = world.servers[address]
        server.dies_at = world.now + chance.uniform(0.0, within)
        server.back_at = server.dies_at + back


@dataclass(frozen=True)
class Scenario:
    """What goes wrong while a release is published.

    Attributes:
        network: of all servers.
        failing: share of the servers that die, each for ``back`` seconds.
        slow: share whose link, hashing and commits take ten times as long.
        quorum: ``publish.quorum``.
        back: seconds.
    """

    network: Network = Network()
    failing: float = 0.0
    slow: float = 0.0
    quorum: float = 1.0
    back: float = float("inf")


def simulate(scenario: Scenario, servers: int, threads: int, folder: Path) -> dict[str, float]:
    """One publish: virtual seconds to stage and to commit, and what came of it."""
    network = scenario.network
    world = World(network, servers, threads)
    chance = random.Random(1)
    for address in chance.sample(sorted(world.servers), round(scenario.slow * servers)):
        world.servers[address].slow = 10.0
    fail_at_random(world, scenario.failing, 5.0, scenario.back, seed=2)
    config = PublishConfig(quorum=scenario.quorum, straggler_s=1.0, stage_timeout_s=600.0)
    fleet = VirtualFleet(world, config)
    registry = write_releases(folder, 2)
    pointer, counters = open_pointer(registry), Counters()
    publisher = Publisher(fleet, registry, pointer, counters)
    get = publisher.payloads.get
    size = torch.empty(round(network.draft_bytes), dtype=torch.uint8, device="meta")
    sized = replace(get(1), tensors={"w": size})
    publisher.payloads.get = lambda version: sized if version == 1 else get(version)  # type: ignore[method-assign]
    for server in world.servers.values():
        server.live_sha256 = publisher.payloads.get(0).sha256
    began = time.process_time()
    pointer.offer(1)
    prepared = publisher.prepare()
    staged_at = world.now
    result = publisher.complete(0, "")
    done_at = world.now
    while world.step():
        """What stragglers still do."""
    # What the reconciler does every ``publish.reconcile_s``.
    Reconciler(publisher, AcceptanceWatch(fleet)).round()
    there = [server for server in world.servers.values() if not server.down(world.now)]
    serving = Counter(server.live for server in there if not server.not_ready)
    figures = {
        "stage_seconds": staged_at,
        "commit_seconds": done_at - staged_at,
        "seconds": done_at,
        "healed_seconds": world.now - done_at,
        "live": float(result.draft_version),
        "staged": float(len(prepared.holders)),
        "committed": float(sum(o.draft_committed for o in result.outcomes.values())),
        "ready_on_it": float(serving[1]),
        "ready_on_another": float(sum(serving.values()) - serving[1]),
        "unreachable": float(servers - len(there)),
        "egress_drafts": counters.staged_bytes.labels("trainer")._value.get() / network.draft_bytes,
        "calls": float(world.calls),
        "processor_seconds": time.process_time() - began,
    }
    registry.close()
    fleet.close()
    return figures


def scenarios(**seconds: float) -> dict[str, Scenario]:
    """The rows of the table; ``seconds`` of the trainer's interpreter for a call of each kind."""
    network = Network(**seconds)  # type: ignore[arg-type]
    far = replace(network, regions=3)
    return {
        "nothing fails": Scenario(network),
        "1 % fail": Scenario(network, failing=0.01, quorum=0.95),
        "1 % restart": Scenario(network, failing=0.01, quorum=0.95, back=1.0),
        "1 % ten times slower": Scenario(network, slow=0.01, quorum=0.95),
        "three regions": Scenario(far),
        "streams of 5 Gb/s": Scenario(replace(network, stream=5 * GIGABIT)),
    }
