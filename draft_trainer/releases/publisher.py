"""Puts releases on the fleet: stage everywhere, then commit everywhere, or end where it began.

A server that does not answer before anything was staged is left out and caught up by
``heal``; a server that fails after that makes the whole publish fail, and every server
that had committed is put back to the last good release. The policy is never held up by
a draft: where a combined commit fails, the policy is committed alone.

Two locks. ``_staging`` serialises publishes; ``_committing`` covers only the commits, so
that a policy's commit waits for another commit at most, never for another publish that
is still staging.

The phases of a publish over the whole fleet: stage, commit, put back.

The caller serialises. What each phase leaves behind: staging holds the release on
every server that can be reached or on none; a commit that fails anywhere is undone
everywhere, trial servers included. What is intended is on disk before the first
commit, so a trainer that dies in between undoes it when it is back.

One server's part of a publish: commit, commit the policy alone, or go back.

What happened is decided by an answer or, where the answer was lost, by reading
the server's state back; never by assuming.

Brings servers that serve something else than wanted back in line, one round at a time.

A server may have restarted with the draft on its command line, slept at level 2 and
lost its draft, been away during a publish, or been written to by somebody else. Its own
account (version, checksum, what its workers read back) is compared with what is wanted;
a server that does not come right is tried again less and less often and stays marked
not ready by its own health service.

How many servers are reachable, ready and on the release that they should serve.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

from draft_trainer.counters import Counters, Servers
from draft_trainer.releases.canary import Canary
from draft_trainer.releases.fleet import (
    DraftLag,
    DraftPayload,
    Failure,
    Fleet,
    RolloutClient,
    Timed,
)
from draft_trainer.releases.registry import Registry
from draft_trainer.state import Promotion, Promotions
from slipstream.errors import RefusedError, StatusCode
from slipstream.tensors import digest_of_specs
from slipstream.v1 import rollout_server_pb2 as pb
from slipstream.v1 import rollout_server_pb2 as rollout_pb


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


def look(
    states: Mapping[str, pb.ServerState | Failure], now: Promotion, payloads: Payloads
) -> Servers:
    """Count them.

    Args:
        states: every server of the fleet, as it answered.
        now: what each should serve.
        payloads: knows a release by its content.
    """
    reached = {a: s for a, s in states.items() if not isinstance(s, Failure)}
    return Servers(
        known=len(states),
        reachable=len(reached),
        ready=sum(not state.not_ready for state in reached.values()),
        current=sum(payloads.is_served(s, now.wanted_on(a)) for a, s in reached.items()),
    )


logger = logging.getLogger(__name__)


class Phases:
    """See the module.

    Args:
        fleet: the rollout servers.
        payloads: releases, ready to stage.
        promotions: which release is wanted, served and intended.
        counters: counts stages, commits and outcomes.
    """

    def __init__(
        self, fleet: Fleet, payloads: Payloads, promotions: Promotions, counters: Counters
    ) -> None:
        self._fleet = fleet
        self._payloads = payloads
        self._promotions = promotions
        self._counters = counters

    def stage(self, version: int) -> tuple[Prepared | None, Published]:
        """Stage on every reachable server that serves another release, or on none of them."""
        self._fleet.refresh()
        states = self._fleet.states()
        self._counters.looked(look(states, self._promotions.now, self._payloads))
        outcomes = {a: with_state(Outcome(), state) for a, state in states.items()}
        behind = [
            a
            for a, state in states.items()
            if not isinstance(state, Failure) and not self._payloads.is_served(state, version)
        ]
        if not behind:
            if any(outcome.state is not None for outcome in outcomes.values()):
                self._promotions.serves(version)
            return None, Published(version, False, outcomes)
        draft = self._payloads.get(version)
        # Nobody commits another draft now: what is left there would only take this one's room.
        self._fleet.abort_strays(states, (draft.stage_id,))
        answers = self._fleet.each(lambda client: client.stage(draft), behind)
        failed = []
        for address, answer in answers.items():
            if isinstance(answer, Failure):
                failed.append(address)
                error = f"staging failed: {answer.text}"
                outcomes[address] = replace(outcomes[address], error=error)
            else:
                self._counters.stage_seconds.observe(answer.seconds)
                outcomes[address] = replace(
                    outcomes[address], staged=True, stage_seconds=answer.seconds
                )
        if not failed:
            return Prepared(draft, outcomes), Published(version, True, outcomes)
        self._fleet.each(lambda client: client.abort([draft.stage_id]), behind)
        self._note("stage_failed", version, "; ".join(f"{a}: {outcomes[a].error}" for a in failed))
        for address in set(behind) - set(failed):
            error = f"{draft.stage_id} was aborted: staging failed on {', '.join(failed)}"
            outcomes[address] = replace(outcomes[address], staged=False, error=error)
        return None, Published(self._promotions.now.last_good, False, outcomes)

    def commit(
        self,
        prepared: Prepared | None,
        policy_version: int,
        policy_stage_id: str,
        choose: Callable[[Sequence[str]], tuple[str, ...]],
    ) -> tuple[Published, tuple[str, ...]]:
        """Commit on every server; a draft that fails on one of its holders is undone on all.

        Args:
            prepared: the staged draft, if any.
            policy_version: of the staged policy.
            policy_stage_id: empty where there is none.
            choose: from the servers that hold the draft those that get it now.

        Returns:
            How it ended, and the servers on which the draft is live.
        """
        before = prepared.outcomes if prepared else {}
        holders = [a for a, outcome in before.items() if outcome.staged]
        chosen = choose(holders) if prepared else ()
        refusal = self._intend(prepared, chosen if len(chosen) < len(holders) else ())
        if refusal:
            self.abort(prepared)
            chosen = ()
        addresses = dict.fromkeys((*self._fleet.addresses, *chosen))
        orders = {
            a: CommitOrder(
                prepared.draft if prepared and a in chosen else None,
                policy_version,
                policy_stage_id,
            )
            for a in addresses
        }
        after = self._fleet.each(
            lambda client: commit_on(
                client,
                orders[client.address],
                before[client.address] if client.address in holders else Outcome(),
            ),
            addresses,
        )
        for outcome in after.values():
            if outcome.committed:
                self._counters.commit_seconds.observe(outcome.commit_seconds)
        good = self._promotions.now.last_good
        if prepared is None or refusal:
            if policy_stage_id:
                missed = [a for a in after if not after[a].committed]
                self._counters.published("policy_failed" if missed else "policy_only")
            if refusal:
                after = {a: replace(o, error=o.error or refusal) for a, o in after.items()}
            return Published(good, False, after), ()
        version = prepared.draft.version
        failed = [a for a in chosen if not after[a].draft_committed]
        why = f"it failed on {', '.join(failed)}" if failed else ""
        if not failed:
            if len(chosen) < len(holders):
                return Published(good, True, after), chosen
            try:
                self._promotions.serves(version)
                self._note("committed", version, "")
                return Published(version, True, after), chosen
            except RefusedError as error:
                # The disk does not know that it is live, so it must not be.
                why = str(error)
        undo = [a for a in chosen if after[a].draft_committed]
        after |= self.undo(version, undo, after, why, bool(policy_stage_id))
        return Published(good, False, after), ()

    def undo(
        self,
        version: int,
        addresses: Sequence[str],
        outcomes: dict[str, Outcome],
        why: str,
        policy_committed: bool = False,
    ) -> dict[str, Outcome]:
        """Put servers, and those that serve ``version`` on trial, on the last good release.

        Args:
            version: that is taken back.
            addresses: where it was committed.
            outcomes: so far, by address.
            why: for the outcomes, the log and the metrics.
            policy_committed: the outcome is then a commit all the same.
        """
        now = self._promotions.now
        affected = dict.fromkeys((*addresses, *now.canaries))
        restored = self.restore(now.last_good, {a: outcomes.get(a, Outcome()) for a in affected})
        text = f"draft {version} was rolled back: {why}"
        for address, outcome in restored.items():
            error = f"{text}; {outcome.error}" if outcome.error else text
            restored[address] = replace(outcome, committed=policy_committed, error=error)
        try:
            self._promotions.undone()
        except RefusedError as error:
            # It stays intended on disk, which a restart takes for "undo it", as it should.
            logger.error("%s", error)
        self._note("rolled_back", version, why)
        return restored

    def restore(self, target: int, outcomes: dict[str, Outcome]) -> dict[str, Outcome]:
        """Put servers on release ``target``; answers their outcomes, with what failed."""
        answers = self._fleet.each(lambda c: restore_on(c, target, self._payloads), outcomes)
        restored = {}
        for address, answer in answers.items():
            outcome = replace(outcomes[address], committed=False, draft_committed=False)
            if isinstance(answer, Failure):
                error = f"putting it on draft {target} failed: {answer.text}"
                restored[address] = replace(outcome, error=error, state=None)
            elif isinstance(answer, rollout_pb.ServerState):
                restored[address] = replace(outcome, committed=True, state=answer)
            else:
                self._counters.commit_seconds.observe(answer.seconds)
                restored[address] = replace(
                    outcome,
                    committed=True,
                    state=answer.value.state,
                    commit_seconds=answer.seconds,
                )
        return restored

    def abort(self, prepared: Prepared | None) -> None:
        """Have the holders forget a stage."""
        if prepared is not None:
            stage_id = prepared.draft.stage_id
            holders = [a for a, o in prepared.outcomes.items() if o.staged]
            self._fleet.each(lambda client: client.abort([stage_id]), holders)

    def _intend(self, prepared: Prepared | None, canaries: tuple[str, ...]) -> str:
        """Put on disk what is about to be committed; why not, where that fails."""
        if prepared is None:
            return ""
        now = self._promotions.now
        try:
            # Servers that are on trial already stay on it until all have committed.
            self._promotions.intends(prepared.draft.version, canaries or now.canaries)
        except RefusedError as error:
            self._note("not_committed", prepared.draft.version, str(error))
            return f"{prepared.draft.stage_id} was not committed: {error}"
        return ""

    def _note(self, event: str, version: int, reason: str) -> None:
        self._counters.published(event)
        self._promotions.state.events.published(event, version, reason)
        if reason:
            logger.warning("draft %d, %s: %s", version, event, reason)


READ_BACK_SECONDS = 10.0
"""Between two looks into the workers' memory: they cost an engine step a little time."""

FIRST_WAIT = 1.0
LONGEST_WAIT = 60.0


@dataclass
class _Patient:
    """A server that had to be healed: attempts in a row, and when the next may be (monotonic)."""

    attempts: int = 0
    not_before: float = 0.0


class _Fault(NamedTuple):
    """What is wrong with a server: for the metrics, and for people."""

    reason: str
    text: str


class Healing:
    """See the module. One round at a time.

    Args:
        fleet: the rollout servers.
        payloads: releases, ready to stage.
        promotions: what each server should serve.
        counters: counts what was healed.
        lag: whether each server should speculate.
    """

    def __init__(
        self,
        fleet: Fleet,
        payloads: Payloads,
        promotions: Promotions,
        counters: Counters,
        lag: DraftLag,
    ) -> None:
        self._fleet = fleet
        self._payloads = payloads
        self._promotions = promotions
        self._counters = counters
        self._lag = lag
        self._patients: dict[str, _Patient] = {}
        self._healed = 0
        self._read_back_at = 0.0

    def round(
        self,
        committed_alone: Callable[[], AbstractContextManager[None]],
        staged: Collection[str],
    ) -> None:
        """Look at every server once.

        Args:
            committed_alone: held while something is committed, not while it is staged.
            staged: ids of drafts that wait for their commit; all others are left behind.
        """
        self._fleet.refresh()
        now = time.monotonic()
        read_back = now >= self._read_back_at
        if read_back:
            self._read_back_at = now + READ_BACK_SECONDS
        states = self._fleet.states(read_back)
        self._fleet.abort_strays(states, staged)
        wrong: dict[str, _Fault] = {}
        for address, state in states.items():
            why = None if isinstance(state, Failure) else self._wrong_with(address, state)
            if why is None:
                # One that cannot be reached has not been healed, but was not tried either.
                if not isinstance(state, Failure):
                    self._patients.pop(address, None)
            elif self._patients.setdefault(address, _Patient()).not_before <= time.monotonic():
                wrong[address] = why
        self._patients = {a: p for a, p in self._patients.items() if a in states}
        if wrong:
            answers = self._fleet.each(lambda c: self._heal(c, committed_alone), wrong)
            for address, answer in answers.items():
                self._note(address, wrong[address], answer)
                if not isinstance(answer, Failure):
                    states[address] = answer
        self._counters.looked(look(states, self._promotions.now, self._payloads))
        if self._lag.max_lag:
            known = {a: s for a, s in states.items() if not isinstance(s, Failure)}
            self._fleet.each(lambda c: self._lag.apply(c, known[c.address]), known)

    def _wrong_with(self, address: str, state: pb.ServerState) -> _Fault | None:
        wanted = self._promotions.now.wanted_on(address)
        if not self._payloads.is_served(state, wanted):
            same = state.draft_version == wanted
            return _Fault(
                "other_content" if same else "other_version",
                f"serves {'another ' if same else ''}draft {state.draft_version}, not {wanted}",
            )
        return _Fault("not_ready", state.not_ready) if state.not_ready else None

    def _heal(
        self,
        client: RolloutClient,
        committed_alone: Callable[[], AbstractContextManager[None]],
    ) -> pb.ServerState | Failure:
        wanted = self._promotions.now.wanted_on(client.address)
        # An id of its own: what is live under the usual one would be answered, not applied.
        self._healed += 1
        stage_id = f"draft-{wanted}-healed-{self._healed}"
        staged = stage_on(client, wanted, self._payloads, stage_id)
        if isinstance(staged, Failure):
            return staged
        with committed_alone():
            if self._promotions.now.wanted_on(client.address) != wanted:
                client.abort([stage_id])
                answer = restore_on(
                    client, self._promotions.now.wanted_on(client.address), self._payloads
                )
            else:
                answer = client.commit([stage_id])
        if isinstance(answer, Failure):
            client.abort([stage_id])
            return answer
        return answer if isinstance(answer, pb.ServerState) else answer.value.state

    def _note(self, address: str, fault: _Fault, answer: pb.ServerState | Failure) -> None:
        patient = self._patients[address]
        wait = min(LONGEST_WAIT, FIRST_WAIT * 2**patient.attempts)
        patient.attempts += 1
        patient.not_before = time.monotonic() + wait
        wanted, why = self._promotions.now.wanted_on(address), fault.text
        self._counters.healed(fault.reason, not isinstance(answer, Failure))
        if isinstance(answer, Failure):
            logger.warning("%s %s; next try in %.0f s: %s", address, why, wait, answer.text)
            return
        self._promotions.state.events.published("healed", wanted, f"{address} {why}")
        logger.warning("%s was put on draft %d: it %s", address, wanted, why)


class Publisher:
    """Owner of what the fleet serves. Safe to call from several threads.

    Args:
        fleet: the rollout servers; closed by its own owner.
        registry: where releases are read from.
        promotions: which release is wanted, and which were served.
        counters: counts stages, commits and outcomes.
        canary: tries releases out; None for no trials.
        max_draft_lag: see ``DraftLag``.
    """

    def __init__(
        self,
        fleet: Fleet,
        registry: Registry,
        promotions: Promotions,
        counters: Counters,
        canary: Canary | None = None,
        max_draft_lag: int = 0,
    ) -> None:
        self._fleet = fleet
        self._registry = registry
        self._payloads = Payloads(registry)
        self._promotions = promotions
        self._counters = counters
        self._canary = canary
        self._lag = DraftLag(max_draft_lag)
        self._phases = Phases(fleet, self._payloads, promotions, counters)
        self._healing = Healing(fleet, self._payloads, promotions, counters, self._lag)
        self._staging = threading.Lock()
        self._committing = threading.Lock()
        self._handover = threading.Lock()
        self._prepared: Prepared | None = None
        interrupted = promotions.now.intent
        if interrupted is not None:
            # ``heal`` puts the servers that took it back; what is promoted is tried again.
            promotions.undone()
            self._note("interrupted", interrupted, "the trainer ended between commits")

    @property
    def addresses(self) -> tuple[str, ...]:
        """The rollout servers of now."""
        return self._fleet.refresh()

    def prepare(self) -> Published:
        """Stage the promoted release on every reachable server that serves another one.

        Staging that fails anywhere is undone everywhere and told in the outcomes. While
        a release is on trial on some servers nothing is staged: the trial comes first.
        """
        with self._staged_alone():
            self._drop_prepared()
            if self._on_shared_trial() is not None:
                return Published(self._promotions.now.last_good, False, {})
            prepared, published = self._phases.stage(self._promotions.now.promoted)
            with self._handover:
                self._prepared = prepared
            return published

    def complete(self, policy_version: int, policy_stage_id: str) -> Published:
        """Commit what ``prepare`` staged, together with a staged policy, in one call per server.

        Args:
            policy_version: the version of the staged policy.
            policy_stage_id: empty where the framework syncs the policy itself.
        """
        with self._handover:
            prepared, self._prepared = self._prepared, None
        with self._committed_alone():
            return self._commit(prepared, policy_version, policy_stage_id)

    def promote(self, version: int, pin: bool) -> Published:
        """Stage and commit a release now. The pointer moves only when the fleet does.

        Raises:
            RefusedError: no such release (NOT_FOUND), or another publish is under way (ABORTED).
        """
        self._registry.get(version)
        with self._staged_alone():
            on_trial = self._on_shared_trial()
            if on_trial is not None:
                raise RefusedError(
                    "publish",
                    f"draft {on_trial} on trial",
                    "a fleet that serves one release",
                    "wait for the trial's verdict, or roll back",
                    StatusCode.ABORTED,
                )
            published, done = self._publish(version)
            if done:
                self._promotions.promote(version, pin)
            return published

    def publish_promoted(self) -> Published:
        """Stage and commit the promoted release now, where it is not served yet."""
        with self._staged_alone():
            if self._on_shared_trial() is not None:
                return Published(self._promotions.now.last_good, False, {})
            return self._publish(self._promotions.now.promoted)[0]

    def roll_back(self, reason: str) -> Published:
        """Put every reachable server back to the release that was served before the last good
        one; where a release is on trial on some of them, to the last good one.

        Args:
            reason: for the log.

        Raises:
            RefusedError: there is none (FAILED_PRECONDITION), or another publish is
                under way (ABORTED).
        """
        with self._staged_alone():
            return self._roll_back("rolled_back_by_hand", reason)

    def settle(self) -> bool:
        """End the trial under way if there is a verdict: promote to the rest, or roll back.

        Returns:
            Whether a trial ended.

        Raises:
            RefusedError: another publish is under way (ABORTED).
        """
        verdict = self._canary.judge() if self._canary else None
        if self._canary is None or verdict is None:
            return False
        with self._staged_alone():
            trial = verdict.trial
            if self._canary.trial is not trial:
                return False
            self._canary.end()
            if not verdict.keep:
                self._roll_back(verdict.event, verdict.reason, trial.version)
                return True
            self._note(verdict.event, trial.version, verdict.reason)
            if trial.shared:
                self._publish_to_the_rest(trial.version)
            return True

    def heal(self) -> None:
        """One round of reconciling: who serves something else than wanted is put right.

        Does nothing while a publish is under way; that one sees to the fleet itself.
        """
        if not self._staging.acquire(blocking=False):
            return
        try:
            with self._handover:
                prepared = self._prepared
            waiting = {prepared.draft.stage_id} if prepared is not None else set()
            on_trial = self._on_shared_trial()
            if on_trial is not None:
                waiting.add(f"draft-{on_trial}")
            self._healing.round(self._committed_alone, waiting)
        finally:
            self._staging.release()

    def _publish(self, version: int) -> tuple[Published, bool]:
        """Stage and commit; whether the reachable servers serve ``version`` now, or try it."""
        self._drop_prepared()
        prepared, published = self._phases.stage(version)
        if prepared is None:
            return published, published.draft_version == version
        with self._committed_alone():
            published = self._commit(prepared, 0, "")
        return published, published.changes

    def _publish_to_the_rest(self, version: int) -> None:
        """After a trial that went well. If it fails, nobody serves ``version``."""
        prepared, published = self._phases.stage(version)
        with self._committed_alone():
            if prepared is not None:
                self._phases.commit(prepared, 0, "", tuple)
            elif published.draft_version != version:
                why = "the others could not stage it"
                self._phases.undo(version, (), {}, why)

    def _commit(
        self, prepared: Prepared | None, policy_version: int, policy_stage_id: str
    ) -> Published:
        incumbent = self._promotions.now.last_good
        if policy_version and self._lag.max_lag:
            self._lag.policy_synced(policy_version)
            self._fleet.each(lambda client: self._lag.before_policy(client, policy_version))
        choose = self._canary.choose if self._canary else tuple
        published, live = self._phases.commit(prepared, policy_version, policy_stage_id, choose)
        if self._lag.max_lag:
            states = {a: o.state for a, o in published.outcomes.items() if o.state is not None}
            self._fleet.each(lambda c: self._lag.apply(c, states[c.address]), states)
        if self._canary and prepared is not None and live:
            others = [a for a, o in prepared.outcomes.items() if o.staged and a not in live]
            self._canary.begin(prepared.draft.version, incumbent, live, others)
        return published

    def _roll_back(self, event: str, reason: str, failed: int | None = None) -> Published:
        """To the last good release from a trial on some servers, else to the one before it.

        Args:
            event: for the log and the metrics.
            reason: for people.
            failed: the release that failed its trial.
        """
        self._drop_prepared()
        if self._canary is not None:
            self._canary.end()
        with self._committed_alone():
            now = self._promotions.now
            if now.canaries and now.intent is not None:
                failed, target = now.intent, now.last_good
                self._promotions.give_up(failed)
            else:
                # A pin by hand holds what was rolled back to; one on a ruined draft holds nothing.
                unpin, failed = failed is not None, now.last_good
                target = self._promotions.roll_back(unpin)
            everywhere = {a: Outcome() for a in self._fleet.addresses}
            outcomes = self._phases.restore(target, everywhere)
        self._fleet.each(lambda client: client.abort([f"draft-{failed}"]))
        self._note(event, failed, reason or "no reason given")
        logger.warning("rolled back to draft %d: %s", target, reason or "no reason given")
        return Published(target, True, outcomes)

    def _on_shared_trial(self) -> int | None:
        """The release that is live on some servers only."""
        now = self._promotions.now
        return now.intent if now.canaries else None

    def _drop_prepared(self) -> None:
        """Abort a stage whose window was never closed, or that another publish replaces."""
        with self._handover:
            prepared, self._prepared = self._prepared, None
        self._phases.abort(prepared)

    def _note(self, event: str, version: int, reason: str) -> None:
        self._counters.published(event)
        self._promotions.state.events.published(event, version, reason)

    @contextmanager
    def _staged_alone(self) -> Iterator[None]:
        t = self._fleet.timeouts
        with _held(self._staging, 3 * t.state + t.stage + 2 * t.commit):
            yield

    @contextmanager
    def _committed_alone(self) -> Iterator[None]:
        t = self._fleet.timeouts
        with _held(self._committing, 3 * t.state + t.stage + 3 * t.commit):
            yield


@contextmanager
def _held(lock: threading.Lock, timeout: float) -> Iterator[None]:
    if not lock.acquire(timeout=timeout):
        raise RefusedError(
            "publish",
            f"another publish, for more than {timeout:.0f} s",
            "one publish at a time",
            "look at the rollout servers' state, then try again",
            StatusCode.ABORTED,
        )
    try:
        yield
    finally:
        lock.release()
