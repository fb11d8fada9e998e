"""The demo's GRPO loop: an ordinary one, in which three lines belong to Slipstream.

``bridge.capture`` goes around the policy's log-prob forward, ``capture.ship`` hands over its
states, ``bridge.sync`` goes around the weight sync. The arms exist only for the comparison: part of
each group is drafted by release 0, part by the newest release, part by neither, part by both.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from examples.arithmetic_grpo import task as arithmetic
from examples.arithmetic_grpo.grpo import GrpoBatch, group_advantages, pad_batch, update
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
from examples.arithmetic_grpo.task import Problem
from examples.arithmetic_grpo.tokenizer import PAD_ID
from examples.task import Grade, reward
from policy_bridge import PolicyBridge


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
    """

    prompts: int
    samples: dict[str, int]
    learning_rate: float
    steps: int
    warmup_steps: int = 4
    log_prob_batch: int = 64

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
        rollouts: RolloutClient,
        settings: LoopSettings,
        seed: int,
    ) -> None:
        self._model, self._bridge, self._rollouts = model, bridge, rollouts
        self._settings = settings
        self._rng = random.Random(seed)
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self._schedule = torch.optim.lr_scheduler.LambdaLR(
            self._optimizer,
            lambda step: learning_rate_share(step, settings.warmup_steps, settings.steps),
        )
        self.policy_version = 0
        self.swaps: list[SwapRecord] = []
        self.draft_commits = 0
        """Draft commits that this loop asked for or saw a sync make."""
        self._draft_train_seconds = 0.0

    def announce_initial_policy(self) -> None:
        """Sync version 0, so that server and sidecar start from the policy that trains."""
        self._sync()

    def step(self, index: int) -> StepRecord:
        """One GRPO step; returns what happened in it."""
        seconds: dict[str, float] = {}
        with timed(seconds, "data"):
            problems = [arithmetic.sample_problem(self._rng) for _ in range(self._settings.prompts)]
            prompts = [prompt_ids(problem) for problem in problems]
        served = self._rollouts.server.state()
        with timed(seconds, "generation"):
            rounds = self._generate(index, prompts, served.draft_version)
        with timed(seconds, "data"):
            grades, arms, batch = self._grade(problems, prompts, rounds)
        with timed(seconds, "log_prob"):
            surprise, variance = self._log_prob(batch)
        with timed(seconds, "training"):
            update(self._model, self._optimizer, batch, micro_batch=32)
            self._schedule.step()
        version = self.policy_version
        with timed(seconds, "sync"):
            self.policy_version += 1
            self._sync()
        status = self._rollouts.status()
        train_seconds = status.train_seconds - self._draft_train_seconds
        self._draft_train_seconds = status.train_seconds
        rewards = [reward(graded) for graded in grades]
        return StepRecord(
            step=index,
            policy_version=version,
            draft_version=served.draft_version,
            trained_against=served.trained_against_policy_version
            if served.HasField("trained_against_policy_version")
            else None,
            arms={
                arm: _arm_record(
                    rounds[arm],
                    [g for g, of in zip(grades, arms, strict=True) if of == arm],
                    *_pick(arm, arms, surprise, variance),
                )
                for arm in rounds
            },
            seconds=seconds,
            draft_train_seconds=train_seconds,
            reward=sum(rewards) / len(rewards),
        )

    def _generate(self, index: int, prompts: list[list[int]], newest: int) -> dict[str, _Round]:
        """Every arm's rollouts; the server ends on the newest release."""
        samples = self._settings.samples
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
            rounds[arm] = _Round(self._rollouts.generate(prompts, samples[arm])[0], live)
        # Two swaps with requests in flight, ending on the newest release.
        flips = [newest, 0, newest] if live != newest else [0, newest]
        generation, swaps = self._rollouts.generate(prompts, samples[MIXED], swaps=flips)
        rounds[MIXED] = _Round(generation, newest)
        for swap in swaps:
            self._note(index, "in flight", swap)
        self._rollouts.server.speculate(False)
        rounds[OFF] = _Round(self._rollouts.generate(prompts, samples[OFF])[0], None)
        self._rollouts.server.speculate(True)
        return {arm: rounds[arm] for arm in ARMS}

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

    def _grade(
        self, problems: list[Problem], prompts: list[list[int]], rounds: dict[str, _Round]
    ) -> tuple[list[Grade], list[str], GrpoBatch]:
        """Grades, arm of each completion, and the padded batch, shortest sequence first."""
        for arm, played in rounds.items():
            if played.generation.failed:
                raise RuntimeError(f"{arm}: requests failed: {played.generation.failed[:3]}")
        grades, arms, rows_prompts, rows = [], [], [], []
        for number, (problem, prompt) in enumerate(zip(problems, prompts, strict=True)):
            for arm, played in rounds.items():
                count = self._settings.samples[arm]
                for completion in played.generation.completions[number * count :][:count]:
                    text = completion_text(completion)
                    grades.append(arithmetic.grade(problem, text))
                    arms.append(arm)
                    rows_prompts.append(prompt)
                    rows.append(completion)
        rewards = torch.tensor([reward(graded) for graded in grades])
        advantages = group_advantages(rewards, self._settings.group_size)
        # A micro-batch is as wide as its longest sequence: of the update's time a sixth.
        order = sorted(range(len(rows)), key=lambda row: len(rows_prompts[row]) + len(rows[row]))
        batch = pad_batch(
            [rows_prompts[row] for row in order],
            [rows[row] for row in order],
            advantages[order],
            PAD_ID,
        )
        return [grades[row] for row in order], [arms[row] for row in order], batch

    @torch.no_grad()
    def _log_prob(self, batch: GrpoBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """The log-prob forward that GRPO does anyway, captured for the draft.

        Returns:
            Surprise log p(x) + H(p) and its variance, summed over each sequence's completion:
            float64 (sequences,) each.
        """
        surprise, variance = [], []
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
                inside = mask[:, 1:]
                surprise.append(((chosen + entropy) * inside).double().sum(1))
                variance.append((spread * inside).double().sum(1))
        return torch.cat(surprise), torch.cat(variance)

    def _sync(self) -> None:
        """Push the policy; the draft that the sidecar has ready goes with it."""
        before = self._rollouts.server.state().draft_version
        with self._bridge.sync(self.policy_version) as window:
            window.push_policy()
        self.draft_commits += self._rollouts.server.state().draft_version != before


def _pick(
    arm: str, arms: list[str], surprise: torch.Tensor, variance: torch.Tensor
) -> tuple[float, float]:
    of = torch.tensor([name == arm for name in arms])
    return float(surprise[of].sum()), float(variance[of].sum())


def _arm_record(played: _Round, grades: list[Grade], surprise: float, variance: float) -> ArmRecord:
    count = len(grades)
    generation, counters = played.generation, played.generation.counters
    return ArmRecord(
        requests=count + len(generation.failed),
        failed=len(generation.failed),
        tokens=generation.tokens,
        seconds=generation.seconds,
        drafts=counters.drafts,
        draft_tokens=counters.draft_tokens,
        accepted=counters.accepted,
        per_position=counters.per_position,
        reward=sum(map(reward, grades)) / count,
        correct=sum(graded.correct for graded in grades) / count,
        style_share=sum(graded.style_share for graded in grades) / count,
        surprise=surprise,
        surprise_variance=variance,
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
