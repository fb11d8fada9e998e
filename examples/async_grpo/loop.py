"""A GRPO loop that trains on rollouts of up to ``lag`` policy versions before.

Batch i is trained on by version i, and begins once version i - lag is live: lag 0 alternates, with
lag 1 a batch is generated while the one before it is trained on. A new version is pushed while
requests run; they go on, and the server says which version sampled which of their tokens. There is
no log-prob pass: the old log-probs are the rollouts' own, and states are captured in the training
forward.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import cast

import httpx
import torch
from transformers import PreTrainedModel

from examples.arithmetic_grpo import task as arithmetic
from examples.arithmetic_grpo.grpo import GrpoBatch, group_advantages, pad_batch, update
from examples.arithmetic_grpo.loop import learning_rate_share, timed
from examples.arithmetic_grpo.sampling import completion_text, prompt_ids
from examples.arithmetic_grpo.task import MAX_COMPLETION_TOKENS, Problem
from examples.arithmetic_grpo.tokenizer import PAD_ID
from examples.task import reward
from policy_bridge import PolicyBridge
from policy_bridge.adapters.completions import Completion, Rollouts

BATCH_SECONDS = 300.0
"""Longest wait for a batch."""


@dataclass(frozen=True)
class AsyncSettings:
    """Sizes of a run.

    Attributes:
        steps: optimizer steps.
        lag: policy versions that a rollout may be behind the one that is trained.
        prompts, samples: problems of a step, and completions of each.
        learning_rate: of the policy's AdamW at its highest.
        warmup_steps: linear, before the rate falls to half of it.
    """

    steps: int
    lag: int
    prompts: int
    samples: int
    learning_rate: float
    warmup_steps: int = 4


@dataclass(frozen=True)
class Generated:
    """Rollouts of one batch.

    Attributes:
        groups: problem, its prompt and completions; a problem whose request failed is left out.
        failed: why requests failed.
        seconds: from the first request to the last answer.
    """

    groups: list[tuple[Problem, list[int], list[Completion]]]
    failed: list[str]
    seconds: float


@dataclass(frozen=True)
class AsyncStep:
    """One optimizer step.

    Attributes:
        step: 0-based; also the policy version that was trained.
        seconds: wall time by phase: generation (that the step waited for its rollouts), data,
            training, sync.
        batch_seconds: that its rollouts took, most of it behind other steps where they overlap.
        tokens: of its completions.
        failed: why requests failed.
        lag: versions that the oldest token's policy was behind.
        spans: completions by the number of policy versions that sampled them.
        reward: mean.
    """

    step: int
    seconds: Mapping[str, float]
    batch_seconds: float
    tokens: int
    failed: list[str]
    lag: int
    spans: Mapping[int, int]
    reward: float

    @property
    def exposed(self) -> float:
        """Seconds that it waited for rollouts."""
        return self.seconds["generation"]

    @property
    def total(self) -> float:
        """Its seconds."""
        return sum(self.seconds.values())


class Ahead:
    """Generates batches ahead of the training, in threads.

    Args:
        rollouts: generates with the policies that are pushed meanwhile.
        settings: how far ahead.
        seed: of the problems: those of a batch are the same in every run.
    """

    def __init__(self, rollouts: Rollouts, settings: AsyncSettings, seed: int) -> None:
        self._rollouts, self._settings, self._seed = rollouts, settings, seed
        requests = (settings.lag + 1) * settings.prompts
        self._pool = ThreadPoolExecutor(requests, "rollouts")
        self._begun: dict[int, list[Future[_Answer]]] = {}
        self._next = 0

    def live(self, version: int) -> None:
        """A policy version is live: the batches that waited for it begin."""
        last = min(version + self._settings.lag, self._settings.steps - 1)
        while self._next <= last:
            rng = random.Random(f"{self._seed}:{self._next}")
            problems = [arithmetic.sample_problem(rng) for _ in range(self._settings.prompts)]
            self._begun[self._next] = [self._pool.submit(self._one, p) for p in problems]
            self._next += 1

    def take(self, index: int) -> Generated:
        """Wait for a batch. Raises TimeoutError."""
        deadline = time.monotonic() + BATCH_SECONDS
        waiting = self._begun.pop(index)
        answers = [one.result(max(0.0, deadline - time.monotonic())) for one in waiting]
        return Generated(
            [
                (one.problem, one.prompt, one.completions)
                for one in answers
                if one.completions is not None
            ],
            [one.error for one in answers if one.completions is None],
            max(one.ended for one in answers) - min(one.began for one in answers),
        )

    def close(self) -> None:
        """End the threads; requests that run are waited for."""
        self._pool.shutdown(cancel_futures=True)

    def _one(self, problem: Problem) -> _Answer:
        began, prompt = time.perf_counter(), prompt_ids(problem)
        sampling = {"temperature": 1.0, "max_tokens": MAX_COMPLETION_TOKENS}
        try:
            done = self._rollouts.generate([prompt] * self._settings.samples, sampling)
        except httpx.HTTPError as error:
            text = f"{type(error).__name__}: {error}"
            return _Answer(problem, prompt, None, text, began, time.perf_counter())
        return _Answer(problem, prompt, done, "", began, time.perf_counter())


@dataclass(frozen=True)
class _Answer:
    problem: Problem
    prompt: list[int]
    completions: list[Completion] | None
    error: str
    began: float
    ended: float


class AsyncGrpo:
    """A policy, its optimizer, and rollouts ahead of it.

    Args:
        model: the policy, fp32 master weights.
        bridge: an open bridge on ``model``.
        rollouts: the server that generates.
        settings: sizes.
        seed: of the problems.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        bridge: PolicyBridge,
        rollouts: Rollouts,
        settings: AsyncSettings,
        seed: int,
    ) -> None:
        self._model, self._bridge, self._settings = model, bridge, settings
        self._ahead = Ahead(rollouts, settings, seed)
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer,
            lambda step: learning_rate_share(step, settings.warmup_steps, settings.steps),
        )

    def run(self, after: Callable[[AsyncStep], None] = lambda step: None) -> list[AsyncStep]:
        """All steps; ``after`` is told of each."""
        steps = []
        try:
            self._sync(0)
            self._ahead.live(0)
            for index in range(self._settings.steps):
                steps.append(self._step(index))
                after(steps[-1])
        finally:
            self._ahead.close()
        return steps

    def _step(self, index: int) -> AsyncStep:
        seconds: dict[str, float] = {}
        with timed(seconds, "generation"):
            generated = self._ahead.take(index)
        if not generated.groups:
            raise RuntimeError(f"every request failed: {generated.failed[:3]}")
        with timed(seconds, "data"):
            rows = [row for _, _, rows in generated.groups for row in rows]
            rewards = torch.tensor(
                [
                    reward(arithmetic.grade(problem, completion_text(row.token_ids)))
                    for problem, _, rows in generated.groups
                    for row in rows
                ]
            )
            batch = self._batch(generated, rewards)
        with timed(seconds, "training"):
            capture = self._bridge.capture(training=True)
            update(self._model, self._optimizer, batch, micro_batch=32, capture=capture)
            self._schedule.step()
        with timed(seconds, "sync"):
            self._sync(index + 1)
        self._ahead.live(index + 1)
        counts = [len(row.spans) for row in rows]
        return AsyncStep(
            step=index,
            seconds=seconds,
            batch_seconds=generated.seconds,
            tokens=sum(len(row.token_ids) for row in rows),
            failed=generated.failed,
            lag=index - int(cast(torch.Tensor, batch.rollout_versions).min()),
            spans={count: counts.count(count) for count in sorted(set(counts))},
            reward=float(rewards.mean()),
        )

    def _sync(self, version: int) -> None:
        """Push the policy, with requests in flight; the draft that is ready goes with it."""
        with self._bridge.sync(version) as window:
            window.push_policy()

    def _batch(self, generated: Generated, rewards: torch.Tensor) -> GrpoBatch:
        """Collate the batch, shortest sequence first: a micro-batch is as wide as its longest."""
        pairs = [(prompt, row) for _, prompt, rows in generated.groups for row in rows]
        advantages = group_advantages(rewards, self._settings.samples)
        order = sorted(
            range(len(pairs)), key=lambda n: len(pairs[n][0]) + len(pairs[n][1].token_ids)
        )
        chosen = [pairs[number] for number in order]
        versions = [row.oldest_version for _, row in chosen]
        if None in versions:
            raise RuntimeError("the server does not say which policy version sampled a token")
        batch = pad_batch(
            [prompt for prompt, _ in chosen],
            [row.token_ids for _, row in chosen],
            advantages[order],
            PAD_ID,
            # A log-probability that is missing ends the run here.
            [cast(list[float], row.logprobs) for _, row in chosen],
        )
        return replace(batch, rollout_versions=torch.tensor(versions))
