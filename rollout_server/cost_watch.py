"""Asks the engine every few seconds what its steps took, while it generates."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Protocol

from rollout_server.acceptance_tracker import AcceptanceTracker, Counters
from rollout_server.step_costs import Accepted, StepCosts, StepSums
from slipstream.refusal import RefusedError

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
PROBE_SECONDS = 1.0
"""Longest that drafting is off for a measurement."""

PROBE_EVERY_SECONDS = 60.0


class StepSource(Protocol):
    """The engine, as far as it times steps."""

    async def step_sums(self, measure: bool) -> StepSums:
        """Since the start; raises RefusedError where the engine does not answer."""
        ...


class CostWatch:
    """Owns one task. An engine that generates nothing is not asked.

    Args:
        engine: already started.
        tracker: what was generated, and what of it was accepted.
        costs: is told.
        without_speculation: turns drafting off for as long as it is entered, to measure what a
            plain step of as many requests costs where that is not known; None: never.
    """

    def __init__(
        self,
        engine: StepSource,
        tracker: AcceptanceTracker,
        costs: StepCosts,
        without_speculation: Callable[[], AbstractAsyncContextManager[None]] | None = None,
    ) -> None:
        self._engine = engine
        self._tracker = tracker
        self._costs = costs
        self._without_speculation = without_speculation
        self._not_before = 0.0
        self._seen = 0
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin, inside a running event loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """End."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def look(self) -> None:
        """Once, if anything was generated since the last time."""
        tracker = self._tracker
        if tracker.live is None or tracker.all.generated_tokens == self._seen:
            return
        self._seen = tracker.all.generated_tokens
        sums = await self._engine.step_sums(True)
        live = tracker.exposed().get(tracker.live, Counters())
        accepted = Accepted(tracker.live, live.drafts, live.accepted_tokens)
        self._costs.look(time.monotonic(), sums, accepted)

    async def probe(self) -> None:
        """Take plain steps for a moment, if the cost of one is needed and not known."""
        size = self._costs.unknown_size
        now = time.monotonic()
        if self._without_speculation is None or size is None or now < self._not_before:
            return
        self._not_before = now + PROBE_EVERY_SECONDS
        logger.info("no drafts for at most %.0f s: timing plain steps", PROBE_SECONDS)
        async with self._without_speculation():
            while self._costs.unknown_size == size and time.monotonic() < now + PROBE_SECONDS:
                await asyncio.sleep(PROBE_SECONDS / 20)
                await self.look()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self.look()
                await self.probe()
            except RefusedError as error:
                # An engine that died ends the server; one that is slow is asked again.
                logger.warning("step costs: %s", error)
