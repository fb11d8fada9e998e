"""``python -m benchmarks.publish_faults``: the fault table."""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.harness import Target, machine, target_table
from benchmarks.publish_faults.faults import FAULTS, Fault, run
from benchmarks.publish_faults.rig import Rig
from benchmarks.publish_faults.vllm_rig import VLLM_FAULTS, VllmRig
from draft_trainer.files import written_whole


def main(argv: list[str] | None = None) -> int:
    """Run it; the exit status is 0 only if the fleet came right every time."""
    options = _parse(argv)
    began = time.monotonic()
    # So that ``timeout`` ends the processes too; the rows so far are in the JSON by then.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    rows: dict[str, Row] = {}
    faults: Sequence[Fault] = VLLM_FAULTS if options.vllm else FAULTS
    with tempfile.TemporaryDirectory() as folder:
        rig = _rig(options, Path(folder))
        try:
            for turn in range(options.runs):
                if options.minutes and time.monotonic() - began > 60 * options.minutes:
                    print(f"{options.minutes} minutes are over", file=sys.stderr)
                    break
                fault = faults[turn % len(faults)]
                row = rows.setdefault(fault.name, Row())
                error = row.take(lambda: run(rig, fault, turn // len(faults)))  # noqa: B023
                said = f"{turn + 1}: {fault.name}: {error or 'right'} in {row.seconds[-1]:.1f} s"
                print(f"{time.strftime('%H:%M:%S')} {said}", file=sys.stderr, flush=True)
                _write(options, rows, time.monotonic() - began)
        finally:
            rig.stop()
    print(f"{'fault':<46}{'runs':>6}{'right':>7}{'median s':>10}{'longest':>9}")
    for name, row in rows.items():
        print(
            f"{name:<46}{len(row.seconds):>6}{row.right:>7}"
            f"{statistics.median(row.seconds):>10.1f}{max(row.seconds):>9.1f}"
        )
    targets = _targets(options, rows)
    print("\n" + target_table(targets))
    return 0 if all(target.ok for target in targets) else 1


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


def _rig(options: argparse.Namespace, folder: Path) -> Rig:
    if not options.vllm:
        return Rig(folder, options.servers)
    cores = sorted(os.sched_getaffinity(0))
    return VllmRig(folder, tuple(cores[:2]) if len(cores) > 1 else (None, None))


def _targets(options: argparse.Namespace, rows: dict[str, Row]) -> list[Target]:
    runs = sum(len(row.seconds) for row in rows.values())
    share = sum(row.right for row in rows.values()) / runs
    return [
        Target("runs", runs, f">= {options.wanted}", runs >= options.wanted),
        Target("share of runs after which all is right", share, "1.0", share == 1.0),
    ]


def _write(options: argparse.Namespace, rows: dict[str, Row], seconds: float) -> None:
    if options.json is None:
        return
    found = {
        "machine": machine(),
        "servers": "2, real vLLM" if options.vllm else options.servers,
        "seconds": seconds,
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
        "targets": [vars(target) for target in _targets(options, rows)],
    }
    with written_whole(options.json) as path:
        path.write_text(json.dumps(found, indent=1) + "\n")


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.publish_faults",
        description="Publishes releases to rollout servers while processes are killed and data "
        "is damaged, each a real process with the product's own control plane over an engine in "
        "memory. After every fault all servers must serve one release, the registry must be "
        "readable and the next publish must succeed.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--vllm", action="store_true", help="two real vLLM servers under load")
    parser.add_argument("--runs", type=int, help="in all; the rows take turns (150; vLLM: 14)")
    parser.add_argument("--wanted", type=int, help="runs without which it fails (as --runs)")
    parser.add_argument("--minutes", type=float, help="begin no run after so many")
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write figures and targets there")
    options = parser.parse_args(argv)
    options.runs = options.runs or (2 * len(VLLM_FAULTS) if options.vllm else 150)
    options.wanted = options.runs if options.wanted is None else options.wanted
    return options


if __name__ == "__main__":
    sys.exit(main())
