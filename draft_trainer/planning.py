"""A plan: whether speculation and adapting pay on a given fleet, and at which draft length.

``make_plan`` applies ``slipstream.economics.arithmetic`` to a loop's own figures and simulates its
steps: rollouts with their tail over all engines, synchronous or asynchronous. No GPU and no torch.
"""

from __future__ import annotations

import html
import io
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draft_trainer.files import written_whole
from slipstream.economics.arithmetic import (
    Generation,
    Loop,
    acceptance_length,
    best_length,
    break_even,
    drift_that_pays,
    generate,
    schedule,
    speed_up,
)
from slipstream.economics.costs import FITTED_REQUESTS, OFF, Costs
from slipstream.errors import RefusedError

LEAST_TAIL = 1.2
"""Longest rollout over the median below which lengths are refused: RL's are long-tailed, and the
tail, where few requests run, is where speculation gains most."""


LEAST_LIMIT = 1.01
"""Speed-up that is possible at most below which it is none."""


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """The fleet that is planned for.

    Attributes:
        costs: of engine steps, with ``costs_source`` in words.
        guess: why they are a guess (``beyond_fit``).
        rates: acceptance by position of the adapted draft, or of the only one.
        frozen_rates: of the draft that would be served unadapted, in the same state of the policy.
        lengths: tokens of completions, one entry each: what a step's are drawn from.
        upkeep: seconds of a step that adapting the draft costs the loop.
        rollouts: completions of a step on each engine.
        requests: of them at once.
        prompt_tokens: of a request.
        steps: simulated.
    """

    costs: Costs
    costs_source: str
    rates: Sequence[float]
    lengths: Sequence[float]
    loop: Loop
    upkeep: float
    guess: Sequence[str] = ()
    frozen_rates: Sequence[float] | None = None
    engines: int = 1
    rollouts: int = 64
    requests: int = 64
    prompt_tokens: float = 0.0
    steps: int = 10
    seed: int = 0


@dataclass(frozen=True)
class Arm:
    """One way to generate, over all simulated steps; seconds are means of a step."""

    name: str
    generation: float
    exposed: float
    step: float
    mean_batch: float


def make_plan(fleet: Fleet) -> dict[str, Any]:
    """Figures of every arm, the best table of draft lengths, the verdict, and every input.

    Returns:
        What ``draft-trainer plan --json`` writes.

    Raises:
        RefusedError: a cost is not known at a number of requests that the fleet reaches.
    """
    costs, rates = fleet.costs, fleet.rates
    lengths = [k for k in costs.draft_lengths if k > 0]
    context = fleet.prompt_tokens + sum(fleet.lengths) / len(fleet.lengths) / 2
    batches = sorted({2**i for i in range(12) if 2**i < fleet.requests} | {fleet.requests})
    steps = _draw_steps(fleet)

    def table_of(rates: Sequence[float]) -> dict[int, int]:
        return {b: best_length(costs, rates, b, context) for b in range(1, fleet.requests + 1)}

    def arm(name: str, rates: Sequence[float], k: int) -> Arm:
        return _simulate(fleet, steps, name, rates, lambda batch: k)

    def best(
        name: str, rates: Sequence[float], steps: Sequence[Sequence[Sequence[float]]] = steps
    ) -> Arm:
        """Simulate the best table, or no speculation where that is as fast."""
        table = table_of(rates)
        choices = (lambda batch: OFF, lambda batch: table[round(batch)])
        arms = [_simulate(fleet, steps, name, rates, choose) for choose in choices]
        return min(arms, key=lambda arm: arm.generation)

    plain = arm("no speculation", rates, OFF)
    fixed = {k: arm(f"k = {k}", rates, k) for k in lengths}
    chosen = best("best k per batch", rates)
    table = table_of(rates) if chosen.generation < plain.generation else {}
    limit = None
    if not table and 0 not in costs.draft_lengths:
        # What vLLM's zero takes is not known: as little as a step without drafts, at best.
        free = {
            b: k if speed_up(costs, rates, k, b, context) > 1 else OFF
            for b, k in table_of(rates).items()
        }
        limited = _simulate(fleet, steps, "", rates, lambda batch: free[round(batch)])
        limit = plain.generation / limited.generation
    frozen = fleet.frozen_rates and best("frozen draft, best k per batch", fleet.frozen_rates)
    best_k = min(fixed, key=lambda k: fixed[k].generation) if fixed else 0
    more = [rate + 0.1 * rate / max(sum(rates), 1e-9) for rate in rates]
    better = best("", [min(rate, 1.0) for rate in more])
    few = steps[: max(1, min(len(steps), 2000 // (fleet.engines * fleet.rollouts) + 1))]
    drift = drift_that_pays(lambda rates: best("", rates, few).step, rates, fleet.upkeep)
    plan: dict[str, Any] = {
        "inputs": {
            "step_costs": fleet.costs_source,
            "beyond_fitted_range": list(fleet.guess),
            "acceptance_by_position": list(rates),
            "frozen_acceptance_by_position": fleet.frozen_rates and list(fleet.frozen_rates),
            "rollout_tokens": _quantiles(fleet.lengths),
            **{n: getattr(fleet, n) for n in ("engines", "rollouts", "requests", "prompt_tokens")},
            "other_seconds": fleet.loop.other_seconds,
            "lag": fleet.loop.lag,
            "upkeep_seconds": fleet.upkeep,
            "simulated_steps": fleet.steps,
            "seed": fleet.seed,
        },
        "batches": [
            {
                "requests": batch,
                "plain_step_seconds": costs.seconds(OFF, batch, context),
                "break_even": {str(k): break_even(costs, k, batch, context) for k in lengths},
                "speed_up": {str(k): speed_up(costs, rates, k, batch, context) for k in lengths},
                "best": table.get(batch),
            }
            for batch in batches
        ],
        "acceptance_length": {str(k): acceptance_length(rates, k) for k in lengths},
        "num_speculative_tokens_per_batch_size": schedule(table.__getitem__, len(table)),
        "arms": [
            {**vars(a), "generation_speed_up": plain.generation / a.generation}
            | {"step_speed_up": plain.step / a.step}
            for a in (plain, *fixed.values(), chosen, *([frozen] if frozen else []))
        ],
        "best_fixed_k": best_k,
        "speed_up_at_most": limit,
        "seconds_saved_by_tenth_of_acceptance": chosen.step - better.step,
        "drift_that_pays": drift,
        "saved_by_adapting": frozen and frozen.step - chosen.step,
    }
    plan["verdict"] = verdict(plan)
    return plan


def verdict(plan: Mapping[str, Any]) -> str:
    """The plan in a sentence or two, and whether it is a guess."""
    guess = plan["inputs"]["beyond_fitted_range"]
    if not guess:
        return _verdict(plan)
    return (
        f"A guess: {_verdict(plan)} Estimates were compared with measured steps and drafts of "
        "dense policies of 7 to 14 billion parameters in bfloat16 on one A100 or H100 at up to "
        f"{FITTED_REQUESTS} requests; this is {', '.join(guess)}. Measure: give --server or "
        "--step-costs."
    )


def _verdict(plan: Mapping[str, Any]) -> str:
    arms = {a["name"]: a for a in plan["arms"]}
    plain, chosen = arms["no speculation"], arms["best k per batch"]
    gain = chosen["generation_speed_up"]
    limit = plan["speed_up_at_most"]
    if limit is not None and limit >= LEAST_LIMIT:
        return (
            "A fixed draft length does not pay; one per batch size may: generation is at most "
            f"{limit:.2f}x as fast with drafts only where they gain. What a step takes where such "
            "a table has 0, these costs do not say: a server with --speculation auto measures it."
        )
    if not plan["num_speculative_tokens_per_batch_size"]:
        return "Do not speculate: drafts cost more than they gain, whatever their length is."
    fixed = plan["best_fixed_k"]
    text = (
        f"Speculate: generation is {gain:.2f}x as fast with the best draft length per batch size "
        f"({arms[f'k = {fixed}']['generation_speed_up']:.2f}x with k = {fixed} throughout), a step "
        f"takes {chosen['step']:.4g} s instead of {plain['step']:.4g}."
    )
    upkeep, saved = plan["inputs"]["upkeep_seconds"], plan["saved_by_adapting"]
    if saved is not None:
        pays = "pays" if saved > upkeep else "does not pay"
        text += f" Adapting saves {saved:.3g} s a step and costs {upkeep:.3g} s: it {pays}."
    elif plan["drift_that_pays"] is None:
        text += f" Adapting, at {upkeep:.3g} s a step, never pays."
    else:
        text += (
            f" Adapting, at {upkeep:.3g} s a step, pays once a frozen draft has lost "
            f"{plan['drift_that_pays']:.1%} of its acceptance at each position."
        )
    return text


def _draw_steps(fleet: Fleet) -> list[list[list[float]]]:
    """Draw lengths with replacement, by step and engine."""
    draw = random.Random(fleet.seed)
    lengths = list(fleet.lengths)
    return [
        [draw.choices(lengths, k=fleet.rollouts) for _ in range(fleet.engines)]
        for _ in range(fleet.steps)
    ]


def _simulate(
    fleet: Fleet,
    steps: Sequence[Sequence[Sequence[float]]],
    name: str,
    rates: Sequence[float],
    choose: Callable[[float], int],
) -> Arm:
    slowest, batch = [], 0.0
    for engines in steps:
        done: list[Generation] = [
            generate(fleet.costs, rates, lengths, choose, fleet.requests, fleet.prompt_tokens)
            for lengths in engines
        ]
        slowest.append(max(g.seconds for g in done))
        batch += sum(g.mean_batch for g in done) / len(done)
    step, exposed = fleet.loop.run(slowest)
    return Arm(name, sum(slowest) / len(steps), exposed, step, batch / len(steps))


def read_lengths(text: str, equal_lengths: bool = False) -> list[float]:
    """Rollout lengths in tokens: a file with one number a line or a JSON list, or
    ``lognormal:MEDIAN,SIGMA,CAP``.

    Args:
        text: the file's path or the distribution.
        equal_lengths: accept lengths without a tail.

    Raises:
        RefusedError: they cannot be read, are not positive, or have no tail.
    """
    option = "--lengths"
    try:
        if text.startswith("lognormal:"):
            median, sigma, cap = map(float, text.partition(":")[2].split(","))
            draw = random.Random(0)
            lengths = [min(cap, median * math.exp(sigma * draw.gauss(0, 1))) for _ in range(4096)]
        else:
            content = Path(text).read_text()
            lengths = [
                float(n) for n in (json.loads(content) if "[" in content else content.split())
            ]
    except OSError as error:
        raise RefusedError(option, f"{error}", "a file of lengths", "check its path") from error
    except (ValueError, TypeError) as error:
        raise RefusedError(
            option,
            f"{text}: {error}",
            "numbers of tokens",
            "one a line, a JSON list, or lognormal:MEDIAN,SIGMA,CAP",
        ) from error
    if not lengths or not all(0 < n < math.inf for n in lengths):
        raise RefusedError(
            option, f"{text}: {len(lengths)} lengths", "positive ones", "take out the others"
        )
    if not equal_lengths and max(lengths) < LEAST_TAIL * sorted(lengths)[len(lengths) // 2]:
        raise RefusedError(
            option,
            f"the longest is {max(lengths):g}, the median {sorted(lengths)[len(lengths) // 2]:g}",
            f"a tail: the longest at least {LEAST_TAIL:g} times the median",
            "give one step's completion lengths; --equal-lengths if they really are alike",
        )
    return lengths


def _quantiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        name: ordered[min(len(ordered) - 1, int(share * len(ordered)))]
        for name, share in (("median", 0.5), ("p90", 0.9), ("p99", 0.99), ("longest", 1.0))
    }


def tables(plan: Mapping[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """Title, columns and rows of what the terminal and the page show."""
    lengths = list(plan["acceptance_length"])
    return [
        (
            "Speed-up of generation by draft length k and requests in a step",
            ["requests", "plain step ms", *(f"k = {k}" for k in lengths), "best k"],
            [
                [
                    str(row["requests"]),
                    f"{1e3 * row['plain_step_seconds']:.3g}",
                    *(f"{row['speed_up'][k]:.2f}" for k in lengths),
                    "none" if row["best"] is None else str(row["best"]),
                ]
                for row in plan["batches"]
            ],
        ),
        (
            "A whole step, seconds",
            ["", "generation", "exposed", "step", "speed-up", "of the step", "mean batch"],
            [
                [
                    arm["name"],
                    *(f"{arm[n]:.4g}" for n in ("generation", "exposed", "step")),
                    *(f"{arm[n]:.2f}" for n in ("generation_speed_up", "step_speed_up")),
                    f"{arm['mean_batch']:.1f}",
                ]
                for arm in plan["arms"]
            ],
        ),
    ]


def write_page(plan: Mapping[str, Any], path: Path) -> None:
    """Verdict, tables, plots and inputs as one HTML file. Raises OSError."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for k in plan["acceptance_length"]:
        batches = [row["requests"] for row in plan["batches"]]
        left.plot(batches, [row["speed_up"][k] for row in plan["batches"]], "o-", label=f"k = {k}")
    left.axhline(1, color="grey")
    left.set_xscale("log", base=2)
    left.set_xlabel("requests in a step")
    left.set_title("Speed-up of generation")
    left.legend(fontsize="small")
    names = [arm["name"] for arm in plan["arms"]]
    right.barh(names, [arm["step"] for arm in plan["arms"]], color="lightgrey", label="rest")
    right.barh(names, [arm["exposed"] for arm in plan["arms"]], label="exposed generation")
    right.invert_yaxis()
    right.set_title("Seconds of a step")
    right.legend(fontsize="small")
    picture = io.StringIO()
    figure.savefig(picture, format="svg")
    parts = [f"<h1>Slipstream plan</h1><p><b>{html.escape(plan['verdict'])}</b></p>"]
    parts.append(picture.getvalue()[picture.getvalue().index("<svg") :])
    for title, columns, rows in tables(plan):
        head = "".join(f"<th>{html.escape(c)}" for c in columns)
        body = "".join("<tr>" + "".join(f"<td>{html.escape(c)}" for c in row) for row in rows)
        parts.append(f"<h2>{html.escape(title)}</h2><table><tr>{head}{body}</table>")
    parts.append(f"<h2>Inputs</h2><pre>{html.escape(json.dumps(plan['inputs'], indent=2))}</pre>")
    style = (
        "body{font:15px sans-serif;max-width:70em;margin:auto}"
        "td,th{padding:.2em .8em;text-align:right}"
    )
    with written_whole(path) as temporary:
        temporary.write_text(
            f'<!doctype html><meta charset="utf-8"><title>Slipstream plan</title>'
            f"<style>{style}</style>" + "\n".join(parts)
        )
