"""The phases of a publish over the whole fleet: stage, commit, put back.

The caller serialises. What each phase leaves behind: staging holds the release on
every server that can be reached or on none; a commit that fails anywhere is undone
everywhere, trial servers included. What is intended is on disk before the first
commit, so a trainer that dies in between undoes it when it is back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
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
from draft_trainer.releases.fleet_look import look
from draft_trainer.releases.promotions import Promotions
from draft_trainer.sidecar.board import Board
from slipstream.refusal import RefusedError
from slipstream.v1 import rollout_server_pb2 as rollout_pb

logger = logging.getLogger(__name__)


class Phases:
    """See the module.

    Args:
        fleet: the rollout servers.
        payloads: releases, ready to stage.
        promotions: which release is wanted, served and intended.
        board: counts stages, commits and outcomes.
    """

    def __init__(
        self, fleet: Fleet, payloads: Payloads, promotions: Promotions, board: Board
    ) -> None:
        self._fleet = fleet
        self._payloads = payloads
        self._promotions = promotions
        self._board = board

    def stage(self, version: int) -> tuple[Prepared | None, Published]:
        """Stage on every reachable server that serves another release, or on none of them."""
        self._fleet.refresh()
        states = self._fleet.states()
        self._board.looked(look(states, self._promotions.now, self._payloads))
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
                self._board.staged(answer.seconds)
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
                self._board.committed(outcome.commit_seconds)
        good = self._promotions.now.last_good
        if prepared is None or refusal:
            if policy_stage_id:
                missed = [a for a in after if not after[a].committed]
                self._board.published("policy_failed" if missed else "policy_only")
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
                self._board.committed(answer.seconds)
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
        self._board.published(event)
        self._promotions.log.note(event, version, reason)
        if reason:
            logger.warning("draft %d, %s: %s", version, event, reason)
