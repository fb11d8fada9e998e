"""The demo's GRPO loop: an ordinary one, in which three lines belong to Slipstream.

``bridge.capture`` goes around the policy's log-prob forward, ``capture.ship`` hands over its
states, ``bridge.sync`` goes around the weight sync. The arms exist only for the comparison: part of
each group is drafted by release 0, part by the newest release, part by neither, part by both.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from examples.arithmetic_grpo import task as arithmetic
from examples.arithmetic_grpo.grpo import GrpoBatch, by_length, group_advantages, update
from examples.arithmetic_grpo.records import (
    ADAPTED,
    ARMS,
    FROZEN,
    MIXED,
    OFF,
    ArmRecord,
    StepRecord,
    SwapRecord,
)
from examples.arithmetic_grpo.rollouts import Generation, RolloutClient, Swap
from examples.arithmetic_grpo.sampling import completion_text, prompt_ids
from examples.arithmetic_grpo.task import MAX_COMPLETION_TOKENS
from examples.arithmetic_grpo.tokenizer import PAD_ID
from examples.task import reward
from policy_bridge import PolicyBridge


@dataclass(frozen=True)
class Scored:
    """A completion's reward, whether its answer is right, and its share of the style that grows."""

    reward: float
    correct: float
    style_share: float


class LoopTask(Protocol):
    """A task as a loop asks for it.

    Attributes:
        pad_id: token that fills rows up.
        max_tokens: of a completion.
    """

    pad_id: int
    max_tokens: int

    def problem(self) -> Any:
        """The next problem of the run."""
        ...

    def prompt_ids(self, problem: Any) -> list[int]:
        """Token ids of its prompt."""
        ...

    def score(self, problem: Any, completion: Sequence[int]) -> Scored:
        """Score the token ids of a completion."""
        ...


class ArithmeticTask:
    """The demo's task; ``seed`` is that of its problems."""

    pad_id = PAD_ID
    max_tokens = MAX_COMPLETION_TOKENS

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def problem(self) -> arithmetic.Problem:
        """The next problem of the run."""
        return arithmetic.sample_problem(self._rng)

    def prompt_ids(self, problem: arithmetic.Problem) -> list[int]:
        """Token ids of its prompt."""
        return prompt_ids(problem)

    def score(self, problem: arithmetic.Problem, completion: Sequence[int]) -> Scored:
        """Score the token ids of a completion."""
        graded = arithmetic.grade(problem, completion_text(completion))
        return Scored(reward(graded), graded.correct, graded.style_share)


@dataclass(frozen=True)
class LoopSettings:
    """Sizes of one GRPO step.

    Attributes:
        prompts: problems per step.
        samples: completions of each problem in each arm.
        learning_rate: of the policy's AdamW at its highest: linear warm-up over ``warmup_steps``
            steps, then a cosine to half of it at the end, so that the policy moves in every step.
        steps: GRPO steps of the run.
        log_prob_batch: sequences per micro-batch of the log-prob forward.
        update_batch: sequences per micro-batch of the update.
    """

    prompts: int
    samples: dict[str, int]
    learning_rate: float
    steps: int
    warmup_steps: int = 4
    log_prob_batch: int = 64
    update_batch: int = 32

    @property
    def group_size(self) -> int:
        """Completions of one problem over all arms."""
        return sum(self.samples.values())


@dataclass
class _Round:
    """One arm's generation and what became of it."""

    generation: Generation
    version: int | None


class GrpoLoop:
    """A policy, its optimizer and its rollouts.

    Args:
        model: the policy.
        bridge: an open bridge on ``model``.
        rollouts: the server that generates.
        settings: sizes.
        task: of the run.
        optimizer: AdamW on the policy, if it is not to be the loop's own on float32 weights.
        first_step: steps that policy and optimizer have behind them.
        keep: called with the record of each step after its update and before its sync.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        bridge: PolicyBridge,
        rollouts: RolloutClient,
        settings: LoopSettings,
        task: LoopTask,
        optimizer: torch.optim.AdamW | None = None,
        first_step: int = 0,
        keep: Callable[[StepRecord], None] = lambda record: None,
    ) -> None:
        self._model, self._bridge, self._rollouts = model, bridge, rollouts
        self._settings, self._task = settings, task
        self._optimizer = optimizer or torch.optim.AdamW(
            model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self._keep = keep
        self.policy_version = first_step
        for _ in range(first_step * settings.prompts):
            task.problem()
        self.swaps: list[SwapRecord] = []
        self.draft_commits = 0
        """Draft commits that this loop asked for or saw a sync make."""
        self._draft_train_seconds = 0.0

    def announce_initial_policy(self) -> None:
        """Sync the first version, so that server and sidecar start from the policy that trains."""
        self._sync()

    def step(self, index: int) -> StepRecord:
        """One GRPO step; returns what happened in it."""
        seconds: dict[str, float] = {}
        with timed(seconds, "data"):
            problems = [self._task.problem() for _ in range(self._settings.prompts)]
            prompts = [self._task.prompt_ids(problem) for problem in problems]
        served = self._rollouts.server.state()
        with timed(seconds, "generation"):
            rounds = self._generate(index, prompts, served.draft_version)
        with timed(seconds, "data"):
            scores, arms, batch = self._score(problems, prompts, rounds)
        with timed(seconds, "log_prob"):
            sums = self._log_prob(batch)
        with timed(seconds, "training"):
            share = learning_rate_share(index, self._settings.warmup_steps, self._settings.steps)
            for group in self._optimizer.param_groups:
                group["lr"] = share * self._settings.learning_rate
            update(self._model, self._optimizer, batch, micro_batch=self._settings.update_batch)
        status = self._rollouts.status()
        train_seconds = status.train_seconds - self._draft_train_seconds
        self._draft_train_seconds = status.train_seconds
        rewards = [scored.reward for scored in scores]
        record = StepRecord(
            step=index,
            policy_version=self.policy_version,
            draft_version=served.draft_version,
            trained_against=served.trained_against_policy_version
            if served.HasField("trained_against_policy_version")
            else None,
            arms={
                arm: _arm_record(
                    rounds[arm],
                    [s for s, of in zip(scores, arms, strict=True) if of == arm],
                    sums[torch.tensor([of == arm for of in arms])].sum(0).tolist(),
                )
                for arm in rounds
            },
            seconds=seconds,
            draft_train_seconds=train_seconds,
            reward=sum(rewards) / len(rewards),
        )
        self._keep(record)
        with timed(seconds, "sync"):
            self.policy_version += 1
            self._sync()
        return record

    def _generate(self, index: int, prompts: list[list[int]], newest: int) -> dict[str, _Round]:
        """Every arm's rollouts; the server ends on the newest release."""
        versions = {FROZEN: 0, ADAPTED: newest}
        # The server comes from the sync on the newest release. In every other step the frozen arm
        # goes first, so that neither arm always meets the colder cache or the busier sidecar.
        order = [ADAPTED, FROZEN] if index % 2 == 0 else [FROZEN, ADAPTED]
        rounds: dict[str, _Round] = {}
        live = newest
        for arm in order:
            if versions[arm] != live:
                self._note(index, "between arms", self._rollouts.swap(versions[arm]))
                live = versions[arm]
            rounds[arm] = _Round(self._generated(prompts, arm)[0], live)
        # Two swaps with requests in flight, ending on the newest release.
        flips = [newest, 0, newest] if live != newest else [0, newest]
        generation, swaps = self._generated(prompts, MIXED, flips)
        rounds[MIXED] = _Round(generation, newest)
        for swap in swaps:
            self._note(index, "in flight", swap)
        self._rollouts.server.speculate(False)
        rounds[OFF] = _Round(self._generated(prompts, OFF)[0], None)
        self._rollouts.server.speculate(True)
        return {arm: rounds[arm] for arm in ARMS}

    def _generated(
        self, prompts: list[list[int]], arm: str, swaps: Sequence[int] = ()
    ) -> tuple[Generation, list[Swap]]:
        samples, limit = self._settings.samples[arm], self._task.max_tokens
        return self._rollouts.generate(prompts, samples, max_tokens=limit, swaps=swaps)

    def _note(self, step: int, kind: str, swap: Swap) -> None:
        self.draft_commits += 1
        self.swaps.append(
            SwapRecord(
                step,
                kind,
                swap.draft_version,
                swap.call_seconds,
                swap.worker_seconds,
                swap.requests_in_flight,
            )
        )

    def _score(
        self, problems: list[Any], prompts: list[list[int]], rounds: dict[str, _Round]
    ) -> tuple[list[Scored], list[str], GrpoBatch]:
        """Scores, arm of each completion, and the padded batch, shortest sequence first."""
        for arm, played in rounds.items():
            if played.generation.failed:
                raise RuntimeError(f"{arm}: requests failed: {played.generation.failed[:3]}")
        scores, arms, rows_prompts, rows = [], [], [], []
        for number, (problem, prompt) in enumerate(zip(problems, prompts, strict=True)):
            for arm, played in rounds.items():
                count = self._settings.samples[arm]
                for completion in played.generation.completions[number * count :][:count]:
                    scores.append(self._task.score(problem, completion))
                    arms.append(arm)
                    rows_prompts.append(prompt)
                    rows.append(completion)
        rewards = torch.tensor([scored.reward for scored in scores])
        advantages = group_advantages(rewards, self._settings.group_size)
        batch, order = by_length(rows_prompts, rows, advantages, self._task.pad_id)
        return [scores[row] for row in order], [arms[row] for row in order], batch

    @torch.no_grad()
    def _log_prob(self, batch: GrpoBatch) -> torch.Tensor:
        """The log-prob forward that GRPO does anyway, captured for the draft.

        Returns:
            Surprise log p(x) + H(p), its variance and the entropy H(p), summed over each sequence's
            completion: float64 (sequences, 3).
        """
        sums = []
        with self._bridge.capture() as capture:
            for start in range(0, len(batch.input_ids), self._settings.log_prob_batch):
                rows = slice(start, start + self._settings.log_prob_batch)
                width = int(batch.attention_mask[rows].sum(1).max())
                ids, attention = batch.input_ids[rows, :width], batch.attention_mask[rows, :width]
                mask = batch.completion_mask[rows, :width]
                output = self._model(input_ids=ids, attention_mask=attention, use_cache=False)
                log_p = output.logits[:, :-1].float().log_softmax(-1)
                chosen = log_p.gather(-1, ids[:, 1:, None]).squeeze(-1)
                capture.ship(
                    input_ids=ids,
                    attention_mask=attention,
                    loss_mask=mask,
                    sampled_logprobs=torch.nn.functional.pad(chosen, (1, 0)),
                )
                p = log_p.exp()
                entropy = -(p * log_p).sum(-1)
                spread = (p * log_p.square()).sum(-1) - entropy.square()
                figures = torch.stack([chosen + entropy, spread, entropy], -1)
                sums.append((figures * mask[:, 1:, None]).double().sum(1))
        return torch.cat(sums)

    def _sync(self) -> None:
        """Push the policy; the draft that the sidecar has ready goes with it."""
        before = self._rollouts.server.state().draft_version
        with self._bridge.sync(self.policy_version) as window:
            window.push_policy()
        self.draft_commits += self._rollouts.server.state().draft_version != before


def _arm_record(played: _Round, scores: list[Scored], sums: list[float]) -> ArmRecord:
    count = len(scores)
    generation, counters = played.generation, played.generation.counters
    surprise, variance, entropy = sums
    return ArmRecord(
        requests=count + len(generation.failed),
        failed=len(generation.failed),
        tokens=generation.tokens,
        seconds=generation.seconds,
        drafts=counters.drafts,
        draft_tokens=counters.draft_tokens,
        accepted=counters.accepted,
        per_position=counters.per_position,
        reward=sum(scored.reward for scored in scores) / count,
        correct=sum(scored.correct for scored in scores) / count,
        style_share=sum(scored.style_share for scored in scores) / count,
        surprise=surprise,
        surprise_variance=variance,
        entropy=entropy,
        draft_version=played.version,
    )


def learning_rate_share(step: int, warmup: int, steps: int) -> float:
    """Share of the highest learning rate at a 0-based step."""
    done = min(max(step - warmup, 0) / max(steps - warmup, 1), 1.0)
    return min((step + 1) / (warmup + 1), 1.0) * (0.75 + 0.25 * math.cos(math.pi * done))


@contextmanager
def timed(seconds: dict[str, float], phase: str) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds[phase] = seconds.get(phase, 0.0) + time.perf_counter() - began
