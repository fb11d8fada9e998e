"""``python -m benchmarks.draft_training``: a training step beside the public EAGLE-3 trainers'."""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.draft_training.case import SHAPES, Case
from benchmarks.draft_training.contestants import (
    PEERS,
    default_directory,
    default_setting,
    python_of,
)
from benchmarks.harness import (
    Target,
    finish,
    interleaved,
    options,
    ratios,
    say,
    spread,
    spread_text,
    table,
    write,
)
from benchmarks.workers import WorkerProcess

# (shape, dtype): how many times as fast as the fastest peer ours must be, for every K.
SPEED_BOUNDS = {
    ("A", "bfloat16"): 2.0,
    ("B", "bfloat16"): 1.5,
    ("A", "float32"): 1.4,
    ("B", "float32"): 1.1,
}


@dataclass
class Measured:
    """One contestant in one case; index r of every list is round r.

    Attributes:
        setting: what it runs with.
        wall: seconds of a step.
        cost: what is compared: CPU seconds on a CPU, which another program on the core does not
            change, and wall seconds on a GPU.
        memory: peak bytes above the idle process.
        loss: of the first step.
    """

    setting: str
    wall: list[float] = field(default_factory=list)
    cost: list[float] = field(default_factory=list)
    memory: list[int] = field(default_factory=list)
    loss: float = float("nan")

    def note(self, answer: Mapping[str, Any], device: str) -> None:
        """Add a round's step."""
        self.wall.append(answer["wall"])
        self.cost.append(answer["cpu" if device == "cpu" else "wall"])
        self.memory.append(answer["memory"])


@dataclass(frozen=True)
class CaseResult:
    """All contestants in one case."""

    case: Case
    measured: dict[str, Measured]

    def ratios(self, slow: str, fast: str) -> list[float]:
        """Cost of ``slow`` over that of ``fast``, round by round."""
        return ratios(self.measured[slow].cost, self.measured[fast].cost)

    @property
    def peers(self) -> list[str]:
        """Names of the peers that took part."""
        return [name for name in self.measured if name != "ours"]

    def targets(self) -> list[Target]:
        """Speed against the fastest peer, memory against the leanest."""
        if not self.peers:
            return []
        found = []
        measured, label = self.measured, self.case.label
        bound = SPEED_BOUNDS.get((self.case.name, self.case.dtype))
        if bound is not None:
            peer = min(self.peers, key=lambda name: statistics.median(measured[name].cost))
            name = f"{label}: speed against the fastest peer ({peer})"
            value = statistics.median(self.ratios(peer, "ours"))
            found.append(Target.at_least(name, value, bound))
        peer = min(self.peers, key=lambda name: max(measured[name].memory))
        name = f"{label}: peak memory against the leanest peer ({peer})"
        value = max(measured["ours"].memory) / max(measured[peer].memory)
        return [*found, Target.at_most(name, value, 1.0)]

    def table(self) -> str:
        """The contestants."""
        case = self.case
        tokens = case.rows * case.tokens
        rows = []
        for name in ("ours", *self.peers):
            m = self.measured[name]
            against = "" if name == "ours" else spread_text(self.ratios(name, "ours"))
            rate = spread_text([tokens / seconds for seconds in m.wall], 0)
            peak = f"{max(m.memory) / 2**20:.0f}"
            rows.append([name, rate, f"{statistics.median(m.cost):.3f}", peak, against])
            rows[-1].append(m.setting)
        columns = ["", "tokens/s", "s a step", "peak MiB", "times ours", "setting"]
        title = f"\n{case.label}: {case.rows} x {case.tokens} tokens a step"
        return table(title, columns, rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the cell for JSON."""
        return {
            "case": self.case.to_dict(),
            "contestants": {
                name: {
                    "setting": m.setting,
                    "seconds": spread(m.wall),
                    "compared_seconds": spread(m.cost),
                    "peak_memory_bytes": max(m.memory),
                    "first_loss": m.loss,
                }
                for name, m in self.measured.items()
            },
            "speed_against": {name: spread(self.ratios(name, "ours")) for name in self.peers},
        }


def main(argv: list[str] | None = None) -> int:
    """Command line entry; the exit status is 0 only if every target is met."""
    chosen = _parse(argv)
    chosen.peers_dir.mkdir(parents=True, exist_ok=True)
    peers = [name for name in chosen.against.split(",") if name]
    pythons = {name: python_of(name, chosen.peers_dir) for name in peers}
    pythons["ours"] = Path(sys.executable)
    results: list[CaseResult] = []
    figures: dict[str, Any] = {}
    targets: list[Target] = []
    for case in _cases(chosen):
        results.append(_measure(chosen, case, pythons))
        print(results[-1].table(), flush=True)
        targets = [target for result in results for target in result.targets()]
        figures = {"cases": [result.to_dict() for result in results]}
        write(chosen.json, figures, targets)
    return finish(chosen.json, figures, targets)


def _measure(chosen: argparse.Namespace, case: Case, pythons: Mapping[str, Path]) -> CaseResult:
    core = chosen.core if case.device == "cpu" else None
    settings = {name: default_setting(name, case) for name in pythons}
    measured = {name: Measured(settings[name]) for name in pythons}
    module = "benchmarks.draft_training.worker"
    log = chosen.peers_dir / "workers.log"
    with ExitStack() as stack:
        workers = {
            name: stack.enter_context(WorkerProcess(name, module, [name], log, python, core))
            for name, python in pythons.items()
        }
        for name, worker in workers.items():
            worker.ask("load", case=case.to_dict(), setting=settings[name])
            losses = [worker.ask("step")["loss"] for _ in range(chosen.warmup)]
            measured[name].loss = losses[0]
            say(f"{case.label}: {name} ({settings[name]}) is warm")
        steps = {
            name: lambda name=name: measured[name].note(workers[name].ask("step"), case.device)
            for name in workers
        }
        interleaved(
            steps,
            chosen.rounds,
            after_round=lambda number: say(f"{case.label}: round {number} of {chosen.rounds}"),
        )
    return CaseResult(case, measured)


def _cases(chosen: argparse.Namespace) -> Iterator[Case]:
    shapes = chosen.cases or ("8B" if chosen.device == "cuda" else "A,B")
    dtypes = chosen.dtypes or ("bfloat16" if chosen.device == "cuda" else "float32,bfloat16")
    for shape in shapes.split(","):
        for dtype in dtypes.split(","):
            for steps in chosen.ttt_steps.split(","):
                yield dataclasses.replace(
                    SHAPES[shape], ttt_steps=int(steps), dtype=dtype, device=chosen.device
                )


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = options(
        "draft_training",
        "One training step of ours and of the public EAGLE-3 trainers on the same random case: "
        "same torch, same core, one thread, interleaved round by round. Peers are installed into "
        "environments of their own. Progress goes to stderr, tables to stdout.",
    )
    add = parser.add_argument
    add("--against", default=",".join(PEERS), help="peers, separated by commas; empty for none")
    add("--cases", help=f"of {', '.join(SHAPES)}; A,B on a CPU and 8B on a GPU if not given")
    add("--dtypes", help="float32,bfloat16 on a CPU and bfloat16 on a GPU if not given")
    add("--ttt-steps", default="3,7", help="depths K of the unroll")
    add("--rounds", type=int, default=9, help="counted steps of each contestant")
    add("--warmup", type=int, default=2, help="steps of each contestant before that")
    add("--core", type=int, default=max(os.sched_getaffinity(0)), help="the one all run on")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where the steps run")
    add("--peers-dir", type=Path, default=default_directory(), help="the peers' environments")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
