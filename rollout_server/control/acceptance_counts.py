"""Splits vLLM's speculative counters by the versions that were live, and streams them.

vLLM reports, per engine step, how many drafts were verified and how many of their tokens were
accepted. The first step after a commit verifies drafts that were proposed before it, so a commit
is reported as "the first N verification steps belong to what came before", for each engine core
(``engine_core.VerificationSteps``). A report is not split: it belongs to the version of its first
draft. With nothing in flight the boundary is exact; with requests in flight it may be late by the
drafts of requests that ended in the steps around the commit, never early.

Counters are kept by draft version, and by pair of draft and policy version, both those that were
live when the draft was proposed: the first step after a policy commit, which the new policy
verifies, counts for the policy before it.
"""

from __future__ import annotations

import asyncio
import math
from collections import OrderedDict
from collections.abc import Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from rollout_server.control.policy_spans import PolicySpans
from slipstream.v1 import rollout_server_pb2 as pb

KEPT_VERSIONS = 64

MIN_DRAFTS = 50
"""The fewest tries of a position for its acceptance to be known."""

FIRST_DRAFTS = 1000
"""The drafts of a release after which its acceptance is an estimate like any other: its standard
error is below 0.05 tokens. Before, drafting stops on a sequential test only
(``draft_length.LengthChooser.loses``)."""

KEPT_DRAFTS = 2000.0
"""Drafts over which older acceptance fades to 1/e."""


def tried(drafts: int, draft_tokens: int, accepted: Sequence[int]) -> list[int]:
    """Estimate, for one engine step, how many drafts had a token at each position.

    For a vLLM that does not say. Drafts are of one length but for those of requests that end, and
    what was accepted was tried. Wrong where a grammar drops drafted tokens.
    """
    return [
        max(count, min(drafts, max(0, draft_tokens - place * drafts)))
        for place, count in enumerate(accepted)
    ]


def _add(sums: MutableSequence[Any], counts: Sequence[int]) -> None:
    sums.extend([0] * (len(counts) - len(sums)))
    for place, count in enumerate(counts):
        sums[place] += count


class RecentAcceptance:
    """Acceptance by position of the live draft; older steps fade.

    Attributes:
        expected: acceptance by position before any draft, by the gate; empty: not known.
        drafts: since the commit.
        outcomes: the first ``FIRST_DRAFTS``, by drafts in the step and draft length: how many had
            0, 1, 2 and so on of their tokens accepted.
    """

    def __init__(self, expected: Sequence[float] = ()) -> None:
        self.expected = tuple(expected)
        self.drafts = 0
        self.outcomes: dict[tuple[int, int], list[int]] = {}
        self._tried: list[float] = []
        self._accepted: list[float] = []

    def add(self, drafts: int, tried: Sequence[int], accepted: Sequence[int]) -> None:
        """Count one engine step, by position."""
        length = sum(count > 0 for count in tried)
        if length and self.drafts < FIRST_DRAFTS:
            at_least = (drafts, *accepted[:length], 0)
            exactly = [more - less for more, less in pairwise(at_least)]
            _add(self.outcomes.setdefault((drafts, length), []), exactly)
        self.drafts += drafts
        keep = math.exp(-drafts / KEPT_DRAFTS)
        self._tried = [n * keep for n in self._tried]
        self._accepted = [n * keep for n in self._accepted]
        _add(self._tried, tried)
        _add(self._accepted, accepted)

    def rates(self, least: int = MIN_DRAFTS) -> tuple[float, ...] | None:
        """Share of drafts accepted at each position that was tried ``least`` times; None where the
        first was not."""
        rates: list[float] = []
        for tried, accepted in zip(self._tried, self._accepted, strict=True):
            if tried < least:
                break
            rates.append(min(accepted / tried, rates[-1] if rates else 1.0))
        return tuple(rates) or None


Pair = tuple[int, int | None]
"""Draft and policy version; no policy version before one was pushed."""


@dataclass
class _Boundaries:
    """The pairs that the reports of one engine core belong to.

    Attributes:
        pair: that of the next report; None before the first.
        seen: verification steps in the reports so far.
        ahead: (verification steps before it, pair), ascending; still to come.
    """

    pair: Pair | None
    seen: int = 0
    ahead: list[tuple[int, Pair]] = field(default_factory=list)

    def switch(self, pair: Pair, steps_before: int) -> None:
        if self.ahead and self.ahead[-1][0] == steps_before:
            # The pair before it drafted nothing: without load the list does not grow.
            self.ahead.pop()
        self.ahead.append((steps_before, pair))

    def of_next(self, drafts: int) -> Pair | None:
        while self.ahead and self.seen >= self.ahead[0][0]:
            self.pair = self.ahead.pop(0)[1]
        self.seen += drafts
        return self.pair


class AcceptanceTracker:
    """Counts per draft version, and per pair with the policy version.

    Owned by the API server's event loop.

    Attributes:
        recent: acceptance of the live draft, since its commit.
        engine_seconds: time that an engine core has spent in steps, when last asked.
        speed_up: of generation over no speculation in the last minute; None while unknown.
        all: counters of every version since the start, including those that are forgotten.
        live: version that proposes; None before ``start``.
        spans: which policy version sampled the tokens of requests.
        changed: event that the next ``wake`` sets and replaces.
    """

    def __init__(self) -> None:
        self.all = pb.AcceptanceCounters()
        self.live: int | None = None
        self.recent = RecentAcceptance()
        self.engine_seconds = 0.0
        self.speed_up: float | None = None
        self.spans = PolicySpans()
        self._started: Pair | None = None
        self._engines: dict[int, _Boundaries] = {}
        self._counters: OrderedDict[int, pb.AcceptanceCounters] = OrderedDict()
        self._pairs: OrderedDict[Pair, pb.AcceptanceCounters] = OrderedDict()
        self.changed = asyncio.Event()

    def start(self, version: int, expected: Sequence[float] = ()) -> None:
        """Begin with the version that drafts from the first step on; ``expected``: its acceptance
        by position, by the gate."""
        self.live = version
        self.recent = RecentAcceptance(expected)
        self._started = (version, self.spans.version)
        for boundaries in self._engines.values():
            boundaries.pair = self._started

    def switch(
        self, version: int, steps_before: Sequence[int], expected: Sequence[float] = ()
    ) -> None:
        """Count for another draft, which is live now, but for the first ``steps_before`` steps of
        each engine core; ``expected``: as in ``start``."""
        self.live = version
        self.recent = RecentAcceptance(expected)
        self._switch((version, self.spans.version), steps_before)

    def switch_policy(
        self, version: int, steps_before: Sequence[int], requests: Mapping[str, int]
    ) -> None:
        """Count for another policy, which is live now; ``requests``: see ``PolicySpans.commit``."""
        self.spans.commit(version, requests)
        if self.live is not None:
            self._switch((self.live, version), steps_before)

    def _switch(self, pair: Pair, steps_before: Sequence[int]) -> None:
        for engine, steps in enumerate(steps_before):
            self._boundaries(engine).switch(pair, steps)
        self.wake()

    def record(
        self,
        drafts: int,
        draft_tokens: int,
        accepted: int,
        per_position: Sequence[int],
        engine: int = 0,
        tries: Sequence[int] | None = None,
    ) -> None:
        """Add one step's counts (vLLM's ``SpecDecodingStats``) of an engine core.

        ``tries``: how many drafts had a token at each position; None: estimated (``tried``).

        Before ``start`` only steps are counted: they belong to the calibration.
        """
        pair = self._boundaries(engine).of_next(drafts)
        if pair is None:
            return
        version, policy = pair
        if tries is None:
            tries = tried(drafts, draft_tokens, per_position)
        if version == self.live:
            self.recent.add(drafts, tries, per_position)
        kept = [self._of_version(version), self.all]
        if policy is not None:
            kept.append(self._of_pair(pair))
        for counters in kept:
            counters.drafts += drafts
            counters.draft_tokens += draft_tokens
            counters.accepted_tokens += accepted
            _add(counters.tried_per_position, tries)
            _add(counters.accepted_per_position, per_position)
        self.wake()

    def generated(self, tokens: int) -> None:
        """Add one engine step's tokens, while ``live`` is live, whether it proposed or not."""
        self.all.generated_tokens += tokens
        if self.live is not None:
            self._of_version(self.live).generated_tokens += tokens

    def counters(self) -> dict[int, pb.AcceptanceCounters]:
        """The counters of the most recent versions that have drafted, by version."""
        return {v: c for v, c in self._counters.copy().items() if c.drafts}

    def pairs(self) -> list[pb.AcceptanceCounters]:
        """The counters of the most recent pairs of draft and policy version that have drafted."""
        return list(self._pairs.copy().values())

    def exposed(self) -> dict[int, pb.AcceptanceCounters]:
        """The counters by version, ``live`` always among them: a series must not begin with its
        first draft."""
        live = (
            {} if self.live is None else {self.live: pb.AcceptanceCounters(draft_version=self.live)}
        )
        return live | self._counters.copy()

    def _boundaries(self, engine: int) -> _Boundaries:
        return self._engines.setdefault(engine, _Boundaries(self._started))

    def _of_version(self, version: int) -> pb.AcceptanceCounters:
        fresh = pb.AcceptanceCounters(draft_version=version)
        counters = self._counters.setdefault(version, fresh)
        self._counters.move_to_end(version)
        if len(self._counters) > KEPT_VERSIONS:
            oldest = next(kept for kept in self._counters if kept != self.live)
            del self._counters[oldest]
        return counters

    def _of_pair(self, pair: Pair) -> pb.AcceptanceCounters:
        fresh = pb.AcceptanceCounters(draft_version=pair[0], policy_version=pair[1])
        counters = self._pairs.setdefault(pair, fresh)
        self._pairs.move_to_end(pair)
        if len(self._pairs) > KEPT_VERSIONS:
            self._pairs.popitem(last=False)
        return counters

    def wake(self) -> None:
        """Wake watchers: a state or counter that they report has changed."""
        self.changed.set()
        self.changed = asyncio.Event()


class AcceptanceGuard:
    """Finds out whether nothing of the live draft is accepted.

    Judges windows of verification steps of one draft version and one commit. Fewer steps than a
    window say nothing.
    """

    MIN_ACCEPTED = 0.005
    """The accepted tokens per step below which the acceptance length reads 1.00."""

    def __init__(self, tracker: AcceptanceTracker, min_drafts: int) -> None:
        self._tracker = tracker
        self._min_drafts = min_drafts
        self._window: tuple[int, int] | None = None
        self._start = (0, 0)
        self._found: list[pb.NotReady] = []

    def check(self, version: int, commits: int) -> list[pb.NotReady]:
        """Return why the live draft is not to be trusted; nothing if it is."""
        counters = self._tracker.counters().get(version, pb.AcceptanceCounters())
        now = (counters.drafts, counters.accepted_tokens)
        if self._window != (version, commits):
            self._window, self._found, self._start = (version, commits), [], now
        drafts, accepted = now[0] - self._start[0], now[1] - self._start[1]
        if drafts >= self._min_drafts:
            nothing = pb.NotReady(
                reason=pb.NOT_READY_REASON_NOTHING_ACCEPTED,
                draft_version=version,
                acceptance_length=1 + accepted / drafts,
                drafts=drafts,
            )
            self._found = [nothing] if accepted < self.MIN_ACCEPTED * drafts else []
            self._start = now
        return self._found
