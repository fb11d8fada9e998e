"""The figures of a run on the real model, with intervals, and the claims that it tests."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from examples.arithmetic_grpo.records import (
    ADAPTED,
    ARMS,
    FROZEN,
    OFF,
    ArmRecord,
    RunRecord,
    StepRecord,
    SwapRecord,
)
from examples.arithmetic_grpo.rollouts import RolloutClient
from examples.arithmetic_grpo.summary import (
    END_STEPS,
    Z_BOUND,
    entropy,
    followed_in,
    moving_part,
    pooled_length,
    pooled_positions,
    surprise_against_off,
)
from examples.figures import Target, machine
from examples.local_services import DRAFT_LENGTH

GATE_VERSIONS = 4
"""Policy versions from a release's first on in which counters stand beside the gate's estimate: as
many as the gate judges by."""
NEAR_TIE = 0.25
"""Logits of 16 to 32 are multiples of 0.125 in bfloat16: two steps."""
_RESAMPLES = 2000

Interval = tuple[float, float, float]
"""A figure, and the ends of its 95 % interval."""


def record_from(document: Mapping[str, Any]) -> RunRecord:
    """Read a run's record from what ``dataclasses.asdict`` made of it."""
    steps = []
    for step in document["steps"]:
        arms = {
            name: ArmRecord(**{**arm, "per_position": tuple(arm["per_position"])})
            for name, arm in step["arms"].items()
        }
        # The state is written before the sync.
        steps.append(
            StepRecord(**{**step, "arms": arms, "seconds": {"sync": 0.0} | step["seconds"]})
        )
    swaps = [SwapRecord(**swap) for swap in document["swaps"]]
    return RunRecord(**{**document, "steps": steps, "swaps": swaps})


def over_steps(
    steps: Sequence[StepRecord], figure: Callable[[Sequence[StepRecord]], float]
) -> Interval:
    """A figure of several steps with a bootstrap interval: whole steps are drawn again."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(steps), (_RESAMPLES, len(steps)), generator=generator).tolist()
    values = sorted(figure([steps[index] for index in one]) for one in drawn)
    return figure(steps), values[_RESAMPLES // 40], values[-_RESAMPLES // 40]


def length(steps: Sequence[StepRecord], arm: str) -> float:
    """Acceptance length of an arm over several steps, NaN without drafts."""
    return pooled_length(steps, arm) or math.nan


def parts(run: RunRecord) -> dict[str, Sequence[StepRecord]]:
    """The start, the part in which the policy's style moves, and the end of a run."""
    styles = [statistics.fmean(arm.style_share for arm in s.arms.values()) for s in run.steps]
    return {
        "start": run.steps[:2],
        "moving part": run.steps[moving_part(styles)],
        "end": run.steps[-END_STEPS:],
    }


def acceptance(run: RunRecord) -> dict[str, dict[str, Interval]]:
    """Acceptance lengths of both arms and their ratio, by part of the run."""
    return {
        name: {
            FROZEN: over_steps(steps, lambda some: length(some, FROZEN)),
            ADAPTED: over_steps(steps, lambda some: length(some, ADAPTED)),
            "ratio": over_steps(steps, lambda some: length(some, ADAPTED) / length(some, FROZEN)),
        }
        for name, steps in parts(run).items()
    }


def verdicts_of(run: RunRecord) -> list[dict[str, Any]]:
    """The gate's verdicts of a run, as the run kept them."""
    found: Any = run.trainer.get("verdicts", [])
    return list(found)


def gate_against_counters(run: RunRecord) -> list[dict[str, Any]]:
    """The gate's estimate of each release that went live, beside vLLM's counters.

    ``error`` is estimate over counters, less 1; ``half_width`` that of its 95 % interval from the
    counts alone, as though drafts were independent: the least that the error is uncertain by. By
    position, ``gate_per_position`` and ``counters_per_position`` are shares of ``drafts``.
    """
    found = []
    for verdict in verdicts_of(run):
        version = verdict["draft_version"]
        live = [step for step in run.steps if step.draft_version == version][:GATE_VERSIONS]
        if version is None or verdict["outcome"] != "passed" or not live:
            continue
        drafts = sum(step.arms[ADAPTED].drafts for step in live)
        shares = pooled_positions(live, ADAPTED)
        accepted = sum(shares)
        square = sum((2 * place + 1) * share for place, share in enumerate(shares))
        deviation = math.sqrt((square - accepted**2) / drafts)
        found.append(
            {
                "draft_version": version,
                "policy_version": live[0].policy_version,
                "gate": verdict["candidate"],
                "counters": 1 + accepted,
                "error": verdict["candidate"] / (1 + accepted) - 1,
                "half_width": 1.96 * deviation / (1 + accepted),
                "gate_per_position": verdict["per_position"],
                "counters_per_position": list(shares),
                "drafts": drafts,
            }
        )
    return found


def greedy_differences(
    model: PreTrainedModel, rollouts: RolloutClient, prompts: list[list[int]], max_tokens: int
) -> dict[str, dict[str, float]]:
    """Greedy completions with drafts, and without them again, beside those without.

    Returns:
        By arm the number of ``prompts``, how many completions are ``different``, and the largest
        ``gap``, in logits of the policy here, of two tokens where completions part. What the arm
        without drafts has is the server's own: its batches differ from run to run.
    """
    newest = rollouts.server.state().draft_version
    rollouts.server.speculate(False)
    plain = rollouts.generate(prompts, 1, temperature=0.0, max_tokens=max_tokens)[0].completions
    found = {}
    for arm, version in ((OFF, None), (FROZEN, 0), (ADAPTED, newest)):
        if version is not None:
            rollouts.server.speculate(True)
            rollouts.swap(version)
        drawn = rollouts.generate(prompts, 1, temperature=0.0, max_tokens=max_tokens)[0]
        gaps = [
            _gap(model, prompt, ours, theirs)
            for prompt, ours, theirs in zip(prompts, plain, drawn.completions, strict=True)
            if ours != theirs
        ]
        found[arm] = {
            "prompts": len(prompts),
            "different": len(gaps),
            "gap": max(gaps, default=0.0),
        }
    return found


@torch.no_grad()
def _gap(model: PreTrainedModel, prompt: list[int], a: list[int], b: list[int]) -> float:
    """The policy's logit difference of two completions' tokens where they part first."""
    place = next((i for i, pair in enumerate(zip(a, b, strict=False)) if len(set(pair)) > 1), None)
    if place is None:
        return math.inf  # one goes on where the other ends
    logits = model(torch.tensor([[*prompt, *a[:place]]])).logits[0, -1].float()
    return abs(float(logits[a[place]] - logits[b[place]]))


def targets_of(run: RunRecord) -> list[Target]:
    """Return what a run claims, with what it measured."""
    targets = []
    for name, figures in acceptance(run).items():
        if name != "start":
            name = f"adapted acceptance length over frozen, {name}"
            targets.append(Target.within(name, figures["ratio"], 1.0))
    targets += _gate_target(gate_against_counters(run), "of this run")
    for arm in ARMS:
        if arm != OFF:
            name = f"losslessness: |z| of {arm} against no speculation"
            targets.append(Target.at_most(name, abs(surprise_against_off(run, arm)[1]), Z_BOUND))
    greedy: Any = run.trainer["greedy"]
    for arm, figures in greedy.items():
        name = f"greedy, {arm}: {figures['different']} of {figures['prompts']} differ, logit gap"
        targets.append(Target.at_most(name, figures["gap"], NEAR_TIE))
    failed = sum(arm.failed for step in run.steps for arm in step.arms.values())
    return [*targets, Target.at_most("failed requests", failed, 0)]


def targets_over(documents: Mapping[int, Mapping[str, Any]]) -> list[Target]:
    """Return the targets of each seed's summary, and those of all seeds where there are several.

    The mean ratio of all seeds has an interval by Student's t over the seeds: of acceptance
    lengths, and of the gate's shares of accepted drafts over those of the counters.
    """
    targets = [
        Target(**{**target, "name": f"{target['name']}, seed {seed}"})
        for seed, document in documents.items()
        for target in document["targets"]
    ]
    if len(documents) > 1:
        figures = [document["figures"] for document in documents.values()]
        seeds = f"{len(documents)} seeds"
        for part in ("moving part", "end"):
            ratios = [one["acceptance_length"][part]["ratio"][0] for one in figures]
            name = f"adapted acceptance length over frozen, {part}, {seeds}"
            targets.append(Target.of_ratios(name, ratios, 1.0))
        gates = [one["gate_against_counters"] for one in figures]
        targets += _gate_target(list(chain.from_iterable(gates)), seeds)
        for place in range(DRAFT_LENGTH) if all(gates) else ():
            ratios = [_share(one, "gate", place) / _share(one, "counters", place) for one in gates]
            name = f"gate's share of accepted drafts over the counters', position {place}, {seeds}"
            targets.append(Target.of_ratios(name, ratios, 0.97, 1.03))
    return targets


def _share(releases: Sequence[Mapping[str, Any]], of: str, place: int) -> float:
    return math.fsum(one["drafts"] * one[f"{of}_per_position"][place] for one in releases)


def _gate_target(releases: Sequence[Mapping[str, Any]], of: str) -> list[Target]:
    # Too few drafts of a release say neither that the estimate is right nor that it is wrong.
    decided = [abs(one["error"]) <= 0.03 for one in releases if one["half_width"] <= 0.03]
    name = f"share of {len(decided)} releases whose gate estimate is within 3 % of the counters"
    return [Target.at_least(f"{name}, {of}", statistics.fmean(decided), 0.9)] if decided else []


def write_summary(run: RunRecord, path: Path) -> None:
    """Write ``summary.json``: figures, targets and the record of each step."""
    last = run.steps[-END_STEPS:]

    def moved(figure: Callable[[StepRecord], float]) -> dict[str, float]:
        return {
            "start": statistics.fmean(map(figure, run.steps[:2])),
            "end": statistics.fmean(map(figure, last)),
        }

    document = {
        "machine": machine(),
        "figures": {
            "acceptance_length": acceptance(run),
            "per_position_at_the_end": {
                arm: pooled_positions(last, arm) for arm in (FROZEN, ADAPTED)
            },
            "followed": {part: asdict(found) for part, found in followed_in(run).items()},
            "policy": {
                "reward": moved(lambda step: step.reward),
                "entropy": moved(entropy),
                "correct": moved(lambda s: statistics.fmean(a.correct for a in s.arms.values())),
                "with_steps": moved(
                    lambda s: statistics.fmean(a.style_share for a in s.arms.values())
                ),
            },
            "gate_against_counters": gate_against_counters(run),
            "surprise_against_off": {
                arm: dict(zip(("nats_per_token", "z"), surprise_against_off(run, arm), strict=True))
                for arm in ARMS
                if arm != OFF
            },
            "greedy": run.trainer["greedy"],
            "cost": run.cost,
            "seconds": run.total_seconds,
            "phase_seconds_per_step": {
                phase: statistics.fmean(step.seconds[phase] for step in run.steps)
                for phase in run.steps[0].seconds
            },
        },
        "targets": [asdict(target) for target in targets_of(run)],
        "run": asdict(run),
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
