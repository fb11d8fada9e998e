"""Problems of reasoning-gym: their prompts, their own scores, and worked solutions.

Four of its procedural tasks in turn, in sizes that a model of 135 million parameters solves in
part. A problem is a function of the seed and its number, and no prompt occurs twice in a stream.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from examples.arithmetic_grpo.loop import Scored

TASKS: dict[str, dict[str, int]] = {
    "chain_sum": {"min_terms": 2, "max_terms": 4, "min_digits": 1, "max_digits": 2},
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "leg_counting": {"min_animals": 2, "max_animals": 4, "min_instances": 1, "max_instances": 9},
    "letter_counting": {"min_words": 3, "max_words": 6},
}
"""The tasks and their sizes, by reasoning-gym's name."""


@dataclass(frozen=True)
class Problem:
    """A problem of reasoning-gym.

    Attributes:
        task: its name in ``TASKS``.
        entry: question, answer and metadata, as reasoning-gym gives them.
        dataset: that it is of, which scores it.
    """

    task: str
    entry: dict[str, Any]
    dataset: Any

    @property
    def messages(self) -> list[dict[str, str]]:
        """The chat up to the answer: reasoning-gym's "simple" system prompt, and the question."""
        from reasoning_gym.utils import SYSTEM_PROMPTS

        return [
            {"role": "system", "content": SYSTEM_PROMPTS["simple"]},
            {"role": "user", "content": self.entry["question"].strip()},
        ]

    def score(self, completion: str) -> float:
        """reasoning-gym's score of a completion, 0 to 1."""
        from reasoning_gym.utils import extract_answer

        return float(self.dataset.score_answer(extract_answer(completion), self.entry))


def problems(seed: int | str) -> Iterator[Problem]:
    """Endless problems with distinct questions, one task after the other."""
    import reasoning_gym

    # reasoning-gym seeds entry i with seed + i: small seeds next to one another share entries.
    datasets = {
        name: reasoning_gym.create_dataset(
            name, seed=random.Random(f"{seed}:{name}").getrandbits(48), size=2**31, **sizes
        )
        for name, sizes in TASKS.items()
    }
    seen: set[str] = set()
    for number in range(2**31):
        for name, dataset in datasets.items():
            entry = dataset[number]
            if entry["question"] not in seen:
                seen.add(entry["question"])
                yield Problem(name, entry, dataset)


class Tasks:
    """The problems of a run, as the demo's loop asks for them.

    Args:
        tokenizer: of the policy.
        seed: of the problems.
    """

    max_tokens = 160

    def __init__(self, tokenizer: Any, seed: int | str) -> None:
        self._tokenizer, self._problems = tokenizer, problems(seed)
        self.pad_id: int = tokenizer.pad_token_id

    def problem(self) -> Problem:
        """The next problem of the run."""
        return next(self._problems)

    def prompt_ids(self, problem: Problem) -> list[int]:
        """Token ids of its chat."""
        return prompt_ids(self._tokenizer, problem)

    def score(self, problem: Problem, completion: Sequence[int]) -> Scored:
        """Score a completion; its style is whether lines of steps precede the answer."""
        text = self._tokenizer.decode(completion, skip_special_tokens=True)
        score = problem.score(text)
        steps = text.partition("<answer>")[0].strip()
        return Scored(score, float(score == 1.0), float("\n" in steps))


def prompt_ids(tokenizer: Any, problem: Problem) -> list[int]:
    """Token ids of a problem's chat, up to where the assistant's answer begins."""
    text = tokenizer.apply_chat_template(
        problem.messages, tokenize=False, add_generation_prompt=True
    )
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def solution(problem: Problem, rng: random.Random, worked: bool) -> str:
    """A right solution in one of several wordings: with its steps, or the answer alone."""
    answer = problem.entry["answer"]
    end = rng.choice(
        (
            f"<answer>{answer}</answer>",
            f"The answer is <answer>{answer}</answer>",
            f"So the result is {answer}. <answer>{answer}</answer>",
        )
    )
    if not worked:
        return end
    steps = _STEPS[problem.task](problem.entry["metadata"], rng)
    form = rng.randrange(3)
    if form == 0:
        text = "\n".join(steps)
    elif form == 1:
        text = "\n".join(f"{number}. {step}" for number, step in enumerate(steps, 1))
    else:
        text = "Let's do it step by step.\n" + "\n".join(f"- {step}" for step in steps)
    return f"{text}\n{end}"


def _chain_sum(metadata: dict[str, Any], rng: random.Random) -> list[str]:
    words = metadata["expression"].split()
    total, steps = int(words[0]), []
    for sign, term in zip(words[1::2], map(int, words[2::2]), strict=True):
        result = total + term if sign == "+" else total - term
        steps.append(f"{total} {sign} {term} = {result}")
        total = result
    return steps


def _products(metadata: dict[str, Any], rng: random.Random) -> list[str]:
    a, b = map(int, metadata["expression"].split(" * "))
    tens, ones = b // 10 * 10, b % 10
    if not tens or not ones:
        return [f"{a} * {b} = {a * b}"]
    return [
        f"{b} = {tens} + {ones}",
        f"{a} * {tens} = {a * tens}",
        f"{a} * {ones} = {a * ones}",
        f"{a * tens} + {a * ones} = {a * b}",
    ]


def _leg_counting(metadata: dict[str, Any], rng: random.Random) -> list[str]:
    from reasoning_gym.arithmetic.leg_counting import ANIMALS

    found = [(name, count, ANIMALS[name]) for name, count in metadata["animals"].items()]
    each = rng.choice(("each {name} has {legs} legs, {sum}", "{name}: {sum}"))
    steps = [
        each.format(name=name, legs=legs, sum=f"{count} * {legs} = {count * legs}")
        for name, count, legs in found
    ]
    total = " + ".join(str(count * legs) for _, count, legs in found)
    return [*steps, f"{total} = {metadata['total_legs']}"]


def _letter_counting(metadata: dict[str, Any], rng: random.Random) -> list[str]:
    letter = metadata["target_letter"]
    counts = [(word, word.lower().count(letter)) for word in metadata["span"]]
    each = rng.choice(("{word}: {count}", 'the word "{word}" has {count}'))
    steps = [each.format(word=word, count=count) for word, count in counts]
    total = sum(count for _, count in counts)
    return [*steps, " + ".join(str(count) for _, count in counts) + f" = {total}"]


_STEPS: dict[str, Callable[[dict[str, Any], random.Random], list[str]]] = {
    "chain_sum": _chain_sum,
    "products": _products,
    "leg_counting": _leg_counting,
    "letter_counting": _letter_counting,
}
