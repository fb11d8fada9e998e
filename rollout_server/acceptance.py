"""Splits vLLM's speculative counters by the draft version that proposed, and watches them.

vLLM reports, per engine step, how many drafts were verified and how many of their tokens were
accepted. The first step after a commit verifies drafts that were proposed before it, so a commit
is reported as "the first N verification steps belong to what came before"
(``engine_core.VerificationSteps``). A report is not split: it belongs to the version of its first
draft. With nothing in flight the boundary is exact; with requests in flight it may be late by the
drafts of requests that ended in the steps around the commit, never early.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from slipstream.v1 import rollout_server_pb2 as pb

KEPT_VERSIONS = 64


def _add(
    counters: pb.AcceptanceCounters,
    drafts: int,
    draft_tokens: int,
    accepted: int,
    per_position: Sequence[int],
) -> None:
    """Add one engine step."""
    counters.drafts += drafts
    counters.draft_tokens += draft_tokens
    counters.accepted_tokens += accepted
    missing = len(per_position) - len(counters.accepted_per_position)
    counters.accepted_per_position.extend([0] * missing)
    for position, count in enumerate(per_position):
        counters.accepted_per_position[position] += count


class AcceptanceTracker:
    """Counts per draft version; owned by the API server's event loop.

    Attributes:
        all: every version since the start, including those that are forgotten.
        live: version that proposes; None before ``start``.
    """

    def __init__(self) -> None:
        self.all = pb.AcceptanceCounters()
        self.live: int | None = None
        self._seen = 0
        # (verification steps before it, version), ascending; the last entries are still to come.
        self._boundaries: list[tuple[int, int]] = []
        self._version: int | None = None
        self._counters: OrderedDict[int, pb.AcceptanceCounters] = OrderedDict()
        self._changed = asyncio.Event()

    def start(self, version: int) -> None:
        """The version that drafts from the first step on."""
        self._version = self.live = version

    def switch(self, version: int, steps_before: int) -> None:
        """Another version is live; the first ``steps_before`` steps do not belong to it."""
        self.live = version
        if self._boundaries and self._boundaries[-1][0] == steps_before:
            # The version before it drafted nothing: without load the list does not grow.
            self._boundaries.pop()
        self._boundaries.append((steps_before, version))
        self.wake()

    def record(
        self, drafts: int, draft_tokens: int, accepted: int, per_position: Sequence[int]
    ) -> None:
        """One engine step's counts (vLLM's ``SpecDecodingStats``).

        Raises LookupError: before ``start``: no version could be credited.
        """
        while self._boundaries and self._seen >= self._boundaries[0][0]:
            self._version = self._boundaries.pop(0)[1]
        if self._version is None:
            raise LookupError("drafts were verified before a draft version was known")
        self._seen += drafts
        for counters in (self._of(self._version), self.all):
            _add(counters, drafts, draft_tokens, accepted, per_position)
        self.wake()

    def generated(self, tokens: int) -> None:
        """One engine step's tokens, while ``live`` is live, whether it proposed or not."""
        self.all.generated_tokens += tokens
        if self.live is not None:
            self._of(self.live).generated_tokens += tokens

    def counters(self) -> dict[int, pb.AcceptanceCounters]:
        """By version, for the most recent versions that have drafted."""
        return {v: c for v, c in self._counters.copy().items() if c.drafts}

    def exposed(self) -> dict[int, pb.AcceptanceCounters]:
        """By version, with ``live`` always among them: a series must not begin with its first
        draft."""
        live = (
            {} if self.live is None else {self.live: pb.AcceptanceCounters(draft_version=self.live)}
        )
        return live | self._counters.copy()

    def _of(self, version: int) -> pb.AcceptanceCounters:
        fresh = pb.AcceptanceCounters(draft_version=version)
        counters = self._counters.setdefault(version, fresh)
        self._counters.move_to_end(version)
        if len(self._counters) > KEPT_VERSIONS:
            oldest = next(kept for kept in self._counters if kept != self.live)
            del self._counters[oldest]
        return counters

    def wake(self) -> None:
        """A state or counter changed that watchers report."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def changed(self, timeout: float) -> bool:
        """Wait for ``wake``; False when ``timeout`` seconds passed without."""
        try:
            await asyncio.wait_for(self._changed.wait(), timeout)
        except TimeoutError:
            return False
        return True


class AcceptanceGuard:
    """Looks for a live draft of which nothing is accepted.

    Judges windows of verification steps of one draft version and one commit. Fewer steps say
    nothing: no drafts yet is no number.
    """

    MIN_ACCEPTED = 0.005
    """Accepted tokens per step under which acceptance length reads 1.00."""

    def __init__(self, tracker: AcceptanceTracker, min_drafts: int) -> None:
        self._tracker = tracker
        self._min_drafts = min_drafts
        self._window: tuple[int, int] | None = None
        self._start = (0, 0)
        self._found = ""

    def check(self, version: int, commits: int) -> str:
        """Empty, or why the live draft is not to be trusted."""
        counters = self._tracker.counters().get(version, pb.AcceptanceCounters())
        now = (counters.drafts, counters.accepted_tokens)
        if self._window != (version, commits):
            self._window, self._found, self._start = (version, commits), "", now
        drafts, accepted = now[0] - self._start[0], now[1] - self._start[1]
        if drafts >= self._min_drafts:
            bad = accepted < self.MIN_ACCEPTED * drafts
            length = f"{1 + accepted / drafts:.2f} over {drafts} drafts"
            self._found = f"acceptance length of draft {version} is {length}" if bad else ""
            self._start = now
        return self._found
