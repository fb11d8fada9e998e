"""Puts releases on the fleet: stage everywhere, then commit everywhere, or end where it began.

A server that does not answer before anything was staged is left out and caught up by
``heal``; a server that fails after that makes the whole publish fail, and every server
that had committed is put back to the last good release. The policy is never held up by
a draft: where a combined commit fails, the policy is committed alone.

Two locks. ``_staging`` serialises publishes; ``_committing`` covers only the commits, so
that a policy's commit waits for another commit at most, never for another publish that
is still staging.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from draft_trainer.releases.canary import Canary
from draft_trainer.releases.commits import Outcome, Payloads, Prepared, Published
from draft_trainer.releases.draft_lag import DraftLag
from draft_trainer.releases.fleet import Fleet
from draft_trainer.releases.healing import Healing
from draft_trainer.releases.phases import Phases
from draft_trainer.releases.promotions import Promotions
from draft_trainer.releases.registry import Registry
from draft_trainer.sidecar.board import Board
from slipstream.refusal import RefusedError, StatusCode

logger = logging.getLogger(__name__)


class Publisher:
    """Owner of what the fleet serves. Safe to call from several threads.

    Args:
        fleet: the rollout servers; closed by its own owner.
        registry: where releases are read from.
        promotions: which release is wanted, and which were served.
        board: counts stages, commits and outcomes.
        canary: tries releases out; None for no trials.
        max_draft_lag: see ``DraftLag``.
    """

    def __init__(
        self,
        fleet: Fleet,
        registry: Registry,
        promotions: Promotions,
        board: Board,
        canary: Canary | None = None,
        max_draft_lag: int = 0,
    ) -> None:
        self._fleet = fleet
        self._registry = registry
        self._payloads = Payloads(registry)
        self._promotions = promotions
        self._board = board
        self._canary = canary
        self._lag = DraftLag(max_draft_lag)
        self._phases = Phases(fleet, self._payloads, promotions, board)
        self._healing = Healing(fleet, self._payloads, promotions, board, self._lag)
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
                self._board.touch()
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
        self._board.published(event)
        self._promotions.log.note(event, version, reason)

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
