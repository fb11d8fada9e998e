"""A GRPO loop that is timed whole: rollouts of several turns, log-probs, update, weight sync."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import torch
from transformers import PreTrainedModel

from examples.arithmetic_grpo.grpo import group_advantages, old_log_probs, pad_batch, update
from examples.arithmetic_grpo.loop import timed
from examples.arithmetic_grpo.sampling import completion_text, prompt_ids
from examples.arithmetic_grpo.task import MAX_COMPLETION_TOKENS, Problem, grade, sample_problem
from examples.arithmetic_grpo.tokenizer import PAD_ID
from examples.task import reward
from policy_bridge import PolicyBridge

REQUEST_SECONDS = 300.0
LOG_PROB_BATCH = 64


@dataclass(frozen=True)
class Workload:
    """One GRPO run.

    Attributes:
        about: in words.
        groups: of rollouts in a step.
        samples: rollouts of a group. They share their problems.
        turns: median and sigma of the lognormal number of turns of a group's rollouts, and the most
            there may be. A turn is a problem and its solution; a rollout's next turn begins when
            all of its group have ended the one before.
        trained: turns of a step, drawn, that the policy is trained on: what its step costs.
        learning_rate: of the policy's AdamW, constant.
        updates: optimizer steps of a GRPO step, each on a part of its groups.
        steps: GRPO steps of the run.
    """

    about: str
    groups: int
    samples: int
    turns: tuple[float, float, int]
    trained: int
    learning_rate: float
    updates: int
    steps: int

    def problems(self, rng: random.Random) -> list[list[Problem]]:
        """Draw the problems of one step, by group and turn."""
        median, sigma, most = self.turns
        drawn = [rng.lognormvariate(0.0, sigma) for _ in range(self.groups)]
        turns = [max(1, min(most, round(median * factor))) for factor in drawn]
        return [[sample_problem(rng) for _ in range(count)] for count in turns]


@dataclass
class Run:
    """The time that one run took.

    Attributes:
        seconds: from the first rollout to the end of the last step.
        phases: seconds of it: generation, log_prob, update, sync.
        tokens: generated.
        ornate: share of ornate lines in the last step: how far the policy moved.
    """

    seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    ornate: float = 0.0


async def _rollouts(
    http: str, groups: Sequence[Sequence[Problem]], samples: int
) -> list[list[list[list[int]]]]:
    """Token ids of every completion, by group, turn and sample."""
    limits = httpx.Limits(max_connections=len(groups))
    async with httpx.AsyncClient(base_url=http, timeout=REQUEST_SECONDS, limits=limits) as client:

        async def turn(problem: Problem) -> list[list[int]]:
            body = {
                "model": "policy",
                "prompt": prompt_ids(problem),
                "n": samples,
                "max_tokens": MAX_COMPLETION_TOKENS,
                "temperature": 1.0,
                "return_token_ids": True,
            }
            answer = await client.post("/v1/completions", json=body)
            answer.raise_for_status()
            return [list(choice["token_ids"]) for choice in answer.json()["choices"]]

        async def rollout(problems: Sequence[Problem]) -> list[list[list[int]]]:
            return [await turn(problem) for problem in problems]

        return list(await asyncio.gather(*map(rollout, groups)))


def train(
    model: PreTrainedModel,
    workload: Workload,
    seed: int,
    http: str,
    push: Callable[[int], None],
    bridge: PolicyBridge | None,
    begun: Callable[[], None],
) -> Run:
    """Run a workload.

    Args:
        model: the policy, which is trained.
        workload: what of.
        seed: of the problems and the numbers of turns.
        http: base address of the server that generates.
        push: brings the model to the server as this version; where the bridge does that it is
            called all the same.
        bridge: takes the states; None where no draft is trained.
        begun: called when the clock starts: the server has version 0 by then.
    """
    rng, run = random.Random(seed), Run()
    betas = (0.9, 0.95)
    optimizer = torch.optim.AdamW(model.parameters(), workload.learning_rate, betas)
    push(0)
    begun()
    began = time.perf_counter()
    for version in range(workload.steps):
        asked = workload.problems(rng)
        with timed(run.phases, "generation"):
            answers = asyncio.run(_rollouts(http, asked, workload.samples))
        turns = [
            turn
            for group, answered in zip(asked, answers, strict=True)
            for turn in zip(group, answered, strict=True)
        ]
        run.tokens += sum(len(row) for _, completions in turns for row in completions)
        turns = rng.sample(turns, min(workload.trained, len(turns)))
        rows = [row for _, completions in turns for row in completions]
        grades = [
            grade(problem, completion_text(row))
            for problem, completions in turns
            for row in completions
        ]
        run.ornate = sum(graded.style_share for graded in grades) / len(grades)
        batch = pad_batch(
            [prompt_ids(problem) for problem, _ in turns for _ in range(workload.samples)],
            rows,
            group_advantages(torch.tensor([reward(g) for g in grades]), workload.samples),
            PAD_ID,
        )
        capture: AbstractContextManager[Any] = bridge.capture() if bridge else nullcontext()
        with timed(run.phases, "log_prob"), capture as captured:
            old = old_log_probs(model, batch, LOG_PROB_BATCH, captured)
        batch = replace(batch, old_log_probs=old)
        with timed(run.phases, "update"):
            # Mini-batches of whole turns: their advantages belong together.
            whole = torch.arange(len(rows)).view(-1, workload.samples)
            for chosen in whole.chunk(workload.updates):
                update(model, optimizer, batch.rows(chosen.flatten()))
        with timed(run.phases, "sync"):
            push(version + 1)
    run.seconds = time.perf_counter() - began
    return run
