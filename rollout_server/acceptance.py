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
    generated_tokens: int = 0

    def add(
        self, drafts: int, draft_tokens: int, accepted: int, per_position: Sequence[int]
    ) -> None:
        """One engine step's."""
        self.drafts += drafts
        self.draft_tokens += draft_tokens
        self.accepted_tokens += accepted
        missing = len(per_position) - len(self.accepted_per_position)
        self.accepted_per_position.extend([0] * missing)
        for position, count in enumerate(per_position):
            self.accepted_per_position[position] += count


class AcceptanceTracker:
    """Counts per draft version; owned by the API server's event loop.

    Attributes:
        all: of every version since the start, those included that are forgotten.
        live: version that proposes; None before ``start``.
    """

    def __init__(self) -> None:
        self.all = Counters()
        self.live: int | None = None
        self._seen = 0
        # (drafts before it, version), ascending; the last entries are still to come.
        self._boundaries: list[tuple[int, int]] = []
        self._version: int | None = None
        self._counters: OrderedDict[int, Counters] = OrderedDict()
        self._waiters: set[asyncio.Future[None]] = set()

    def start(self, version: int) -> None:
        """The version that drafts from the first step on."""
        self._version = self.live = version

    def switch(self, version: int, drafts_before: int) -> None:
        """Another version is live; the first ``drafts_before`` drafts are not its own."""
        self.live = version
        if self._boundaries and self._boundaries[-1][0] == drafts_before:
            # Nothing was drafted by the one before: a server without load keeps one, not each.
            self._boundaries.pop()
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
        self._of(self._version).add(drafts, draft_tokens, accepted, per_position)
        self.all.add(drafts, draft_tokens, accepted, per_position)
        self.wake()

    def generated(self, tokens: int) -> None:
        """One engine step's tokens, while ``live`` is live, whether it proposed or not."""
        self.all.generated_tokens += tokens
        if self.live is not None:
            self._of(self.live).generated_tokens += tokens

    def counters(self) -> dict[int, Counters]:
        """By version, for the versions that have drafted; the least recent are gone."""
        return {v: c for v, c in self._counters.copy().items() if c.drafts}

    def exposed(self) -> dict[int, Counters]:
        """By version, ``live`` always among them: its first draft must not begin its series."""
        live = {} if self.live is None else {self.live: Counters()}
        return live | self._counters.copy()

    def _of(self, version: int) -> Counters:
        counters = self._counters.setdefault(version, Counters())
        self._counters.move_to_end(version)
        if len(self._counters) > KEPT_VERSIONS:
            oldest = next(kept for kept in self._counters if kept != self.live)
            del self._counters[oldest]
        return counters

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
