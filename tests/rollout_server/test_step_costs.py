"""The times at which the engine is asked what its steps took, and plain steps are probed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from rollout_server.control.acceptance_counts import AcceptanceTracker
from rollout_server.control.step_costs import CostWatch, StepCosts, StepSum, StepSums
from slipstream.errors import RefusedError
from slipstream.v1 import rollout_server_pb2 as pb


class Source:
    """An engine that counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.broken = False

    async def step_sums(self) -> StepSums:
        self.asked += 1
        if self.broken:
            raise RefusedError("slipstream_step_sums", "no answer", "an answer", "look at the log")
        return {("speculative", 1, 3): StepSum(self.asked, 1.0)}


def test_idle_engine_is_not_asked_for_step_sums() -> None:
    source, tracker, costs = Source(), AcceptanceTracker(), StepCosts()
    watch = CostWatch(source.step_sums, tracker, costs)

    async def look() -> None:
        await watch.read()
        tracker.start(0)
        await watch.read()
        tracker.generated(5)
        await watch.read()
        await watch.read()

    asyncio.run(look())
    assert source.asked == 1
    assert costs.sums == {("speculative", 1, 3): StepSum(1, 1.0)}


def test_watchers_wake_for_engine_steps_without_drafts() -> None:
    source, tracker = Source(), AcceptanceTracker()
    watch = CostWatch(source.step_sums, tracker, StepCosts())
    tracker.start(0)
    tracker.generated(5)

    async def look() -> bool:
        changed = tracker.changed
        await watch.read()
        return tracker.engine_seconds == 1.0 and changed.is_set()

    assert asyncio.run(look())


def test_failed_step_sums_are_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_server.control.step_costs.READ_SECONDS", 0.0)
    source, tracker = Source(), AcceptanceTracker()
    tracker.start(0)
    source.broken = True

    async def watch() -> None:
        watch = CostWatch(source.step_sums, tracker, StepCosts())
        watch.start()
        while source.asked < 3:
            tracker.generated(1)
            await asyncio.sleep(0)
        await watch.stop()

    asyncio.run(asyncio.wait_for(watch(), 30))


class Drafting:
    """An engine that takes plain steps only while drafting is off, and has work while it is
    asked unless it is idle."""

    def __init__(self, tracker: AcceptanceTracker, plain: bool = True, idle: bool = False) -> None:
        self.tracker, self.plain, self.idle = tracker, plain, idle
        self.off = False
        self.turned: list[bool] = []
        self.steps = {"speculative": 0, "plain": 0}

    async def step_sums(self) -> StepSums:
        if not self.off or self.plain:
            self.steps["plain" if self.off else "speculative"] += 20
        self.tracker.generated(0 if self.idle else 1)
        return {
            (kind, 4, 3 if kind == "speculative" else 0): StepSum(steps, 0.01 * steps)
            for kind, steps in self.steps.items()
        }

    @asynccontextmanager
    async def without_speculation(self) -> AsyncIterator[None]:
        self.off = True
        self.turned.append(True)
        yield
        self.off = False
        self.turned.append(False)


@pytest.mark.parametrize("plain", [True, False])
def test_plain_steps_are_probed_once_per_size(monkeypatch: pytest.MonkeyPatch, plain: bool) -> None:
    """Also where the probe finds none."""
    monkeypatch.setattr("rollout_server.control.step_costs.PROBE_SECONDS", 0.05)
    tracker, costs = AcceptanceTracker(), StepCosts()
    tracker.start(0)
    tracker.generated(1)
    engine = Drafting(tracker, plain)
    watch = CostWatch(engine.step_sums, tracker, costs, engine.without_speculation)

    async def look_twice() -> None:
        for _ in range(2):
            await watch.read()
            await watch.probe()

    asyncio.run(look_twice())
    assert engine.turned == [True, False]
    if plain:
        assert engine.steps == {"speculative": 40, "plain": 20}
        assert costs.break_even == pytest.approx(1.0)
    else:
        assert costs.break_even is None and costs.unknown_size == 4


def test_plain_cost_is_measured_again_after_an_hour() -> None:
    """Contexts grow over a run. What was measured before counts until enough is known anew."""
    costs, live = StepCosts(), pb.AcceptanceCounters()
    plain = speculative = StepSum()
    for hour, cost in enumerate([0.01, 0.02, 0.04]):
        known = costs.break_even
        speculative = StepSum(speculative.steps + 100, speculative.seconds + 100 * 0.04)
        for second, steps in enumerate((0, 10, 6)):
            plain = StepSum(plain.steps + steps, plain.seconds + steps * cost)
            sums = {("speculative", 4, 3): speculative, ("plain", 4, 0): plain}
            costs.add(3600.0 * hour + second, sums, live)
            if steps == 0:
                assert costs.break_even == known
            assert (costs.break_even is None) == (hour == 0 and steps != 6)
            assert costs.unknown_size == (None if steps == 6 else 4)
        assert costs.break_even == pytest.approx(0.04 / cost)


def test_idle_server_is_not_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("READ_SECONDS", "PROBE_SECONDS", "PROBE_EVERY_SECONDS"):
        monkeypatch.setattr(f"rollout_server.control.step_costs.{name}", 0.0)
    tracker, costs, rounds = AcceptanceTracker(), StepCosts(), asyncio.Semaphore(0)
    tracker.start(0)
    tracker.generated(1)
    engine = Drafting(tracker, idle=True)

    async def measured(sums: StepSums) -> float:
        rounds.release()
        return 1.5

    async def look() -> None:
        watch = CostWatch(engine.step_sums, tracker, costs, engine.without_speculation, measured)
        await watch.read()
        watch.start()
        for _ in range(3):
            await rounds.acquire()
        await watch.stop()

    asyncio.run(asyncio.wait_for(look(), 30))
    assert costs.unknown_size == 4
    assert engine.turned == []
    assert tracker.speed_up is None, "nothing is drafted"
