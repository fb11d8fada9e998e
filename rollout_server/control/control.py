"""The control plane's state: staged and live versions, and the transitions between them.

One event loop owns it. Commits are serialised and, once begun, run to their end even if the caller
disconnects: after half a commit the server would not know what it serves.
Knows nothing of gRPC services or Prometheus.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollout_server.control.acceptance_counts import AcceptanceTracker
from rollout_server.control.changes import Change, ReceivedError, Result, UntrustedEngineError
from rollout_server.control.stages import Key, StagedTensor, StageStore, WeightSource
from slipstream.errors import RefusedError, StatusCode
from slipstream.tensors import release_digest
from slipstream.v1 import rollout_server_pb2 as pb
from slipstream.v1 import tensor_pb2

if TYPE_CHECKING:
    from rollout_server.vllm.engine import VllmEngine

DRAFT, POLICY = "draft", "policy"
READ_BACK, ACCEPTANCE, RELEASE = "read-back", "acceptance", "release"
MAX_STAGED = 16
CLAIM_SECONDS = 60.0
"""Silence after which a trainer's servers may be another's."""


@dataclass(frozen=True)
class Weights:
    """One version of one model, complete and verified.

    Attributes:
        kind: ``DRAFT`` or ``POLICY``.
        version: draft version, or policy version; None for the policy that the server was started
            with, whose version is unknown.
        source: where a worker reads it.
        stage_id: the id it was staged under; empty for a checkpoint on disk.
        trained_against: for a draft: the policy version it was trained against.
        folder: of its tensors in the store; None for a checkpoint on disk.
        expected: for a draft: the gate's acceptance by position; empty: not known.
    """

    kind: str
    version: int | None
    source: WeightSource
    stage_id: str = ""
    trained_against: int | None = None
    folder: Path | None = None
    expected: tuple[float, ...] = ()

    @classmethod
    def of(
        cls,
        kind: str,
        version: int,
        specs: Iterable[tensor_pb2.TensorSpec],
        folder: Path,
        stage_id: str = "",
        trained_against: int | None = None,
        expected: tuple[float, ...] = (),
    ) -> Weights:
        """The weights that ``specs`` name, as they will be in a folder of the store."""
        keys = [(spec, Key.of(spec)) for spec in sorted(specs, key=lambda spec: spec.name)]
        tensors = tuple(
            StagedTensor(spec.name, key, tuple(spec.shape), str(key.below(folder)))
            for spec, key in keys
        )
        source = WeightSource(tensors=tensors)
        return cls(kind, version, source, stage_id, trained_against, folder, expected)

    def as_held(self) -> pb.HeldStage:
        """The message of a stage that is held."""
        policy = pb.STAGE_KIND_POLICY_EXTERNAL if self.source.transfer else pb.STAGE_KIND_POLICY
        kind = pb.STAGE_KIND_DRAFT if self.kind == DRAFT else policy
        return pb.HeldStage(stage_id=self.stage_id, kind=kind, version=self.version)

    def same_content(self, other: Weights) -> bool:
        """Return whether both would be indistinguishable once live."""
        return self._content == other._content

    @property
    def _content(self) -> tuple[object, ...]:
        tensors = tuple((tensor.name, tensor.key, tensor.shape) for tensor in self.source.tensors)
        where = replace(self.source, tensors=())
        return self.kind, self.version, self.trained_against, where, tensors


Committed = Callable[[str, str, Result | None], None]
"""Receives what a change was of, "ok", "failed" or "untrusted", and its result, for metrics."""


class RolloutControl:
    """See the module."""

    def __init__(
        self,
        engine: VllmEngine,
        store: StageStore,
        tracker: AcceptanceTracker,
        committed: Committed,
        draft: Weights,
        policy: Weights,
        constants: pb.ServerState | None = None,
    ) -> None:
        self.engine = engine
        self.store = store
        self.tracker = tracker
        self._committed = committed
        self._constants = constants or pb.ServerState()
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.live = {DRAFT: draft, POLICY: policy}
        self.draft_live_since = time.time()
        self.previous_draft: Weights | None = None
        self.staged: dict[str, Weights] = {}
        self.commits = {DRAFT: 0, POLICY: 0}
        self.speculation_enabled = True
        self._engine_drafts: bool | None = True  # None: not known
        self._received: dict[str, str] = {}  # a stage whose transfer was refused, and why
        self._speculation_asked = True
        self._speculation_pays = True
        self._plain_steps_timed = False
        self.untrusted = asyncio.Event()
        self._against: dict[str, Sequence[pb.NotReady]] = {}
        self._trainer, self._claimed_at = "", -math.inf
        self._left_out_by = ""

    @property
    def not_ready(self) -> list[pb.NotReady]:
        """The reasons to send no requests here; none while the server is ready.

        A server that is not ready still serves: a bad draft costs speed, and no wrong token unless
        its logits are NaN (docs/mechanisms.md). Balancers and operators see it, and the trainer
        replaces the draft.
        """
        told = self._left_out_by == self.trainer  # Nobody catches it up once that one is silent.
        sources = (source for source in sorted(self._against) if told or source != RELEASE)
        return [reason for source in sources for reason in self._against[source]]

    @property
    def speculation_wanted(self) -> bool:
        """True if drafts are proposed where they pay: what is, not what was asked of the engine."""
        no_draft_pays = self._speculation_asked and not self._speculation_pays
        return self.speculation_enabled or self._plain_steps_timed or no_draft_pays

    def report(self, source: str, found: Sequence[pb.NotReady] = ()) -> None:
        """Take what ``source`` finds now in place of what it found before."""
        self._against[source] = found

    def heard(self, trainer: str) -> None:
        """A trainer reads the state; its claim goes on if this server belongs to it."""
        if trainer and trainer == self._trainer:
            self._claimed_at = time.monotonic()

    def check_claim(self, trainer: str, claims: bool = False) -> None:
        """A trainer changes something; with ``claims`` the server belongs to it from now on.

        Raises RefusedError: it belongs to another one (FAILED_PRECONDITION).
        """
        if not trainer:
            return
        silent = time.monotonic() - self._claimed_at
        if self.trainer not in ("", trainer):
            raise RefusedError(
                "publish.rollout_servers",
                f"a server of trainer {self.trainer}, heard {silent:.0f} s ago",
                f"servers that no trainer but this one ({trainer}) publishes to",
                "give every trainer servers of its own (docs/deployment.md), or stop the other one",
                StatusCode.FAILED_PRECONDITION,
            )
        if claims:
            self._trainer = trainer
        self.heard(trainer)

    @property
    def trainer(self) -> str:
        """The trainer that this server belongs to; empty: none was heard for ``CLAIM_SECONDS``."""
        return self._trainer if time.monotonic() - self._claimed_at < CLAIM_SECONDS else ""

    def left_out(self, fleet_draft: pb.FleetDraft, trainer: str = "") -> None:
        """Not ready while another draft than the fleet's is served, as long as that trainer is
        heard; a change of the draft ends it."""
        live, version = self.live[DRAFT].version, fleet_draft.version
        served = (live, self._draft_sha256()) == (version, fleet_draft.sha256)
        other = pb.NotReady(
            reason=pb.NOT_READY_REASON_OTHER_DRAFT, draft_version=live, fleet_draft_version=version
        )
        self.report(RELEASE, () if served else (other,))
        self._left_out_by = trainer

    def _draft_sha256(self) -> bytes:
        tensors = self.live[DRAFT].source.tensors
        return release_digest((tensor.name, tensor.key.sha256) for tensor in tensors)

    def state(self) -> pb.ServerState:
        """Return what is served, as a message."""
        draft, previous = self.live[DRAFT], self.previous_draft
        state = pb.ServerState(
            draft_version=draft.version,
            trained_against_policy_version=draft.trained_against,
            policy_version=self.live[POLICY].version,
            previous_draft_version=None if previous is None else previous.version,
            staged=[weights.as_held() for weights in self.staged.values()],
            speculation_enabled=self.speculation_enabled,
            draft_commits=self.commits[DRAFT],
            policy_commits=self.commits[POLICY],
            draft_sha256=self._draft_sha256(),
            not_ready=self.not_ready,
            trainer=self.trainer,
            engine_seconds=self.tracker.engine_seconds,
            speed_up=self.tracker.speed_up,
            speculation_wanted=self.speculation_wanted,
        )
        state.MergeFrom(self._constants)
        return state

    def already_staged(self, weights: Weights) -> Weights | None:
        """This very stage, where it is held already.

        Raises RefusedError: its id is staged with other content, or too many stages are held.
        """
        known = self.staged.get(weights.stage_id)
        if known is not None:
            if known.same_content(weights):
                return known
            found, code = f"{weights.stage_id}, with other content", StatusCode.ALREADY_EXISTS
            raise RefusedError("stage_id", found, "a new id", "abort the old stage first", code)
        if len(self.staged) >= MAX_STAGED:
            found, code = f"{len(self.staged)} stages held", StatusCode.RESOURCE_EXHAUSTED
            expected = f"at most {MAX_STAGED}"
            raise RefusedError("stage_id", found, expected, "commit or abort them", code)
        return None

    def add_stage(self, weights: Weights) -> None:
        """A verified stage, ready to commit, whose tensors are in the store.

        They are removed where it is staged already. Raises RefusedError: as ``already_staged``.
        """
        try:
            if self.already_staged(weights) is None:
                self.staged[weights.stage_id] = weights
                self.tracker.wake()
        finally:
            if self.staged.get(weights.stage_id) is not weights:
                self.store.remove(weights.folder)

    async def prepare(self, weights: Weights) -> str:
        """Have the workers make a draft's standby copy, so that its commit is a swap.

        Returns:
            Why its commit will have to load it instead; empty if it is ready.

        Raises:
            RefusedError: the engine did not answer.
        """
        if weights.kind != DRAFT:
            return ""
        keep = None if self.previous_draft is None else self.previous_draft.source
        return await self.engine.prepare(weights.source, keep)

    async def abort(self, stage_ids: Sequence[str]) -> None:
        """Forget stages, after the change under way: a commit may be applying them. Unknown ids are
        ignored."""
        await self._to_the_end(lambda _: self._abort(stage_ids))

    async def abort_other_policies(self, stage_id: str) -> None:
        """Abort every staged policy but this one, after the change under way.

        A policy is committed or aborted before the next one is staged. Another one was left by a
        training job that was killed, and no other job knows its id.
        """
        others = [i for i, w in self.staged.items() if w.kind == POLICY and i != stage_id]
        if others:
            await self.abort(others)

    async def commit(self, stage_ids: Sequence[str]) -> Result:
        """Make staged weights live together.

        Naming only stages that are live already answers at once, so that a caller who lost the
        answer can ask again.

        Raises:
            RefusedError: unknown or duplicate stages, or nothing was applied.
        """
        return await self._to_the_end(lambda arrival: self._commit(tuple(stage_ids), arrival))

    async def roll_back(self) -> Result:
        """Put the previous draft back. Raises RefusedError when there is none."""
        return await self._to_the_end(self._roll_back)

    async def set_speculation(self, enabled: bool) -> Result:
        """Turn drafting on or off between two engine steps."""
        self._speculation_asked = enabled
        return await self._to_the_end(lambda _: self._set_speculation(self._drafting))

    async def set_draft_lengths(self, lengths: Sequence[int] | None) -> None:
        """Tokens to draft, by the number of requests in a step; None: none, because no length pays.

        ``set_speculation(False)`` outranks it. Raises RefusedError: the engine did not answer.
        """

        async def change(arrival: float) -> Result:
            # Until drafts run, they are off because none paid.
            self._speculation_pays &= lengths is not None
            try:
                if lengths is not None:
                    await self.engine.set_draft_lengths(lengths)
                return await self._set_speculation(self._speculation_asked and lengths is not None)
            finally:
                self._speculation_pays = lengths is not None

        await self._to_the_end(change)

    @property
    def _drafting(self) -> bool:
        return self._speculation_asked and self._speculation_pays

    @asynccontextmanager
    async def without_speculation(self) -> AsyncIterator[None]:
        """Drafting off inside; afterwards as the last ``set_speculation`` says.

        Raises RefusedError: the engine did not answer.
        """
        self._plain_steps_timed = True
        try:
            await self._to_the_end(lambda _: self._set_speculation(False))
            yield
        finally:
            try:
                await self._to_the_end(lambda _: self._set_speculation(self._drafting))
            finally:
                self._plain_steps_timed = False

    async def read_back(self) -> None:
        """Have the workers hash the draft in their memory; the finding goes to ``report``.

        Raises RefusedError: the engine did not answer.
        """
        async with self._changing:
            self.report(READ_BACK, await self.engine.read_back())

    async def close(self) -> None:
        """Wait for a change that is under way."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5.0)

    def _to_the_end(self, change: Callable[[float], Awaitable[Result]]) -> Awaitable[Result]:
        """Run a change, one at a time, to its end. Its argument is when it arrived."""
        arrival = time.perf_counter()

        async def run() -> Result:
            async with self._changing:
                result = await change(arrival)
            return replace(result, seconds=time.perf_counter() - arrival)

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return asyncio.shield(task)

    async def _abort(self, stage_ids: Sequence[str]) -> Result:
        for stage_id in stage_ids:
            weights = self.staged.pop(stage_id, None)
            if weights is not None:
                self.store.remove(weights.folder)
                self.tracker.wake()
        return Result(0.0)

    async def _commit(self, stage_ids: tuple[str, ...], arrival: float) -> Result:
        named = [self._named(stage_id) for stage_id in dict.fromkeys(stage_ids)]
        if not named:
            raise RefusedError("stage_ids", "none", "at least one", "name the stages to make live")
        if len({weights.kind for weights in named}) < len(named):
            found, expected = f"two of one kind in {list(stage_ids)}", "at most one of each kind"
            raise RefusedError("stage_ids", found, expected, "commit one after the other")
        todo = [weights for weights in named if weights.stage_id in self.staged]
        if not todo:
            return Result(0.0)
        try:
            result = await self._apply(todo, "both" if len(todo) > 1 else todo[0].kind, arrival)
        except ReceivedError as error:
            # Another commit would wait for tensors that nobody sends, until the server ends itself.
            self._received = {w.stage_id: str(error) for w in todo if w.source.transfer}
            await self._abort([*self._received])
            raise
        for weights in todo:
            del self.staged[weights.stage_id]
            self._went_live(weights)
        return result

    async def _roll_back(self, arrival: float) -> Result:
        previous = self.previous_draft
        if previous is None:
            expected, code = "a draft that was served before", StatusCode.FAILED_PRECONDITION
            next_step = "stage and commit the release that you want"
            raise RefusedError("previous_draft_version", "none", expected, next_step, code)
        # Usually ready; if not, it is prepared while the engine generates.
        await self.engine.prepare(previous.source, None)
        result = await self._apply([previous], "rollback", arrival)
        self.store.remove(self.live[DRAFT].folder)
        self.live[DRAFT] = previous
        self.draft_live_since = time.time()
        # The draft that was rolled back is not kept for another roll back.
        self.previous_draft = None
        return result

    async def _set_speculation(self, enabled: bool) -> Result:
        worker_seconds = 0.0
        if enabled != self._engine_drafts:
            # A call without an answer may still be carried out.
            self._engine_drafts = None
            worker_seconds = await self.engine.set_speculation(enabled)
            self._engine_drafts = self.speculation_enabled = enabled
        # Also where only what is wanted changed.
        self.tracker.wake()
        return Result(worker_seconds)

    async def _apply(self, todo: Sequence[Weights], label: str, arrival: float) -> Result:
        changes = [Change(w.kind, w.source, self.live[w.kind].source) for w in todo]
        try:
            result = await self.engine.apply(changes)
        except UntrustedEngineError as error:
            self._committed(label, "untrusted", None)
            self.untrusted.set()
            raise RefusedError(
                "rollback" if label == "rollback" else "commit",
                error,
                "the new weights, or the old ones again",
                "this server stops itself; restart it",
                StatusCode.DATA_LOSS,
            ) from error
        except RefusedError:
            self._committed(label, "failed", None)
            raise
        for weights in todo:
            self.commits[weights.kind] += 1
            if weights.kind == DRAFT and weights.version is not None:
                for source in (READ_BACK, ACCEPTANCE, RELEASE):
                    self.report(source)
                self.tracker.switch(weights.version, result.steps_before, weights.expected)
            elif weights.version is not None:
                self.tracker.switch_policy(weights.version, result.steps_before, result.requests)
        result = replace(result, seconds=time.perf_counter() - arrival)
        self._committed(label, "ok", result)
        self.tracker.wake()
        return result

    def _went_live(self, weights: Weights) -> None:
        """The stage becomes the live weights; what it replaces moves on."""
        replaced, self.live[weights.kind] = self.live[weights.kind], weights
        if weights.kind == POLICY:
            self.store.remove(replaced.folder)
            return
        if replaced.same_content(weights):
            # The same release once more repairs the memory; what RollBack goes to stays.
            self.store.remove(replaced.folder)
            return
        self.draft_live_since = time.time()
        if self.previous_draft is not None:
            self.store.remove(self.previous_draft.folder)
        self.previous_draft = replaced

    def _named(self, stage_id: str) -> Weights:
        if stage_id in self.staged:
            return self.staged[stage_id]
        for weights in self.live.values():
            if stage_id and weights.stage_id == stage_id:
                return weights
        if stage_id in self._received:
            found = f"{stage_id}, received in vain: {self._received[stage_id]}"
            raise RefusedError("stage_ids", found, "a stage", "send the policy again")
        raise RefusedError(
            "stage_ids",
            stage_id,
            f"one of {sorted(self.staged)}",
            "stage it first (a stage is forgotten when it is aborted or superseded)",
            StatusCode.NOT_FOUND,
        )
