"""One release's prediction and measurement, and what all of them together are held to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.acceptance_curve.curve import Acceptance
from benchmarks.draft_training.report import Target

TOLERANCE = 0.02
STANDARD_ERROR = 0.01
LEAST_RELEASES = 10


@dataclass(frozen=True)
class Point:
    """Acceptance lengths of one release.

    Attributes:
        version: draft version.
        noise: share of noise in its matrices.
        predicted: by the gate's estimator from states of the very rollouts that were measured.
        held_out: by the same from states of other rollouts of the same prompts, recorded before, as
            a gate predicts.
        held_out_error: standard error of ``held_out``.
        per_position: ``predicted`` at each draft position, chained.
        measured: vLLM's counters.
        seconds: of both predictions.
    """

    version: int
    noise: float
    predicted: float
    held_out: float
    held_out_error: float
    per_position: tuple[float, ...]
    measured: Acceptance
    seconds: float

    @property
    def relative(self) -> float:
        """``predicted`` over measured, less 1."""
        return self.predicted / self.measured.length - 1

    @property
    def held_out_relative(self) -> float:
        """``held_out`` over measured, less 1."""
        return self.held_out / self.measured.length - 1

    @property
    def measured_error(self) -> float:
        """Standard error of the measurement over it."""
        return self.measured.standard_error / self.measured.length

    def to_dict(self) -> dict[str, Any]:
        """All figures."""
        return asdict(self) | {
            "measured_length": self.measured.length,
            "measured_standard_error": self.measured.standard_error,
            "relative": self.relative,
            "held_out_relative": self.held_out_relative,
        }


def table(points: Sequence[Point]) -> str:
    """One line a release."""
    lines = [
        f"{'draft':>5}{'noise':>7}{'drafts':>8}{'measured':>10}{'± se':>8}{'predicted':>11}"
        f"{'off by':>9}{'held out':>10}{'± se':>8}{'off by':>9}"
    ]
    for p in points:
        lines.append(
            f"{p.version:>5}{p.noise:>7.2f}{p.measured.drafts:>8}{p.measured.length:>10.3f}"
            f"{p.measured.standard_error:>8.3f}{p.predicted:>11.3f}{p.relative:>+9.2%}"
            f"{p.held_out:>10.3f}{p.held_out_error:>8.3f}{p.held_out_relative:>+9.2%}"
        )
    return "\n".join(lines)


def targets(points: Sequence[Point]) -> list[Target]:
    """What must hold for the gate's figures to be taken at their word."""
    worst = max(abs(p.relative) for p in points)
    held_out = max(abs(p.held_out_relative) for p in points)
    error = max(p.measured_error for p in points)
    lengths = [p.measured.length for p in points]
    spread = max(lengths) - min(lengths)
    return [
        Target("releases", len(points), f">= {LEAST_RELEASES}", len(points) >= LEAST_RELEASES),
        Target("spread of measured acceptance lengths", spread, ">= 1.0", spread >= 1.0),
        Target(
            "greatest standard error of a measurement, relative",
            error,
            f"<= {STANDARD_ERROR}",
            error <= STANDARD_ERROR,
        ),
        Target(
            "greatest |predicted / measured - 1|, states of the measured rollouts",
            worst,
            f"<= {TOLERANCE}",
            worst <= TOLERANCE,
        ),
        Target(
            "greatest |predicted / measured - 1|, states of other rollouts of the prompts",
            held_out,
            f"<= {TOLERANCE}",
            held_out <= TOLERANCE,
        ),
    ]
