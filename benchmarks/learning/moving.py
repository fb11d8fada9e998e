"""A policy that moves, its states version by version, and a draft that follows it afterwards.

The trainer's own steps, gate and ``Pace.settle`` on states that are there already: what a
version brought is trained on to the end before the next one comes, so that the figures depend on
no machine's speed.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.harness import say
from benchmarks.learning.states import read_states, write_states
from draft_trainer.config import HELD_OUT_MOST, GateSection, TrainingConfig
from draft_trainer.drafters import Draft
from draft_trainer.drafters.expected_acceptance import expected_acceptance
from draft_trainer.drafters.policy import PolicyHeads
from draft_trainer.releases.gate import compare
from draft_trainer.training.learner import Learner
from examples.arithmetic_grpo.grpo import group_advantages, old_log_probs, pad_batch, update
from examples.arithmetic_grpo.sampling import completion_text, prompt_ids, sample
from examples.arithmetic_grpo.states import states_of
from examples.arithmetic_grpo.tokenizer import PAD_ID
from examples.task import reward
from slipstream.sample import Sample, is_held_out

VERSIONS, PROMPTS, SAMPLES, UPDATES = 20, 24, 8, 3
POLICY_RATE = 8e-4
LOG_PROB_BATCH = 48
DRAFT_LENGTH = 3


def move(policy: Path, task: Any, seed: int, out: Path) -> None:
    """Write the states of ``VERSIONS`` versions of a policy under GRPO, a file each."""
    out.mkdir(parents=True)
    model = AutoModelForCausalLM.from_pretrained(
        policy, dtype=torch.float32, attn_implementation="eager"
    )
    optimizer = torch.optim.AdamW(model.parameters(), POLICY_RATE, (0.9, 0.95))
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    for number in range(VERSIONS):
        problems = [task.sample_problem(rng) for _ in range(PROMPTS)]
        asked = [problem for problem in problems for _ in range(SAMPLES)]
        drawn = sample(
            model.eval(), [prompt_ids(problem, task) for problem in asked], 1.0, generator=generator
        )
        rollouts = list(zip(drawn.prompts, drawn.completions, strict=True))
        write_states(out / f"{number:02}.safetensors", states_of(model, rollouts))
        pairs = zip(asked, drawn.completions, strict=True)
        grades = [task.grade(problem, completion_text(row, task)) for problem, row in pairs]
        style = sum(graded.style_share for graded in grades) / len(grades)
        say(f"policy version {number}: {style:.2f} ornate")
        rewards = torch.tensor([reward(graded) for graded in grades])
        _improve(model, optimizer, rollouts, group_advantages(rewards, SAMPLES))


def _improve(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    rollouts: Sequence[tuple[list[int], list[int]]],
    advantages: torch.Tensor,
) -> None:
    prompts, completions = zip(*rollouts, strict=True)
    batch = pad_batch(prompts, completions, advantages, PAD_ID)
    old = old_log_probs(model, batch, LOG_PROB_BATCH)
    batch = replace(batch, old_log_probs=old)
    # Mini-batches of whole groups, as GRPO trainers make them.
    for chosen in torch.arange(len(rollouts)).chunk(UPDATES):
        update(model, optimizer, batch.rows(chosen))


class Versions:
    """The versions in a folder as one run."""

    def __init__(self, folder: Path, draft_vocab_ids: torch.Tensor) -> None:
        found = [read_states(path) for path in sorted(folder.iterdir())]
        self.heads = PolicyHeads(keep=len(found))
        self.samples: list[list[Sample]] = []
        for version, states in enumerate(found):
            head = states.heads(draft_vocab_ids).get(0)
            self.heads.add(replace(head, policy_version=version))
            self.samples.append([one.repacked(policy_version=version) for one in states.samples])

    def acceptance(self, draft: Draft, version: int) -> float:
        """Acceptance length on everything that a version brought."""
        return expected_acceptance(
            draft, self.samples[version], self.heads, DRAFT_LENGTH, "probabilistic"
        ).acceptance_length


def drawn(
    version: Sequence[Sample], epochs: int, learner: Learner, rng: random.Random
) -> Iterator[list[Sample]]:
    """A version's samples, each ``epochs`` times, in steps of the size of the learner's pace."""
    arrived = epochs * sum(sample.tokens for sample in version)
    step: list[Sample] = []
    for _ in range(epochs):
        for one in rng.sample(version, len(version)):
            tokens = sum(part.tokens for part in step) + one.tokens
            most = learner.pace.batch_tokens(learner.config, arrived)
            if step and tokens > most:
                yield step
                step = []
            step.append(one)
    yield step


@dataclass(frozen=True)
class Candidate:
    """The gate's finding: a candidate's gain over the served draft; None if it has none."""

    served: Draft
    gain: float | None = None
    half_width: float = 0.0

    @property
    def worse(self) -> bool:
        """Significantly, than the draft that it was compared with."""
        return self.gain is not None and self.gain + self.half_width < 0.0


def considered(
    learner: Learner, served: Draft, held: Sequence[Sample], heads: PolicyHeads, steps: int
) -> Candidate:
    """Judge a candidate as ``TrainingLoop`` does, so many steps after the one before it; ``served``
    is then what is served."""
    shares = learner.pace.shares
    result, best = compare(
        GateSection(),
        (learner.snapshot(served=served, share=share) for share in shares),
        served,
        held,
        heads,
        DRAFT_LENGTH,
        "probabilistic",
        compute_dtype=getattr(torch, learner.config.compute_dtype),
    )
    if not result.HasField("gate"):
        return Candidate(served)
    gate = result.gate
    if gate.passed:
        passed = learner.snapshot(served=served, share=shares[best])
    learner.pace.settle(gate.difference, gate.difference_half_width, steps, learner.config)
    return Candidate(passed if gate.passed else served, gate.difference, gate.difference_half_width)


@dataclass(frozen=True)
class Course:
    """A run over the versions.

    Attributes:
        adapted, frozen: acceptance length at each version, of the draft that was served when it
            came and of the first one, on everything that it brought.
        candidates: of all versions.
        seconds: CPU time of steps and candidates.
    """

    adapted: list[float]
    frozen: list[float]
    candidates: list[Candidate]
    seconds: float

    @property
    def kept(self) -> float:
        """Share of what drift took from the frozen draft that the adapted one kept, after the
        first version."""
        adapted, frozen = (statistics.fmean(arm[1:]) for arm in (self.adapted, self.frozen))
        return (adapted - frozen) / (self.frozen[0] - frozen)

    @property
    def figures(self) -> dict[str, Any]:
        """Return the course for the JSON document."""
        gains = [[one.gain, one.half_width] for one in self.candidates if one.gain is not None]
        return {
            **{"adapted": self.adapted, "frozen": self.frozen, "seconds": self.seconds},
            **{"kept": self.kept, "candidate_gains": gains},
        }


def follow(
    versions: Versions, draft: Callable[[], Draft], config: TrainingConfig, epochs: int
) -> Course:
    """Train the draft on each version when it came, a share of its prompts held out."""
    served, frozen, learner = draft(), draft(), Learner(draft(), config)
    learner.restart_optimizer()
    course, steps = Course([], [], [], 0.0), 0
    began, measuring = time.process_time(), 0.0
    for version, samples in enumerate(versions.samples):
        pause = time.process_time()
        course.adapted.append(versions.acceptance(served, version))
        course.frozen.append(versions.acceptance(frozen, version))
        measuring += time.process_time() - pause
        recent = versions.samples[max(version - 1, 0) : version + 1]
        held = [one for part in recent for one in part if _held_out(one)]
        training = [one for one in samples if not _held_out(one)]
        batches = drawn(training, epochs, learner, random.Random(version))
        for batch in batches:
            learner.step(batch, versions.heads)
            steps += 1
            if steps >= learner.pace.steps_per_candidate(config):
                course.candidates.append(considered(learner, served, held, versions.heads, steps))
                served, steps = course.candidates[-1].served, 0
        if steps:
            # As where nothing is left to draw.
            course.candidates.append(considered(learner, served, held, versions.heads, steps))
            served, steps = course.candidates[-1].served, 0
    return replace(course, seconds=time.process_time() - began - measuring)


def _held_out(one: Sample) -> bool:
    return is_held_out(one.group, HELD_OUT_MOST)
