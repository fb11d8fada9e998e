"""The interface of a task to the examples' loop, pretraining and warm-up; a module can be one.

Solutions are lines in one of two styles. The corpus is almost all terse and the reward favours
ornate lines, so GRPO moves the policy onto words and layouts that it, and a draft trained beside
it, used to see seldom. Texts are token strings joined by single blanks.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, TypeVar

_STYLE_BONUS = 4.0  # beside 1 for the answer
_MIN_ORNATE_WORDS = 4  # ornate words from which a line counts as ornate


class Style(StrEnum):
    """Writing style of one line."""

    TERSE = "terse"
    ORNATE = "ornate"


class Problem(Protocol):
    """A problem, as its prompt says it."""

    @property
    def prompt(self) -> str: ...


@dataclass(frozen=True)
class Grade:
    """The achievements of a completion.

    Attributes:
        correct: whether the completion ends in the right answer.
        style_share: ornate lines over all lines (at least the lines the problem needs), 0..1.
        richness: mean over lines of the ornate words in the line, relative to a full ornate line
            and cut off at 1; 0..1.
    """

    correct: bool
    style_share: float
    richness: float


P = TypeVar("P", bound=Problem)


class Task(Protocol[P]):
    """Problems, their solutions in both styles, and grades."""

    @property
    def ORNATE_LINE_SHARE(self) -> float:  # noqa: N802 (a module's constant)
        """Share of ornate lines in the final pretraining corpus."""
        ...

    @property
    def SLIP_SHARE(self) -> float:  # noqa: N802
        """Share of the corpus's lines with a wrong result."""
        ...

    def vocabulary(self) -> tuple[str, ...]:
        """Every token a prompt or a solution can hold, in a fixed order, specials excluded."""
        ...

    def sample_problem(self, rng: random.Random) -> P:
        """A problem."""
        ...

    def write_solution(
        self,
        problem: P,
        style: Style | None,
        rng: random.Random,
        *,
        ornate_share: float,
        slip_share: float,
    ) -> str:
        """A solution without ``<eos>``; every line in ``style``, or in a drawn one where None."""
        ...

    def grade(self, problem: P, completion: str) -> Grade:
        """Grade a completion's text, from which special tokens were removed."""
        ...


def grade_lines(completion: str, correct: bool, ornate: Set[str], needed: int, full: int) -> Grade:
    """The grade of a completion by its lines, which ``;`` and ``.`` end.

    Args:
        completion: text.
        correct: whether its answer is right.
        ornate: words of the ornate style.
        needed: lines that the problem needs, so that run-together lines gain nothing.
        full: ornate words in one line from which its richness is full.
    """
    lines = [line for line in re.split(r"[;.]", completion) if line.strip()]
    words = [sum(word in ornate for word in line.split()) for line in lines]
    count = max(len(lines), needed)
    return Grade(
        correct=correct,
        style_share=sum(found >= _MIN_ORNATE_WORDS for found in words) / count,
        richness=sum(min(found / full, 1.0) for found in words) / count,
    )


def reward(graded: Grade) -> float:
    """Reward of a graded completion: correctness plus a style bonus, paid only if correct.

    The condition keeps the policy from giving up the task for style.
    """
    return graded.correct * (1.0 + _STYLE_BONUS * (graded.style_share + graded.richness))


def draw_style(style: Style | None, ornate_share: float, rng: random.Random) -> Style:
    """The given style, or one drawn."""
    return style or (Style.ORNATE if rng.random() < ornate_share else Style.TERSE)


def pick(rng: random.Random, choices: Sequence[tuple[str, float]]) -> str:
    """One of the texts, with probability proportional to its weight."""
    return rng.choices([text for text, _ in choices], [weight for _, weight in choices])[0]


def join(*parts: str) -> str:
    """The non-empty parts, joined by single blanks."""
    return " ".join(part for part in parts if part)
