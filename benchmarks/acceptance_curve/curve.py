"""Figures of the contestants: marks, curves, the ladder of acceptance lengths, targets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.draft_training.report import Target


@dataclass(frozen=True)
class Acceptance:
    """One draft's counters in vLLM.

    Attributes:
        drafts: verification steps.
        accepted: tokens accepted.
        per_position: drafts of which at least 1, 2, ... tokens were accepted.
    """

    drafts: int
    accepted: int
    per_position: tuple[int, ...]

    @property
    def length(self) -> float:
        """Tokens per verification step, bonus token included."""
        return 1 + self.accepted / self.drafts

    @property
    def standard_error(self) -> float:
        """Of ``length``, verification steps taken as independent.

        The counters hold the whole distribution of the accepted tokens a of a step:
        E[a^2] = sum over s of (2 s - 1) P(a >= s).
        """
        mean = self.accepted / self.drafts
        square = sum((2 * s + 1) * n for s, n in enumerate(self.per_position)) / self.drafts
        return float(((square - mean**2) / self.drafts) ** 0.5)


@dataclass(frozen=True)
class Mark:
    """A draft on its way.

    Attributes:
        tokens: trained on so far.
        steps: optimizer steps so far.
        wall: seconds that they took.
        cpu: CPU seconds that they took.
        acceptance: in vLLM.
    """

    tokens: int
    steps: int
    wall: float
    cpu: float
    acceptance: Acceptance

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "tokens": self.tokens,
            "steps": self.steps,
            "wall_seconds": self.wall,
            "cpu_seconds": self.cpu,
            "acceptance_length": self.acceptance.length,
            "standard_error": self.acceptance.standard_error,
            "drafts": self.acceptance.drafts,
            "accepted_per_position": self.acceptance.per_position,
        }


Curves = Mapping[str, Sequence[Mark]]
"""By contestant; the first mark of each is the initial draft, which took no time."""


def seconds_to(marks: Sequence[Mark], length: float, clock: str = "wall") -> float | None:
    """When the line through the marks first reaches an acceptance length; None: it never does.

    Args:
        marks: in their order.
        length: acceptance length.
        clock: "wall" or "cpu".
    """
    if marks[0].acceptance.length >= length:
        return float(getattr(marks[0], clock))
    for before, after in itertools.pairwise(marks):
        low, high = before.acceptance.length, after.acceptance.length
        if high >= length:
            start, end = getattr(before, clock), getattr(after, clock)
            return float(start + (end - start) * (length - low) / (high - low))
    return None


@dataclass(frozen=True)
class Rung:
    """An acceptance length and what it took to get there.

    Attributes:
        length: acceptance length.
        wall: seconds by contestant, None where it was not reached.
        cpu: CPU seconds, likewise.
        peer: the peer's way that was the first there.
        ratio: wall seconds of that one over ours.
        cpu_ratio: CPU seconds, likewise.
    """

    length: float
    wall: dict[str, float | None]
    cpu: dict[str, float | None]
    peer: str
    ratio: float
    cpu_ratio: float


def ladder(curves: Curves, ours: str, peers: Sequence[str], lengths: Sequence[float]) -> list[Rung]:
    """The seconds to every acceptance length that ours and at least one of the peers reached.

    None where one side did not take part (``--only``)."""
    rungs = []
    for length in lengths:
        wall = {name: seconds_to(marks, length) for name, marks in curves.items()}
        cpu = {name: seconds_to(marks, length, "cpu") for name, marks in curves.items()}
        there = {name: found for name in peers if (found := wall.get(name)) is not None}
        mine, my_cpu = wall.get(ours), cpu.get(ours)
        if not there or not mine or not my_cpu:
            continue
        peer = min(there, key=lambda name: there[name])
        ratios = there[peer] / mine, (cpu[peer] or 0.0) / my_cpu
        rungs.append(Rung(length, wall, cpu, peer, *ratios))
    return rungs


def targets(rungs: Sequence[Rung]) -> list[Target]:
    """Ours first at every rung; one rung at least."""
    bound = "> 1.0"
    if not rungs:
        return [Target("acceptance lengths that both reached", 0.0, ">= 1", False)]
    return [
        Target(
            f"acceptance length {rung.length:.2f}: seconds of {rung.peer} / ours",
            rung.ratio,
            bound,
            rung.ratio > 1.0,
        )
        for rung in rungs
    ]


def difference(before: Mark, after: Mark) -> tuple[float, float]:
    """Acceptance length of ``after`` less that of ``before``, and its standard error."""
    errors = before.acceptance.standard_error, after.acceptance.standard_error
    return after.acceptance.length - before.acceptance.length, math.hypot(*errors)


def float8_targets(before: Sequence[Mark], after: Sequence[Mark]) -> list[Target]:
    """Float8 states cost no acceptance that can be seen: at every trained mark at most three
    standard errors. One of four marks says so by chance at most once in 185 runs."""
    found = []
    for plain, float8 in zip(before[1:], after[1:], strict=True):
        change, error = difference(plain, float8)
        name = f"{plain.tokens} tokens: acceptance length with float8 states, less with bfloat16"
        least = -3 * error
        found.append(Target(name, change, f">= {least:.3f}", change >= least))
    return found


def curve_table(curves: Curves) -> str:
    """A line per contestant and mark."""
    width = max(map(len, curves))
    lines = [
        f"{'':<{width}}{'tokens':>9}{'steps':>7}{'s':>8}{'CPU s':>8}"
        f"{'acceptance length':>20}{'s.e.':>7}"
    ]
    for name, marks in curves.items():
        for mark in marks:
            found = mark.acceptance
            lines.append(
                f"{name:<{width}}{mark.tokens:>9}{mark.steps:>7}{mark.wall:>8.2f}{mark.cpu:>8.2f}"
                f"{found.length:>20.3f}{found.standard_error:>7.3f}"
            )
            name = ""
    return "\n".join(lines)


def ladder_table(rungs: Sequence[Rung], names: Sequence[str]) -> str:
    """A line per acceptance length: seconds of everybody, and how much sooner ours was there."""
    widths = [max(len(name), 8) + 2 for name in names]
    head = "".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True))
    lines = [f"{'seconds to':<12}{head}{'best peer / ours':>18}{'by CPU s':>10}"]
    for rung in rungs:
        cells = "".join(
            f"{'-' if (found := rung.wall[name]) is None else f'{found:.2f}':>{width}}"
            for name, width in zip(names, widths, strict=True)
        )
        lines.append(f"{rung.length:<12.2f}{cells}{rung.ratio:>17.2f}x{rung.cpu_ratio:>9.2f}x")
    return "\n".join(lines)
