"""Puts a release on the fleet in two phases: stage on every server, then commit on every server.

Stage: every reachable server that serves another release verifies it while it generates. One that
refuses it makes all forget it. One that is late or gone is left out: it is not ready until it has
what is live, and ``reconcile`` catches it up.

Commit: the intent is on disk first, then one call per server between two engine steps, with the
policy's weights where there are some. A lost answer is settled by reading the server's state, never
by assuming. Where one server fails, all are put back on the release before and the policy is
committed without the draft. A trainer that dies in between undoes it when it is back.

What is live is on trial until its live acceptance is compared with the last good release's.

``_publish_lock`` lets one publish at a time stage. ``_commit_lock`` guards what the servers serve
and which stage waits for a commit: a policy's commit does not wait for a publish that is still
staging. It does wait for a roll back, which stages on servers that no longer hold the release
before. Both are taken in this order.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from draft_trainer.counters import Counters
from draft_trainer.releases.commits import (
    Payloads,
    PublishResult,
    ServerOutcome,
    commit_on_all,
    put_all_on,
    stage_on,
)
from draft_trainer.releases.fleet import STAGES_AT_ONCE, Fleet
from draft_trainer.releases.pointer import PointerStore
from draft_trainer.releases.registry import Registry
from draft_trainer.releases.rollout_client import POLICY_SECONDS, Failure, RolloutClient
from draft_trainer.releases.states import ReleaseEvent
from draft_trainer.releases.trial import Trials
from slipstream.errors import RefusedError, StatusCode
from slipstream.v1 import rollout_server_pb2 as pb

logger = logging.getLogger(__name__)

Pin = bool | None

TRIAL_EVENTS = {
    ReleaseEvent.PASS: "trial_passed",
    ReleaseEvent.FAIL: "trial_rolled_back",
    ReleaseEvent.FIND_TOO_LITTLE: "trial_undecided",
}
"""The events (``state.KINDS``) that the ends of trials are noted as."""


class Publisher:
    """The owner of what the fleet serves. Thread-safe."""

    def __init__(
        self,
        fleet: Fleet,
        registry: Registry,
        pointer: PointerStore,
        counters: Counters,
        trials: Trials | None = None,
    ) -> None:
        self.fleet = fleet
        self.pointer = pointer
        self.counters = counters
        self.payloads = Payloads(registry, fleet.config.shared_registry)
        self._registry = registry
        self._trials = trials
        self._publish_lock = threading.Lock()
        self._commit_lock = threading.Lock()
        self._staged: PublishResult | None = None  # guarded by _commit_lock
        self._undo_interrupted()
        if trials is not None:
            trials.resume(pointer.now)

    def prepare(self, until: float = math.inf) -> PublishResult:
        """Stage the promoted release on every reachable server that serves another one.

        Staging that fails anywhere is undone everywhere; the outcomes say why. ``until``: as in
        ``promote``.
        """
        with self._publishing(until):
            promoted = self.pointer.now.promoted
            # What a sync that ended early has left is not sent again.
            self._drop_staged(until, unless=promoted)
            result = self._stage(promoted)
            with self.committing(until):
                self._staged = result if result.draft is not None else None
            return result

    def complete(self, policy_version: int, policy_stage_id: str) -> PublishResult:
        """Commit what ``prepare`` staged, together with a staged policy, in one call per server."""
        with self.committing():
            try:
                return self._commit(self._staged, policy_version, policy_stage_id)
            finally:
                self._staged = None

    def promote(self, version: int, pin: bool, until: float = math.inf) -> PublishResult:
        """Stage and commit a release now. The pointer moves only when the fleet does.

        Raises:
            RefusedError: no such release (NOT_FOUND), or another publish is under way (ABORTED), at
                the monotonic time ``until`` at the latest: the caller does not wait any longer.
        """
        self._registry.get(version)
        with self._publishing(until):
            result = self._publish(version, until, pin)
            if result.draft is None and result.draft_version == version:
                self.pointer.promote(version, pin)  # It was live, or no server is reachable.
            return result

    def publish_promoted(self) -> PublishResult:
        """Stage and commit the promoted release now, where it is not served yet."""
        with self._publishing():
            return self._publish(self.pointer.now.promoted)

    def roll_back(
        self, reason: str, failed: int | None = None, until: float = math.inf
    ) -> PublishResult:
        """Put every reachable server on the newest good release before the live one; where a
        release is on trial, on the last good one.

        Args:
            reason: for the events.
            failed: the release that failed, which is left only while it is live; None: an
                operator asks.
            until: as in ``promote``.

        Raises:
            RefusedError: FAILED_PRECONDITION, there is none; ABORTED, a publish is under way.
        """
        with self._publishing(until), self.committing(until):
            return self._roll_back(reason, failed)

    def settle(self) -> bool:
        """End the trial under way if it has a result: the release is good, or rolled back.

        What is undecided stays on trial until it can be decided or another release replaces it.

        Returns:
            Whether something changed.

        Raises:
            RefusedError: another publish is under way (ABORTED), or the disk is full.
        """
        pointer, trials = self.pointer, self._trials
        result = None if trials is None else trials.result(pointer.now, self.fleet.addresses)
        if result is None:
            return False
        with self._publishing(), self.committing():
            if not result.is_of(pointer.now):  # A sync has replaced it meanwhile.
                return False
            if result.event is ReleaseEvent.FAIL:
                return self._roll_back(result.reason, result.version).changes
            with pointer.state.transaction():
                if result.event is ReleaseEvent.PASS:
                    pointer.passed(result.figures, result.ratio)
                else:
                    pointer.found_too_little(result.reason)
                self._record(TRIAL_EVENTS[result.event], result.version, result.reason)
            return True

    def measure(self) -> None:
        """Keep what a trial compares with: the live acceptance of a good release."""
        now = self.pointer.now
        if self._trials is None or now.on_trial:
            return
        figures = self._trials.figures(now.live, self.fleet.addresses)
        with self.pointer.state.transaction():
            if figures is not None and self.pointer.now == now:
                self.pointer.measured(figures)

    @contextmanager
    def try_pause(self) -> Iterator[frozenset[str] | None]:
        """Keep publishes from starting. Yields the ids of stages that wait for a commit; None, and
        without waiting, while a publish is under way."""
        if not self._publish_lock.acquire(blocking=False):
            yield None
            return
        try:
            staged = self._staged  # ``complete`` clears it once its commits have ended.
            yield frozenset(() if staged is None else staged.stage_ids)
        finally:
            self._publish_lock.release()

    def _publishing(self, until: float = math.inf) -> AbstractContextManager[None]:
        return self._held(self._publish_lock, 2, until)

    def committing(self, until: float = math.inf) -> AbstractContextManager[None]:
        """Hold ``_commit_lock``, to commit something or put it back, but not to stage. Raises
        RefusedError as ``promote``."""
        return self._held(self._commit_lock, 3, until)

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
            pin: unless None, it is promoted, pinned or not, at the moment it goes live.
        """
        self._drop_staged(until)
        result = self._stage(version, pin)
        with self.committing(until):
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
            if reached and version != self.pointer.now.live:
                self._went_live(version, pin)
            return PublishResult(version, outcomes)
        draft = self.payloads.get(version)
        # Only ``complete`` commits another stage: one left over would take this one's memory.
        self.fleet.abort_strays(states, (draft.stage_id,))

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
        return PublishResult(self.pointer.now.live, outcomes)

    def _commit(
        self,
        staged: PublishResult | None,
        policy_version: int,
        policy_stage_id: str,
        pin: Pin = None,
    ) -> PublishResult:
        """Commit on every server; a draft that fails on one of its holders is undone on all."""
        now = self.pointer.now
        draft = staged.draft if staged is not None else None
        holders = staged.holders if staged is not None else []
        chosen, refusal = holders, ""
        if draft is not None:
            try:
                # A server that is caught up with the live release changes no pointer.
                if draft.version != now.live:
                    self.pointer.begin_commit(draft.version)
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
        pointer, trials = self.pointer, self._trials
        now, figures = pointer.now, None
        # Not inside the transaction: reports of servers take other locks.
        if trials is not None and not now.on_trial:
            figures = trials.figures(now.live, self.fleet.addresses)
        with pointer.state.transaction():
            if now.on_trial and version != now.live:
                text = f"draft {version} replaced it before a verdict"
                self._record("trial_undecided", now.live, text)
            if version != now.live and trials is not None and version != now.incumbent:
                pointer.begin_trial(version, figures)
                pointer.state.after_commit(trials.begin)
            elif version != now.live:
                pointer.go_live(version)
            if pin is not None:
                pointer.promote(version, pin)
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
        now, restored = self.pointer.now, dict[str, ServerOutcome]()
        # If servers were caught up with the live release, those that took it stay on it.
        replaced = version != now.live
        if replaced:
            restored = self._restore(now.live, addresses, outcomes)
        text = f"draft {version} was rolled back: {why}"
        for outcome in restored.values():
            outcome.committed = policy_committed
            outcome.error = f"{text}; {outcome.error}" if outcome.error else text
        try:
            self.pointer.undo_commit()
        except RefusedError as error:
            # The intent stays on disk, and a restart undoes it, as it should.
            logger.error("%s", error)
        if replaced:
            self._note("rolled_back", version, why)
        return restored

    def _roll_back(self, reason: str, failed: int | None) -> PublishResult:
        """Put the fleet on a good release. Only a failed trial lets go of a pin."""
        pointer, reason = self.pointer, reason or "no reason given"
        if failed not in (None, pointer.now.live):  # A sync has put another one live.
            return PublishResult(pointer.now.live)
        with pointer.state.transaction():
            version, target = pointer.roll_back() if failed is None else pointer.failed()
            event = "rolled_back_by_hand" if failed is None else "trial_rolled_back"
            self._record(event, version, reason)
        # Not before: if there is no release to go to, what a sync staged is still committed.
        self._abort_staged()
        outcomes = self._restore(target, self.fleet.addresses, {})
        self.fleet.each(lambda client: client.abort([f"draft-{version}"]))
        logger.warning("rolled back to draft %d: %s", target, reason)
        return PublishResult(target, outcomes, True)

    def _restore(
        self, target: int, addresses: Iterable[str], outcomes: dict[str, ServerOutcome]
    ) -> dict[str, ServerOutcome]:
        return put_all_on(self.fleet, target, addresses, outcomes, self.payloads, self.counters)

    def _undo_interrupted(self) -> None:
        """Resume after a restart: commits that began and did not end are undone by ``reconcile``; a
        trial goes on, unless trials are off now."""
        now, pointer = self.pointer.now, self.pointer
        if now.intent is not None:
            with pointer.state.transaction():
                pointer.undo_commit()
                self._record("interrupted", now.intent, "the trainer ended between commits")
        if self._trials is None and now.on_trial:
            pointer.go_live(now.live)

    def _drop_staged(self, until: float, unless: int | None = None) -> None:
        """Forget what waits for a commit, and abort it unless it is this release."""
        with self.committing(until):
            if self._staged is not None and self._staged.draft_version == unless:
                self._staged = None
            self._abort_staged()

    def _abort_staged(self) -> None:
        """Abort the stages that wait for a commit. ``_commit_lock`` is held."""
        staged, self._staged = self._staged, None
        self._abort(staged)

    def _abort(self, staged: PublishResult | None) -> None:
        if staged is not None and (stage_ids := staged.stage_ids):
            self.fleet.each(lambda client: client.abort(stage_ids), staged.holders)

    def _record(self, event: str, version: int, reason: str = "") -> None:
        """Note an event in the transaction under way; count it once that is on disk."""
        self.pointer.state.events.note(event, draft_version=version, reason=reason)
        self.pointer.state.after_commit(lambda: self.counters.published(event))

    def _note(self, event: str, version: int, reason: str) -> None:
        self.counters.published(event)
        self.pointer.state.events.note(event, draft_version=version, reason=reason)
        logger.warning("draft %d, %s: %s", version, event, reason)
