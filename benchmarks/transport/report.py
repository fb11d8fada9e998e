"""Medians, ratios and targets of the transport benchmark."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.transport.case import Case


@dataclass
class Measured:
    """One case, one number a round under each name.

    Attributes:
        case: what was sent.
        rates: bytes a second: memcpy, read, floor, bare, kept, inline, ring.
        cpu: CPU seconds a GB: "inline sender" and so on.
        microseconds: a message, of ``ring`` and ``inline``.
    """

    case: Case
    rates: dict[str, list[float]] = field(default_factory=dict)
    cpu: dict[str, list[float]] = field(default_factory=dict)
    microseconds: dict[str, list[float]] = field(default_factory=dict)

    def add(self, kind: str, name: str, value: float) -> None:
        """A round's number."""
        getattr(self, kind).setdefault(name, []).append(value)

    def ratio(self, name: str, to: str) -> list[float]:
        """Round by round."""
        return [a / b for a, b in zip(self.rates[name], self.rates[to], strict=True)]


@dataclass(frozen=True)
class Target:
    """A figure and what it is held to."""

    name: str
    value: float
    bound: str
    ok: bool


def targets(large: Sequence[Measured], small: Sequence[Measured]) -> list[Target]:
    """The issue's four."""
    found = []
    for measured in large:
        label = measured.case.label
        for name, to, bound, words in (
            ("ring", "floor", 0.8, "shared memory / floor"),
            ("ring", "inline", 4.0, "shared memory / gRPC inline"),
            ("inline", "bare", 0.9, "gRPC inline / bare gRPC"),
        ):
            value = statistics.median(measured.ratio(name, to))
            found.append(Target(f"{label}: {words}", value, f">= {bound}", value >= bound))
    for measured in small:
        for name in ("ring", "inline"):
            value = statistics.median(measured.microseconds[name])
            found.append(
                Target(f"{measured.case.label}: us a message, {name}", value, "<= 50", value <= 50)
            )
    return found


def table(measured: Measured) -> str:
    """One case for people."""
    lines = [f"\n{measured.case.label} a sample, {measured.case.count} a round"]
    for name, rates in measured.rates.items():
        lines.append(f"  {name:<8}{_spread([rate / 1e9 for rate in rates])} GB/s")
    for name, to in (
        ("ring", "floor"),
        ("ring", "inline"),
        ("inline", "bare"),
        ("inline", "kept"),
        ("ring", "plain"),
    ):
        lines.append(f"  {f'{name} / {to}':<16}{_spread(measured.ratio(name, to))}")
    for name, values in measured.microseconds.items():
        lines.append(f"  {name:<8}{_spread(values)} us a message")
    for name, values in measured.cpu.items():
        lines.append(f"  {name:<16}{_spread(values)} CPU s a GB")
    return "\n".join(lines)


def to_dict(measured: Measured) -> dict[str, Any]:
    """One case for machines."""
    return {
        "sample_bytes": measured.case.sample_bytes,
        "tokens": measured.case.tokens,
        "hidden_size": measured.case.hidden_size,
        "count": measured.case.count,
        "bytes_per_second": measured.rates,
        "cpu_seconds_per_gb": measured.cpu,
        "microseconds_per_message": measured.microseconds,
    }


def _spread(values: Sequence[float]) -> str:
    middle = f"{statistics.median(values):8.3f}"
    return f"{middle} ({min(values):.3f} .. {max(values):.3f})"
