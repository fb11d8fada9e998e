"""Sorting letters by selection, in two writing styles. A module that is an ``examples.task.Task``.

A problem is four to six distinct letters. A solution writes a line for every selection, which names
the smallest letter that is left and the others, and closes with ``sorted`` and all of them:

* terse: ``take b leave f d k ;``
* ornate: ``out of the basket holding k d f the clerk lifts b .`` The letters that stay come first
  and in reverse order, so that neither words nor layout are the terse ones.
"""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from dataclasses import dataclass

from examples.task import Grade, Style, draw_style, grade_lines, join, pick

ORNATE_LINE_SHARE = 0.03
SLIP_SHARE = 0.02
"""Share of the corpus's lines that take a wrong letter."""

ANSWER_MARK = "sorted"
LETTERS = tuple(string.ascii_lowercase[:20])
_COUNTS = (4, 5, 6)
_FULL_ORNATE_WORDS = 7
_TERSE_WORDS = ("take", "pick", "next", "leave", "keep", ":", "ok", "done")
_PLACES = (("basket", 0.5), ("drawer", 0.3), ("satchel", 0.2))
_CLERKS = (("clerk", 0.6), ("porter", 0.4))
_ORNATE_TEXT = """
out of the basket drawer satchel holding clerk porter lifts carries away gladly behold
while remain upon shelf we set aside at last every parcel rests in its rightful place
"""
ORNATE_WORDS = frozenset(_ORNATE_TEXT.split())


@dataclass(frozen=True)
class Problem:
    """Letters in the order of the prompt."""

    letters: tuple[str, ...]

    @property
    def prompt(self) -> str:
        """``sort f b k d ?``"""
        return " ".join(("sort", *self.letters, "?"))


def vocabulary() -> tuple[str, ...]:
    """Every token a prompt or a solution can hold, in a fixed order, specials excluded."""
    marks = ("sort", "?", ";", ".", ANSWER_MARK)
    return (*LETTERS, *marks, *_TERSE_WORDS, *sorted(ORNATE_WORDS))


def sample_problem(rng: random.Random) -> Problem:
    """Four to six distinct letters in random order."""
    return Problem(tuple(rng.sample(LETTERS, rng.choice(_COUNTS))))


def write_solution(
    problem: Problem,
    style: Style | None,
    rng: random.Random,
    *,
    ornate_share: float = ORNATE_LINE_SHARE,
    slip_share: float = 0.0,
) -> str:
    """A solution without ``<eos>``; arguments as in ``examples.task.Task``."""
    left, taken = list(problem.letters), []
    lines = []
    while len(left) > 1:
        smallest = rng.choice(left) if rng.random() < slip_share else min(left)
        left.remove(smallest)
        taken.append(smallest)
        ornate = draw_style(style, ornate_share, rng) is Style.ORNATE
        lines.append((_ornate_line if ornate else _terse_line)(smallest, left, rng))
    if draw_style(style, ornate_share, rng) is Style.ORNATE:
        opening = "at last every parcel rests in its rightful place"
    else:
        opening = pick(rng, (("", 0.7), ("done", 0.3)))
    lines.append(join(opening, ANSWER_MARK, *taken, *left))
    return " ".join(lines)


def grade(problem: Problem, completion: str) -> Grade:
    """Grade whether the completion ends in the sorted letters, and its style."""
    words = completion.split()
    answer = [ANSWER_MARK, *sorted(problem.letters)]
    correct = words[-len(answer) :] == answer
    needed = len(problem.letters)
    return grade_lines(completion, correct, ORNATE_WORDS, needed, _FULL_ORNATE_WORDS)


def _terse_line(letter: str, left: Sequence[str], rng: random.Random) -> str:
    verb = pick(rng, (("take", 0.6), ("pick", 0.25), ("next :", 0.15)))
    rest = pick(rng, (("leave", 0.7), ("keep", 0.3)))
    return join(verb, letter, rest, *left, pick(rng, (("", 0.85), ("ok", 0.15))), ";")


def _ornate_line(letter: str, left: Sequence[str], rng: random.Random) -> str:
    place, clerk = pick(rng, _PLACES), pick(rng, _CLERKS)
    others = " ".join(reversed(left))
    form = pick(rng, (("out", 0.5), ("while", 0.3), ("behold", 0.2)))
    if form == "out":
        verb = pick(rng, (("lifts", 0.7), ("carries away", 0.3)))
        return f"out of the {place} holding {others} the {clerk} {verb} {letter} ."
    if form == "while":
        return f"while {others} remain upon the shelf we gladly set aside {letter} ."
    return f"behold the {clerk} holding {others} in the {place} away gladly lifts {letter} ."
