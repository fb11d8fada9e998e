"""Figures of the contestants: marks, curves, the ladder of acceptance lengths, targets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness import Target, table
from benchmarks.vllm_server import Acceptance


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
    rows = []
    for name, marks in curves.items():
        for mark in marks:
            found = mark.acceptance
            seconds = [f"{mark.wall:.2f}", f"{mark.cpu:.2f}"]
            length = [f"{found.length:.3f}", f"{found.standard_error:.3f}"]
            rows.append([name, mark.tokens, mark.steps, *seconds, *length])
            name = ""
    columns = ["", "tokens", "steps", "s", "CPU s", "acceptance length", "s.e."]
    return table("", columns, rows)


def ladder_table(rungs: Sequence[Rung], names: Sequence[str]) -> str:
    """A line per acceptance length: seconds of each, and the best peer's over ours."""
    rows = [
        [
            f"{rung.length:.2f}",
            *("-" if (s := rung.wall[name]) is None else f"{s:.2f}" for name in names),
            f"{rung.ratio:.2f}x",
            f"{rung.cpu_ratio:.2f}x",
        ]
        for rung in rungs
    ]
    return table("", ["seconds to", *names, "best peer / ours", "by CPU s"], rows)
