"""Puts releases on the fleet: stage everywhere, then commit everywhere, or end where it began.

A server that does not answer before anything was staged is left out and caught
up at the next publish; a server that fails after that makes the whole publish
fail, and every server that had committed is put back to the last good release.
The policy is never held up by a draft: where a combined commit fails, the policy
is committed alone.

Two locks. ``_staging`` serialises publishes; ``_committing`` covers only the
commits, so that a policy's commit waits for another commit at most, never for
another publish that is still staging.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from draft_trainer.releases.commits import (
    CommitOrder,
    Outcome,
    Payloads,
    Prepared,
    Published,
    commit_on,
    restore_on,
    with_state,
)
from draft_trainer.releases.fleet import Failure, Fleet
from draft_trainer.releases.promotions import Promotions
from draft_trainer.releases.registry import Registry
from draft_trainer.sidecar.board import Board
from slipstream.refusal import RefusedError, StatusCode
from slipstream.v1 import rollout_server_pb2 as rollout_pb

logger = logging.getLogger(__name__)


class Publisher:
    """Owner of what the fleet serves. Safe to call from several threads.

    Args:
        fleet: the rollout servers; closed by its own owner.
        registry: where releases are read from.
        promotions: which release is wanted, and which were served.
        board: counts stages, commits and outcomes.
    """

    def __init__(
        self, fleet: Fleet, registry: Registry, promotions: Promotions, board: Board
    ) -> None:
        self._fleet = fleet
        self._registry = registry
        self._payloads = Payloads(registry)
        self._promotions = promotions
        self._board = board
        self._staging = threading.Lock()
        self._committing = threading.Lock()
        self._handover = threading.Lock()
        self._prepared: Prepared | None = None

    def prepare(self) -> Published:
        """Stage the promoted release on every reachable server that serves another one.

        Staging that fails anywhere is undone everywhere and told in the outcomes.
        """
        with self._staged_alone():
            self._drop_prepared()
            prepared, published = self._stage(self._promotions.now.promoted)
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
            published, done = self._publish(version)
            if done:
                self._promotions.promote(version, pin)
                self._board.touch()
            return published

    def publish_promoted(self) -> Published:
        """Stage and commit the promoted release now, where it is not served yet."""
        with self._staged_alone():
            return self._publish(self._promotions.now.promoted)[0]

    def roll_back(self, reason: str) -> Published:
        """Put every reachable server back to the release that was served before the last good one.

        Args:
            reason: for the log.

        Raises:
            RefusedError: there is none (FAILED_PRECONDITION), or another publish is
                under way (ABORTED).
        """
        with self._staged_alone():
            self._drop_prepared()
            with self._committed_alone():
                target = self._promotions.roll_back()
                outcomes = self._restore(target, {a: Outcome() for a in self._fleet.addresses})
        self._board.published("rolled_back_by_hand")
        logger.warning("rolled back by hand to draft %d: %s", target, reason or "no reason given")
        return Published(target, True, outcomes)

    def _publish(self, version: int) -> tuple[Published, bool]:
        """Stage and commit; whether the reachable servers serve ``version`` now."""
        self._drop_prepared()
        prepared, published = self._stage(version)
        if prepared is None:
            return published, published.draft_version == version
        with self._committed_alone():
            published = self._commit(prepared, 0, "")
        return published, published.changes

    def _stage(self, version: int) -> tuple[Prepared | None, Published]:
        """Stage on every reachable server that serves another release, or on none of them."""
        states = self._fleet.states()
        outcomes = {a: with_state(Outcome(), state) for a, state in states.items()}
        behind = [
            a
            for a, state in states.items()
            if not isinstance(state, Failure) and state.draft_version != version
        ]
        if not behind:
            if any(outcome.state is not None for outcome in outcomes.values()):
                self._promotions.serves(version)
            return None, Published(version, False, outcomes)
        draft = self._payloads.get(version)
        answers = self._fleet.each(lambda client: client.stage(draft), behind)
        failed = []
        for address, answer in answers.items():
            if isinstance(answer, Failure):
                failed.append(address)
                error = f"staging failed: {answer.text}"
                outcomes[address] = replace(outcomes[address], error=error)
            else:
                self._board.staged(answer.seconds)
                outcomes[address] = replace(
                    outcomes[address], staged=True, stage_seconds=answer.seconds
                )
        if not failed:
            return Prepared(draft, outcomes), Published(version, True, outcomes)
        self._fleet.each(lambda client: client.abort([draft.stage_id]), behind)
        self._board.published("stage_failed")
        logger.warning("%s was not published: staging failed on %s", draft.stage_id, failed)
        for address in set(behind) - set(failed):
            error = f"{draft.stage_id} was aborted: staging failed on {', '.join(failed)}"
            outcomes[address] = replace(outcomes[address], staged=False, error=error)
        return None, Published(self._promotions.now.last_good, False, outcomes)

    def _commit(
        self, prepared: Prepared | None, policy_version: int, policy_stage_id: str
    ) -> Published:
        """Commit on every server; a draft that fails on one of its holders is undone on all."""
        good = self._promotions.now.last_good
        before = prepared.outcomes if prepared else {}
        holders = [a for a, outcome in before.items() if outcome.staged]
        orders = {
            a: CommitOrder(
                prepared.draft if prepared and a in holders else None,
                policy_version,
                policy_stage_id,
            )
            for a in self._fleet.addresses
        }
        after = self._fleet.each(
            lambda client: commit_on(
                client,
                orders[client.address],
                before[client.address] if client.address in holders else Outcome(),
            )
        )
        for outcome in after.values():
            if outcome.committed:
                self._board.committed(outcome.commit_seconds)
        if prepared is None:
            if policy_stage_id:
                failed = [a for a in after if not after[a].committed]
                self._board.published("policy_failed" if failed else "policy_only")
            return Published(good, False, after)
        version = prepared.draft.version
        failed = [a for a in holders if not after[a].draft_committed]
        if not failed:
            self._promotions.serves(version)
            self._board.published("committed")
            return Published(version, True, after)
        why = f"draft {version} was rolled back: it failed on {', '.join(failed)}"
        undo = {a: after[a] for a in holders if after[a].draft_committed}
        restored = self._restore(good, undo)
        for address, outcome in restored.items():
            error = f"{why}; {outcome.error}" if outcome.error else why
            committed = bool(policy_stage_id)
            after[address] = replace(outcome, committed=committed, error=error)
        self._board.published("rolled_back")
        logger.warning("%s", why)
        return Published(good, False, after)

    def _restore(self, target: int, outcomes: dict[str, Outcome]) -> dict[str, Outcome]:
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
                self._board.committed(answer.seconds)
                restored[address] = replace(
                    outcome,
                    committed=True,
                    state=answer.value.state,
                    commit_seconds=answer.seconds,
                )
        return restored

    def _drop_prepared(self) -> None:
        """Abort a stage whose window was never closed, or that another publish replaces."""
        with self._handover:
            prepared, self._prepared = self._prepared, None
        if prepared is not None:
            stage_id = prepared.draft.stage_id
            holders = [a for a, o in prepared.outcomes.items() if o.staged]
            self._fleet.each(lambda client: client.abort([stage_id]), holders)

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
