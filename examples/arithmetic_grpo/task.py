"""A verifiable multi-step arithmetic task with two writing styles.

A problem is a running total: a start value and three or four single-digit additions and
subtractions, the total staying within 0..99. A solution writes one line per operation and closes
with ``answer`` and the digits of the final total. Every line, the closing one included, is written
in one of two styles, drawn line by line:

* ``TERSE``: symbols and a few connectives, ended by ``;``: ``then 4 7 + 8 = 5 5 ;``
* ``ORNATE``: a wordy sentence, ended by ``.``, in which the operand comes before (or far from) the
  total, totals are written units first with a tens word, and the words agree with the noun chosen
  at the start: ``gather 8 pebbles into basket 7 forty and count 5 fifty as masons agree .``

In the corpus almost all lines are terse; the reward favours ornate ones (``examples.task``).

All texts are token strings joined by single blanks (digits are tokens of their own), which is the
form the tokenizer decodes to, so that texts and token ids convert both ways without loss.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass

from examples.task import Grade, Style, draw_style, grade_lines, join, pick

ANSWER_MARK = "answer"
MAX_TOTAL = 99
MAX_COMPLETION_TOKENS = 96
"""Generation limit, in tokens, that holds the longest solution and its ``<eos>``."""

ORNATE_LINE_SHARE = 0.03
"""Share of ornate lines in the final pretraining corpus."""

SLIP_SHARE = 0.02
"""Share of the corpus's operations whose written total is off by one or by ten."""

TENS_WORDS = (
    "nil", "ten", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety",
)  # fmt: skip
TERSE_WORDS = frozenset(
    {"then", "next", "now", "so", "plus", "minus", "is", "gives", "ok", "total", "->", "=", ";"}
)

_FULL_ORNATE_WORDS = 11  # ornate words in one line from which its richness is full
_STEP_COUNTS = (3, 4)


@dataclass(frozen=True)
class Step:
    """One operation: ``total_before`` plus or minus ``operand`` makes ``total_after``."""

    operator: str
    operand: int
    total_before: int
    total_after: int


@dataclass(frozen=True)
class Problem:
    """A problem: its prompt text, its operations in order, and the final total."""

    prompt: str
    steps: tuple[Step, ...]
    answer: int


@dataclass(frozen=True)
class _Scene:
    """The words of an ornate sentence that agree with its noun."""

    noun: str
    place: str
    witness: str
    group: str


_SCENES = (
    _Scene("pebbles", "basket", "masons", "mound"),
    _Scene("pilgrims", "chapel", "scribes", "caravan"),
    _Scene("lanterns", "harbour", "sailors", "fleet"),
)
_SCENE_WEIGHTS = (0.55, 0.3, 0.15)


def sample_problem(rng: random.Random) -> Problem:
    """Draws a problem: a start value in 10..99 and three or four operands in 1..9."""
    total = rng.randint(10, 99)
    parts = [digits(total)]
    steps: list[Step] = []
    for _ in range(rng.choice(_STEP_COUNTS)):
        operand = rng.randint(1, 9)
        operator = rng.choice("+-")
        if not 0 <= (total + operand if operator == "+" else total - operand) <= MAX_TOTAL:
            operator = "-" if operator == "+" else "+"
        after = total + operand if operator == "+" else total - operand
        steps.append(Step(operator, operand, total, after))
        parts.append(f"{operator} {operand}")
        total = after
    return Problem(prompt=" ".join(parts) + " ?", steps=tuple(steps), answer=total)


def write_solution(
    problem: Problem,
    style: Style | None,
    rng: random.Random,
    *,
    ornate_share: float = ORNATE_LINE_SHARE,
    slip_share: float = 0.0,
) -> str:
    """Writes a solution (without ``<eos>``).

    Args:
        problem: the problem to solve.
        style: style of every line, or None to draw each line's style.
        rng: source of every choice.
        ornate_share: probability of an ornate line where ``style`` is None.
        slip_share: probability that an operation's total is written wrong; the lines after it go
            on from the wrong total.
    """
    lines: list[str] = []
    total = problem.steps[0].total_before
    for step in problem.steps:
        after = _apply(total, step)
        if rng.random() < slip_share:
            after += rng.choice((-10, -1, 1, 10))
        after = min(max(after, 0), MAX_TOTAL)
        write = (
            _ornate_line if draw_style(style, ornate_share, rng) is Style.ORNATE else _terse_line
        )
        lines.append(write(Step(step.operator, step.operand, total, after), rng))
        total = after
    lines.append(_closing_line(total, draw_style(style, ornate_share, rng), rng))
    return " ".join(lines)


def grade(problem: Problem, completion: str) -> Grade:
    """Grades a completion's text (special tokens removed)."""
    found = re.search(rf"\b{ANSWER_MARK} ((?:\d )?\d)$", completion.strip())
    correct = found is not None and found.group(1) == digits(problem.answer)
    needed = len(problem.steps) + 1
    return grade_lines(completion, correct, ORNATE_WORDS, needed, _FULL_ORNATE_WORDS)


def digits(number: int) -> str:
    """The number's decimal digits as tokens, ``47`` as ``4 7``."""
    return " ".join(str(number))


def vocabulary() -> tuple[str, ...]:
    """Every token a prompt or a solution can hold, in a fixed order, specials excluded."""
    symbols = ("+", "-", "?", ".", ":")
    return (
        *map(str, range(10)),
        *symbols,
        ANSWER_MARK,
        *sorted(TERSE_WORDS),
        *TENS_WORDS,
        *sorted(ORNATE_WORDS - set(TENS_WORDS)),
    )


def _apply(total: int, step: Step) -> int:
    """The total after the step's operation on ``total``."""
    return total + step.operand if step.operator == "+" else total - step.operand


def _units_first(number: int) -> str:
    """The number in ornate notation: its unit digit, then its tens word."""
    return f"{number % 10} {TENS_WORDS[number // 10]}"


def _terse_line(step: Step, rng: random.Random) -> str:
    word = "plus" if step.operator == "+" else "minus"
    return join(
        pick(rng, (("", 0.45), ("then", 0.2), ("next", 0.15), ("now :", 0.1), ("so", 0.1))),
        digits(step.total_before),
        pick(rng, ((step.operator, 0.75), (word, 0.25))),
        str(step.operand),
        pick(rng, (("=", 0.65), ("->", 0.2), ("is", 0.1), ("gives", 0.05))),
        digits(step.total_after),
        pick(rng, (("", 0.85), ("ok", 0.15))),
        ";",
    )


def _ornate_line(step: Step, rng: random.Random) -> str:
    scene = rng.choices(_SCENES, _SCENE_WEIGHTS)[0]
    before, after = _units_first(step.total_before), _units_first(step.total_after)
    add = step.operator == "+"
    form = pick(rng, (("gather", 0.5), ("when", 0.3), ("behold", 0.2)))
    if form == "gather":
        verb = "gather" if add else "remove"
        preposition = "into" if add else "from"
        count = pick(rng, (("count", 0.7), ("find", 0.3)))
        head = f"{verb} {step.operand} {scene.noun} {preposition} {scene.place} {before}"
        body = f"{head} and {count} {after}"
    elif form == "when":
        verb = "join" if add else "leave"
        head = f"when {step.operand} {scene.noun} {verb} {before} our {scene.group}"
        body = f"{head} {pick(rng, (('reaches', 0.6), ('numbers', 0.4)))} {after}"
    else:
        verb = "welcoming" if add else "losing"
        head = f"behold the {scene.place} {before} {verb} {step.operand} {scene.noun}"
        body = f"{head} until it {pick(rng, (('holds', 0.75), ('shows', 0.25)))} {after}"
    agree = f"as wise {scene.witness} agree"
    record = f"which {scene.witness} faithfully record"
    return join(body, pick(rng, (("", 0.7), (agree, 0.18), (record, 0.12))), ".")


def _closing_line(answer: int, style: Style, rng: random.Random) -> str:
    if style is Style.TERSE:
        opening = pick(rng, (("", 0.5), ("so", 0.3), ("total", 0.2)))
    else:
        opening = join(
            pick(rng, (("at long last", 0.6), ("in every telling", 0.4))),
            pick(rng, (("the tally rests proudly upon", 0.65), ("our tale stands upon", 0.35))),
        )
    return join(opening, f"{ANSWER_MARK} {digits(answer)}")


_ORNATE_TEXT = """
gather remove into from and count find when join leave our reaches numbers behold the welcoming
losing until it holds shows as wise agree which faithfully record at long last in every telling
tally rests proudly upon tale stands
"""
ORNATE_WORDS = frozenset(
    (
        *TENS_WORDS,
        *(word for s in _SCENES for word in (s.noun, s.place, s.witness, s.group)),
        *_ORNATE_TEXT.split(),
    )
)
