"""The pure parts of the acceptance curve: counters to figures, interpolation, ladder, targets."""

from __future__ import annotations

import random
import statistics

import pytest

from benchmarks.acceptance_curve.curve import (
    Mark,
    curve_table,
    float8_targets,
    ladder,
    ladder_table,
    seconds_to,
    targets,
)
from benchmarks.vllm_server import Acceptance


def curve(*points: tuple[float, float], cpu: float = 1.0) -> list[Mark]:
    """Marks at (wall seconds, acceptance length) with ``cpu`` CPU seconds per wall second."""
    return [
        Mark(i * 1000, i, wall, wall * cpu, accepting(length))
        for i, (wall, length) in enumerate(points)
    ]


def accepting(length: float) -> Acceptance:
    """1000 verification steps of this acceptance length."""
    accepted = round((length - 1) * 1000)
    at_least = tuple(min(max(accepted - 1000 * s, 0), 1000) for s in range(3))
    return Acceptance(1000, accepted, at_least)


def test_acceptance_is_that_of_the_single_steps() -> None:
    """Mean and standard error from the counters are those of the steps behind them."""
    rng = random.Random(0)
    steps = [rng.choice((0, 1, 1, 2, 3)) for _ in range(500)]
    found = Acceptance(len(steps), sum(steps), tuple(sum(a >= s for a in steps) for s in (1, 2, 3)))
    assert found.length == pytest.approx(1 + statistics.fmean(steps))
    assert found.standard_error == pytest.approx(statistics.pstdev(steps) / 500**0.5)


def test_seconds_to_an_acceptance_length() -> None:
    """Linear between marks; the first crossing counts; None where it was never reached."""
    marks = curve((0, 1.0), (2, 1.5), (6, 2.5), (8, 2.3), (20, 3.0), cpu=0.5)
    assert seconds_to(marks, 1.25) == 1
    assert seconds_to(marks, 1.5) == 2
    assert seconds_to(marks, 2.0) == 4
    assert seconds_to(marks, 2.0, "cpu") == 2
    assert seconds_to(marks, 2.4) == pytest.approx(5.6)
    assert seconds_to(marks, 2.65) == pytest.approx(14)
    assert seconds_to(marks, 3.01) is None
    assert seconds_to(marks, 1.0) == 0


def test_every_rung_is_against_the_peer_that_was_first_there() -> None:
    """And a rung that one side did not reach is none."""
    curves = {
        "ours": curve((0, 1.0), (10, 3.0)),
        "quick start": curve((0, 1.0), (10, 2.0), (100, 2.1), cpu=0.5),
        "long run": curve((0, 1.0), (50, 2.0), (75, 3.5)),
    }
    rungs = ladder(curves, "ours", ["quick start", "long run"], (1.5, 2.5, 3.5))
    assert [(rung.length, rung.peer) for rung in rungs] == [(1.5, "quick start"), (2.5, "long run")]
    assert [rung.ratio for rung in rungs] == pytest.approx([2.0, (50 + 25 / 3) / 7.5])
    assert rungs[0].cpu_ratio == pytest.approx(1.0)
    assert all(target.ok for target in targets(rungs))
    table = ladder_table(rungs, list(curves)).splitlines()
    assert len(table) == 3 and "2.00x" in table[1] and " - " in table[2]
    assert curve_table(curves).count("ours") == 1


def test_a_slower_rung_or_none_at_all_misses() -> None:
    """There is no way to meet the target without having reached anything."""
    curves = {"ours": curve((0, 1.0), (10, 2.0)), "peer": curve((0, 1.0), (3, 1.4), (30, 2.0))}
    found = targets(ladder(curves, "ours", ["peer"], (1.4, 1.9)))
    assert [target.ok for target in found] == [False, True]
    assert [target.ok for target in targets(ladder(curves, "ours", ["peer"], (2.5,)))] == [False]


def test_without_a_peer_there_is_no_ladder() -> None:
    """And what was measured is not lost for it."""
    alone = {"ours": curve((0, 1.0), (1, 2.0)), "float8": curve((0, 1.0), (1, 1.9))}
    assert ladder(alone, "ours", ["peer"], [1.5]) == []
    assert ladder({"peer": alone["ours"]}, "ours", ["peer"], [1.5]) == []
    assert "ours" in ladder_table([], list(alone))


def test_float8_states_may_cost_what_chance_explains() -> None:
    """Three standard errors of the difference of two drafts, each of 1000 steps."""
    plain = curve((0, 1.0), (1, 2.0), (2, 2.5))
    same, worse = float8_targets(plain, curve((0, 1.0), (1, 2.0), (2, 2.25)))
    assert same.ok and same.value == 0.0 and "1000 tokens" in same.name
    # Steps accept one or two tokens: half of them two, variance 1/4, or a quarter, variance 3/16.
    spread = 3 * (0.25 / 1000 + 0.1875 / 1000) ** 0.5
    assert not worse.ok and worse.value == pytest.approx(-0.25)
    assert worse.bound == f">= {-spread:.3f}"
