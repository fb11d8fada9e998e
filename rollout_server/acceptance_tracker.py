"""Splits vLLM's speculative counters by the draft version that proposed.

vLLM reports, per engine step, how many drafts were verified and how much of them
was accepted. The drafts that the first step after a commit verifies were proposed
before it, so a commit is told as "the first N drafts belong to what came before"
(``draft_count.DraftCount``). A step's report is not split: it belongs to the
version that its first draft belongs to. With nothing in flight the boundary is
exact; with requests in flight it may be late by the drafts of requests that ended
in the steps around the commit, never early.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

KEPT_VERSIONS = 64


@dataclass
class Counters:
    """Of one draft version. ``accepted_per_position`` has one entry per draft position."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)


class AcceptanceTracker:
    """Counts per draft version; owned by the API server's event loop."""

    def __init__(self) -> None:
        self._seen = 0
        # (drafts before it, version), ascending; the last entries are still to come.
        self._boundaries: list[tuple[int, int]] = []
        self._version: int | None = None
        self._counters: OrderedDict[int, Counters] = OrderedDict()
        self._waiters: set[asyncio.Future[None]] = set()

    def start(self, version: int) -> None:
        """The version that drafts from the first step on."""
        self._version = version

    def switch(self, version: int, drafts_before: int) -> None:
        """Another version is live; the first ``drafts_before`` drafts are not its own."""
        self._boundaries.append((drafts_before, version))
        self.wake()

    def record(
        self, drafts: int, draft_tokens: int, accepted: int, per_position: Sequence[int]
    ) -> None:
        """One engine step's counts (vLLM's ``SpecDecodingStats``).

        Raises:
            LookupError: before ``start``; nothing could be said about whose they are.
        """
        while self._boundaries and self._seen >= self._boundaries[0][0]:
            self._version = self._boundaries.pop(0)[1]
        if self._version is None:
            raise LookupError("drafts were verified before a draft version was known")
        self._seen += drafts
        counters = self._counters.setdefault(self._version, Counters())
        self._counters.move_to_end(self._version)
        counters.drafts += drafts
        counters.draft_tokens += draft_tokens
        counters.accepted_tokens += accepted
        missing = len(per_position) - len(counters.accepted_per_position)
        counters.accepted_per_position.extend([0] * missing)
        for position, count in enumerate(per_position):
            counters.accepted_per_position[position] += count
        while len(self._counters) > KEPT_VERSIONS:
            self._counters.popitem(last=False)
        self.wake()

    def counters(self) -> dict[int, Counters]:
        """By version, for the versions that have drafted; the least recent are gone."""
        return dict(self._counters)

    def wake(self) -> None:
        """Something worth reporting changed."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def changed(self, timeout: float) -> bool:
        """Wait until ``wake``; False when ``timeout`` seconds passed without."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            await asyncio.wait_for(waiter, timeout)
        except TimeoutError:
            return False
        finally:
            self._waiters.discard(waiter)
        return True
