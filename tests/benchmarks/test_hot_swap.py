"""The hot-swap benchmark sees a swap that stalls streams or costs throughput."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.hot_swap.figures import NONE, OURS, PEER, Outcome, Window, figures, targets
from benchmarks.hot_swap.load import Seen
from benchmarks.hot_swap.swaps import Swap

STEP = 0.01


def seen(slow: tuple[float, ...] = (), gap: float = 0.0) -> Seen:
    """A chunk every step for 30 s; the one after each of ``slow`` comes ``gap`` later."""
    one, now = Seen(greedy=100), 0.0
    while now < 30.0:
        late = gap if any(now <= at < now + STEP for at in slow) else 0.0
        now += STEP + late
        one.chunks.append((now, STEP + late))
    return one


def outcome(commit: float, gap: float, ours: float = 990.0) -> Outcome:
    """Three windows of ten seconds, ten swaps in the second."""
    times = tuple(10.5 + second for second in range(9))
    windows = [
        # The better release and the worse one.
        Window(NONE, 0.0, 5.0, 7_000.0, 0),
        Window(NONE, 5.0, 10.0, 3_000.0, 0),
        Window(OURS, 10.0, 20.0, 10 * ours, 9),
        Window(PEER, 20.0, 30.0, 5000.0, 9),
    ]
    swaps = [Swap(at, at + 0.015, n % 2, {"a": commit}) for n, at in enumerate(times)]
    return Outcome(
        windows, swaps, [0.2], [seen(times, gap)], ["a"], 0.3, 100, [0.002], {0: 3.0}, True
    )


def failing(found: dict[str, Any], wanted_swaps: int) -> set[str]:
    return {target.name for target in targets(found, wanted_swaps) if not target.ok}


def test_hot_swap_figures_measure_gaps_across_swaps() -> None:
    found = figures(outcome(commit=0.015, gap=0.005))
    assert failing(found, 9) == set()
    [server] = found["servers"]
    assert server["step_seconds"] == pytest.approx(STEP)
    assert server["commit_steps"]["median"] == pytest.approx(1.5)
    assert server["gap_p99"]["no_swaps"] == pytest.approx(STEP)
    assert server["gap_p99"]["across_a_swap"] == pytest.approx(STEP + 0.005)
    assert found["throughput_ratio"][OURS]["median"] == pytest.approx(0.99)
    assert found["throughput_ratio"][PEER]["median"] == pytest.approx(0.5)
    slow = failing(figures(outcome(commit=0.025, gap=0.015, ours=970.0)), 200)
    assert slow == {
        "fleet-wide swaps",
        "commit, median, in steps",
        "gap p99 across a swap / without",
        "throughput, a swap every second / none",
    }
