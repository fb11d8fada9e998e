"""The arithmetic of the overhead benchmark."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.metrics_overhead.direct import Pieces, clock_seconds, direct_figures, direct_table
from benchmarks.metrics_overhead.figures import OFF, ON, Round, figures, table


def _round(off: float, on: float) -> Round:
    return {
        OFF: {"drafts": off, "tokens": 2.5 * off},
        ON: {"drafts": on, "tokens": 2.0 * on},
    }


def test_rounds_are_compared_with_themselves() -> None:
    # The machine is twice as slow in the second round: its ratio is the same.
    found = figures([_round(1000.0, 998.0), _round(500.0, 499.0), _round(1000.0, 700.0)])
    assert found["rates"][OFF]["drafts"] == {"median": 1000.0, "min": 500.0, "max": 1000.0}
    assert found["ratio_to_off"]["drafts"]["median"] == pytest.approx(0.998)
    assert found["ratio_to_off"]["tokens"]["median"] == pytest.approx(0.998 * 0.8)
    (target,) = found["targets"]
    # Drafts count: what they yield is chance.
    assert target["ok"] and target["value"] == pytest.approx(0.002)
    assert "0.9980" in table(found)
    assert not figures([_round(500.0, 497.0)] * 3)["targets"][0]["ok"]


def test_pieces_add_up() -> None:
    pieces = Pieces(step=0.02, clock=2e-6, record=28e-6, exposition=1e-3, scrape_every=1.0)
    found = direct_figures(pieces)
    assert found["share"] == pytest.approx(0.0025) and found["targets"][0]["ok"]
    assert "0.250 %" in direct_table(found)
    assert not direct_figures(replace(pieces, exposition=4e-3))["targets"][0]["ok"]


def test_the_clock_costs_what_its_quickest_rows_differ_by() -> None:
    # Rows of 100 steps, off and on in turn: 1 and 4 seconds, 9 (a pause) and 3, 2 and 5.
    readings = iter([0.0, 1.0, 1.0, 5.0, 5.0, 14.0, 14.0, 17.0, 17.0, 19.0, 19.0, 24.0])
    assert clock_seconds(8, 3, steps=100, rounds=3, timer=lambda: next(readings)) == 0.02
