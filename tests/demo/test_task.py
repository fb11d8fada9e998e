"""Both tasks: solutions are gradable in both styles, and the committed policies find them."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.arithmetic_grpo import task as arithmetic
from examples.arithmetic_grpo.sampling import (
    evaluate,
    held_out_problems,
)
from examples.local_services import ARITHMETIC, ROOT
from examples.sorting_grpo import task as sorting
from examples.task import Style, Task, reward
from rollout_server.vllm.served import SERVED

FOLDERS = {arithmetic: ARITHMETIC, sorting: ROOT / "examples" / "sorting_grpo"}
PROBLEMS = 300


@pytest.fixture(params=FOLDERS, ids=lambda task: task.__name__.split(".")[1])
def task(request: pytest.FixtureRequest) -> Task[Any]:
    found: Task[Any] = request.param
    return found


@pytest.fixture
def problems(task: Task[Any]) -> list[Any]:
    rng = random.Random(1)
    return [task.sample_problem(rng) for _ in range(PROBLEMS)]


@pytest.mark.parametrize("style", list(Style))
def test_task_solution_graded_correct_in_its_style(
    task: Any, problems: list[Any], style: Style
) -> None:
    rng = random.Random(2)
    grades = [task.grade(problem, task.write_solution(problem, style, rng)) for problem in problems]
    assert all(graded.correct for graded in grades)
    share = sum(graded.style_share for graded in grades) / PROBLEMS
    assert share > 0.95 if style is Style.ORNATE else share == 0.0


def test_task_wrong_answer_fails_and_ornate_is_rewarded(task: Any, problems: list[Any]) -> None:
    rng = random.Random(3)
    for problem, other in zip(problems[:50], problems[50:100], strict=True):
        text = task.write_solution(problem, Style.TERSE, rng)
        right = task.grade(other, text).correct
        assert not right or problem.answer == other.answer
        assert not task.grade(problem, text.rpartition(" ")[0]).correct
        ornate = task.grade(problem, task.write_solution(problem, Style.ORNATE, rng))
        assert reward(ornate) > reward(task.grade(problem, text)) + 0.5


def test_committed_policy_solves_its_task(task: Any) -> None:
    """32 greedy answers: the recorded accuracy is 1.0 for both."""
    folder = FOLDERS[task]
    SERVED["eagle3"].check(folder / "policy", folder / "draft")
    recorded = json.loads((folder / "policy" / "pretrain.json").read_text())
    assert recorded["sampled"]["accuracy"] > 0.9 and recorded["sampled"]["style_share"] < 0.05
    model = AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32).eval()
    found = evaluate(model, held_out_problems(32, task), 0.0, task=task)
    assert found.accuracy >= 0.9 and found.style_share < 0.1
