"""Interleaved rounds: in each, every contestant takes one step while the others wait."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.draft_training.case import Case
from benchmarks.draft_training.process import WorkerProcess
from benchmarks.spread import spread


@dataclass(frozen=True)
class Measured:
    """One contestant in one case, a value per round.

    Attributes:
        name: of the contestant.
        setting: which of its settings.
        wall: seconds of a step.
        cpu: CPU seconds of a step, all threads.
        cost: what is compared: CPU seconds on a CPU, wall seconds on a GPU. On an idle core they
            agree; on a shared one only CPU seconds mean something. Of the floor, the seconds
            that it computed.
        memory: peak bytes above the idle process.
        loss: of the first step, before anything was learned.
        rates: of the floor, FLOP/s per product in every round.
    """

    name: str
    setting: str
    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    cost: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    loss: float = float("nan")
    rates: dict[str, list[float]] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Median cost of a step."""
        return statistics.median(self.cost)

    @property
    def peak(self) -> int:
        """Bytes, the highest of the rounds."""
        return max(self.memory)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        figures = {
            "setting": self.setting,
            "seconds": spread(self.wall),
            "cpu_seconds": spread(self.cpu),
            "peak_memory_bytes": self.peak,
            "first_loss": self.loss,
        }
        if not self.rates:
            return figures
        return {
            "seconds": spread(self.cost),
            "flops_per_second": {name: statistics.median(v) for name, v in self.rates.items()},
        }


@dataclass(frozen=True)
class CaseResult:
    """Everybody in one case; round r is index r of every list."""

    case: Case
    measured: dict[str, Measured]

    def ratios(self, slow: str, fast: str) -> list[float]:
        """Cost of ``slow`` over that of ``fast``, round by round."""
        pairs = zip(self.measured[slow].cost, self.measured[fast].cost, strict=True)
        return [a / b for a, b in pairs]

    def peers(self) -> list[str]:
        """Names of the peers that took part."""
        return [name for name in self.measured if name not in ("ours", "floor")]

    def fastest_peer(self) -> str:
        """By median cost."""
        return min(self.peers(), key=lambda name: self.measured[name].seconds)

    def leanest_peer(self) -> str:
        """By peak memory."""
        return min(self.peers(), key=lambda name: self.measured[name].peak)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        floor = {name: spread(self.ratios(name, "floor")) for name in ("ours", *self.peers())}
        return {
            "case": self.case.to_dict(),
            "contestants": {name: m.to_dict() for name, m in self.measured.items()},
            "times_the_floor": floor,
            "speed_against": {name: spread(self.ratios(name, "ours")) for name in self.peers()},
        }


def measure(
    workers: Mapping[str, WorkerProcess],
    settings: Mapping[str, str],
    case: Case,
    *,
    warmup: int,
    rounds: int,
    say: Callable[[str], None],
) -> CaseResult:
    """Load the case everywhere, warm up, then take the rounds.

    Args:
        workers: by contestant.
        settings: by contestant.
        case: for all.
        warmup: steps of each that are not counted.
        rounds: steps of each that are.
        say: told what is going on.
    """
    measured = {name: Measured(name, settings[name]) for name in workers}
    for name, worker in workers.items():
        worker.load(case, settings[name])
        losses = [worker.step()["loss"] for _ in range(warmup)]
        measured[name] = Measured(name, settings[name], loss=losses[0])
        say(f"{case.label}: {name} ({settings[name]}) is warm")
    for number in range(rounds):
        for name, worker in workers.items():
            _note(measured[name], worker.step(), case.device)
        last = ", ".join(f"{name} {m.cost[-1]:.3f} s" for name, m in measured.items())
        say(f"{case.label}: round {number + 1} of {rounds}: {last}")
    return CaseResult(case, measured)


def _note(measured: Measured, answer: dict[str, Any], device: str) -> None:
    detail = answer.get("detail", {})
    measured.wall.append(answer["wall"])
    measured.cpu.append(answer["cpu"])
    measured.cost.append(detail.get("seconds", answer["cpu" if device == "cpu" else "wall"]))
    measured.memory.append(answer["memory"])
    for name, rate in detail.get("rates", {}).items():
        measured.rates.setdefault(name, []).append(rate)
