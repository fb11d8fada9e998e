"""Brings servers that serve something else than wanted back in line, one round at a time.

A server may have restarted with the draft on its command line, slept at level 2 and
lost its draft, been away during a publish, or been written to by somebody else. Its own
account (version, checksum, what its workers read back) is compared with what is wanted;
a server that does not come right is tried again less and less often and stays marked
not ready by its own health service.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

from draft_trainer.releases.commits import Payloads, restore_on, stage_on
from draft_trainer.releases.draft_lag import DraftLag
from draft_trainer.releases.fleet import Failure, Fleet, RolloutClient
from draft_trainer.releases.fleet_look import look
from draft_trainer.releases.promotions import Promotions
from draft_trainer.sidecar.board import Board
from slipstream.v1 import rollout_server_pb2 as pb

logger = logging.getLogger(__name__)

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
        board: counts what was healed.
        lag: whether each server should speculate.
    """

    def __init__(
        self,
        fleet: Fleet,
        payloads: Payloads,
        promotions: Promotions,
        board: Board,
        lag: DraftLag,
    ) -> None:
        self._fleet = fleet
        self._payloads = payloads
        self._promotions = promotions
        self._board = board
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
        self._board.looked(look(states, self._promotions.now, self._payloads))
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
        self._board.healed(fault.reason, not isinstance(answer, Failure))
        if isinstance(answer, Failure):
            self._board.published("not_healed")
            logger.warning("%s %s; next try in %.0f s: %s", address, why, wait, answer.text)
            return
        self._board.published("healed")
        self._promotions.log.note("healed", wanted, f"{address} {why}")
        logger.warning("%s was put on draft %d: it %s", address, wanted, why)
