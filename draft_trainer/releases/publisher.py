"""Puts a release on the fleet in two phases: stage on every server, then commit on every server.

Stage: every reachable server that serves another release verifies it while it generates. One that
refuses it makes all forget it. One that is late or gone is left out: it is not ready until it has
what is live, and ``reconcile`` catches it up.

Commit: the intent is on disk first, then one call per server between two engine steps, with the
policy's weights where there are some. A lost answer is settled by reading the server's state, never
by assuming. Where one server fails, all are put back on the release before and the policy is
committed without the draft. A trainer that dies in between undoes it when it is back.

What is live is on trial until its live acceptance is compared with the last good release's.

``_staging`` serialises publishes. ``_committing`` covers the commits and what puts servers back, so
that a policy's commit does not wait for a publish that is still staging. It does wait for a roll
back, which stages on servers that no longer hold the release before.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

from draft_trainer.counters import Counters
from draft_trainer.releases.canary import Canary
from draft_trainer.releases.client import POLICY_SECONDS, Failure, RolloutClient
from draft_trainer.releases.commits import (
    Payloads,
    PublishResult,
    ServerOutcome,
    commit_on_all,
    put_all_on,
    stage_on,
)
from draft_trainer.releases.fleet import STAGES_AT_ONCE, Fleet
from draft_trainer.releases.promotions import Promotions, Trial
from draft_trainer.releases.registry import Registry
from slipstream.errors import RefusedError, StatusCode
from slipstream.v1 import rollout_server_pb2 as pb

logger = logging.getLogger(__name__)

Pin = bool | None


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
        self.payloads = Payloads(registry, fleet.config.shared_registry)
        self._registry = registry
        self._canary = canary
        self._staging = threading.Lock()
        self._committing = threading.Lock()
        self._handover = threading.Lock()
        self._staged: PublishResult | None = None
        self._taken: Counter[str] = Counter()  # ids that ``complete`` is about to commit
        self._undo_interrupted()
        if canary is not None:
            canary.resume(promotions.now)

    def prepare(self, until: float = math.inf) -> PublishResult:
        """Stage the promoted release on every reachable server that serves another one.

        Staging that fails anywhere is undone everywhere; the outcomes say why. ``until``: as in
        ``promote``.
        """
        with self._staged_alone(until):
            promoted = self.promotions.now.promoted
            # What a sync that ended early has left is not sent again.
            self._drop_staged(unless=promoted)
            result = self._stage(promoted)
            with self._handover:
                self._staged = result if result.draft is not None else None
            return result

    def complete(self, policy_version: int, policy_stage_id: str) -> PublishResult:
        """Commit what ``prepare`` staged, together with a staged policy, in one call per server."""
        with self._handover:
            staged, self._staged = self._staged, None
            taken = [] if staged is None else staged.stage_ids
            self._taken += Counter(taken)
        try:
            with self.committed_alone():
                now = self.promotions.now
                other = staged is not None and now.live == now.promoted != staged.draft_version
                if other or not self._taken.keys() >= {*taken}:
                    # Since it was staged, it was rolled back, or another one is live.
                    self._abort(staged)
                    staged = None
                return self._commit(staged, policy_version, policy_stage_id)
        finally:
            with self._handover:
                self._taken -= Counter(taken)

    def promote(self, version: int, pin: bool, until: float = math.inf) -> PublishResult:
        """Stage and commit a release now. The pointer moves only when the fleet does.

        Raises:
            RefusedError: no such release (NOT_FOUND), or another publish is under way (ABORTED), at
                the monotonic time ``until`` at the latest: whoever asked does not wait any longer.
        """
        self._registry.get(version)
        with self._staged_alone(until):
            result = self._publish(version, until, pin)
            if result.draft is None and result.draft_version == version:
                self.promotions.promote(version, pin)  # It was live, or no server is reachable.
            return result

    def publish_promoted(self) -> PublishResult:
        """Stage and commit the promoted release now, where it is not served yet."""
        with self._staged_alone():
            return self._publish(self.promotions.now.promoted)

    def roll_back(
        self, reason: str, failed: int | None = None, until: float = math.inf
    ) -> PublishResult:
        """Put every reachable server on the newest good release before the live one; where a
        release is on trial, on the last good one.

        Args:
            reason: for the events.
            failed: not an operator's wish: what this release showed, if it is live.
            until: as in ``promote``.

        Raises:
            RefusedError: FAILED_PRECONDITION, there is none; ABORTED, a publish is under way.
        """
        with self._staged_alone(until):
            return self._roll_back(reason, failed, until)

    def settle(self) -> bool:
        """End the trial under way if it has a result: the release is good, or rolled back.

        What is undecided stays on trial until it can be decided or another release replaces it.

        Returns:
            Whether something changed.

        Raises:
            RefusedError: another publish is under way (ABORTED), or the disk is full.
        """
        promotions, canary = self.promotions, self._canary
        result = None if canary is None else canary.result(promotions.now, self.fleet)
        if result is None:
            return False
        trial = result.trial
        with self._staged_alone():
            if promotions.now.trial != trial:
                return False
            if result.event == "canary_rolled_back":
                return self._roll_back(result.reason, trial.version).changes
            with self.committed_alone():
                if promotions.now.trial != trial:  # A sync has replaced it meanwhile.
                    return False
                with promotions.state.transaction():
                    if result.event == "canary_undecided":
                        promotions.on_trial(replace(trial, undecided=result.reason))
                    else:
                        promotions.serves(trial.version, result.figures)
                    self._record(result.event, trial.version, result.reason)
            return True

    def measure(self) -> None:
        """Keep what a trial compares with: the live acceptance of a good release."""
        now = self.promotions.now
        if self._canary is None or now.trial is not None:
            return
        figures = self._canary.figures(now.live, self.fleet.addresses)
        with self.promotions.state.transaction():
            if figures is not None and self.promotions.now == now:
                self.promotions.measured(figures)

    @contextmanager
    def at_rest(self) -> Iterator[frozenset[str] | None]:
        """Keep publishes from starting. Yields the ids of stages that wait for a commit; None, and
        without waiting, while a publish is under way."""
        if not self._staging.acquire(blocking=False):
            yield None
            return
        try:
            with self._handover:
                waiting = {*self._taken, *(() if self._staged is None else self._staged.stage_ids)}
            yield frozenset(waiting)
        finally:
            self._staging.release()

    def _staged_alone(self, until: float = math.inf) -> AbstractContextManager[None]:
        return self._held(self._staging, 2, until)

    def committed_alone(self, until: float = math.inf) -> AbstractContextManager[None]:
        """Held while something is committed or put back, not while a publish stages."""
        return self._held(self._committing, 3, until)

    @contextmanager
    def _held(self, lock: threading.Lock, commits: int, until: float) -> Iterator[None]:
        c = self.fleet.config
        stages = math.ceil(len(self.fleet.addresses) / STAGES_AT_ONCE) * c.stage_timeout_s
        longest = 3 * c.state_timeout_s + stages + commits * c.commit_timeout_s
        # A policy with the draft, then, where that fails, the policy alone.
        longest = min(longest + 2 * POLICY_SECONDS, max(0.0, until - time.monotonic()))
        if not lock.acquire(timeout=longest):
            found = f"another publish, for more than {longest:.0f} s"
            next_step = "look at the rollout servers' state, then try again"
            expected = "one publish at a time"
            raise RefusedError("publish", found, expected, next_step, StatusCode.ABORTED)
        try:
            yield
        finally:
            lock.release()

    def _publish(self, version: int, until: float = math.inf, pin: Pin = None) -> PublishResult:
        """Stage and commit.

        Args:
            version: the release.
            until: as in ``promote``.
            pin: not None: it is promoted, pinned or not, in the moment in which it goes live.
        """
        self._drop_staged()
        result = self._stage(version, pin)
        with self.committed_alone(until):
            return result if result.draft is None else self._commit(result, 0, "", pin)

    def _stage(self, version: int, pin: Pin = None) -> PublishResult:
        """Stage on every reachable server that serves another release, but for those that are late
        or gone; or on none of them."""
        self.fleet.refresh()
        states = self.fleet.states()
        outcomes = {address: ServerOutcome() for address in states}
        for address, state in states.items():
            outcomes[address].saw(state)
        reached = {a: o.state for a, o in outcomes.items() if o.state is not None}
        behind = [a for a, s in reached.items() if not self.payloads.is_served(s, version)]
        if not behind:
            if reached and version != self.promotions.now.live:
                self._went_live(version, pin)
            return PublishResult(version, outcomes)
        draft = self.payloads.get(version)
        # No other will be committed but by ``complete``: what is left would take this one's memory.
        self.fleet.abort_strays(states, (draft.stage_id, *self._taken))

        def stage(client: RolloutClient) -> pb.StageResult | Failure:
            return stage_on(client, draft, draft.stage_id, self.fleet, self.counters)

        failed, refused = [], False
        for address, answer in self.fleet.each(stage, behind).items():
            if isinstance(answer, Failure):
                outcomes[address].error = f"staging failed: {answer.text}"
                failed.append(address)
                refused = refused or not answer.unknown_fate
            else:
                outcomes[address].staged, outcomes[address].stage_seconds = True, answer.seconds
        if not refused and len(failed) < len(behind):
            return PublishResult(version, outcomes, True, draft)
        self.fleet.each(lambda client: client.abort([draft.stage_id]), behind)
        self._note("stage_failed", version, "; ".join(f"{a}: {outcomes[a].error}" for a in failed))
        for address in set(behind) - set(failed):
            error = f"{draft.stage_id} was aborted: staging failed on {', '.join(failed)}"
            outcomes[address].staged, outcomes[address].error = False, error
        return PublishResult(self.promotions.now.live, outcomes)

    def _commit(
        self,
        staged: PublishResult | None,
        policy_version: int,
        policy_stage_id: str,
        pin: Pin = None,
    ) -> PublishResult:
        """Commit on every server; a draft that fails on one of its holders is undone on all."""
        now = self.promotions.now
        draft = staged.draft if staged is not None else None
        holders = staged.holders if staged is not None else []
        chosen, refusal = holders, ""
        if draft is not None:
            try:
                self.promotions.intends(draft.version)
            except RefusedError as error:
                self._note("not_committed", draft.version, str(error))
                refusal = f"{draft.stage_id} was not committed: {error}"
                self._abort(staged)
                chosen = []
        known = {} if staged is None else {address: staged.outcomes[address] for address in holders}
        addresses = dict.fromkeys((*self.fleet.addresses, *chosen))
        outcomes = {address: known.get(address, ServerOutcome()) for address in addresses}
        commit_on_all(self.fleet, draft, chosen, policy_version, policy_stage_id, outcomes)
        without = staged.without if staged is not None else {}
        for address, outcome in outcomes.items():
            if outcome.committed:
                self.counters.commit_seconds.observe(outcome.commit_seconds)
            outcome.error = outcome.error or refusal or without.get(address, "")
        result = PublishResult(now.live, outcomes, draft=draft)
        if draft is None or refusal:
            if policy_stage_id:
                missed = not all(outcome.committed for outcome in outcomes.values())
                self.counters.published("policy_failed" if missed else "policy_only")
        else:
            failed = [address for address in chosen if not outcomes[address].draft_committed]
            why = f"it failed on {', '.join(failed)}" if failed else ""
            try:
                if not failed:
                    self._went_live(draft.version, pin)
            except RefusedError as error:
                # The disk does not know that it is live, so it must not be.
                why = str(error)
            if why:
                undo = [address for address in chosen if outcomes[address].draft_committed]
                restored = self._undo(draft.version, undo, outcomes, why, bool(policy_stage_id))
                result.outcomes |= restored
            else:
                result.changes = True
                result.draft_version = draft.version
                left, live = [draft.stage_id], draft.on_the_fleet
                self.fleet.start(lambda client: client.abort(left, live), without)
        return result

    def _went_live(self, version: int, pin: Pin) -> None:
        """Write down that the fleet serves a release; its trial begins, if it needs one.

        Args:
            version: the release.
            pin: as in ``_publish``.

        Raises:
            RefusedError: it cannot be written.
        """
        promotions, canary = self.promotions, self._canary
        now = promotions.now
        # Not inside the transaction: reports of servers take other locks.
        figures = None
        if canary is not None and now.trial is None:
            figures = canary.figures(now.live, self.fleet.addresses)
        trial = Trial(version, now.incumbent, time.time())
        with promotions.state.transaction():
            if now.trial is not None and version != now.live:
                text = f"draft {version} replaced it before a verdict"
                self._record("canary_undecided", now.trial.version, text)
                trial = replace(now.trial, version=version)
            if canary is not None and version not in (now.live, now.incumbent):
                promotions.on_trial(trial, figures)
                promotions.state.after_commit(canary.begin)
            elif version == now.live and now.trial is not None:
                promotions.undone()
            else:
                promotions.serves(version)
            if pin is not None:
                promotions.promote(version, pin)
            self._record("committed", version)

    def _undo(
        self,
        version: int,
        addresses: Sequence[str],
        outcomes: dict[str, ServerOutcome],
        why: str,
        policy_committed: bool = False,
    ) -> dict[str, ServerOutcome]:
        """Put servers on the live release."""
        now, restored = self.promotions.now, dict[str, ServerOutcome]()
        # Servers that were caught up with the live one: those that took it stay on it.
        replaced = version != now.live
        if replaced:
            restored = self._restore(now.live, addresses, outcomes)
        text = f"draft {version} was rolled back: {why}"
        for outcome in restored.values():
            outcome.committed = policy_committed
            outcome.error = f"{text}; {outcome.error}" if outcome.error else text
        try:
            self.promotions.undone()
        except RefusedError as error:
            # It stays intended on disk, which a restart takes for "undo it", as it should.
            logger.error("%s", error)
        if replaced:
            self._note("rolled_back", version, why)
        return restored

    def _roll_back(self, reason: str, failed: int | None, until: float = math.inf) -> PublishResult:
        """To a good release. Only a failed trial lets go of a pin."""
        promotions, reason = self.promotions, reason or "no reason given"
        with self.committed_alone(until):
            if failed not in (None, promotions.now.live):  # A sync has put another one live.
                return PublishResult(promotions.now.live)
            with promotions.state.transaction():
                by_hand, tried = failed is None, self._canary is not None
                version, target = promotions.roll_back(tried) if by_hand else promotions.failed()
                event = "rolled_back_by_hand" if by_hand else "canary_rolled_back"
                self._record(event, version, reason)
            # Only now: where there is none to go to, what a sync has staged is still committed.
            self._drop_staged()
            with self._handover:
                self._taken.pop(f"draft-{version}", None)
            if self._canary is not None:
                self._canary.begin()
            outcomes = self._restore(target, self.fleet.addresses, {})
        self.fleet.each(lambda client: client.abort([f"draft-{version}"]))
        logger.warning("rolled back to draft %d: %s", target, reason)
        return PublishResult(target, outcomes, True)

    def _restore(
        self, target: int, addresses: Iterable[str], outcomes: dict[str, ServerOutcome]
    ) -> dict[str, ServerOutcome]:
        return put_all_on(self.fleet, target, addresses, outcomes, self.payloads, self.counters)

    def _undo_interrupted(self) -> None:
        """After a restart: commits that have begun and did not end are undone by ``reconcile``; a
        trial goes on, unless there are none any more."""
        now, promotions = self.promotions.now, self.promotions
        if self._canary is None and now.trial is not None:
            promotions.serves(now.live)
        if now.intent is None:
            return
        with promotions.state.transaction():
            promotions.undone()
            self._record("interrupted", now.intent, "the trainer ended between commits")

    def _drop_staged(self, unless: int | None = None) -> None:
        with self._handover:
            staged, self._staged = self._staged, None
        if staged is not None and staged.draft_version != unless:
            self._abort(staged)

    def _abort(self, staged: PublishResult | None) -> None:
        if staged is not None and (stage_ids := staged.stage_ids):
            self.fleet.each(lambda client: client.abort(stage_ids), staged.holders)

    def _record(self, event: str, version: int, reason: str = "") -> None:
        """An event of the transaction under way, counted once that is on disk."""
        self.promotions.state.events.note(event, draft_version=version, reason=reason)
        self.promotions.state.after_commit(lambda: self.counters.published(event))

    def _note(self, event: str, version: int, reason: str) -> None:
        self.counters.published(event)
        self.promotions.state.events.note(event, draft_version=version, reason=reason)
        logger.warning("draft %d, %s: %s", version, event, reason)
