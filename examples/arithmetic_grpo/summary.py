"""Turns a run's record into ``summary.json``: figures, and the targets they are held to."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from examples.arithmetic_grpo.records import (
    ADAPTED,
    ARMS,
    FROZEN,
    NGRAM,
    OFF,
    ArmRecord,
    RunRecord,
    StepRecord,
)
from examples.figures import Target, machine, spread

END_STEPS = 5
"""Steps pooled at either end of the run; one step alone has too few drafts for a steady figure."""

Z_BOUND = 3.3
"""Two-sided false-alarm rate 0.1 % for each arm's comparison with no speculation."""


class Counts(Protocol):
    """vLLM's speculative counters of some steps."""

    @property
    def drafts(self) -> int: ...
    @property
    def accepted(self) -> int: ...


@dataclass(frozen=True)
class Followed:
    """Acceptance of the adapted draft over part of a run.

    Attributes:
        steps: of the part.
        mean: acceptance length, pooled over the part.
        minimum: of its steps.
        over_start: ``mean`` over the acceptance length of the run's first step.
        minimum_over_start: the same of ``minimum``.
        over_frozen: ``mean`` over the frozen draft's.
        kept: share of what the frozen draft lost from the start that the adapted one did not:
            1 where it is as good as at the start, 0 where it is no better than the frozen one;
            None where the frozen one lost nothing.
    """

    steps: int
    mean: float
    minimum: float
    over_start: float
    minimum_over_start: float
    over_frozen: float
    kept: float | None

    def text(self) -> str:
        """One line."""
        return (
            f"{self.steps} steps, adapted {self.mean:.2f} (minimum {self.minimum:.2f}), "
            f"{self.over_start:.3f} of the start (minimum {self.minimum_over_start:.3f}), "
            f"{self.over_frozen:.3f} of the frozen one"
            + ("" if self.kept is None else f", {self.kept:.3f} of what drift took kept")
        )


def moving_part(styles: Sequence[float]) -> slice:
    """The steps in which the policy's style went from 5 % to 95 % of its whole change."""
    low = styles[0] + 0.05 * (max(styles) - styles[0])
    high = styles[0] + 0.95 * (max(styles) - styles[0])
    first = next((step for step, style in enumerate(styles) if style > low), 0)
    last = next((step for step, style in enumerate(styles) if style >= high), len(styles) - 1)
    return slice(first, max(first, last) + 1)


def followed(
    styles: Sequence[float], adapted: Sequence[Counts], frozen: Sequence[Counts]
) -> dict[str, Followed]:
    """Measure how the adapted draft followed: "whole run" after its first step, and "moving part".

    Args:
        styles: share of ornate lines by step.
        adapted, frozen: counters of the same steps.
    """

    def length(parts: Sequence[Counts]) -> float:
        return 1 + sum(part.accepted for part in parts) / sum(part.drafts for part in parts)

    start = length(adapted[:1])
    found = {}
    for name, part in (("whole run", slice(1, None)), ("moving part", moving_part(styles))):
        mean = length(adapted[part])
        minimum = min(length([one]) for one in adapted[part])
        theirs = length(frozen[part])
        found[name] = Followed(
            steps=len(adapted[part]),
            mean=mean,
            minimum=minimum,
            over_start=mean / start,
            minimum_over_start=minimum / start,
            over_frozen=mean / theirs,
            kept=(mean - theirs) / (start - theirs) if theirs < start else None,
        )
    return found


def pooled_length(steps: Sequence[StepRecord], arm: str) -> float | None:
    """Acceptance length of an arm over several steps; None without drafts."""
    drafts = sum(step.arms[arm].drafts for step in steps)
    return 1 + sum(step.arms[arm].accepted for step in steps) / drafts if drafts else None


def pooled_positions(steps: Sequence[StepRecord], arm: str) -> list[float]:
    """Share of drafts whose token at each position was accepted, over several steps."""
    drafts = sum(step.arms[arm].drafts for step in steps)
    columns = zip(*(step.arms[arm].per_position for step in steps), strict=True)
    return [sum(column) / drafts for column in columns] if drafts else []


def entropy(step: StepRecord) -> float:
    """The policy's entropy in a step, in nats per sampled token of all arms."""
    arms = step.arms.values()
    return sum(arm.entropy for arm in arms) / sum(arm.tokens for arm in arms)


def surprise_against_off(run: RunRecord, arm: str) -> tuple[float, float]:
    """(difference per token in nats, z) of an arm's surprise from that without speculation.

    log p(x) + H(p) summed over sampled tokens is a martingale when tokens are drawn from p. The
    server computes p in bf16 and the policy in fp32, which shifts every arm alike; the difference
    between two arms has mean 0 if and only if speculation leaves the distribution alone.
    """

    def mean_and_variance(name: str) -> tuple[float, float]:
        parts: list[ArmRecord] = [step.arms[name] for step in run.steps]
        tokens = sum(part.tokens for part in parts)
        return (
            sum(part.surprise for part in parts) / tokens,
            sum(part.surprise_variance for part in parts) / tokens**2,
        )

    mean, variance = mean_and_variance(arm)
    mean_off, variance_off = mean_and_variance(OFF)
    return mean - mean_off, (mean - mean_off) / math.sqrt(variance + variance_off)


def speed_ratios(run: RunRecord, batch: str, arm: str) -> list[float]:
    """Tokens/s of an arm over those without speculation, round by round."""
    rounds = (run.ngram_speed if arm == NGRAM else run.speed)[batch]
    return [a / b for a, b in zip(rounds[arm], rounds[OFF], strict=True)]


def followed_in(run: RunRecord) -> dict[str, Followed]:
    """Measure how the adapted draft followed the policy of a demo."""
    arms = [step.arms for step in run.steps]
    styles = [statistics.fmean(part.style_share for part in step.values()) for step in arms]
    return followed(styles, [step[ADAPTED] for step in arms], [step[FROZEN] for step in arms])


def loop_ratios(run: RunRecord, arm: str) -> list[float]:
    """Tokens/s of an arm over those without speculation in the loop, step by step.

    Both generate as many completions of the same prompts at once.
    """
    return [
        (one[arm].tokens / one[arm].seconds) / (one[OFF].tokens / one[OFF].seconds)
        for one in (step.arms for step in run.steps)
    ]


def saved_seconds(run: RunRecord, other: str) -> float:
    """Seconds of generation that the adapted arm took less than another for as many tokens."""
    return sum(
        arms[ADAPTED].tokens * arms[other].seconds / arms[other].tokens - arms[ADAPTED].seconds
        for arms in (step.arms for step in run.steps)
    )


@dataclass(frozen=True)
class Net:
    """A run all of whose rollouts are the adapted arm's, from this run's own times.

    Attributes:
        saved: seconds of generation less than with the frozen draft.
        cost: seconds that the trainer took from the rest, on cores that both wanted.
        speed: of the whole run, over one without speculation and without a trainer.
        speed_over_frozen: the same, over one with the frozen draft and without a trainer.
    """

    saved: float
    cost: float
    speed: float
    speed_over_frozen: float


def net(run: RunRecord) -> Net:
    """Every step has as many rollouts as all of this run's arms together, and its other phases."""
    cost = run.cost["trainer_took_seconds"]
    rest = sum(sum(step.seconds.values()) - step.seconds["generation"] for step in run.steps)
    adapted = rest + len(ARMS) * sum(step.arms[ADAPTED].seconds for step in run.steps)

    def speed_over(other: str) -> float:
        return (adapted + len(ARMS) * saved_seconds(run, other) - cost) / adapted

    saved = len(ARMS) * saved_seconds(run, FROZEN)
    return Net(saved, cost, speed_over(OFF), speed_over(FROZEN))


def net_text(run: RunRecord) -> str:
    """Say in words whether adapting paid in this run."""
    found = net(run)
    return (
        f"adapting saved {found.saved:.1f} s of generation and cost {found.cost:.1f} s "
        f"({run.cost['trainer_cpu_seconds']:.0f} s of CPU): with the adapted draft alone the run "
        f"is {found.speed:.2f} times as fast as without speculation and "
        f"{found.speed_over_frozen:.2f} times as fast as with the frozen draft"
    )


def targets_of(run: RunRecord) -> list[Target]:
    """Return what the demo promises, with what this run measured."""
    last = run.steps[-END_STEPS:]
    frozen, adapted = pooled_length(last, FROZEN), pooled_length(last, ADAPTED)
    found = followed_in(run)
    whole, moving = found["whole run"], found["moving part"]
    name = "adapted acceptance length"
    targets = [
        Target.at_least(f"{name} over the frozen one's, moving part", moving.over_frozen, 1.1),
        Target.at_least(f"{name} over the frozen one's, end", _ratio(adapted, frozen), 1.3),
        Target.at_least(f"{name} over its start, moving part", moving.over_start, 0.85),
        Target.at_least(f"{name} over its start, whole run", whole.over_start, 0.85),
        Target.at_least(f"{name} over its start, worst step", whole.minimum_over_start, 0.7),
        Target.at_least(
            "generation, adapted / no speculation, in the loop",
            statistics.median(loop_ratios(run, ADAPTED)),
            1,
        ),
    ]
    for batch in run.speed:
        median = statistics.median(speed_ratios(run, batch, ADAPTED))
        targets.append(
            Target.at_least(f"generation, adapted / no speculation, batch {batch}", median, 1)
        )
    live = [swap.call_seconds for swap in run.swaps if swap.requests_in_flight]
    failed = sum(arm.failed for step in run.steps for arm in step.arms.values())
    targets.append(
        Target.at_most("live swap, median seconds from call to answer", _median(live), 0.150)
    )
    targets.append(Target.at_most("failed requests", failed, 0))
    uncounted = float(str(run.trainer["swaps_made"])) - float(str(run.trainer["swaps_counted"]))
    targets.append(Target.at_most("swaps made less swaps counted by the server", abs(uncounted), 0))
    if "base_tensors_changed" in run.trainer:
        moved = float(str(run.trainer["base_tensors_changed"]))
        targets.append(Target.at_most("tensors that changed below the adapters", moved, 0))
    for arm in ARMS:
        if arm != OFF:
            name = f"losslessness: |z| of {arm} against no speculation"
            targets.append(Target.at_most(name, abs(surprise_against_off(run, arm)[1]), Z_BOUND))
    targets.append(Target.at_most("seconds of the whole demo", run.total_seconds, 600))
    return targets


def write_summary(run: RunRecord, path: Path) -> dict[str, Any]:
    """Write ``summary.json``; returns it without the record of each step."""
    targets = targets_of(run)
    last = run.steps[-END_STEPS:]
    live = [swap for swap in run.swaps if swap.requests_in_flight]
    figures = {
        "acceptance_length": {
            arm: {
                "start": pooled_length(run.steps[:2], arm),
                "end": pooled_length(last, arm),
                "end_per_position": pooled_positions(last, arm),
            }
            for arm in (FROZEN, ADAPTED)
        },
        "followed": {part: asdict(found) for part, found in followed_in(run).items()},
        "speed_in_the_loop": {
            "requests": run.steps[0].arms[OFF].requests,
            **{arm: spread(loop_ratios(run, arm)) for arm in (FROZEN, ADAPTED)},
        },
        "speed_over_no_speculation": {
            batch: {arm: spread(speed_ratios(run, batch, arm)) for arm in (FROZEN, ADAPTED, NGRAM)}
            for batch in run.speed
        },
        "tokens_per_step": run.tokens_per_step,
        "cost": run.cost,
        "net": asdict(net(run)) | {"text": net_text(run)} if run.cost else None,
        "live_swap_seconds": spread([s.call_seconds for s in live]) if live else None,
        "live_swap_worker_seconds": spread([s.worker_seconds for s in live]) if live else None,
        "surprise_against_off": {
            arm: dict(zip(("nats_per_token", "z"), surprise_against_off(run, arm), strict=True))
            for arm in ARMS
            if arm != OFF
        },
        "phase_seconds_per_step": {
            phase: statistics.fmean(step.seconds[phase] for step in run.steps)
            for phase in run.steps[0].seconds
        },
    }
    document = {
        "machine": machine(),
        "figures": figures,
        "targets": [asdict(target) for target in targets],
    }
    path.write_text(json.dumps(document | {"run": asdict(run)}, indent=1))
    return document


def pooled_seeds(documents: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    """Several seeds' summaries in one document: all of their targets, and the figures of the first.

    Args:
        documents: of ``write_summary``, by seed.
    """
    first = next(iter(documents.values()))
    if len(documents) == 1:
        return dict(first)
    return {
        **first,
        "seeds": {str(seed): document["figures"] for seed, document in documents.items()},
        "targets": [
            {**target, "name": f"{target['name']}, seed {seed}"}
            for seed, document in documents.items()
            for target in document["targets"]
        ],
    }


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b is not None else None
