"""``python -m benchmarks.publish_faults``: publishes while something fails."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness import Target, end_on_sigterm, finish, options, say, table, write
from benchmarks.publish_faults.faults import FAULTS, Fault, run
from benchmarks.publish_faults.rig import Rig
from benchmarks.publish_faults.vllm_rig import VLLM_FAULTS, VllmRig

SERVERS = 3
"""Without --vllm."""


def main(argv: list[str] | None = None) -> int:
    """Command line entry; the exit status is 0 only if the fleet recovered every time."""
    chosen = _parse(argv)
    end_on_sigterm()
    rows: dict[str, Row] = {}
    faults: Sequence[Fault] = VLLM_FAULTS if chosen.vllm else FAULTS
    with tempfile.TemporaryDirectory() as folder:
        rig = _rig(chosen, Path(folder))
        try:
            for turn in range(chosen.runs):
                fault = faults[turn % len(faults)]
                row = rows.setdefault(fault.name, Row())
                error = row.take(lambda: run(rig, fault, turn // len(faults)))  # noqa: B023
                say(f"{turn + 1}: {fault.name}: {error or 'right'} in {row.seconds[-1]:.1f} s")
                write(chosen.json, _figures(chosen, rows), _targets(chosen, rows))
        finally:
            rig.stop()
    lines = [
        [
            name,
            len(row.seconds),
            row.right,
            f"{statistics.median(row.seconds):.1f}",
            f"{max(row.seconds):.1f}",
        ]
        for name, row in rows.items()
    ]
    print(table("", ["fault", "runs", "right", "median s", "longest s"], lines))
    return finish(chosen.json, _figures(chosen, rows), _targets(chosen, rows))


@dataclass
class Row:
    """The runs of one fault: seconds of each, and what was wrong."""

    seconds: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def right(self) -> int:
        """Runs after which all was right."""
        return len(self.seconds) - len(self.wrong)

    def take(self, work: Callable[[], None]) -> str:
        """One run; what was wrong with it."""
        began, error = time.monotonic(), ""
        try:
            work()
        except (AssertionError, RuntimeError) as failure:
            error = str(failure)
            self.wrong.append(error)
        self.seconds.append(time.monotonic() - began)
        return error


def _rig(chosen: argparse.Namespace, folder: Path) -> Rig:
    if not chosen.vllm:
        return Rig(folder, SERVERS)
    cores = sorted(os.sched_getaffinity(0))
    return VllmRig(folder, tuple(cores[:2]) if len(cores) > 1 else (None, None))


def _targets(chosen: argparse.Namespace, rows: Mapping[str, Row]) -> list[Target]:
    runs = sum(len(row.seconds) for row in rows.values())
    share = sum(row.right for row in rows.values()) / runs
    return [
        Target.at_least("runs", runs, chosen.runs),
        Target.at_least("share of runs after which all is right", share, 1.0),
    ]


def _figures(chosen: argparse.Namespace, rows: Mapping[str, Row]) -> dict[str, Any]:
    return {
        "servers": "2, real vLLM" if chosen.vllm else SERVERS,
        "rows": {
            name: {
                "runs": len(row.seconds),
                "right": row.right,
                "median_seconds": statistics.median(row.seconds),
                "longest_seconds": max(row.seconds),
                "wrong": row.wrong,
            }
            for name, row in rows.items()
        },
    }


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = options(
        "publish_faults",
        "Publishes releases to rollout servers while processes are killed and data is damaged, "
        "each a real process with the product's own control plane over an engine in memory. After "
        "every fault all servers must serve one release, the registry must be readable and the "
        "next publish must succeed.",
    )
    parser.add_argument("--vllm", action="store_true", help="two real vLLM servers under load")
    parser.add_argument("--runs", type=int, help="in all; the rows take turns (150; vLLM: 14)")
    chosen = parser.parse_args(argv)
    chosen.runs = chosen.runs or (2 * len(VLLM_FAULTS) if chosen.vllm else 150)
    return chosen


if __name__ == "__main__":
    sys.exit(main())
