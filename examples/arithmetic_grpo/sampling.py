"""Plain sampling from a causal language model with a key-value cache, for checks and evaluation."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from examples.arithmetic_grpo import task as arithmetic
from examples.arithmetic_grpo.task import MAX_COMPLETION_TOKENS
from examples.arithmetic_grpo.tokenizer import BOS_ID, EOS_ID, PAD_ID, token_ids
from examples.task import P, Problem, Task

_PROBLEMS_AT_ONCE = 1024


@dataclass(frozen=True)
class Samples:
    """Completions of a list of prompts, in the prompts' order.

    Attributes:
        prompts: token ids of each prompt, ``<bos>`` included.
        completions: token ids of each completion, the closing ``<eos>`` included where reached.
        mean_entropy: mean over sampled tokens of the T=1 distribution's entropy, in nats.
    """

    prompts: list[list[int]]
    completions: list[list[int]]
    mean_entropy: float


@dataclass(frozen=True)
class Evaluation:
    """Figures of one evaluation; lengths in tokens with ``<eos>``, entropy in nats per token."""

    accuracy: float
    style_share: float
    mean_completion_tokens: float
    mean_token_entropy: float


@torch.inference_mode()
def sample(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    temperature: float = 1.0,
    max_new_tokens: int = MAX_COMPLETION_TOKENS,
    generator: torch.Generator | None = None,
) -> Samples:
    """Samples one completion per prompt; greedily where ``temperature`` is 0.

    Prompts of one length form one batch (no padding before the first sampled token).
    """
    completions: list[list[int]] = [[] for _ in prompts]
    entropy_sum, entropy_count = 0.0, 0
    for length in sorted({len(prompt) for prompt in prompts}):
        rows = [index for index, prompt in enumerate(prompts) if len(prompt) == length]
        cache = DynamicCache(config=model.config)
        inputs = torch.tensor([list(prompts[row]) for row in rows])
        alive = torch.ones(len(rows), dtype=torch.bool)
        for _ in range(max_new_tokens):
            output = model(input_ids=inputs, past_key_values=cache, use_cache=True)
            log_probs = output.logits[:, -1].float().log_softmax(-1)  # (rows, vocab)
            entropy = -(log_probs.exp() * log_probs).sum(-1)
            entropy_sum += float(entropy[alive].sum())
            entropy_count += int(alive.sum())
            if temperature == 0:
                drawn = log_probs.argmax(-1)
            else:
                weights = (log_probs / temperature).softmax(-1)
                drawn = torch.multinomial(weights, 1, generator=generator).squeeze(1)
            drawn = drawn.where(alive, torch.full_like(drawn, PAD_ID))
            for row, token, live in zip(rows, drawn.tolist(), alive.tolist(), strict=True):
                if live:
                    completions[row].append(token)
            alive &= drawn != EOS_ID
            if not alive.any():
                break
            inputs = drawn[:, None]
    return Samples([list(p) for p in prompts], completions, entropy_sum / max(entropy_count, 1))


def prompt_ids(problem: Problem, task: Task[Any] = arithmetic) -> list[int]:
    """Token ids of the problem's prompt, ``<bos>`` first."""
    ids = token_ids(task)
    return [BOS_ID, *(ids[token] for token in problem.prompt.split())]


def completion_text(completion: Sequence[int], task: Task[Any] = arithmetic) -> str:
    """Text of a completion up to its ``<eos>``; other special tokens stay visible as words."""
    tokens = list(token_ids(task))
    end = list(completion).index(EOS_ID) if EOS_ID in completion else len(completion)
    return " ".join(tokens[token] for token in completion[:end])


def solutions(
    model: PreTrainedModel, count: int, seed: int, task: Task[Any] = arithmetic
) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Prompts of a task and their completions at temperature 1, as token ids, some at a time."""
    for start in range(0, count, _PROBLEMS_AT_ONCE):
        rng = random.Random(f"{seed}:{start}")
        size = min(_PROBLEMS_AT_ONCE, count - start)
        prompts = [prompt_ids(task.sample_problem(rng), task) for _ in range(size)]
        generator = torch.Generator().manual_seed(rng.getrandbits(32))
        drawn = sample(model, prompts, 1.0, generator=generator)
        yield list(zip(drawn.prompts, drawn.completions, strict=True))


def held_out_problems(count: int, task: Task[Any] = arithmetic) -> list[Any]:
    """The first ``count`` problems of the held-out stream (a fixed seed of its own)."""
    rng = random.Random("held-out")
    return [task.sample_problem(rng) for _ in range(count)]


def evaluate(
    model: PreTrainedModel,
    problems: Sequence[P],
    temperature: float,
    seed: int = 0,
    task: Task[P] = arithmetic,  # type: ignore[assignment]
) -> Evaluation:
    """Samples one completion per problem and grades it."""
    generator = torch.Generator().manual_seed(seed)
    drawn = sample(model, [prompt_ids(p, task) for p in problems], temperature, generator=generator)
    grades = [
        task.grade(problem, completion_text(completion, task))
        for problem, completion in zip(problems, drawn.completions, strict=True)
    ]
    return Evaluation(
        accuracy=sum(g.correct for g in grades) / len(grades),
        style_share=sum(g.style_share for g in grades) / len(grades),
        mean_completion_tokens=sum(map(len, drawn.completions)) / len(grades),
        mean_token_entropy=drawn.mean_entropy,
    )


def describe(evaluation: Evaluation) -> str:
    """One line for a log."""
    return "  ".join(f"{name} {value:.3f}" for name, value in asdict(evaluation).items())
