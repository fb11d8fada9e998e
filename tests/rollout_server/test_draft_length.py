"""The draft length that is chosen: from costs and acceptance by hand, and over an engine double."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING

import pytest

from rollout_server.control.acceptance_counts import FIRST_DRAFTS, AcceptanceTracker
from rollout_server.control.draft_length import (
    MARGIN,
    MAX_RETRY_SECONDS,
    RECENT_SECONDS,
    REFRESH_SECONDS,
    RETRY_SECONDS,
    LengthChooser,
    LengthControl,
    calibrate,
    launch_schedule,
    lengths_to_choose,
    sizes_to_measure,
)
from rollout_server.control.step_costs import (
    MIXED,
    PLAIN,
    SPECULATIVE,
    CostWatch,
    StepCosts,
    StepSum,
    StepSums,
)
from rollout_server.vllm.api_server import _load
from slipstream.economics.costs import OFF

if TYPE_CHECKING:
    from vllm import SamplingParams

pytestmark = pytest.mark.contract("draft length")

SIZES = (1, 4, 16, 64)
FRESH = (0.9, 0.8, 0.7)
STALE = (0.3, 0.1, 0.0)


def seconds(k: int, requests: int) -> float:
    """A step's: cheap drafts for few requests, dear verification for many."""
    if k < 0:
        return 0.010 + 0.0001 * requests
    return 0.010 + 0.002 * (k + 1) + requests * (0.0001 + 0.0004 * k)


def measured(steps: int = 100) -> StepSums:
    sums = {(PLAIN, n, 0): StepSum(steps, steps * seconds(-1, n)) for n in SIZES}
    for k in range(4):
        sums |= {(SPECULATIVE, n, k): StepSum(steps, steps * seconds(k, n)) for n in SIZES}
    return sums


def speed(rates: Sequence[float], k: int, requests: int) -> float:
    return (1 + sum(rates[: max(k, 0)])) / seconds(k, requests)


def is_best(rates: Sequence[float], k: int, requests: int) -> bool:
    """Within the margin."""
    best = max(speed(rates, other, requests) for other in range(OFF, 4))
    return speed(rates, k, requests) >= best * (1 - MARGIN)


def test_chooser_picks_best_length_per_batch_size() -> None:
    chooser = LengthChooser(longest=3, largest=64)
    assert chooser.table == [3] * 65
    chooser.choose(FRESH)
    assert chooser.table == [3] * 65, "no cost is known"
    chooser.add(measured(), FRESH)
    chooser.choose(None)
    assert chooser.table == [3] * 65, "no acceptance is known"
    chooser.choose(FRESH)
    assert chooser.table is not None
    assert all(is_best(FRESH, chooser.table[n], n) for n in range(1, 65))
    assert chooser.table[1] == 3 and chooser.table[64] == OFF
    assert chooser.speed_up is not None and chooser.speed_up > 1


@pytest.mark.parametrize(("fill", "length"), [(1.04, 0), (1.06, OFF)])
def test_chooser_runs_draft_without_drafts_where_cheap(fill: float, length: int) -> None:
    filled = {(SPECULATIVE, n, 0): StepSum(100, 100 * fill * seconds(OFF, n)) for n in SIZES}
    chooser = LengthChooser(3, 64)
    chooser.add({**measured(), **filled}, FRESH)
    chooser.choose(FRESH)
    assert chooser.table is not None and chooser.table[64] == length


def test_chooser_is_ready_for_fewer_requests() -> None:
    """The draft does not run at the load in use, so nothing need be switched on for others."""
    chooser = LengthChooser(3, 64)
    sums = measured()
    chooser.add(sums, FRESH)
    for _ in range(12):
        before = sums[PLAIN, 64, 0]
        more = before + StepSum(10, 10 * seconds(OFF, 64))
        sums = {**sums, (PLAIN, 64, 0): more}
        chooser.add(sums, FRESH)
    chooser.choose(FRESH)
    assert chooser.idle and chooser.speed_up == 1.0
    assert chooser.table is not None and (chooser.table[1], chooser.table[64]) == (3, OFF)


def test_chooser_drafts_nothing_when_no_length_pays() -> None:
    chooser = LengthChooser(3, 64)
    chooser.add(measured(), STALE)
    chooser.choose(STALE)
    assert chooser.table is None
    assert chooser.speed_up == 1.0
    chooser.try_again()
    assert chooser.table == [1] * 65
    chooser.choose(FRESH)
    assert chooser.table is not None and chooser.table[1] == 3


@pytest.mark.parametrize(
    "outliers",
    [
        {(SPECULATIVE, n, 0): StepSum(100, 99 * seconds(-1, n)) for n in SIZES},
        {(PLAIN, 3, 0): StepSum(2, 2 * 0.05)},
    ],
    ids=["length 0 faster than plain steps", "a pause in two plain steps"],
)
def test_chooser_turns_drafting_off_despite_outliers(outliers: StepSums) -> None:
    chooser = LengthChooser(3, 64)
    chooser.add({**measured(), **outliers}, STALE)
    chooser.choose(STALE)
    assert chooser.table is None and chooser.speed_up == 1.0


def test_chooser_ignores_gain_within_margin() -> None:
    chooser = LengthChooser(3, 1)
    chooser.add({key: total for key, total in measured().items() if key[1] == 1}, FRESH)
    chooser.choose(FRESH)
    assert chooser.table == [3, 3]
    # The third position earns less and less: at what share is k = 2 1 % ahead, and 5 %?
    two = 2.7 / seconds(2, 1)
    for ahead, expected in ((1.01, 3), (1.05, 2)):
        third = two / ahead * seconds(3, 1) - 2.7
        chooser.choose((0.9, 0.8, third))
        assert chooser.table == [expected] * 2


def test_chooser_judges_larger_batches_by_largest_measured() -> None:
    """Lengths are compared at a batch size that two of them and plain steps were measured at."""
    sums = measured()
    for k in (-1, 0, 1, 2):
        kind = PLAIN if k < 0 else SPECULATIVE
        sums[kind, 256, max(k, 0)] = StepSum(100, 100 * seconds(k, 256))
    chooser = LengthChooser(3, 500)
    chooser.add(sums, FRESH)
    chooser.choose(FRESH)
    assert chooser.table is not None and len(chooser.table) == 501
    assert chooser.table[500] == chooser.table[256] == chooser.table[64] == OFF


def test_chooser_compares_lengths_timed_at_as_many_requests() -> None:
    """Plain steps and the longest drafts were timed at 64 requests, the others at 4 at most."""
    sums = {key: total for key, total in measured().items() if key[1] <= 4}
    chooser = LengthChooser(3, 64)
    chooser.add(sums, FRESH)
    chooser.choose(FRESH)
    assert chooser.table == [3] * 65, "drafts pay for the most requests that were timed"
    for kind, k in ((PLAIN, -1), (SPECULATIVE, 3)):
        sums[kind, 64, max(k, 0)] = StepSum(300, 300 * seconds(k, 64))
    chooser.add(sums, FRESH)
    assert speed(FRESH, 3, 64) * 1.5 < 1 / seconds(-1, 64)
    chooser.choose(FRESH)
    assert chooser.table is not None and (chooser.table[4], chooser.table[64]) == (3, OFF)


@pytest.mark.parametrize(("got", "length"), [(1.0, 3), (0.6, None)])
def test_chooser_counts_accepted_tokens_that_requests_get(got: float, length: int | None) -> None:
    """Steps with three drafts take 1.91 plain ones: 2.08 tokens of a step pay, 1.65 do not."""
    rates = (0.405, 0.36, 0.315)
    sums = {key: total for key, total in measured().items() if key[1] == 1}
    sums[MIXED, 1, 3] = StepSum(1000, 30.0, 1000, 1000 + round(1080 * got))
    chooser = LengthChooser(3, 1)
    chooser.add(sums, rates, served=False)
    assert chooser.kept == 1.0, "the calibration's requests are no users'"
    chooser = LengthChooser(3, 1)
    chooser.add(sums, rates)
    chooser.choose(rates)
    assert chooser.kept == pytest.approx(got)
    assert chooser.table == (None if length is None else [length] * 2)


@pytest.mark.parametrize(("longer", "length"), [(0.02, 3), (0.08, None)])
def test_chooser_counts_what_prompts_take(longer: float, length: int | None) -> None:
    """Drafts save 0.8 ms a token; with a prompt every 11 tokens, 60 ms each take more."""
    rates = (0.405, 0.36, 0.315)
    sums = {key: total for key, total in measured().items() if key[1] == 1}
    sums[MIXED, 1, 3] = StepSum(100, 100 * (seconds(3, 1) + longer), 100, 1100, 100)
    sums[MIXED, 1, 0] = StepSum(100, 100 * (seconds(-1, 1) + 0.02), 100, 1100, 100)
    chooser = LengthChooser(3, 1)
    chooser.add(sums, rates)
    chooser.choose(rates)
    assert chooser.kept == 1.0, "too few requests say so"
    assert chooser.prompt_seconds(True) == pytest.approx(longer / 11)
    assert chooser.prompt_seconds(False) == pytest.approx(0.02 / 11)
    assert chooser.table == (None if length is None else [length] * 2)


def test_chooser_fades_older_costs() -> None:
    chooser = LengthChooser(3, 1)
    alone = {key: total for key, total in measured().items() if key[1] == 1}
    chooser.add(alone, FRESH)
    chooser.choose(FRESH)
    assert chooser.table == [3, 3]
    slow = dict(alone)
    slow[SPECULATIVE, 1, 3] = StepSum(2100, 100 * seconds(3, 1) + 2000 * 0.1)
    chooser.add(slow, FRESH)
    chooser.choose(FRESH)
    assert chooser.table is not None and chooser.table[1] < 3


def test_launch_schedule_names_every_length() -> None:
    assert lengths_to_choose(3) == (1, 2, 3)
    assert lengths_to_choose(8) == (1, 2, 3, 5, 7, 8)
    most = 1 << 20
    assert launch_schedule((1, 2, 3)) == [[1, 1, 3], [2, 2, 0], [3, 3, 1], [4, 4, 2], [5, most, 3]]
    assert launch_schedule((4,)) == [[1, 1, 4], [2, 2, 0], [3, most, 4]]
    assert sizes_to_measure(64) == [1, 4, 16, 64]
    assert sizes_to_measure(3) == [1, 3]


class Server:
    """Steps as ``seconds`` says, and a draft with ``rates``.

    Attributes:
        running: requests that take ten steps of each length that is told; 0: none do.
    """

    def __init__(self, rates: Sequence[float], running: int = 0) -> None:
        self.rates = rates
        self.running = running
        self.tracker = AcceptanceTracker()
        self.tracker.start(0)
        self.told: list[Sequence[int] | None] = []
        self.control = LengthControl(LengthChooser(3, 64), self.tracker, self.set_lengths)
        self.sums = dict(measured())

    async def set_lengths(self, lengths: Sequence[int] | None) -> None:
        self.told.append(lengths)
        if self.running:
            k = -1 if lengths is None else lengths[self.running]
            self.step(10, k, self.running)

    def spend(self, more: float) -> None:
        """Seconds of steps that read prompts."""
        before = self.sums.get((MIXED, 1, 0), StepSum())
        self.sums[MIXED, 1, 0] = StepSum(before.steps + 1, before.seconds + more)

    def step(self, steps: int, k: int, requests: int, slower: float = 1.0) -> None:
        """Engine steps of a length."""
        key = (PLAIN, requests, 0) if k < 0 else (SPECULATIVE, requests, k)
        before = self.sums.get(key, StepSum())
        more = steps * seconds(k, requests) * slower
        self.sums[key] = StepSum(before.steps + steps, before.seconds + more)

    def serve(self, steps: int, requests: int = 1, slower: float = 1.0) -> None:
        table = self.control.chooser.table
        k = -1 if table is None else table[requests]
        self.step(steps, k, requests, slower)
        if k > 0:
            for number in range(steps):
                at = (number * 7 % steps + 0.5) / steps
                accepted = [requests * (at < rate) for rate in self.rates[:k]]
                self.tracker.record(requests, k * requests, sum(accepted), accepted)
        asyncio.run(self.control.update(self.sums))


def test_drafting_is_off_from_ruined_draft_to_next_commit() -> None:
    server = Server(STALE)
    server.serve(60)
    assert server.told == [None]
    server.serve(60)
    assert server.told == [None]
    # A commit: the next draft is tried with one token at once, and with three when it is known.
    server.tracker.switch(1, [60])
    server.rates = FRESH
    server.serve(60)
    assert server.told[1] == [1] * 65
    for _ in range(3):
        server.serve(60)
    table = server.control.chooser.table
    assert table is not None and table[1] == 3


def test_drafting_is_retried_at_doubling_intervals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollout_server.control.draft_length.REFRESH_SECONDS", math.inf)
    server = Server(STALE)
    server.serve(60)
    assert server.told == [None]
    # Nothing is generated, however long: drafts would not be tried.
    asyncio.run(server.control.update(server.sums))
    assert server.told == [None]

    def tried_after(seconds: float) -> bool:
        server.told.clear()
        server.spend(seconds)
        server.serve(60)
        tried = bool(server.told)
        if tried:
            server.serve(300)
            assert server.told == [[1] * 65, None]
        return tried

    after = RETRY_SECONDS
    while after <= MAX_RETRY_SECONDS:
        assert not tried_after(after - 10) and tried_after(11)
        after *= 2
    assert tried_after(MAX_RETRY_SECONDS + 1), "never less often"
    server.tracker.switch(1, [server.tracker.all.drafts])
    assert tried_after(0)
    assert tried_after(RETRY_SECONDS + 1), "another draft"


def test_speed_up_is_known_after_few_plain_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollout_server.control.step_costs.READ_SECONDS", 0.0)
    server, costs = Server(FRESH), StepCosts()
    server.sums = dict(measured(steps=5))

    async def step_sums() -> StepSums:
        server.step(100, 3, 1)
        server.tracker.record(100, 300, 240, [90, 80, 70])
        return server.sums

    async def look() -> None:
        watch = CostWatch(step_sums, server.tracker, costs, measured=server.control.update)
        watch.start()
        while server.tracker.speed_up is None:
            server.tracker.generated(1)
            await asyncio.sleep(0)
        await watch.stop()

    asyncio.run(asyncio.wait_for(look(), 30))
    assert costs.break_even is None, "5 plain steps of a size"
    speed_up = server.control.chooser.speed_up
    assert speed_up is not None and server.tracker.speed_up == speed_up > 1


async def no_sleep(seconds: float) -> None:
    pass


def test_old_plain_cost_is_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain steps were timed while something else slowed the machine: drafting seems to pay."""
    monkeypatch.setattr("rollout_server.control.draft_length.MIN_REFRESH_SECONDS", 0.0)
    monkeypatch.setattr("rollout_server.control.draft_length.asyncio.sleep", no_sleep)
    server = Server(STALE)
    server.sums = {
        key: StepSum(total.steps, total.seconds * (3 if key[0] == PLAIN else 1))
        for key, total in server.sums.items()
    }
    server.serve(60)
    table = server.control.chooser.table
    assert table is not None
    off = 0
    for _ in range(10):
        server.spend(REFRESH_SECONDS / 5)
        server.told.clear()
        server.serve(60)
        found = sum(lengths is None or lengths[1] == OFF for lengths in server.told)
        off += found
        if found:
            # What the engine does while drafting is off for the measurement.
            before = server.sums[PLAIN, 1, 0]
            quick = StepSum(before.steps + 400, before.seconds + 400 * seconds(-1, 1))
            server.sums[PLAIN, 1, 0] = quick
    assert off == 3, "because it is old, before lengths change for it, and for good"
    table = server.control.chooser.table
    assert table is None or table[1] == OFF


def test_lengths_are_measured_before_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps take twice what they took in the calibration: only what is in use seems slower."""
    monkeypatch.setattr("rollout_server.control.draft_length.asyncio.sleep", no_sleep)
    server = Server(FRESH)
    server.serve(60)
    for _ in range(6):
        server.spend(RECENT_SECONDS + 1)
        server.serve(60)
    live = server.control.chooser.table
    assert live is not None and live[1] == 3
    told: list[Sequence[int] | None] = []
    for _ in range(12):
        server.told.clear()
        server.serve(100, slower=2.0)
        told += server.told
        for lengths in server.told:
            # What the engine does while it measures.
            k = -1 if lengths is None else lengths[1]
            if k != 3:
                server.step(20, k, 1, slower=2.0)
    table = server.control.chooser.table
    assert table is not None and table[1] == 3
    measured = [k for k in (-1 if lengths is None else lengths[1] for lengths in told) if k != 3]
    assert {1, 2} <= {*measured}, "each was measured once it seemed faster"
    assert len(measured) <= 4


def test_lengths_that_cannot_be_timed_stay_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step of the measurement also read a prompt."""
    monkeypatch.setattr("rollout_server.control.draft_length.asyncio.sleep", no_sleep)
    server = Server(FRESH)
    for _ in range(10):
        server.serve(60)
    server.spend(RECENT_SECONDS + 1)
    server.told.clear()
    for _ in range(6):
        server.serve(30, slower=2.0)
    told = [-1 if lengths is None else lengths[1] for lengths in server.told]
    tried = [k for k in told if k != 3]
    assert tried and len({*tried}) == len(tried), "each once in a while"
    table = server.control.chooser.table
    assert table is not None and table[1] == 3


class Engine:
    """Counts the steps of each calibration batch; more requests than ``reached`` take for ever."""

    def __init__(self, reached: int = 16) -> None:
        self.k, self.on = 3, True
        self.reached = reached
        self.sums: dict[tuple[str, int, int], StepSum] = {}

    async def set_speculation(self, enabled: bool) -> float:
        self.on = enabled
        return 0.0

    async def set_draft_lengths(self, lengths: Sequence[int]) -> None:
        assert len(set(lengths)) == 1 and len(lengths) == 17
        self.k = lengths[1]

    async def generate(self, requests: int, steps: int, tokens: int) -> None:
        assert tokens == (self.k + 1 if self.on else 1)
        if requests > self.reached:
            await asyncio.Event().wait()
        key = (SPECULATIVE, requests, self.k) if self.on else (PLAIN, requests, 0)
        self.sums[key] = StepSum(steps, steps * seconds(self.k if self.on else -1, requests))

    async def step_sums(self) -> StepSums:
        return self.sums


def test_calibration_measures_every_length() -> None:
    engine, chooser = Engine(), LengthChooser(3, 16)
    asyncio.run(calibrate(engine, engine.generate, chooser))  # type: ignore[arg-type]
    assert {(n, k) for kind, n, k in engine.sums if kind == SPECULATIVE} == {
        (n, k) for n in (1, 4, 16) for k in range(4)
    }
    assert {n for kind, n, _ in engine.sums if kind == PLAIN} == {1, 4, 16}
    assert engine.on and engine.k == 3
    chooser.choose(FRESH)
    assert chooser.table is not None and is_best(FRESH, chooser.table[1], 1)
    chooser.choose((0.3, 0.1, 0.0))
    assert chooser.table is None, "drafts pay at no number of requests"
    served = engine.sums[SPECULATIVE, 1, 3]
    more = StepSum(served.steps + 50, served.seconds + 50 * seconds(3, 1))
    chooser.add(engine.sums | {(SPECULATIVE, 1, 3): more}, FRESH)
    chooser.choose(FRESH)
    assert chooser.table is not None
    assert all(is_best(FRESH, chooser.table[n], n) for n in range(1, 17))


def test_calibration_stops_and_load_times_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_server.control.draft_length.CALIBRATION_SECONDS", 0.05)
    monkeypatch.setattr("rollout_server.control.draft_length.asyncio.sleep", no_sleep)
    engine, server = Engine(reached=1), Server(FRESH, running=8)
    chooser = LengthChooser(3, 16)
    calibration = calibrate(engine, engine.generate, chooser)  # type: ignore[arg-type]
    asyncio.run(asyncio.wait_for(calibration, 30))
    assert {n for _, n, _ in engine.sums} == {1}, "the fewest requests first"
    assert (engine.on, engine.k) == (True, 3)
    server.control = LengthControl(chooser, server.tracker, server.set_lengths)
    server.sums, server.running = dict(engine.sums), 1
    for _ in range(6):
        server.serve(20)
    assert {*server.control._timed.values()}.isdisjoint({-math.inf}), "under load, at one request"
    server.running = 8
    server.serve(50, requests=8)
    assert chooser.untimed() == [-1, 1, 2, 0], "at eight requests"
    server.spend(RECENT_SECONDS + 1)
    for _ in range(5):
        server.serve(50, requests=8)
    assert chooser.untimed() == []
    assert sum(total.seconds for total in server.sums.values()) < REFRESH_SECONDS
    server.serve(100, requests=8)
    table = chooser.table
    assert table is not None and table[8] == max(range(4), key=lambda k: speed(FRESH, k, 8))


def test_calibration_load_ends_after_its_steps() -> None:
    """A model that accepts nothing would take four steps where one that accepts all takes one."""
    running: set[str] = set()
    longest = []

    class Client:
        async def generate(
            self, prompt: object, sampling: SamplingParams, name: str
        ) -> AsyncIterator[int]:
            running.add(name)
            longest.append(sampling.max_tokens)
            try:
                for token in range(sampling.max_tokens or 0):
                    await asyncio.sleep(0)
                    seen[name] = token + 1
                    yield token
            finally:
                running.remove(name)

    seen: dict[str, int] = {}
    asyncio.run(_load(Client())(3, 6, 4))
    assert running == set() and [*seen.values()] == [7] * 3, "one for the prompt"
    assert longest == [25] * 3


def test_idle_reading_does_not_count_calibration_again() -> None:
    """No sums are known before the first request."""
    engine, chooser = Engine(), LengthChooser(3, 16)
    asyncio.run(calibrate(engine, engine.generate, chooser))  # type: ignore[arg-type]
    chooser.add({}, None)
    assert chooser.add(engine.sums, FRESH) == {}


@pytest.mark.parametrize(("expected", "first"), [(FRESH, 3), ((0.05, 0.0, 0.0), None), ((), 3)])
def test_first_lengths_follow_expected_acceptance(
    expected: Sequence[float], first: int | None
) -> None:
    server = Server(STALE)
    server.tracker.start(0, expected)
    server.control.chooser.add(server.sums, None, served=False)
    asyncio.run(server.control.update({}))
    table = server.control.chooser.table
    assert (table and table[1]) == first
    # The same of a draft that is committed later.
    server.tracker.switch(1, [0], expected)
    server.told.clear()
    server.serve(20)
    table = server.control.chooser.table
    assert (table and table[1]) == first


def test_draft_that_is_better_than_expected_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rollout_server.control.draft_length.asyncio.sleep", no_sleep)
    server = Server(FRESH, running=1)
    server.tracker.start(0, (0.05, 0.0, 0.0))
    asyncio.run(server.control.update(server.sums))
    assert server.told == [None]
    server.spend(RETRY_SECONDS + 1)
    server.serve(10)
    assert server.told == [None, [1] * 65]
    # Steps that read prompts: nothing was drafted yet.
    server.spend(1.0)
    asyncio.run(server.control.update(server.sums))
    assert server.told == [None, [1] * 65]
    for _ in range(6):
        server.serve(60)
    table = server.control.chooser.table
    assert table is not None and table[1] == 3


def drafted(rates: Sequence[float], drafts: int, seed: int) -> list[int]:
    """Count these drafts by how many of their tokens are accepted, from 0 on."""
    draw = random.Random(seed)
    counts = [0] * (len(rates) + 1)
    for _ in range(drafts):
        at = draw.random()
        counts[sum(at < rate for rate in rates)] += 1
    return counts


def calibrated() -> LengthChooser:
    chooser = LengthChooser(3, 64)
    chooser.add(measured(), None, served=False)
    return chooser


def test_bad_draft_is_recognised_within_few_drafts() -> None:
    """Half as fast as without drafts at k = 3 and one request: the old rule took 161 drafts."""
    chooser = calibrated()
    found = [
        next(n for n in range(1, 200) if chooser.loses({(1, 3): drafted((0.1, 0.0, 0.0), n, seed)}))
        for seed in range(20)
    ]
    assert max(found) <= 40
    assert sorted(found)[10] <= 25


def test_draft_that_breaks_even_is_rarely_called_bad() -> None:
    """The test is asked after each draft. Of 400 at an error rate of 1 %, more than 14 are called
    bad with p < 0.001."""
    chooser = calibrated()
    even = seconds(3, 1) / seconds(-1, 1) - 1
    rates = tuple(even / 3 for _ in range(3))
    called = 0
    for seed in range(400):
        draw, counts = random.Random(seed), [0] * 4
        for _ in range(150):
            counts[3 if draw.random() < rates[0] else 0] += 1
            if chooser.loses({(1, 3): counts}):
                called += 1
                break
    assert called <= 14


def test_drafting_stops_on_test_not_on_first_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft whose estimate lies a little below break-even goes on for its first drafts."""
    monkeypatch.setattr("rollout_server.control.draft_length.asyncio.sleep", no_sleep)
    server = Server((0.34, 0.28, 0.24), running=1)
    slower = [speed(server.rates, k, 1) / speed((), -1, 1) for k in (1, 2, 3)]
    assert min(slower) > 0.9 and max(slower) < 0.98
    while server.tracker.recent.drafts < 600:
        server.serve(60)
        assert server.control.chooser.table is not None
    while server.tracker.recent.drafts < FIRST_DRAFTS:
        server.serve(60)
    server.serve(60)
    server.serve(60)
    assert server.control.chooser.table is None
