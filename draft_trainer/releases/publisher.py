"""Puts a release on the fleet in two phases: stage on every server, then commit on every server.

Stage: every reachable server that serves another release verifies it while it generates. Where one
fails, all forget it. A server that cannot be reached is left out; ``reconcile`` catches it up.

Commit: the intent is on disk first, then one call per server between two engine steps, with the
policy's weights where there are some. A lost answer is settled by reading the server's state, never
by assuming. Where one server fails, all are put back on the last good release and the policy is
committed without the draft. A trainer that dies in between undoes it when it is back.

``_staging`` serialises publishes. ``_committing`` covers only the commits, so that a policy's
commit waits for another commit at most, never for a publish that is still staging.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace

from draft_trainer.counters import Counters
from draft_trainer.releases.canary import Canary
from draft_trainer.releases.fleet import (
    DraftLag,
    DraftPayload,
    Failure,
    Fleet,
    Payloads,
    RolloutClient,
    ServerOutcome,
    commit_on,
    put_on,
)
from draft_trainer.releases.promotions import Promotions
from draft_trainer.releases.registry import Registry
from slipstream.errors import RefusedError, StatusCode
from slipstream.v1 import rollout_server_pb2 as pb

logger = logging.getLogger(__name__)


@dataclass
class PublishResult:
    """How a publish ended, or what it has done so far."""

    draft_version: int
    """The release that every reachable server serves or, after a stage, will serve."""
    outcomes: dict[str, ServerOutcome] = field(default_factory=dict)
    changes: bool = False
    """A draft is staged (``prepare``) or was committed."""
    draft: DraftPayload | None = None

    @property
    def holders(self) -> list[str]:
        """The servers that hold the staged draft."""
        return [address for address, outcome in self.outcomes.items() if outcome.staged]


class Publisher:
    """Owner of what the fleet serves. Safe to call from several threads."""

    def __init__(
        self,
        fleet: Fleet,
        registry: Registry,
        promotions: Promotions,
        counters: Counters,
        canary: Canary | None = None,
    ) -> None:
        self.fleet = fleet
        self.promotions = promotions
        self.counters = counters
        self.payloads = Payloads(registry)
        self.lag = DraftLag(fleet.config.max_draft_lag)
        self._registry = registry
        self._canary = canary
        self._staging = threading.Lock()
        self._committing = threading.Lock()
        self._handover = threading.Lock()
        self._staged: PublishResult | None = None
        self._undo_interrupted()

    def prepare(self) -> PublishResult:
        """Stage the promoted release on every reachable server that serves another one.

        Staging that fails anywhere is undone everywhere; the outcomes say why. While a release
        is on trial on some servers nothing is staged: the trial comes first.
        """
        with self._staged_alone():
            self._drop_staged()
            now = self.promotions.now
            if now.canaries:
                return PublishResult(now.last_good)
            result = self._stage(now.promoted)
            with self._handover:
                self._staged = result if result.draft is not None else None
            return result

    def complete(self, policy_version: int, policy_stage_id: str) -> PublishResult:
        """Commit what ``prepare`` staged, together with a staged policy, in one call per server."""
        with self._handover:
            staged, self._staged = self._staged, None
        with self.committed_alone():
            return self._commit(staged, policy_version, policy_stage_id)

    def promote(self, version: int, pin: bool) -> PublishResult:
        """Stage and commit a release now. The pointer moves only when the fleet does.

        Raises:
            RefusedError: no such release (NOT_FOUND), or another publish is under way (ABORTED).
        """
        self._registry.get(version)
        with self._staged_alone():
            now = self.promotions.now
            if now.canaries:
                raise RefusedError(
                    "publish",
                    f"draft {now.intent} on trial",
                    "a fleet that serves one release",
                    "wait for the trial's result, or roll back",
                    StatusCode.ABORTED,
                )
            result = self._publish(version)
            done = result.draft_version == version if result.draft is None else result.changes
            if done:
                self.promotions.promote(version, pin)
            return result

    def publish_promoted(self) -> PublishResult:
        """Stage and commit the promoted release now, where it is not served yet."""
        with self._staged_alone():
            now = self.promotions.now
            return PublishResult(now.last_good) if now.canaries else self._publish(now.promoted)

    def roll_back(self, reason: str) -> PublishResult:
        """Put every reachable server back to the release that was served before the last good
        one; where a release is on trial on some of them, to the last good one.

        Raises:
            RefusedError: there is none (FAILED_PRECONDITION), or another publish is
                under way (ABORTED).
        """
        with self._staged_alone():
            return self._roll_back("rolled_back_by_hand", reason)

    def settle(self) -> bool:
        """End the trial under way if it has a result: promote to the rest, or roll back.

        Returns:
            Whether a trial ended.

        Raises:
            RefusedError: another publish is under way (ABORTED), or the disk is full.
        """
        result = self._canary.result() if self._canary is not None else None
        if self._canary is None or result is None:
            return False
        with self._staged_alone():
            trial = result.trial
            if self._canary.trial is not trial:
                return False
            if not result.keep:
                self._roll_back(result.event, result.reason, failed=True)
                return True
            with self.promotions.state.transaction():
                self._canary.end()
                self.promotions.state.events.published(result.event, trial.version, result.reason)
            self.counters.published(result.event)
            if trial.shared:
                self._publish(trial.version, trial=False)
            return True

    def looked(self, states: Mapping[str, pb.ServerState | Failure]) -> None:
        """Count servers that are known, reachable, ready, and on the release wanted on them."""
        now = self.promotions.now
        reached = {a: s for a, s in states.items() if not isinstance(s, Failure)}
        served = [self.payloads.is_served(s, now.wanted_on(a)) for a, s in reached.items()]
        ready = [state for state in reached.values() if not state.not_ready]
        self.counters.servers = {
            **{"known": len(states), "reachable": len(reached)},
            **{"ready": len(ready), "current": sum(served)},
        }

    @contextmanager
    def at_rest(self) -> Iterator[frozenset[str] | None]:
        """Keep publishes from starting. Yields the ids of stages that wait for a commit; None, and
        without waiting, while a publish is under way."""
        if not self._staging.acquire(blocking=False):
            yield None
            return
        try:
            with self._handover:
                draft = self._staged.draft if self._staged is not None else None
            now = self.promotions.now
            waiting = {draft.stage_id} if draft is not None else set()
            yield frozenset(waiting | ({f"draft-{now.intent}"} if now.canaries else set()))
        finally:
            self._staging.release()

    def _staged_alone(self) -> AbstractContextManager[None]:
        return self._held(self._staging, 2)

    def committed_alone(self) -> AbstractContextManager[None]:
        """Held while something is committed, not while it is staged."""
        return self._held(self._committing, 3)

    @contextmanager
    def _held(self, lock: threading.Lock, commits: int) -> Iterator[None]:
        c = self.fleet.config
        longest = 3 * c.state_timeout_s + c.stage_timeout_s + commits * c.commit_timeout_s
        if not lock.acquire(timeout=longest):
            raise RefusedError(
                "publish",
                f"another publish, for more than {longest:.0f} s",
                "one publish at a time",
                "look at the rollout servers' state, then try again",
                StatusCode.ABORTED,
            )
        try:
            yield
        finally:
            lock.release()

    def _publish(self, version: int, trial: bool = True) -> PublishResult:
        """Stage and commit.

        Args:
            version: the release.
            trial: try it out first, where trials are on; otherwise it goes to all servers, and from
                its canaries too where that fails.
        """
        self._drop_staged()
        result = self._stage(version)
        with self.committed_alone():
            if result.draft is not None:
                return self._commit(result, 0, "", trial)
            if not trial and result.draft_version != version:
                why = "the others could not stage it"
                result.outcomes |= self._undo(version, (), {}, why)
            return result

    def _stage(self, version: int) -> PublishResult:
        """Stage on every reachable server that serves another release, or on none of them."""
        self.fleet.refresh()
        states = self.fleet.states()
        self.looked(states)
        outcomes = {address: ServerOutcome() for address in states}
        for address, state in states.items():
            outcomes[address].saw(state)
        reached = {a: o.state for a, o in outcomes.items() if o.state is not None}
        behind = [a for a, s in reached.items() if not self.payloads.is_served(s, version)]
        if not behind:
            if reached:
                self.promotions.serves(version)
            return PublishResult(version, outcomes)
        draft = self.payloads.get(version)
        # No other draft will be committed: what is left there would only take this one's memory.
        self.fleet.abort_strays(states, (draft.stage_id,))

        def stage(client: RolloutClient) -> None:
            outcome, began = outcomes[client.address], time.monotonic()
            answer = client.stage(draft)
            if isinstance(answer, Failure):
                outcome.error = f"staging failed: {answer.text}"
            else:
                outcome.staged, outcome.stage_seconds = True, time.monotonic() - began
                self.counters.stage_seconds.observe(outcome.stage_seconds)

        self.fleet.each(stage, behind)
        failed = [address for address in behind if not outcomes[address].staged]
        if not failed:
            return PublishResult(version, outcomes, True, draft)
        self.fleet.each(lambda client: client.abort([draft.stage_id]), behind)
        self._note("stage_failed", version, "; ".join(f"{a}: {outcomes[a].error}" for a in failed))
        for address in set(behind) - set(failed):
            error = f"{draft.stage_id} was aborted: staging failed on {', '.join(failed)}"
            outcomes[address].staged, outcomes[address].error = False, error
        return PublishResult(self.promotions.now.last_good, outcomes)

    def _commit(
        self,
        staged: PublishResult | None,
        policy_version: int,
        policy_stage_id: str,
        trial: bool = True,
    ) -> PublishResult:
        """Commit on every server; a draft that fails on one of its holders is undone on all."""
        if policy_version:
            self.lag.before_policy(self.fleet, policy_version)
        now, canary = self.promotions.now, self._canary if trial else None
        draft = staged.draft if staged is not None else None
        holders = staged.holders if staged is not None else []
        chosen = canary.choose(holders) if canary is not None else tuple(holders)
        others = [address for address in holders if address not in chosen]
        refusal = ""
        if draft is not None:
            try:
                # Servers that are on trial already stay on it until all have committed.
                self.promotions.intends(draft.version, chosen if others else now.canaries)
            except RefusedError as error:
                self._note("not_committed", draft.version, str(error))
                refusal = f"{draft.stage_id} was not committed: {error}"
                self._abort(staged)
                chosen = ()
        outcomes = {
            address: staged.outcomes[address]
            if staged is not None and address in holders
            else ServerOutcome()
            for address in dict.fromkeys((*self.fleet.addresses, *chosen))
        }
        self.fleet.each(
            lambda client: commit_on(
                client,
                draft if client.address in chosen else None,
                policy_version,
                policy_stage_id,
                outcomes[client.address],
            ),
            outcomes,
        )
        for outcome in outcomes.values():
            if outcome.committed:
                self.counters.commit_seconds.observe(outcome.commit_seconds)
            outcome.error = outcome.error or refusal
        result = PublishResult(now.last_good, outcomes, draft=draft)
        if draft is None or refusal:
            if policy_stage_id:
                missed = not all(outcome.committed for outcome in outcomes.values())
                self.counters.published("policy_failed" if missed else "policy_only")
        else:
            self._finish(result, draft.version, chosen, others, canary, bool(policy_stage_id))
        self.lag.apply(self.fleet, {a: o.state for a, o in outcomes.items()})
        return result

    def _finish(
        self,
        result: PublishResult,
        version: int,
        chosen: Sequence[str],
        others: Sequence[str],
        canary: Canary | None,
        with_policy: bool,
    ) -> None:
        """Write down that a draft is live on ``chosen``, or undo it everywhere."""
        incumbent = result.draft_version
        failed = [a for a in chosen if not result.outcomes[a].draft_committed]
        why = f"it failed on {', '.join(failed)}" if failed else ""
        if not failed:
            # Not inside the transaction: reports of servers take other locks.
            trial = canary.plan(version, incumbent, chosen, others) if canary is not None else None
            try:
                with self.promotions.state.transaction():
                    if not others:
                        self.promotions.serves(version)
                        self.promotions.state.events.published("committed", version, "")
                    if canary is not None and trial is not None:
                        canary.begin(trial)
            except RefusedError as error:
                # The disk does not know that it is live, so it must not be.
                why = str(error)
        if not why:
            result.changes = True
            if not others:
                result.draft_version = version
                self.counters.published("committed")
            return
        undo = [a for a in chosen if result.outcomes[a].draft_committed]
        result.outcomes |= self._undo(version, undo, result.outcomes, why, with_policy)

    def _undo(
        self,
        version: int,
        addresses: Sequence[str],
        outcomes: dict[str, ServerOutcome],
        why: str,
        policy_committed: bool = False,
    ) -> dict[str, ServerOutcome]:
        """Put servers, and those that serve ``version`` on trial, on the last good release."""
        now = self.promotions.now
        affected = dict.fromkeys((*addresses, *now.canaries))
        restored = self._restore(now.last_good, affected, outcomes)
        text = f"draft {version} was rolled back: {why}"
        for outcome in restored.values():
            outcome.committed = policy_committed
            outcome.error = f"{text}; {outcome.error}" if outcome.error else text
        try:
            self.promotions.undone()
        except RefusedError as error:
            # It stays intended on disk, which a restart takes for "undo it", as it should.
            logger.error("%s", error)
        self._note("rolled_back", version, why)
        return restored

    def _roll_back(self, event: str, reason: str, failed: bool = False) -> PublishResult:
        """To the last good release from a trial on some servers, else to the one before it.

        A pin holds a release that an operator rolled back to, not one that a failed trial did.
        """
        self._drop_staged()
        reason = reason or "no reason given"
        with self.committed_alone():
            with self.promotions.state.transaction():
                now = self.promotions.now
                if now.canaries and now.intent is not None:
                    version, target = now.intent, now.last_good
                    self.promotions.give_up(version)
                else:
                    version, target = now.last_good, self.promotions.roll_back(unpin=failed)
                if self._canary is not None:
                    self._canary.end()
                self.promotions.state.events.published(event, version, reason)
            outcomes = self._restore(target, self.fleet.addresses, {})
        self.fleet.each(lambda client: client.abort([f"draft-{version}"]))
        self.counters.published(event)
        logger.warning("rolled back to draft %d: %s", target, reason)
        return PublishResult(target, outcomes, True)

    def _restore(
        self, target: int, addresses: Iterable[str], outcomes: dict[str, ServerOutcome]
    ) -> dict[str, ServerOutcome]:
        """Put servers on release ``target``; their outcomes, with what failed."""
        restored = {a: replace(outcomes.get(a, ServerOutcome())) for a in addresses}

        def restore(client: RolloutClient) -> None:
            outcome = restored[client.address]
            answer = put_on(client, target, self.payloads)
            outcome.draft_committed = False
            outcome.committed = not isinstance(answer, Failure)
            outcome.state = None if isinstance(answer, Failure) else answer
            if isinstance(answer, Failure):
                outcome.error = f"putting it on draft {target} failed: {answer.text}"

        self.fleet.each(restore, restored)
        return restored

    def _undo_interrupted(self) -> None:
        """After a restart: commits that have begun and did not end are undone by ``reconcile``; a
        trial goes on."""
        now = self.promotions.now
        trial = self._canary.trial if self._canary is not None else None
        if now.intent is None or (trial is not None and trial.shared and now.canaries):
            return
        state = self.promotions.state
        with state.transaction():
            self.promotions.undone()
            state.set_trial(None)
            state.events.published("interrupted", now.intent, "the trainer ended between commits")
        self.counters.published("interrupted")

    def _drop_staged(self) -> None:
        """Abort a stage that was never committed, or that another publish replaces."""
        with self._handover:
            staged, self._staged = self._staged, None
        self._abort(staged)

    def _abort(self, staged: PublishResult | None) -> None:
        """Have the holders forget a stage."""
        if staged is not None and staged.draft is not None:
            stage_id = staged.draft.stage_id
            self.fleet.each(lambda client: client.abort([stage_id]), staged.holders)

    def _note(self, event: str, version: int, reason: str) -> None:
        self.counters.published(event)
        self.promotions.state.events.published(event, version, reason)
        logger.warning("draft %d, %s: %s", version, event, reason)
