"""One server's part of a publish: the prepared release, its commit, and the result.

What happened is decided by an answer or, where the answer was lost, by reading the server's state;
never by assuming.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from draft_trainer.counters import Counters
from draft_trainer.releases.fleet import WITHOUT_WEIGHTS, Fleet
from draft_trainer.releases.registry import Registry
from draft_trainer.releases.rollout_client import DraftPayload, Failure, RolloutClient
from slipstream.errors import RefusedError, StatusCode, clean
from slipstream.tensors import digest_of_specs
from slipstream.v1 import rollout_server_pb2 as pb

logger = logging.getLogger(__name__)


@dataclass
class ServerOutcome:
    """One server's part in a publish: what is live, why something is not, what it serves now.

    ``committed``: all that was asked of it is live; for a draft with a policy, the policy is, and
    ``draft_committed`` says whether the draft is. ``state`` is None if it was not reached.
    """

    committed: bool = False
    draft_committed: bool = False
    staged: bool = False
    error: str = ""
    state: pb.ServerState | None = None
    commit_seconds: float = 0.0
    stage_seconds: float = 0.0

    def saw(self, state: pb.ServerState | Failure) -> None:
        """Keep what the server serves, or why that is not known."""
        if isinstance(state, Failure):
            self.state, self.error = None, self.error or f"unreachable: {state.text}"
        else:
            self.state = state


@dataclass
class PublishResult:
    """The outcome of a publish, or of what it has done so far."""

    draft_version: int
    """The release that every reachable server serves or, after a stage, will serve."""
    outcomes: dict[str, ServerOutcome] = field(default_factory=dict)
    changes: bool = False
    """A draft is staged (``prepare``) or was committed."""
    draft: DraftPayload | None = None

    @property
    def stage_ids(self) -> list[str]:
        """The name of the staged draft, if there is one."""
        return [] if self.draft is None else [self.draft.stage_id]

    @property
    def holders(self) -> list[str]:
        """The servers that hold the staged draft."""
        return [address for address, outcome in self.outcomes.items() if outcome.staged]

    @property
    def without(self) -> dict[str, str]:
        """The servers that were reached and should hold it but do not, each with why."""
        reached = {a: o for a, o in self.outcomes.items() if o.state is not None}
        return {address: outcome.error for address, outcome in reached.items() if outcome.error}


class Payloads:
    """Releases ready to stage, read and hashed once. Holds the last two used. Thread-safe.

    Args:
        registry: where they are.
        shared: ``publish.shared_registry``.
    """

    def __init__(self, registry: Registry, shared: Path | None = None) -> None:
        self._registry = registry
        self._shared = shared
        self._lock = threading.Lock()
        self._read_once = lru_cache(2)(self._read)
        self._digest = lru_cache(64)(lambda v: digest_of_specs(registry.get(v).tensors))

    def is_served(self, state: pb.ServerState, version: int) -> bool:
        """Return whether a server serves this release, by number and content, or needs none."""
        if state.draft_kind in WITHOUT_WEIGHTS:
            return True
        digest = self.digest(version) if state.draft_version == version else None
        return digest is not None and state.draft_sha256 in (b"", digest)

    def digest(self, version: int) -> bytes | None:
        """Return the ``draft_sha256`` of a server that serves it; None: the release is damaged."""
        try:
            return self._digest(version)
        except RefusedError:
            return None

    def get(self, version: int) -> DraftPayload:
        """Return a release to send. Raises RefusedError: none such, or its files were altered."""
        with self._lock:
            return self._read_once(version)

    def _read(self, version: int) -> DraftPayload:
        manifest = self._registry.get(version)
        known = manifest.HasField("trained_against_policy_version")
        shared = self._shared
        folder = self._registry.path(version)
        return DraftPayload(
            version,
            manifest.trained_against_policy_version if known else None,
            self._registry.tensors(version),
            list(manifest.tensors),
            "" if shared is None else folder.relative_to(shared).as_posix(),
            tuple(manifest.gate.candidate_acceptance_per_position),
        )


def stage_on(
    client: RolloutClient, draft: DraftPayload, stage_id: str, fleet: Fleet, counters: Counters
) -> pb.StageResult | Failure:
    """Send a release to one server, when fewer than ``STAGES_AT_ONCE`` others are sent one."""
    with fleet.staging:
        answer = client.stage(draft, stage_id)
    if not isinstance(answer, Failure):
        if answer.not_shared:
            logger.warning(
                "%s was sent draft %d: %s", client.address, draft.version, clean(answer.not_shared)
            )
        counters.staged_bytes.inc(answer.bytes_received)
        counters.stage_seconds.observe(answer.seconds)
    return answer


def stage_version_on(
    client: RolloutClient,
    version: int,
    payloads: Payloads,
    stage_id: str,
    fleet: Fleet,
    counters: Counters,
) -> pb.StageResult | Failure:
    """Send a release, given by number; an unreadable one is a failure like any other."""
    try:
        draft = payloads.get(version)
    except RefusedError as error:
        return Failure(f"{client.address}: {error}", error.code)
    return stage_on(client, draft, stage_id, fleet, counters)


def commit_on_all(
    fleet: Fleet,
    draft: DraftPayload | None,
    holders: Collection[str],
    policy_version: int,
    policy_stage_id: str,
    outcomes: dict[str, ServerOutcome],
) -> None:
    """Commit a draft on its holders, and a policy on every server of ``outcomes``."""
    chosen = frozenset(holders)
    fleet.each(
        lambda client: commit_on(
            client,
            draft if client.address in chosen else None,
            policy_version,
            policy_stage_id,
            outcomes[client.address],
        ),
        tuple(outcomes),
    )


def commit_on(
    client: RolloutClient,
    draft: DraftPayload | None,
    policy_version: int,
    policy_stage_id: str,
    outcome: ServerOutcome,
) -> bool:
    """Commit on one server; a draft that fails there does not keep the policy back.

    Returns:
        Whether the draft is live.
    """
    policy = [policy_stage_id] if policy_stage_id else []
    if draft is None and not policy:
        outcome.saw(client.state())
        return False
    if draft is not None:
        answer = _committed(client, draft, policy_version, policy, outcome)
        if not isinstance(answer, Failure):
            outcome.draft_committed = True
            return True
        if policy and answer.code is StatusCode.NOT_FOUND:
            # If the loop could not stage its policy, the draft goes live without it: counted as
            # failed, it would be rolled back on every server at every sync.
            without = _committed(client, draft, policy_version, [], outcome)
            if not isinstance(without, Failure):
                outcome.committed, outcome.draft_committed = False, True
                outcome.error = f"{policy_stage_id} was not committed: {answer.text}"
                return True
        client.abort([draft.stage_id])
        outcome.error = f"{draft.stage_id} was not committed: {answer.text}"
    if policy:
        answer = _committed(client, None, policy_version, policy, outcome)
        if not isinstance(answer, Failure):
            if outcome.error:
                outcome.error += f"; {policy_stage_id} was committed without it"
            return False
        alone = f"; {policy_stage_id} alone failed too: " if outcome.error else "commit failed: "
        outcome.error += alone + answer.text
    outcome.saw(client.state())
    return False


def _committed(
    client: RolloutClient,
    draft: DraftPayload | None,
    policy_version: int,
    policy: list[str],
    outcome: ServerOutcome,
) -> pb.ServerState | Failure:
    """Commit in one call; if its answer is lost, the server's state takes its place."""
    stage_ids = ([draft.stage_id] if draft is not None else []) + policy
    began = time.monotonic()
    answer = client.commit(stage_ids, with_policy=bool(policy))
    seconds = time.monotonic() - began
    if isinstance(answer, Failure) and answer.unknown_fate:
        state = client.state()
        if not isinstance(state, Failure):
            live = {stage.stage_id for stage in state.staged}.isdisjoint(stage_ids)
            live = live and (draft is None or state.draft_version == draft.version)
            known = state.HasField("policy_version") and state.policy_version == policy_version
            if live and (not policy or known):
                answer = state
    if not isinstance(answer, Failure):
        outcome.committed, outcome.state, outcome.commit_seconds = True, answer, seconds
    return answer


def put_on(
    client: RolloutClient, version: int, payloads: Payloads, fleet: Fleet, counters: Counters
) -> pb.ServerState | Failure:
    """Put one server on a release: from its own memory if it has it, else by staging."""
    state = client.state()
    if isinstance(state, Failure) or payloads.is_served(state, version):
        return state
    if state.HasField("previous_draft_version") and state.previous_draft_version == version:
        back = client.roll_back()
        if not isinstance(back, Failure) and payloads.is_served(back, version):
            return back
    staged = stage_version_on(client, version, payloads, f"draft-{version}", fleet, counters)
    return staged if isinstance(staged, Failure) else client.commit([f"draft-{version}"])


def put_all_on(
    fleet: Fleet,
    version: int,
    addresses: Iterable[str],
    outcomes: Mapping[str, ServerOutcome],
    payloads: Payloads,
    counters: Counters,
) -> dict[str, ServerOutcome]:
    """Put servers on a release; return their ``outcomes``, with what failed."""
    restored = {a: replace(outcomes.get(a, ServerOutcome())) for a in addresses}

    def restore(client: RolloutClient) -> None:
        outcome = restored[client.address]
        answer = put_on(client, version, payloads, fleet, counters)
        outcome.draft_committed = False
        outcome.committed = not isinstance(answer, Failure)
        outcome.state = None if isinstance(answer, Failure) else answer
        if isinstance(answer, Failure):
            outcome.error = f"putting it on draft {version} failed: {answer.text}"

    fleet.each(restore, restored)
    return restored
