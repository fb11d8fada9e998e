"""Rollouts with the draft lengths of several rules, on published step times.

A step verifies in the time that EfficientRollout measured on an A100 (``a100_steps.csv``, at 1,024
tokens of past; linear between its draft lengths 0, 3 and 7), and drafts in the time that the
planner estimates for an EAGLE-3 draft: nobody has published that by batch size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.plan_published.cells import config_of, shape_of
from draft_trainer.planning import read_lengths
from rollout_server.control.draft_length import LengthChooser, sizes_to_measure
from rollout_server.control.step_costs import PLAIN, SPECULATIVE, StepSum
from slipstream.economics.arithmetic import acceptance_length, best_length, generate, speed_up
from slipstream.economics.costs import OFF, Roofline, StepTable, eagle3_shape, hardware

if TYPE_CHECKING:
    from benchmarks.plan_published.__main__ import Row

SGLANG = {1: (1, 3, 5, 7), 8: (0, 1, 3), 32: (0, 1), 64: (0,)}
"""The draft lengths between which SGLang 0.5.23 chooses by default, by the least requests."""

CONTEXT = 1024
LONGEST = 7
REQUESTS = 64
CONDITIONAL = (0.3, 0.5, 0.6, 0.7, 0.8)
"""Acceptance of a position, once it is reached."""

FIXED, BY_SGLANG, BY_PLAN, BY_AUTO = "best fixed k", "SGLang's table", "plan", "auto"
RULES = (FIXED, BY_SGLANG, BY_PLAN, BY_AUTO)
OURS = (BY_PLAN, BY_AUTO)


def table_of(rows: Sequence[Row], model: str) -> StepTable:
    """Make the step costs of a model with an EAGLE-3 draft."""
    cells = {
        (row.k, row.batch): row.target
        for row in rows
        if (row.model, row.context) == (model, CONTEXT) and row.batch <= REQUESTS
    }
    batches = sorted(
        {b for k, b in cells if (0, b) in cells and (3, b) in cells and (7, b) in cells}
    )
    draft = eagle3_shape(config_of(model), 32_000)
    estimate = Roofline(hardware("A100"), shape_of(model), draft)

    def seconds(k: int, batch: int) -> float:
        verified = max(k, 0)
        low, high = (0, 3) if verified <= 3 else (3, 7)
        share = (verified - low) / (high - low)
        target = cells[low, batch] + share * (cells[high, batch] - cells[low, batch])
        drafting = estimate.seconds(0, batch, CONTEXT) - estimate.seconds(OFF, batch, CONTEXT)
        one = drafting - estimate.speculative_seconds
        return target if k == OFF else target + estimate.speculative_seconds + max(k, 1) * one

    return StepTable.measured(
        (batch, k, seconds(k, batch), 1.0) for k in range(OFF, LONGEST + 1) for batch in batches
    )


def compare(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Speed-up of 64 rollouts with a long tail over no drafts, by policy, acceptance and rule."""
    lengths = read_lengths("lognormal:2000,0.9,16384")[:REQUESTS]
    found = []
    for model in ("Qwen2.5-7B", "Llama-3.1-8B", "Qwen2.5-14B"):
        costs = table_of(rows, model)
        for conditional in CONDITIONAL:
            rates = [conditional**place for place in range(1, LONGEST + 1)]
            told = {"policy": model, "conditional": conditional}
            at_three = {"acceptance_length": acceptance_length(rates, 3)}
            found.append({**told, **at_three, **_speed_ups(costs, rates, lengths)})
    return found


def _speed_ups(
    costs: StepTable, rates: Sequence[float], lengths: Sequence[float]
) -> dict[str, float]:
    def seconds(choose: Callable[[float], int]) -> float:
        return generate(costs, rates, lengths, choose, REQUESTS).seconds

    plain = seconds(lambda batch: OFF)
    fixed = [seconds(lambda batch, k=k: k) for k in range(1, LONGEST + 1)]  # type: ignore[misc]
    return {
        FIXED: plain / min(plain, *fixed),
        BY_SGLANG: plain / seconds(lambda batch: _sglang(costs, rates, batch)),
        # As the planner's "best k per batch": none where that is as fast.
        BY_PLAN: plain / min(plain, seconds(lambda batch: best_length(costs, rates, batch))),
        BY_AUTO: plain / seconds(_auto(costs, rates)),
    }


def least(compared: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The least share of the best rule's speed that each rule has."""
    return {rule: min(c[rule] / max(c[r] for r in RULES) for c in compared) for rule in RULES}


def _sglang(costs: StepTable, rates: Sequence[float], batch: float) -> int:
    """The best of the lengths that SGLang's table has there: its own rule, a moving average of the
    accepted tokens, finds that at best. Its 0 is taken to cost what no drafts cost."""
    start = max(n for n in SGLANG if n <= max(batch, 1))
    choices = [k or OFF for k in SGLANG[start]]
    return max(choices, key=lambda k: speed_up(costs, rates, k, batch))


def _auto(costs: StepTable, rates: Sequence[float]) -> Callable[[float], int]:
    """The table of ``--speculation auto`` that has timed the sizes of its calibration."""
    chooser = LengthChooser(LONGEST, REQUESTS)
    lengths = (OFF, 0, *chooser.lengths)
    for served in (False, True):
        steps = 100 * (1 + served)
        sums = {
            (PLAIN if k == OFF else SPECULATIVE, n, max(k, 0)): StepSum(
                steps, steps * costs.seconds(k, n)
            )
            for k in lengths
            for n in sizes_to_measure(REQUESTS)
        }
        chooser.add(sums, rates, served)
    chooser.choose(rates)
    table = chooser.table
    return lambda batch: OFF if table is None else table[math.ceil(batch)]
