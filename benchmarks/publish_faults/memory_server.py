"""A rollout server in memory: the product's control plane over an engine that is a dictionary.

Staging, checks, store, commits, roll backs, acceptance counters, health and access are the
product's own; only vLLM's workers are replaced. ``MemoryServer`` runs it in the process of a test,
``server_process`` in one of its own, which may be killed.
"""

# ruff: noqa: N802 (gRPC's names)

from __future__ import annotations

import asyncio
import functools
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import grpc
import torch

from examples.arithmetic_grpo.processes import free_port
from rollout_server.control.acceptance_counts import AcceptanceGuard, AcceptanceTracker
from rollout_server.control.changes import Change, Description, Result
from rollout_server.control.control import DRAFT, POLICY, RolloutControl, Weights
from rollout_server.control.service import ControlServer, RolloutService
from rollout_server.control.stages import StageStore, WeightSource
from rollout_server.vllm import api_server as app
from rollout_server.vllm.engine import not_in_memory
from rollout_server.vllm.plugins import Settings
from rollout_server.vllm.standby import SAME
from slipstream.checkpoints import load_tensors, read_layout
from slipstream.errors import RefusedError
from slipstream.serving.identity import Access, TokenFiles
from slipstream.serving.server import LoopThread
from slipstream.tensors import spec_of
from slipstream.v1 import rollout_server_pb2 as pb

T = TypeVar("T")

DRAFT_DIR = Path(__file__).resolve().parents[2] / "examples" / "arithmetic_grpo" / "draft"
SECONDS = 120.0
"""Longest wait of a test for another thread."""


class MemoryEngine:
    """The methods of ``VllmEngine`` over a dictionary.

    Attributes:
        live: tensors by kind of model.
        prepared: drafts with a standby copy, and what it keeps ready beside them.
        not_prepared: why no draft can get one.
        lengths: tokens to draft by number of requests, as set last.
        memory: what its worker finds where it reads the draft back; a commit of a draft mends it.
        failure: raised instead of changing anything.
        received: weight transfers, as their stages described them.
        receive: takes a weight transfer, on a thread of its own.
    """

    def __init__(self) -> None:
        self.live: dict[str, dict[str, torch.Tensor]] = {}
        self.received: list[str] = []
        self.receive: Callable[[str], object] = self.received.append
        self.prepared: list[tuple[WeightSource, WeightSource | None]] = []
        self.lengths: list[int] = []
        self.not_prepared = ""
        self.memory = SAME
        self.failure: Exception | None = None

    async def describe(self) -> Description:
        return Description(False, (), "bfloat16")

    async def prepare(self, source: WeightSource, keep: WeightSource | None) -> str:
        self.prepared.append((source, keep))
        return self.not_prepared

    async def apply(self, changes: Sequence[Change]) -> Result:
        if self.failure is not None:
            raise self.failure
        for change in changes:
            if change.new.transfer:
                await asyncio.to_thread(self.receive, change.new.transfer)
            weights = () if change.new.transfer else change.new.weights()
            self.live[change.kind] = {name: tensor.clone() for name, tensor in weights}
            if change.kind == DRAFT:
                self.memory = SAME
        return Result(0.01)

    async def check_transfer(self, transfer: str) -> str:
        return ""

    async def set_draft_lengths(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)

    async def set_speculation(self, enabled: bool) -> float:
        if self.failure is not None:
            raise self.failure
        return 0.0

    async def read_back(self) -> list[pb.NotReady]:
        return not_in_memory([self.memory])

    def is_alive(self) -> bool:
        return True


def _no_metrics(kind: str, outcome: str, result: Result | None) -> None: ...


async def control_plane(
    engine: Any, store: StageStore, settings: Settings, tracker: AcceptanceTracker
) -> tuple[RolloutControl, RolloutService]:
    """The product's, for a policy whose checkpoint may be a draft's: no policy has a ``t2d``."""
    layout = read_layout(settings.model_dir)
    layout.pop("t2d", None)
    return await app.control_plane(engine, store, settings, layout, tracker, _no_metrics)


class Listener(ControlServer):
    """The product's gRPC server. Stopped, it may be followed by another one of the same state."""

    def __init__(self, service: Any, control: RolloutControl, settings: Settings) -> None:
        guard = AcceptanceGuard(control.tracker, settings.guard_drafts)
        super().__init__(service, control, guard, lambda: True, lambda: None, settings.access)

    async def kill(self) -> None:
        """Cut every call, as the end of a process does."""
        if self._watch is not None:
            self._watch.cancel()
        await self._server.grpc.stop(None)

    def look(self) -> None:
        """Judge the acceptance now instead of at the next look."""
        self._look_at_acceptance()


@dataclass
class Faults:
    """The faults of a server, each until it is changed.

    Attributes:
        stage: refuse to stage; a text: with it.
        gone: end calls that stage as if the connection had gone.
        commit: refuse commits that name one of these stage ids.
        lose_answer: commit, then fail the call as if the connection had gone.
        drop: the same without the commit: "keep" the stages, or "forget" them as a restart does.
        roll_back: refuse to roll back.
        die: cut every connection at the next commit, "before" or "after" it is done.
        waits: what "Stage" or "Commit" wait for before they do anything.
        lies: changes what GetState answers.
    """

    stage: bool | str = False
    gone: bool = False
    commit: set[str] = field(default_factory=set)
    lose_answer: bool = False
    drop: str = ""
    roll_back: bool = False
    die: str = ""
    waits: dict[str, threading.Event] = field(default_factory=dict)
    lies: Callable[[pb.ServerState], object] = lambda state: None


class MemoryServer:
    """A rollout server in this process; calls of other threads are safe.

    Attributes:
        address: of its control plane, the same after every restart.
        faults: what goes wrong.
        calls: method and stage ids, sorted, of every call that changes something.
        bytes_received: of stages.
        told: versions of drafts that the fleet serves without it, as it was told.
        watched: set once somebody was told the counters: what is drafted then is growth to them.
        control: the product's state, also of a server that was stopped.
        engine, store, tracker: what it works on.
    """

    def __init__(
        self,
        draft: Path | None = DRAFT_DIR,
        *,
        policy: Path | None = None,
        access: Access | None = None,
        **settings: Any,
    ) -> None:
        """Listen at once.

        Args:
            draft: the draft that it starts with; None: it drafts without weights.
            policy: the checkpoint that it serves; None: the draft is its layout, too.
            access: who may use it; None: everybody.
            settings: further ones of the launcher (``Settings``).
        """
        self.faults = Faults()
        self.calls: list[tuple[str, tuple[str, ...]]] = []
        self.bytes_received = 0
        self.told: list[int] = []
        self.watched = threading.Event()
        access = access or Access(None, TokenFiles({}, ""), {})
        model = policy or draft or DRAFT_DIR
        self._settings = Settings(model, draft, access, **settings)
        # None of the system's own: a server that is back finds its port free. Nor one of those that
        # services have chosen and listen on later.
        self.port = free_port(range(28_000, 32_000))
        self.address = f"127.0.0.1:{self.port}"
        self._start()

    def stop(self) -> None:
        """End as if the process were killed: calls in progress are cut."""
        _run(self._listener.kill())
        self.service.workers.close()
        self.store.close()

    def restart(self, **settings: Any) -> None:
        """End it, and start it anew on the same port, with the draft that it was first started
        with; ``settings``: with other ones."""
        self.stop()
        self._settings = replace(self._settings, **settings)
        self._start()

    def reconnect(self) -> None:
        """Cut every connection and listen again; the process, and what it serves, stay."""

        async def again() -> None:
            await self._listener.kill()
            await self._listen()

        _run(again())

    @property
    def state(self) -> pb.ServerState:
        """The state of its control plane."""
        return self.run(self.control.state)

    @property
    def staged(self) -> list[str]:
        """The ids of the stages that it holds."""
        return [stage.stage_id for stage in self.state.staged]

    @property
    def live(self) -> dict[str, torch.Tensor]:
        """The draft in its engine's memory."""
        return self.engine.live[DRAFT]

    @property
    def policy(self) -> dict[str, torch.Tensor]:
        """The policy in its engine's memory; empty before one was pushed, and if a weight transfer
        brought it."""
        return self.engine.live.get(POLICY, {})

    @property
    def policy_version(self) -> int | None:
        """The version of the policy that it serves; None before one was pushed."""
        return self.run(lambda: self.control.live[POLICY].version)

    def commits(self) -> list[tuple[str, ...]]:
        """The stage ids of every commit call, sorted within a call."""
        return [ids for name, ids in [*self.calls] if name == "Commit"]

    def run(self, function: Callable[..., T], *args: Any) -> T:
        """``function(*args)`` on its event loop, such as a method of ``control``."""

        async def call() -> T:
            return function(*args)

        return _run(call())

    def put(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """Serve another draft, as if another client had staged and committed it."""

        async def commit() -> None:
            specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
            folder = self.store.new_folder()
            weights = Weights.of(DRAFT, version, specs, folder, "put")
            contents = {staged.key: tensors[staged.name] for staged in weights.source.tensors}
            with self.store.receiving(folder, contents) as lacking:
                for key in lacking:
                    self.store.write(folder, key, contents[key])
            self.control.add_stage(weights)
            await self.control.commit(["put"])

        _run(commit())

    def stage_policy(self, stage_id: str, version: int) -> None:
        """Hold a policy that vLLM's weight transfer would bring, as the bridge stages it."""
        source = WeightSource(transfer="{}")
        self.run(self.control.add_stage, Weights(POLICY, version, source, stage_id))

    def commit(self, *stage_ids: str) -> pb.ServerState:
        """Commit as another client; the state after it."""
        self.calls.append(("Commit", tuple(sorted(stage_ids))))
        _run(self.control.commit(stage_ids))
        return self.state

    def abort(self, *stage_ids: str) -> None:
        """Abort as another client."""
        _run(self.control.abort(stage_ids))

    def read_back(self, found: str) -> None:
        """Have its worker read the draft back, and find this ("same", "differs", "asleep")."""
        self.engine.memory = found
        _run(self.control.read_back())

    def draft(self, drafts: int, accepted: Sequence[int]) -> None:
        """Count verification steps of the live draft: ``accepted`` of ``drafts`` by position."""

        def record() -> None:
            self._listener.look()
            counts = drafts, drafts * len(accepted), sum(accepted), list(accepted)
            self.tracker.record(*counts)
            self._listener.look()

        self.run(record)

    def accept_nothing(self) -> None:
        """Draft until its guard finds that nothing of the live draft is accepted."""
        self.draft(self._settings.guard_drafts, [0] * self._settings.draft_length)

    def _start(self) -> None:
        folder, draft_dir = Path(tempfile.mkdtemp()), self._settings.draft_dir
        self.engine, self.tracker = MemoryEngine(), AcceptanceTracker()
        self.store = StageStore(folder, self._settings.stage_bytes)
        if draft_dir is not None:
            self.engine.live[DRAFT] = load_tensors(draft_dir)
        plane = control_plane(self.engine, self.store, self._settings, self.tracker)
        self.control, self.service = _run(plane)
        _run(self._listen())

    async def _listen(self) -> None:
        self._listener = Listener(_Faulty(self), self.control, self._settings)
        await self._listener.start("127.0.0.1", self.port)


class _Faulty:
    """The product's service, with faults before and after its methods."""

    def __init__(self, server: MemoryServer) -> None:
        self._server = server
        self._service: Any = server.service

    def __getattr__(self, name: str) -> Any:
        return getattr(self._service, name)

    async def Stage(
        self, requests: AsyncIterator[pb.StageRequest], context: Any
    ) -> AsyncIterator[pb.StageResponse]:
        first = await anext(requests, None)
        await self._arrives("Stage", ["" if first is None else first.header.stage_id])
        if self._server.faults.gone:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")
        if refused := self._server.faults.stage:
            found = "a wrong shape" if refused is True else refused
            raise RefusedError(found, found, found, found)

        async def whole() -> AsyncIterator[pb.StageRequest]:
            if first is not None:
                yield first
            async for request in requests:
                yield request

        async with aclosing(self._service.Stage(whole(), context)) as answers:
            async for answer in answers:
                self._server.bytes_received += answer.staged.bytes_received
                yield answer

    async def Commit(self, request: pb.CommitRequest, context: Any) -> pb.CommitResponse:
        await self._arrives("Commit", request.stage_ids)
        faults, control = self._server.faults, self._server.control
        if faults.die == "before":
            await self._die()
        if faults.drop:
            if faults.drop == "forget":
                await control.abort([*control.staged])
            await context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")
        bad = faults.commit & {*request.stage_ids}
        if bad:
            raise RefusedError("stage", sorted(bad), "weights that load", "look at the log")
        answer = await self._service.Commit(request, context)
        if faults.die == "after":
            await self._die()
        if faults.lose_answer:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "connection reset")
        return answer

    async def RollBack(self, request: pb.RollBackRequest, context: Any) -> pb.CommitResponse:
        await self._arrives("RollBack")
        if self._server.faults.roll_back:
            raise RefusedError("draft", "a fault", "none", "try again")
        return await self._service.RollBack(request, context)

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        if request.stage_ids:
            await self._arrives("Abort", request.stage_ids)
        if request.HasField("fleet_draft"):
            self._server.told.append(request.fleet_draft.version)
        return await self._service.Abort(request, context)

    async def GetState(self, request: pb.GetStateRequest, context: Any) -> pb.ServerState:
        state = await self._service.GetState(request, context)
        self._server.faults.lies(state)
        return state

    async def WatchAcceptance(
        self, request: pb.WatchAcceptanceRequest, context: Any
    ) -> AsyncIterator[pb.AcceptanceReport]:
        async with aclosing(self._service.WatchAcceptance(request, context)) as reports:
            async for report in reports:
                self._server.watched.set()
                yield report

    async def _arrives(self, name: str, ids: Sequence[str] = ()) -> None:
        # Read before the call is recorded: a test that waits for the record may change the faults.
        go_on = self._server.faults.waits.get(name)
        self._server.calls.append((name, tuple(sorted(ids))))
        if go_on is not None:
            assert await asyncio.to_thread(go_on.wait, SECONDS)

    async def _die(self) -> None:
        dying = asyncio.ensure_future(self._server._listener.kill())
        await asyncio.sleep(SECONDS)  # It is cancelled with the other calls.
        await dying


@functools.cache
def _loop() -> LoopThread:
    """The event loop of every server of this process: gRPC wakes all loops for each event."""
    return LoopThread("memory-servers")


def _run(coroutine: Coroutine[Any, Any, T]) -> T:
    return _loop().run(coroutine)
