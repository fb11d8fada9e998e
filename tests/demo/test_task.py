"""The arithmetic task: solutions are right, gradable in both styles, and survive the tokenizer."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from examples.arithmetic_grpo.sampling import completion_text, prompt_ids
from examples.arithmetic_grpo.task import (
    MAX_COMPLETION_TOKENS,
    Problem,
    grade,
    sample_problem,
    write_solution,
)
from examples.task import Style, reward

PROBLEMS = 300


@pytest.fixture(scope="module")
def problems() -> list[Problem]:
    rng = random.Random(1)
    return [sample_problem(rng) for _ in range(PROBLEMS)]


def value(prompt: str) -> int:
    """What a prompt such as ``4 7 + 8 - 3 ?`` comes to, by another way than the task's own."""
    text = prompt.replace("?", "").strip()
    signed = text.replace("+", ";+").replace("-", ";-").split(";")
    return sum(int(part.replace(" ", "")) for part in signed)


def test_answers_are_right(problems: list[Problem]) -> None:
    assert [problem.answer for problem in problems] == [value(p.prompt) for p in problems]
    assert all(0 <= problem.answer <= 99 for problem in problems)


@pytest.mark.parametrize("style", list(Style))
def test_a_written_solution_is_graded_correct_and_in_its_style(
    problems: list[Problem], style: Style
) -> None:
    rng = random.Random(2)
    grades = [grade(problem, write_solution(problem, style, rng)) for problem in problems]
    assert all(graded.correct for graded in grades)
    share = sum(graded.style_share for graded in grades) / PROBLEMS
    assert share > 0.95 if style is Style.ORNATE else share == 0.0


def test_a_wrong_answer_is_not_correct_and_ornate_pays(problems: list[Problem]) -> None:
    rng = random.Random(3)
    for problem in problems[:50]:
        text = write_solution(problem, Style.TERSE, rng)
        wrong = Problem(problem.prompt, problem.steps, (problem.answer + 1) % 100)
        assert not grade(wrong, text).correct
        ornate = grade(problem, write_solution(problem, Style.ORNATE, rng))
        assert reward(ornate) > reward(grade(problem, text)) + 0.5


def test_texts_survive_the_tokenizer_and_fit_the_generation_limit(
    problems: list[Problem], policy_dir: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(policy_dir)
    assert len(tokenizer) == 128
    rng = random.Random(4)
    longest = 0
    for problem in problems:
        text = write_solution(problem, Style.ORNATE, rng)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert completion_text(ids) == text
        longest = max(longest, len(ids))
        assert (
            prompt_ids(problem)[1:]
            == tokenizer(problem.prompt, add_special_tokens=False)["input_ids"]
        )
    assert longest < MAX_COMPLETION_TOKENS
