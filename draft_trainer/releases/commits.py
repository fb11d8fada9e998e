"""One server's part of a publish: commit, commit the policy alone, or go back.

What happened is decided by an answer or, where the answer was lost, by reading
the server's state back; never by assuming.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, replace

from draft_trainer.releases.fleet import DraftPayload, Failure, RolloutClient, Timed
from draft_trainer.releases.registry import Registry
from slipstream.refusal import RefusedError
from slipstream.release_digest import digest_of_specs
from slipstream.v1 import rollout_server_pb2 as pb


@dataclass(frozen=True)
class Outcome:
    """One server's part in a publish.

    Args:
        committed: everything asked of it is live; for a draft with a policy, the
            policy is live (``draft_committed`` tells about the draft).
        draft_committed: the draft is live.
        staged: it holds the draft that was to be committed.
        error: why something was not done; empty when all was.
        state: what it serves now; None if it was not reached.
        commit_seconds: from the commit call to its answer.
        stage_seconds: of staging, 0 when nothing was staged.
    """

    committed: bool = False
    draft_committed: bool = False
    staged: bool = False
    error: str = ""
    state: pb.ServerState | None = None
    commit_seconds: float = 0.0
    stage_seconds: float = 0.0


@dataclass(frozen=True)
class CommitOrder:
    """What one server is to commit in one call; either part may be missing."""

    draft: DraftPayload | None
    policy_version: int
    policy_stage_id: str

    @property
    def stage_ids(self) -> list[str]:
        """At most one draft and one policy."""
        drafts = [self.draft.stage_id] if self.draft is not None else []
        return drafts + ([self.policy_stage_id] if self.policy_stage_id else [])


@dataclass(frozen=True)
class Prepared:
    """A release that is staged and waits for its commit, and the servers that hold it."""

    draft: DraftPayload
    outcomes: dict[str, Outcome]


@dataclass(frozen=True)
class Published:
    """How a publish ended.

    Args:
        draft_version: the release that every reachable server serves or, after a
            stage, will serve.
        changes: a draft is staged (``prepare``) or was committed.
        outcomes: one per rollout server.
    """

    draft_version: int
    changes: bool
    outcomes: dict[str, Outcome]


def commit_on(client: RolloutClient, order: CommitOrder, before: Outcome) -> Outcome:
    """Commit ``order`` on one server; a draft that fails there does not keep the policy back.

    Args:
        client: the server.
        order: what to commit.
        before: its outcome so far (staging).
    """
    if not order.stage_ids:
        return with_state(before, client.state())
    answer = _commit(client, order)
    if not isinstance(answer, Failure):
        return _done(before, answer, draft=order.draft is not None)
    if order.draft is None:
        return with_state(replace(before, error=f"commit failed: {answer.text}"), client.state())
    client.abort([order.draft.stage_id])
    error = f"{order.draft.stage_id} was not committed: {answer.text}"
    if not order.policy_stage_id:
        return with_state(replace(before, error=error), client.state())
    alone = _commit(client, replace(order, draft=None))
    if isinstance(alone, Failure):
        error = f"{error}; {order.policy_stage_id} alone failed too: {alone.text}"
        return with_state(replace(before, error=error), client.state())
    error = f"{error}; {order.policy_stage_id} was committed without it"
    return replace(_done(before, alone, draft=False), error=error)


def restore_on(
    client: RolloutClient, target: int, payloads: Payloads
) -> Timed[pb.CommitResponse] | pb.ServerState | Failure:
    """Put one server on release ``target``: from its own memory if it has it, else by staging.

    Returns:
        The answer to the commit or roll back, the state where nothing had to be
        done, or why it failed.
    """
    state = client.state()
    if isinstance(state, Failure) or payloads.is_served(state, target):
        return state
    if state.HasField("previous_draft_version") and state.previous_draft_version == target:
        back = client.roll_back()
        if not isinstance(back, Failure) and payloads.is_served(back.value.state, target):
            return back
    staged = stage_on(client, target, payloads, f"draft-{target}")
    return staged if isinstance(staged, Failure) else client.commit([f"draft-{target}"])


def stage_on(
    client: RolloutClient, target: int, payloads: Payloads, stage_id: str
) -> Timed[pb.StageResult] | Failure:
    """Stage release ``target`` on one server; an unreadable release is a failure like others."""
    try:
        return client.stage(payloads.get(target), stage_id)
    except RefusedError as error:
        return Failure(f"{client.address}: {error}", error.code)


def with_state(outcome: Outcome, state: pb.ServerState | Failure) -> Outcome:
    """``outcome`` with what the server serves, or with why that is not known."""
    if not isinstance(state, Failure):
        return replace(outcome, state=state)
    return replace(outcome, error=outcome.error or f"unreachable: {state.text}", state=None)


class Payloads:
    """Releases ready to stage, read and hashed once. Holds the last two used. Thread-safe."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._lock = threading.Lock()
        self._held: OrderedDict[int, DraftPayload] = OrderedDict()
        self._digests: OrderedDict[int, bytes] = OrderedDict()

    def is_served(self, state: pb.ServerState, version: int) -> bool:
        """Whether a server serves this release, by number and by content."""
        if state.draft_version != version:
            return False
        # A server whose wire has no checksum yet can only be taken at its word.
        return not state.draft_sha256 or state.draft_sha256 == self._digest(version)

    def _digest(self, version: int) -> bytes | None:
        with self._lock:
            if version not in self._digests:
                try:
                    specs = self._registry.get(version).tensors
                except RefusedError:
                    return None
                self._digests[version] = digest_of_specs(specs)
            self._digests.move_to_end(version)
            while len(self._digests) > 64:
                self._digests.popitem(last=False)
            return self._digests[version]

    def get(self, version: int) -> DraftPayload:
        """One release. Raises RefusedError: there is none, or its files were altered."""
        with self._lock:
            if version not in self._held:
                manifest = self._registry.get(version)
                known = manifest.HasField("trained_against_policy_version")
                self._held[version] = DraftPayload(
                    version,
                    manifest.trained_against_policy_version if known else None,
                    self._registry.tensors(version),
                    list(manifest.tensors),
                )
            self._held.move_to_end(version)
            while len(self._held) > 2:
                self._held.popitem(last=False)
            return self._held[version]


def _commit(client: RolloutClient, order: CommitOrder) -> Timed[pb.CommitResponse] | Failure:
    answer = client.commit(order.stage_ids)
    if not isinstance(answer, Failure) or not answer.unknown_fate:
        return answer
    state = client.state()
    if isinstance(state, Failure) or not _landed(state, order):
        return answer
    return Timed(pb.CommitResponse(state=state), client.timeouts.commit)


def _landed(state: pb.ServerState, order: CommitOrder) -> bool:
    """Whether everything of ``order`` is live, by the server's own account."""
    if any(stage_id in state.staged for stage_id in order.stage_ids):
        return False
    if order.draft is not None and state.draft_version != order.draft.version:
        return False
    return not order.policy_stage_id or (
        state.HasField("policy_version") and state.policy_version == order.policy_version
    )


def _done(before: Outcome, answer: Timed[pb.CommitResponse], draft: bool) -> Outcome:
    return replace(
        before,
        committed=True,
        draft_committed=draft,
        error="",
        state=answer.value.state,
        commit_seconds=answer.seconds,
    )
