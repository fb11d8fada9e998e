"""The states of a release, and the one table that says which event leads from which to which.

Every change of the pointer names its event and the release that it is about. What it does to other
releases is one of ``SIDE_EVENTS``. A change that the table does not allow is a programming error.
docs/architecture.md shows the table as it stands here.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class ReleaseState(StrEnum):
    """The part that a release plays for the fleet."""

    RELEASED = "released"
    """Kept in the registry; the fleet neither serves it nor is to serve it."""
    PROMOTED = "promoted"
    """The gate or an operator wants it on the fleet: the next publish stages it."""
    COMMITTING = "committing"
    """Its commits have begun and have no outcome yet. On disk before the first one is sent."""
    ON_TRIAL = "on trial"
    """Live; its acceptance length is compared with the last good release's."""
    UNDECIDED = "undecided"
    """Live; there was too little to compare in time. It still gets a verdict once there is more."""
    GOOD = "good"
    """Passed its trial, or needed none. Live, or one that a roll back can land on."""


class ReleaseEvent(StrEnum):
    """An event that may lead a release to another state."""

    PROMOTE = "promote"
    SUPERSEDE = "another is promoted"
    BEGIN_COMMIT = "commit begins"
    UNDO = "commit undone"
    BEGIN_TRIAL = "live on all servers"
    GO_LIVE = "live, no trial"
    FIND_TOO_LITTLE = "too few figures"
    PASS = "trial passed"
    FAIL = "trial failed"
    ROLL_BACK = "rolled back"
    REPLACE = "another is live"


def _table() -> dict[tuple[ReleaseState, ReleaseEvent], frozenset[ReleaseState]]:
    state, event = ReleaseState, ReleaseEvent
    idle = {state.RELEASED, state.PROMOTED, state.GOOD}
    table: dict[tuple[ReleaseState, ReleaseEvent], set[ReleaseState]] = {
        (state.RELEASED, event.PROMOTE): {state.PROMOTED},
        (state.PROMOTED, event.PROMOTE): {state.PROMOTED},
        (state.PROMOTED, event.SUPERSEDE): {state.RELEASED},
        # Back to where it came from: an operator's release is not promoted until it is live.
        (state.COMMITTING, event.UNDO): idle,
        (state.COMMITTING, event.BEGIN_TRIAL): {state.ON_TRIAL, state.UNDECIDED},
        (state.COMMITTING, event.GO_LIVE): {state.GOOD},
        (state.ON_TRIAL, event.FIND_TOO_LITTLE): {state.UNDECIDED},
    }
    for before in idle:
        table[before, event.BEGIN_COMMIT] = {state.COMMITTING}
        # Every server was found to serve it.
        table[before, event.BEGIN_TRIAL] = {state.ON_TRIAL, state.UNDECIDED}
        table[before, event.GO_LIVE] = {state.GOOD}
    for before in (state.ON_TRIAL, state.UNDECIDED):
        table[before, event.PROMOTE] = {before}
        table[before, event.PASS] = {state.GOOD}
        table[before, event.GO_LIVE] = {state.GOOD}
        table[before, event.FAIL] = {state.RELEASED}
        table[before, event.ROLL_BACK] = {state.RELEASED}
        table[before, event.REPLACE] = {state.RELEASED, state.PROMOTED}
    table[state.GOOD, event.PROMOTE] = {state.GOOD}
    table[state.GOOD, event.ROLL_BACK] = {state.RELEASED}
    table[state.GOOD, event.FAIL] = {state.RELEASED}
    table[state.GOOD, event.REPLACE] = idle
    return {key: frozenset(after) for key, after in table.items()}


TRANSITIONS: Mapping[tuple[ReleaseState, ReleaseEvent], frozenset[ReleaseState]] = _table()

SIDE_EVENTS = (ReleaseEvent.SUPERSEDE, ReleaseEvent.REPLACE)


def is_legal(event: ReleaseEvent, before: ReleaseState, after: ReleaseState) -> bool:
    """Return whether the event leads a release from one state to the other."""
    return after in TRANSITIONS.get((before, event), ())
