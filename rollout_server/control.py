"""The control plane's state: what is staged, what is live, and how that changes.

Knows nothing of gRPC services or Prometheus. One event loop owns it; commits are
serialised and, once begun, run to their end even if the caller goes away: a
commit that is abandoned half-way would leave the server not knowing what it
serves.

Weights that the server knows: what is staged, live, and was live before.

``ServerState``: what is served, as a message.

Whether this server should be sent requests, and why not.

Serving goes on either way: what a bad draft costs is speed, never a wrong token.
But a balancer or an operator should see it, and the trainer heals it.

Commits by what they changed and how they ended, and how long they took.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from rollout_server.acceptance import AcceptanceTracker, Counters
from rollout_server.content_store import ContentStore, Key
from rollout_server.engine import Change, Engine, UntrustedEngineError
from rollout_server.reload import WeightSource
from slipstream.errors import RefusedError, StatusCode
from slipstream.tensors import release_digest
from slipstream.v1 import rollout_server_pb2 as pb

DRAFT, POLICY = "draft", "policy"


@dataclass(frozen=True)
class Weights:
    """One version of one model, complete and verified.

    Attributes:
        kind: ``DRAFT`` or ``POLICY``.
        version: draft version, or policy version; None for the policy that the
            server was started with, whose version nobody has named.
        source: where a worker reads it.
        keys: its content in the store; empty for a checkpoint on disk.
        stage_id: the id it was staged under; empty for a checkpoint on disk.
        trained_against: for a draft: the policy version it was trained against.
        digests: {name: SHA-256 hex}, to recognise the same stage again.
    """

    kind: str
    version: int | None
    source: WeightSource
    keys: tuple[Key, ...] = ()
    stage_id: str = ""
    trained_against: int | None = None
    digests: tuple[tuple[str, str], ...] = ()

    def same_content(self, other: Weights) -> bool:
        """Whether both would be indistinguishable once live."""
        return (self.kind, self.version, self.trained_against, self.digests) == (
            other.kind,
            other.version,
            other.trained_against,
            other.digests,
        )


READ_BACK, ACCEPTANCE = "read-back", "acceptance"


class Readiness:
    """Reasons against being ready, at most one from each source. Owned by the event loop."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}

    @property
    def reason(self) -> str:
        """Every reason there is; empty while the server is ready."""
        return "; ".join(self._reasons[source] for source in sorted(self._reasons))

    def say(self, source: str, reason: str) -> None:
        """What ``source`` finds now; an empty reason takes back what it found before."""
        if reason:
            self._reasons[source] = reason
        else:
            self._reasons.pop(source, None)


class AcceptanceGuard:
    """Looks for a live draft of which nothing is accepted.

    Judges windows of at least ``min_drafts`` verification steps of one draft version
    and one commit. Fewer say nothing: no drafts yet is no number.

    Args:
        tracker: vLLM's counters by draft version.
        min_drafts: length of a window.
    """

    MIN_ACCEPTED = 0.005
    """Accepted tokens a draft under which acceptance length reads 1.00."""

    def __init__(self, tracker: AcceptanceTracker, min_drafts: int) -> None:
        self._tracker = tracker
        self._min_drafts = min_drafts
        self._window: tuple[int, int] | None = None
        self._start = Counters()
        self._verdict = ""

    def check(self, version: int, commits: int) -> str:
        """The verdict now: empty, or why the draft is not to be trusted.

        Args:
            version: that is live.
            commits: of drafts so far; another commit begins anew.
        """
        counters = self._tracker.counters().get(version, Counters())
        if self._window != (version, commits):
            self._window, self._verdict = (version, commits), ""
            self._begin(counters)
        drafts = counters.drafts - self._start.drafts
        if drafts >= self._min_drafts:
            accepted = counters.accepted_tokens - self._start.accepted_tokens
            self._verdict = (
                f"acceptance length of draft {version} is {1 + accepted / drafts:.2f} "
                f"over {drafts} drafts"
                if accepted < self.MIN_ACCEPTED * drafts
                else ""
            )
            self._begin(counters)
        return self._verdict

    def _begin(self, counters: Counters) -> None:
        self._start = Counters(counters.drafts, counters.draft_tokens, counters.accepted_tokens)


MAX_STAGED = 16
_T = TypeVar("_T")


@dataclass(frozen=True)
class Committed:
    """How long a change took: from the call, and in the workers (seconds)."""

    seconds: float
    worker_seconds: float


class CommitObserver(Protocol):
    """Told of every change that was tried, for metrics."""

    def committed(self, kind: str, outcome: str, took: Committed | None) -> None: ...


class RolloutControl:
    """See the module.

    Args:
        engine: already started.
        store: holds what ``draft`` names.
        tracker: told which draft is live.
        observer: told of commits.
        draft: what the server was started with.
        policy: what the server was started with.
    """

    def __init__(
        self,
        engine: Engine,
        store: ContentStore,
        tracker: AcceptanceTracker,
        observer: CommitObserver,
        draft: Weights,
        policy: Weights,
    ) -> None:
        self._engine = engine
        self._store = store
        self._tracker = tracker
        self._observer = observer
        self._changing = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.live = {DRAFT: draft, POLICY: policy}
        # Unix seconds; of a policy only once one was pushed.
        self.live_since = {DRAFT: time.time()}
        self.previous_draft: Weights | None = None
        self.staged: dict[str, Weights] = {}
        self.commits = {DRAFT: 0, POLICY: 0}
        self.speculation_enabled = True
        self._speculation_wanted = True
        self.untrusted = asyncio.Event()
        self.readiness = Readiness()
        store.hold(draft.keys)

    def already_staged(self, weights: Weights) -> bool:
        """Whether this very stage is held already.

        Raises:
            RefusedError: its id is staged with other content, or too many stages are held.
        """
        known = self.staged.get(weights.stage_id)
        if known is not None:
            if known.same_content(weights):
                return True
            raise RefusedError(
                "stage_id",
                f"{weights.stage_id}, staged with other content",
                "a new id",
                "abort the old stage first, or choose another id",
                StatusCode.ALREADY_EXISTS,
            )
        if len(self.staged) >= MAX_STAGED:
            raise RefusedError(
                "stage_id",
                f"{len(self.staged)} stages that were neither committed nor aborted",
                f"at most {MAX_STAGED}",
                "commit or abort them",
                StatusCode.RESOURCE_EXHAUSTED,
            )
        return False

    def add_stage(self, weights: Weights) -> None:
        """A verified stage, ready to commit; its content is in the store."""
        if not self.already_staged(weights):
            self._store.hold(weights.keys)
            self.staged[weights.stage_id] = weights
            self._tracker.wake()

    async def prepare(self, weights: Weights) -> str:
        """Have the workers lay a draft ready beside the live one, so that its commit is short.

        Returns:
            Why its commit will have to load it instead; empty if it lies ready.

        Raises:
            RefusedError: the engine did not answer.
        """
        if weights.kind != DRAFT:
            return ""
        previous = self.previous_draft
        return await self._engine.prepare(
            weights.source, None if previous is None else previous.source
        )

    def abort(self, stage_ids: Sequence[str]) -> None:
        """Forget stages; unknown ids are ignored."""
        for stage_id in stage_ids:
            weights = self.staged.pop(stage_id, None)
            if weights is not None:
                self._store.release(weights.keys)
                self._tracker.wake()

    async def commit(self, stage_ids: Sequence[str]) -> Committed:
        """Make staged weights live together.

        Naming only stages that are live already answers at once, so that a
        caller who lost the answer can ask again.

        Raises:
            RefusedError: unknown or duplicate stages, or nothing was applied.
        """
        arrival = time.perf_counter()
        return await self._to_the_end(self._commit(tuple(stage_ids), arrival))

    async def roll_back(self) -> Committed:
        """Put the previous draft back. Raises RefusedError when there is none."""
        arrival = time.perf_counter()
        return await self._to_the_end(self._roll_back(arrival))

    async def set_speculation(self, enabled: bool) -> Committed:
        """Turn drafting on or off between two engine steps."""
        arrival = time.perf_counter()
        self._speculation_wanted = enabled
        return await self._to_the_end(self._set_speculation(enabled, arrival))

    @asynccontextmanager
    async def without_speculation(self) -> AsyncIterator[None]:
        """Off inside, then as was asked for last, also if that was meanwhile.

        Raises:
            RefusedError: the engine did not answer.
        """
        await self._to_the_end(self._set_speculation(False, time.perf_counter()))
        try:
            yield
        finally:
            wanted = self._speculation_wanted
            await self._to_the_end(self._set_speculation(wanted, time.perf_counter()))

    async def read_back(self) -> None:
        """Have the workers look at the draft in their memory; the finding goes to ``readiness``.

        Raises:
            RefusedError: the engine did not answer.
        """
        async with self._changing:
            self.readiness.say(READ_BACK, await self._engine.read_back())

    async def close(self) -> None:
        """Wait for a change that is under way."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5.0)

    async def _commit(self, stage_ids: tuple[str, ...], arrival: float) -> Committed:
        async with self._changing:
            named = [self._named(stage_id) for stage_id in dict.fromkeys(stage_ids)]
            if not named:
                raise RefusedError(
                    "stage_ids", "none", "at least one", "name the stages to make live"
                )
            if len({weights.kind for weights in named}) < len(named):
                raise RefusedError(
                    "stage_ids",
                    f"two of one kind in {list(stage_ids)}",
                    "at most one draft and one policy",
                    "commit one after the other",
                )
            todo = [weights for weights in named if weights.stage_id in self.staged]
            if not todo:
                return Committed(time.perf_counter() - arrival, 0.0)
            took = await self._apply(todo, "commit", arrival)
            for weights in todo:
                del self.staged[weights.stage_id]
                self._went_live(weights)
            return took

    async def _roll_back(self, arrival: float) -> Committed:
        async with self._changing:
            previous = self.previous_draft
            if previous is None:
                raise RefusedError(
                    "previous_draft_version",
                    "none",
                    "a draft that was served before the current one",
                    "stage and commit the release that you want",
                    StatusCode.FAILED_PRECONDITION,
                )
            # It usually is; what has to be prepared anew is so before the engine stands still.
            await self._engine.prepare(previous.source, None)
            took = await self._apply([previous], "rollback", arrival)
            self._store.release(self.live[DRAFT].keys)
            self.live[DRAFT] = previous
            self.live_since[DRAFT] = time.time()
            # Not the draft that was just rolled back: nobody wants that one again.
            self.previous_draft = None
            return took

    async def _set_speculation(self, enabled: bool, arrival: float) -> Committed:
        async with self._changing:
            worker_seconds = 0.0
            if enabled != self.speculation_enabled:
                worker_seconds = await self._engine.set_speculation(enabled)
                self.speculation_enabled = enabled
                self._tracker.wake()
            return Committed(time.perf_counter() - arrival, worker_seconds)

    async def _apply(self, todo: Sequence[Weights], action: str, arrival: float) -> Committed:
        label = "both" if len(todo) > 1 else todo[0].kind
        label = label if action == "commit" else action
        try:
            applied = await self._engine.apply(
                [Change(w.kind, w.source, self.live[w.kind].source) for w in todo]
            )
        except UntrustedEngineError as error:
            self._observer.committed(label, "untrusted", None)
            self.untrusted.set()
            raise RefusedError(
                action,
                error,
                "the new weights, or the old ones again",
                "this server stops itself; restart it",
                StatusCode.DATA_LOSS,
            ) from error
        except RefusedError:
            self._observer.committed(label, "failed", None)
            raise
        for weights in todo:
            self.commits[weights.kind] += 1
            if weights.kind == DRAFT and weights.version is not None:
                self.readiness.say(READ_BACK, "")
                self._tracker.switch(weights.version, applied.drafts_before)
        took = Committed(time.perf_counter() - arrival, applied.worker_seconds)
        self._observer.committed(label, "ok", took)
        self._tracker.wake()
        return took

    def _went_live(self, weights: Weights) -> None:
        """The stage's hold becomes the live weights'; what it replaces moves on."""
        replaced, self.live[weights.kind] = self.live[weights.kind], weights
        if weights.kind == POLICY:
            self.live_since[POLICY] = time.time()
            self._store.release(replaced.keys)
            return
        if replaced.same_content(weights):
            # Healed: the same release once more. What RollBack goes to stays.
            self._store.release(replaced.keys)
            return
        self.live_since[DRAFT] = time.time()
        if self.previous_draft is not None:
            self._store.release(self.previous_draft.keys)
        self.previous_draft = replaced

    def _named(self, stage_id: str) -> Weights:
        if stage_id in self.staged:
            return self.staged[stage_id]
        for weights in self.live.values():
            if stage_id and weights.stage_id == stage_id:
                return weights
        raise RefusedError(
            "stage_ids",
            stage_id,
            f"one of {sorted(self.staged)}",
            "stage it first (a stage is forgotten when it is aborted or superseded)",
            StatusCode.NOT_FOUND,
        )

    def _to_the_end(self, work: Coroutine[Any, Any, _T]) -> Awaitable[_T]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return asyncio.shield(task)


@dataclass(frozen=True)
class StateMessage:
    """Builds the message from the control plane's state and what never changes.

    Attributes:
        control: the state.
        draft_length: num_speculative_tokens.
        draft_sample_method: "greedy" or "probabilistic".
        model: for people.
        http_port: of the OpenAI API.
    """

    control: RolloutControl
    draft_length: int
    draft_sample_method: str
    model: str
    http_port: int

    def build(self) -> pb.ServerState:
        """The state now."""
        control = self.control
        draft, previous = control.live[DRAFT], control.previous_draft
        return pb.ServerState(
            draft_version=draft.version,
            trained_against_policy_version=draft.trained_against,
            policy_version=control.live[POLICY].version,
            previous_draft_version=None if previous is None else previous.version,
            staged=list(control.staged),
            num_speculative_tokens=self.draft_length,
            draft_sample_method=self.draft_sample_method,
            speculation_enabled=control.speculation_enabled,
            draft_commits=control.commits[DRAFT],
            policy_commits=control.commits[POLICY],
            model=self.model,
            http_port=self.http_port,
            draft_sha256=release_digest(draft.digests),
            not_ready=control.readiness.reason,
        )
