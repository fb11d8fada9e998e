"""The arithmetic of the overhead benchmark."""

from __future__ import annotations

import pytest

from benchmarks.metrics_overhead.figures import OFF, ON, UNSCRAPED, figures, table


def test_rounds_are_compared_with_themselves() -> None:
    # The machine is twice as slow in the second round: its ratio is the same.
    rounds = [
        {OFF: 1000.0, UNSCRAPED: 1000.0, ON: 998.0},
        {OFF: 500.0, UNSCRAPED: 510.0, ON: 499.0},
        {OFF: 1000.0, UNSCRAPED: 900.0, ON: 700.0},
    ]
    found = figures(rounds)
    assert found["tokens_per_second"][OFF] == {"median": 1000.0, "min": 500.0, "max": 1000.0}
    assert found["ratio_to_off"][ON]["median"] == pytest.approx(0.998)
    (target,) = found["targets"]
    assert target["ok"] and target["value"] == pytest.approx(0.002)
    assert "0.9980" in table(found)
    rounds[1] = rounds[0] = {OFF: 500.0, UNSCRAPED: 500.0, ON: 497.0}
    assert not figures(rounds)["targets"][0]["ok"]
