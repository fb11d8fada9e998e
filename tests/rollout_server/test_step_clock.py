"""What counts as a step, of which kind, and how long it took."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest

import rollout_server.engine_core
from rollout_server.acceptance import AcceptanceTracker
from rollout_server.engine_core import StepClock, rounded_up
from rollout_server.step_costs import CostWatch, StepCosts, StepSum, StepSums
from slipstream.errors import RefusedError


class Core:
    """As much of vLLM's ``EngineCore`` as is looked at, with a clock that only steps move."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.left = True
        self.batch_queue = None
        self.scheduler = SimpleNamespace(
            schedule=lambda: None,
            update_from_output=lambda output, result: result,
            has_requests=lambda: self.left,
        )
        fake = SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(rollout_server.engine_core, "time", fake)
        self.switch: Any = SimpleNamespace(enabled=True)
        self.clock = StepClock(self, self.switch)
        self.clock.measure(True)

    def step(
        self, seconds: float, requests: Sequence[int], new: bool = False, left: bool = True
    ) -> None:
        """A step in which each request verifies so many drafts."""
        self.scheduler.schedule()
        self.now += seconds
        self.left = left
        names = [str(index) for index in range(len(requests))]
        tokens = {name: 1 + drafts for name, drafts in zip(names, requests, strict=True)}
        output = SimpleNamespace(
            num_scheduled_tokens=tokens,
            total_num_scheduled_tokens=sum(tokens.values()),
            scheduled_spec_decode_tokens={
                n: [0] * d for n, d in zip(names, requests, strict=True) if d
            },
            scheduled_new_reqs=["new"] if new else [],
        )
        assert self.scheduler.update_from_output(output, "result") == "result"

    @property
    def sums(self) -> dict[tuple[str, int], tuple[int, float]]:
        return {(kind, n): (steps, seconds) for kind, n, steps, seconds in self.clock.sums()}


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Core:
    return Core(monkeypatch)


def test_steps_by_kind_and_size(core: Core) -> None:
    core.step(1.0, [0, 0], new=True)
    core.step(2.0, [3, 3])
    core.step(2.5, [3, 2])
    core.step(1.0, [3, 0])
    core.switch.enabled = False
    core.step(1.0, [3, 3])
    core.step(0.5, [0] * 5)
    assert core.sums == {
        ("mixed", 2): (3, 3.0),
        ("speculative", 2): (2, 4.5),
        ("plain", 6): (1, 0.5),
    }


def test_a_step_without_drafts_is_not_plain_while_drafts_are_made(core: Core) -> None:
    core.step(1.0, [0])
    assert core.sums == {("mixed", 1): (1, 1.0)}


def test_a_step_lasts_from_output_to_output_while_the_engine_is_busy(core: Core) -> None:
    core.step(1.0, [3])
    core.now += 0.25
    core.step(1.0, [3], left=False)
    core.now += 100.0
    core.step(1.0, [3])
    assert core.sums == {("speculative", 1): (3, 3.25)}
    core.step(0.0, [])
    core.now += 7.0
    core.step(1.0, [3])
    assert core.sums["speculative", 1] == (4, 4.25), "an empty step says that it was idle"


def test_an_interrupted_step_begins_anew(core: Core) -> None:
    core.step(1.0, [3])
    core.now += 5.0
    core.clock.interrupted()
    core.step(1.0, [3])
    assert core.sums == {("speculative", 1): (2, 2.0)}


def test_it_lets_go_of_the_scheduler(core: Core) -> None:
    core.step(1.0, [3])
    core.clock.measure(False)
    core.step(1.0, [3])
    assert core.scheduler.schedule.__name__ == "<lambda>"
    core.clock.measure(True)
    core.step(1.0, [3])
    assert core.sums == {("speculative", 1): (2, 2.0)}


def test_sizes_are_few_and_close() -> None:
    sizes = {rounded_up(requests) for requests in range(1, 257)}
    assert sorted(sizes) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    assert all(n <= rounded_up(n) < 1.5 * n + 1 for n in range(1, 257))


class Source:
    """An engine that counts how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.broken = False

    async def step_sums(self, measure: bool) -> StepSums:
        assert measure
        self.asked += 1
        if self.broken:
            raise RefusedError("slipstream_step_sums", "no answer", "an answer", "look at the log")
        return {("speculative", 1): StepSum(self.asked, 1.0)}


def test_an_engine_that_generates_nothing_is_not_asked() -> None:
    source, tracker, costs = Source(), AcceptanceTracker(), StepCosts()
    watch = CostWatch(source, tracker, costs)

    async def look() -> None:
        await watch.look()
        tracker.start(0)
        await watch.look()
        tracker.generated(5)
        await watch.look()
        await watch.look()

    asyncio.run(look())
    assert source.asked == 1
    assert costs.sums == {("speculative", 1): StepSum(1, 1.0)}


def test_a_slow_engine_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_server.step_costs.LOOK_SECONDS", 0.0)
    source, tracker = Source(), AcceptanceTracker()
    tracker.start(0)
    source.broken = True

    async def watch() -> None:
        watch = CostWatch(source, tracker, StepCosts())
        watch.start()
        while source.asked < 3:
            tracker.generated(1)
            await asyncio.sleep(0)
        await watch.stop()

    asyncio.run(asyncio.wait_for(watch(), 30))


class Drafting:
    """An engine that takes plain steps only while drafting is off."""

    def __init__(self, tracker: AcceptanceTracker, plain: bool = True) -> None:
        self.tracker, self.plain = tracker, plain
        self.off = False
        self.turned: list[bool] = []
        self.steps = {"speculative": 0, "plain": 0}

    async def step_sums(self, measure: bool) -> StepSums:
        if not self.off or self.plain:
            self.steps["plain" if self.off else "speculative"] += 20
        self.tracker.generated(1)
        return {(kind, 4): StepSum(steps, 0.01 * steps) for kind, steps in self.steps.items()}

    @asynccontextmanager
    async def without_speculation(self) -> AsyncIterator[None]:
        self.off = True
        self.turned.append(True)
        yield
        self.off = False
        self.turned.append(False)


def probed(monkeypatch: pytest.MonkeyPatch, plain: bool) -> tuple[Drafting, StepCosts]:
    monkeypatch.setattr("rollout_server.step_costs.PROBE_SECONDS", 0.05)
    tracker, costs = AcceptanceTracker(), StepCosts()
    tracker.start(0)
    tracker.generated(1)
    engine = Drafting(tracker, plain)
    watch = CostWatch(engine, tracker, costs, engine.without_speculation)

    async def look_twice() -> None:
        for _ in range(2):
            await watch.look()
            await watch.probe()

    asyncio.run(look_twice())
    return engine, costs


def test_plain_steps_are_probed_once_for_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, costs = probed(monkeypatch, plain=True)
    assert engine.turned == [True, False]
    assert engine.steps == {"speculative": 40, "plain": 20}
    assert costs.break_even == pytest.approx(1.0)


def test_a_probe_that_finds_nothing_is_not_repeated_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine, costs = probed(monkeypatch, plain=False)
    assert engine.turned == [True, False]
    assert costs.break_even is None and costs.unknown_size == 4
