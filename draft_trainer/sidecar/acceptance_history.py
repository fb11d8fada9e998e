"""Live acceptance over policy versions, by release, and the newest minutes of each server.

Counts, never means: what is merged to save room still gives the exact acceptance length
of what it covers, and where there were no drafts there is nothing to divide.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from slipstream.v1 import console_pb2 as pb
from slipstream.v1 import rollout_server_pb2 as rollout_pb

MAX_CELLS = 1024
"""Of all releases together; beyond, neighbouring policy versions are merged in pairs."""

SLOT_SECONDS = 5.0
MAX_SLOTS = 60
MAX_SERVERS = 1024
MINUTE = 60.0


@dataclass
class Counted:
    """Verification steps, and the tokens accepted at each position of them."""

    drafts: int = 0
    accepted: list[int] = field(default_factory=list)

    def add(self, drafts: int, accepted: Sequence[int]) -> None:
        """Count more."""
        self.drafts += drafts
        self.accepted += [0] * (len(accepted) - len(self.accepted))
        for place, count in enumerate(accepted):
            self.accepted[place] += count


@dataclass
class _Cell(Counted):
    first_policy: int | None = None
    last_policy: int | None = None
    first_time: float = 0.0
    last_time: float = 0.0


@dataclass
class _Slot(Counted):
    number: int = 0
    releases: dict[int, Counted] = field(default_factory=dict)


class AcceptanceHistory:
    """Fed by ``AcceptanceWatch``. Thread-safe; bounded.

    Args:
        policy_version: the newest that the trainer knows, for servers that report none.
        on_change: called after every growth.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        policy_version: Callable[[], int | None],
        on_change: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._on_change = on_change
        self._policy_version = policy_version
        self._clock = clock
        self._lock = threading.Lock()
        self._cells: dict[int, list[_Cell]] = {}
        self._slots: dict[str, deque[_Slot]] = {}
        self._total = Counted()

    def grew(
        self,
        address: str,
        state: rollout_pb.ServerState,
        version: int,
        drafts: int,
        accepted: Sequence[int],
    ) -> None:
        """A server's counters of one release moved on.

        Args:
            address: of the server.
            state: that came with the counters. What was drafted while it changed its policy
                counts for the later version: up to one report's 100 ms.
            version: the release.
            drafts: verification steps since the last report.
            accepted: of those, at each position.
        """
        reported = state.HasField("policy_version")
        policy = state.policy_version if reported else self._policy_version()
        now = self._clock()
        with self._lock:
            self._total.add(drafts, accepted)
            self._cell(version, policy, now).add(drafts, accepted)
            slot = self._slot(address, int(now // SLOT_SECONDS))
            slot.add(drafts, accepted)
            slot.releases.setdefault(version, Counted()).add(drafts, accepted)
        self._on_change()

    @property
    def total(self) -> tuple[int, tuple[int, ...]]:
        """Verification steps since the start, and what was accepted at each position."""
        with self._lock:
            return self._total.drafts, tuple(self._total.accepted)

    def last_minute(self, address: str | None = None) -> list[pb.Drafted]:
        """By release, of one server or of all of them; releases without drafts are absent."""
        since = (self._clock() - MINUTE) // SLOT_SECONDS
        found: dict[int, Counted] = {}
        with self._lock:
            for server in self._slots if address is None else (address,):
                for slot in self._slots.get(server, ()):
                    if slot.number < since:
                        continue
                    for version, counted in slot.releases.items():
                        found.setdefault(version, Counted()).add(counted.drafts, counted.accepted)
        return [_message(version, found[version]) for version in sorted(found)]

    def cells(self) -> list[pb.AcceptanceCell]:
        """By release, then by policy version."""
        with self._lock:
            return [
                pb.AcceptanceCell(
                    draft_version=version,
                    first_policy_version=cell.first_policy,
                    last_policy_version=cell.last_policy,
                    drafts=cell.drafts,
                    accepted_per_position=cell.accepted,
                    first_time=cell.first_time,
                    last_time=cell.last_time,
                )
                for version, cells in sorted(self._cells.items())
                for cell in cells
            ]

    def servers(self) -> list[pb.ServerPast]:
        """The newest ``MAX_SLOTS`` slots of each server that drafted in that time."""
        with self._lock:
            self._forget_old()
            return [
                pb.ServerPast(
                    address=address,
                    slots=[
                        pb.AcceptanceSlot(
                            time=slot.number * SLOT_SECONDS,
                            drafts=slot.drafts,
                            accepted_per_position=slot.accepted,
                        )
                        for slot in slots
                    ],
                )
                for address, slots in sorted(self._slots.items())
            ]

    def _cell(self, version: int, policy: int | None, now: float) -> _Cell:
        cells = self._cells.setdefault(version, [])
        last = cells[-1] if cells else None
        if last is None or not _covers(last, policy):
            if sum(map(len, self._cells.values())) >= MAX_CELLS:
                self._thin()
                cells = self._cells.setdefault(version, [])
            last = _Cell(first_policy=policy, last_policy=policy, first_time=now)
            cells.append(last)
        last.last_time = now
        return last

    def _thin(self) -> None:
        """Half as many cells; where every release has one left, the oldest half of them go."""
        if all(len(cells) < 2 for cells in self._cells.values()):
            for version in sorted(self._cells)[: MAX_CELLS // 2]:
                del self._cells[version]
        for cells in self._cells.values():
            for at in range(len(cells) // 2):
                one, two = cells[at], cells.pop(at + 1)
                one.add(two.drafts, two.accepted)
                if one.first_policy is None:
                    one.first_policy = two.first_policy
                one.last_policy, one.last_time = two.last_policy, two.last_time

    def _slot(self, address: str, number: int) -> _Slot:
        slots = self._slots.get(address)
        if slots is None:
            self._forget_old()
            while len(self._slots) >= MAX_SERVERS:
                self._slots.pop(next(iter(self._slots)))
            slots = self._slots[address] = deque(maxlen=MAX_SLOTS)
        if not slots or slots[-1].number != number:
            slots.append(_Slot(number=number))
        return slots[-1]

    def _forget_old(self) -> None:
        """Servers that left the fleet, or have not drafted for long."""
        since = self._clock() // SLOT_SECONDS - MAX_SLOTS
        for address in [a for a, slots in self._slots.items() if slots[-1].number < since]:
            del self._slots[address]


def _covers(cell: _Cell, policy: int | None) -> bool:
    if policy is None or cell.first_policy is None or cell.last_policy is None:
        return policy is cell.first_policy
    return cell.first_policy <= policy <= cell.last_policy


def _message(version: int, counted: Counted) -> pb.Drafted:
    return pb.Drafted(
        draft_version=version,
        drafts=counted.drafts,
        accepted_per_position=counted.accepted,
        acceptance_length=1 + sum(counted.accepted) / counted.drafts if counted.drafts else None,
    )
