"""What predictions are held to."""

from __future__ import annotations

from typing import Any

from benchmarks.plan_measured.__main__ import targets_of


def cell(k: int, step: float, gain: float) -> dict[str, Any]:
    """Predicted 10 ms and 1.5 times as fast."""
    return {
        **{"policy": "p", "draft": "fresh", "k": k, "requests": 8},
        **{"step_predicted": 0.01, "step_measured": step},
        **{"speed_up_predicted": 1.5, "speed_up_measured": gain},
    }


def test_a_cell_within_a_tenth_counts_and_one_that_was_not_measured_does_not() -> None:
    cells = [cell(0, 0.0105, 1.0), cell(1, 0.0095, 1.6), cell(2, 0.02, 1.0), cell(3, 0.0, 1.45)]
    step, gain = targets_of(cells)
    assert (step.value, step.ok) == (0.5, False)
    # Without drafts the speed-up is 1 by definition.
    assert (gain.value, gain.ok) == (2 / 3, False)
