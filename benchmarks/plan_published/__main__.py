"""``python -m benchmarks.plan_published``: the planner against figures that others have published.

Four questions. How far is the roofline from the step times of a model that it was not fitted to;
how far is a measured table between its own points; are cells of published tables what the model
makes of the others in the same table; and how fast are rollouts with draft lengths from the
planner, from ``--speculation auto`` and from SGLang's default table, on published steps.

``a100_steps.csv`` holds medians of furiosa-ai/EfficientRollout's sweeps (``sd_toggle/configs``,
Apache License 2.0; arXiv 2606.18967): milliseconds of a target pass over k + 1 tokens of each
request and of a draft pass, by batch and context, on one A100. ``cells.SMALL_STEPS`` are of small
models.
"""

from __future__ import annotations

import csv
import dataclasses
import math
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scipy.optimize import least_squares

from benchmarks.harness import Target, finish, options, table
from benchmarks.plan_published import rules
from benchmarks.plan_published.cells import (
    H100_PCIE,
    MEASURED_COST,
    NOT_PREDICTED,
    SMALL_STEPS,
    published_cells,
    shape_of,
)
from slipstream.economics.arithmetic import Loop, acceptance_length, break_even
from slipstream.economics.costs import OFF, Roofline, StepTable, hardware

LARGE = ("Qwen2.5-7B", "Qwen2.5-14B", "Llama-3.1-8B")
SMALL = ("Qwen2.5-0.5B", "Qwen3-1.7B")
FIELDS = (
    *("memory_share", "compute_share", "corner", "context_share"),
    *("layer_seconds", "request_seconds"),
)
BOUNDS = ([0.3, 0.3, 1, 0, 0, 0], [1, 1, 20, 3, 300e-6, 300e-6])
START = [0.75, 0.8, 2, 0.5, 30e-6, 40e-6]
CONDITIONAL = (0.5, 0.6, 0.7, 0.8, 0.9)
"""Acceptance of each position, once it is reached, at which the sign of the gain is judged."""


@dataclass(frozen=True)
class Row:
    """One measured cell; seconds."""

    model: str
    batch: int
    context: int
    k: int
    target: float
    draft: float


def read_rows() -> list[Row]:
    """All cells of ``a100_steps.csv``."""
    with (Path(__file__).parent / "a100_steps.csv").open(newline="") as file:
        return [
            Row(
                row["model"],
                *(int(row[n]) for n in ("batch", "context", "k")),
                *(float(row[n] or 0) / 1e3 for n in ("target_ms", "draft_ms")),
            )
            for row in csv.DictReader(file)
        ]


def small_rows() -> list[Row]:
    """All cells of ``SMALL_STEPS``."""
    return [
        Row(model, batch, context, 0, milliseconds / 1e3, 0.0)
        for model, batch, context, milliseconds in SMALL_STEPS
    ]


def roofline(model: str, figures: Sequence[float] | None = None) -> Roofline:
    """Return the costs of target passes where the model was measured, with the fitted figures or
    the shipped ones."""
    shape = shape_of(model)
    shipped = Roofline(H100_PCIE if model in SMALL else hardware("A100"), shape, shape)
    if figures is None:
        return shipped
    fitted: dict[str, Any] = dict(zip(FIELDS, map(float, figures), strict=True))
    return dataclasses.replace(shipped, **fitted)


def target_seconds(costs: Roofline, row: Row) -> float:
    """Return the seconds of a target pass, without draft passes."""
    shape = costs.policy
    passed = costs.forward(shape, row.batch, row.k + 1, row.context)
    return passed + costs.request_seconds * row.batch


def fit(rows: Sequence[Row]) -> list[float]:
    """``FIELDS`` by least squares of log seconds, in which each model counts the same."""
    cells = Counter(row.model for row in rows)

    def errors(figures: Sequence[float]) -> list[float]:
        by_model = {model: roofline(model, figures) for model in cells}
        return [
            math.log(target_seconds(by_model[r.model], r) / r.target) / math.sqrt(cells[r.model])
            for r in rows
        ]

    found = least_squares(errors, START, bounds=BOUNDS, x_scale=[1, 1, 1, 1, 1e-5, 1e-5])
    return list(found.x)


def mean_error(rows: Sequence[Row], predicted: Sequence[float]) -> float:
    """Mean of |predicted / measured - 1|."""
    return statistics.fmean(
        abs(seconds / row.target - 1) for row, seconds in zip(rows, predicted, strict=True)
    )


def judge_roofline(rows: Sequence[Row]) -> tuple[list[list[str]], dict[str, float]]:
    """Table rows and, by model, its mean error when the fit has not seen it."""
    shown, errors = [], {}
    for model in (*LARGE, *SMALL):
        own = [row for row in rows if row.model == model]
        left_out = fit([row for row in rows if row.model != model])
        predicted = [target_seconds(roofline(model, left_out), row) for row in own]
        shipped = [target_seconds(roofline(model), row) for row in own]
        errors[model] = mean_error(own, predicted)
        shown.append(
            [model, f"{len(own)}", f"{errors[model]:.1%}", f"{mean_error(own, shipped):.1%}"]
        )
    return shown, errors


def judge_tables(rows: Sequence[Row]) -> tuple[float, float, int, int]:
    """Every second batch size is left out and predicted from the others.

    Returns:
        Mean error of a step's seconds, largest error, signs of the gain that are right, and judged.
    """
    errors, right, judged = [], 0, 0
    for model in LARGE:
        for context in sorted({row.context for row in rows}):
            cells = {
                (row.k, row.batch): row.target + row.k * row.draft
                for row in rows
                if (row.model, row.context) == (model, context)
            }
            batches = sorted({batch for _, batch in cells})
            known = {batch for number, batch in enumerate(batches) if number % 2 == 0}
            table_of = StepTable.of(
                ((batch, k, s) for (k, batch), s in cells.items() if batch in known), noise=math.inf
            )
            for (k, batch), seconds in cells.items():
                if batch in known or batch > max(b for k_, b in cells if k_ == k and b in known):
                    continue
                errors.append(abs(table_of.seconds(k or OFF, batch) / seconds - 1))
                for conditional in CONDITIONAL if k else ():
                    length = acceptance_length([conditional, conditional**2], k)
                    truth = length > seconds / cells[0, batch]
                    right += truth == (length > break_even(table_of, k, batch))
                    judged += 1
    return statistics.fmean(errors), max(errors), right, judged


def main(argv: Sequence[str] | None = None) -> int:
    """Print tables and targets."""
    parsed = options("plan_published", (__doc__ or "").split("\n\n")[1]).parse_args(argv)
    rows = read_rows()
    every = rows + small_rows()
    shown, left_out = judge_roofline(every)
    print(
        table(
            "Mean error of the roofline: on an A100, and of small models on an H100",
            ["model", "cells", "fitted to the others", "as shipped"],
            shown,
        )
    )
    mean, largest, right, judged = judge_tables(rows)
    print(
        f"\nMeasured tables between their points: mean error {mean:.1%}, largest {largest:.1%}; "
        f"the sign of the gain is right in {right} of {judged} cells ({right / judged:.1%})\n"
    )
    cells = published_cells()
    print(
        table(
            "Published cells",
            ["source", "cell", "published", "predicted", "error"],
            [
                [c.source, c.name, f"{c.published:g}", f"{c.predicted:.4g}", f"{c.error:+.1%}"]
                for c in cells
            ],
        )
    )
    for cell in cells:
        if cell.reason:
            print(f"off: {cell.source}: {cell.name}: {cell.reason}")
    for source, reason in NOT_PREDICTED.items():
        print(f"not predicted: {source}: {reason}")
    share = (1 - 1 / 1.70) / (1 - 1 / 2.72)
    what_if = {
        name: [1 / Loop(1 - share).run([share * cost / length])[0] for cost in costs]
        for name, (length, costs) in MEASURED_COST.items()
    }
    print("\n235B on 512 GPUs, step speed-up if a speculative step cost what the paper measured:")
    for name, gains in what_if.items():
        print(f"  {name}: {min(gains):.2f} .. {max(gains):.2f}")
    compared = rules.compare(rows)
    print()
    print(
        table(
            "Speed-up of rollouts over no drafts, on published steps; 64 requests, a long tail",
            ["policy", "acceptance of a position", "AL at k = 3", *rules.RULES],
            [
                [c["policy"], f"{c['conditional']:g}", f"{c['acceptance_length']:.2f}"]
                + [f"{c[rule]:.2f}" for rule in rules.RULES]
                for c in compared
            ],
        )
    )
    close = sum(abs(c.error) <= 0.1 or bool(c.reason) for c in cells)
    targets = [
        *(Target.at_most(f"{m}, not fitted to: mean error", e, 0.1) for m, e in left_out.items()),
        Target.at_most("measured tables between their points: mean error", mean, 0.1),
        Target.at_least("sign of the gain", right / judged, 0.95),
        Target.at_least("published cells within 10 %, or with the reason", close / len(cells), 1.0),
        *(
            Target.at_least(f"rollouts, {rule} / the best of all: least", least, 0.97)
            for rule, least in rules.least(compared).items()
            if rule in rules.OURS
        ),
    ]
    figures = {
        "roofline_left_out": left_out,
        "roofline_fit": dict(zip(FIELDS, fit(every), strict=True)),
        "table_mean_error": mean,
        "table_largest_error": largest,
        "sign": {"right": right, "judged": judged},
        "cells": [dataclasses.asdict(c) | {"error": c.error} for c in cells],
        "not_predicted": NOT_PREDICTED,
        "what_if_235b": what_if,
        "rules": compared,
    }
    return finish(parsed.json, figures, targets)


if __name__ == "__main__":
    sys.exit(main())
