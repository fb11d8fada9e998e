"""Stages a release on many servers: the trainer sends to a few, the rest fetch from peers.

A server that holds the release sends it to ``FAN_OUT`` others at a time, so with every round there
are ``1 + FAN_OUT`` times as many that hold it, and what the trainer sends does not depend on the
size of the fleet. A server that gets nowhere with ``TRIES`` sets of sources gets it from the
trainer. Servers that do not fetch (``ServerState.fetches``) always do.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import grpc

from draft_trainer.counters import Counters
from draft_trainer.releases.client import DraftPayload, Failure
from draft_trainer.releases.commits import DRAWS, ServerOutcome
from draft_trainer.releases.fleet import Calls, Fleet, Quorum
from slipstream.client import Progress
from slipstream.v1 import rollout_server_pb2 as pb

logger = logging.getLogger(__name__)

SEEDS = 3
"""Servers that the trainer sends a release to at a time, while no other one holds it."""

FAN_OUT = 2
"""Servers that one which holds it sends it to at a time."""

OTHERS = 2
"""Further sources that a server is told of, for the case that the first gives up."""

TRIES = 3
"""Sets of sources that a server tries before the trainer sends it what is missing."""

MOST_SENT = 4
"""Times its size that the trainer sends a release to servers that fetch. More only where nothing
else gets a server further, and to one server at a time."""

Staged = pb.StageResult | Failure


def spread_to(
    fleet: Fleet,
    draft: DraftPayload,
    outcomes: Mapping[str, ServerOutcome],
    behind: Sequence[str],
    enough: int,
    counters: Counters,
) -> None:
    """Stage a release on the servers that are ``behind``, and note how that ended.

    Args:
        fleet: whose servers.
        draft: the release.
        outcomes: of all servers, with the state of those that were reached.
        behind: servers to stage on.
        enough: of them; the others have ``publish.straggler_s`` from then on.
        counters: of bytes, seconds and dropped sources.
    """
    reached = {a: o.state for a, o in outcomes.items() if o.state is not None}
    fetching = {address for address, state in reached.items() if state.fetches}
    holders = (reached.keys() & fleet.sources(draft)) - set(behind)
    patience = math.inf if enough >= len(behind) else fleet.config.straggler_s
    quorum = Quorum(enough, patience)
    answers = Spread(fleet, draft, fetching, holders, counters).to(behind, quorum)
    for address in behind:
        outcome, answer = outcomes[address], answers.get(address, quorum.late)
        if isinstance(answer, Failure):
            outcome.error = f"staging failed: {answer.text}"
        else:
            outcome.staged, outcome.stage_seconds = True, answer.seconds
            counters.stage_seconds.observe(outcome.stage_seconds)


class Spread:
    """One release on its way to the servers that lack it.

    Args:
        fleet: whose servers.
        draft: the release.
        fetching: servers that take sources; they serve as one once they hold it.
        holders: those that hold it already.
        counters: of bytes and of sources that were dropped.
    """

    def __init__(
        self,
        fleet: Fleet,
        draft: DraftPayload,
        fetching: Collection[str],
        holders: Iterable[str],
        counters: Counters,
    ) -> None:
        self._fleet = fleet
        self._draft = draft
        self._fetching = fetching
        self._counters = counters
        self._calls: Calls[Staged] = fleet.calls()
        self._holders: list[str] = []
        self._free: deque[str] = deque()
        self._dropped: set[str] = set()
        self._tries: Counter[str] = Counter()
        self._running: dict[str, _Call] = {}
        self._sent = 0
        for address in holders:
            self._holds(address)

    def to(self, addresses: Iterable[str], quorum: Quorum | None = None) -> dict[str, Staged]:
        """Stage on servers. Without those that have not answered when ``quorum`` is over."""
        waiting: deque[str] = deque()
        # Servers that no source gave it wait for the trainer, while the others go on fetching.
        refused: deque[str] = deque()
        for address in addresses:
            if address in self._fetching:
                waiting.append(address)
            else:
                self._start(address, _Call(()))
        staged: dict[str, Staged] = {}
        while waiting or refused or self._running:
            for queue in (waiting, refused):
                while queue and (call := self._call_for(queue[0])) is not None:
                    self._start(queue.popleft(), call)
            ended = self._calls.next(quorum)
            if ended is None:
                break
            address, answer = ended
            if self._ended(address, answer):
                staged[address] = answer
                if quorum is not None:
                    quorum.count(not isinstance(answer, Failure))
            else:
                (waiting if self._tries[address] < TRIES else refused).append(address)
        return staged

    def _call_for(self, address: str) -> _Call | None:
        """How to stage on a server now; None: later, because every source is taken."""
        fetches = self._tries[address] < TRIES
        while fetches and self._free:
            source = self._free.popleft()
            if source not in self._dropped:
                drawn = DRAWS.sample(self._holders, min(OTHERS + 1, len(self._holders)))
                others = [other for other in drawn if other != source]
                return _Call((source, *others[:OTHERS]))
        if fetches and self._holders:
            return None
        size = self._draft.nbytes
        sending = size * sum(call.seeds for call in self._running.values())
        within = self._sent + sending + size <= MOST_SENT * size
        if (within and sending < SEEDS * size) or not self._running:
            return _Call((), seeds=True)
        return None

    def _start(self, address: str, call: _Call) -> None:
        self._running[address] = call
        client, draft = self._fleet.client(address), self._draft
        if call.sources:
            ask = partial(client.pull, draft, call.sources, call.progress)
        else:
            ask = partial(client.stage, draft, progress=call.progress)
        self._calls.start(address, ask)

    def _ended(self, address: str, answer: Staged) -> bool:
        """Take note; False where the server is to try other sources."""
        call = self._running.pop(address)
        progress = call.progress
        self._counters.staged_bytes.labels("trainer").inc(progress.sent)
        if call.seeds:
            self._sent += progress.sent
        self._free.extend(call.sources[:1])
        for source in {*progress.altered, *progress.failed} & {*call.sources} - self._dropped:
            self._drop(source, "altered" if source in progress.altered else "failed")
        if isinstance(answer, Failure):
            if call.sources and answer.code == grpc.StatusCode.ABORTED:
                self._tries[address] += 1
                return False
            return True
        self._counters.staged_bytes.labels("server").inc(answer.bytes_from_sources)
        if address in self._fetching:
            self._holds(address)
        return True

    def _holds(self, address: str) -> None:
        if address not in self._dropped:
            self._holders.append(address)
            self._free.extend([address] * FAN_OUT)

    def _drop(self, source: str, why: str) -> None:
        self._dropped.add(source)
        self._holders.remove(source)
        self._counters.sources_dropped.labels(why).inc()
        logger.warning(
            "%s is dropped as a source of draft %d: %s", source, self._draft.version, why
        )


@dataclass
class _Call:
    """A stage in progress: whom it may fetch from, and what the trainer sends at most.

    Attributes:
        sources: empty: the trainer.
        seeds: the trainer sends it to a server that fetches.
        progress: what came of it.
    """

    sources: tuple[str, ...]
    seeds: bool = False
    progress: Progress = field(default_factory=Progress)
