"""``python -m benchmarks.draft_training``: ours against the public EAGLE-3 trainers."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.draft_training.breakdown import account, breakdown_table
from benchmarks.draft_training.case import SHAPES, Case
from benchmarks.draft_training.contestant import PEERS
from benchmarks.draft_training.environments import default_directory, python_of
from benchmarks.draft_training.flops import derivation
from benchmarks.draft_training.process import WorkerProcess
from benchmarks.draft_training.report import (
    case_table,
    floor_table,
    machine,
    target_table,
    targets,
)
from benchmarks.draft_training.rounds import CaseResult, measure
from benchmarks.draft_training.settings import default_setting, tune
from benchmarks.draft_training.sweep import sweep, sweep_table


def main(argv: list[str] | None = None) -> int:
    """Run what the options ask for; the exit status is 0 only if every target was met."""
    options = _parse(argv)
    options.peers_dir.mkdir(parents=True, exist_ok=True)
    log = options.peers_dir / "workers.log"
    if options.sweep:
        points = sweep(options.device, options.core, options.rounds, log, _say)
        print(sweep_table(points))
        _write(options.json, {"sweep": points})
        return 0
    peers = [name for name in options.against.split(",") if name]
    pythons = {name: python_of(name, options.peers_dir, _say) for name in peers}
    pythons |= {"ours": Path(sys.executable), "floor": Path(sys.executable)}
    results, breakdowns, found = [], [], []
    for case in _cases(options):
        print(f"\n{derivation(case)}", flush=True)
        result, profiled = _measure(options, case, pythons, log)
        results.append(result)
        breakdowns.append(account(result, profiled))
        print(floor_table(result))
        print(case_table(result))
        print(breakdown_table(breakdowns[-1]), flush=True)
        found = targets(results)
        # After every case: a run of an hour that is cut short has its figures.
        figures = {
            "cases": [result.to_dict() for result in results],
            "breakdown_of_ours": breakdowns,
            "targets": [dataclasses.asdict(target) for target in found],
        }
        _write(options.json, figures)
    print(f"\n{target_table(found)}")
    return 0 if all(target.ok for target in found) else 1


def _measure(
    options: argparse.Namespace, case: Case, pythons: dict[str, Path], log: Path
) -> tuple[CaseResult, dict[str, Any]]:
    """The rounds of a case, and the profile of ours after them."""
    core = options.core if case.device == "cpu" else None
    settings = {name: default_setting(name, case) for name in pythons} | dict(options.setting)
    if options.tune:
        for name in set(pythons) & set(PEERS):
            start = partial(WorkerProcess, name, pythons[name], core, log)
            settings[name] = tune(name, start, case, _say)
    with ExitStack() as stack:
        workers = {name: WorkerProcess(name, pythons[name], core, log) for name in pythons}
        for worker in workers.values():
            stack.callback(worker.close)
        result = measure(
            workers, settings, case, warmup=options.warmup, rounds=options.rounds, say=_say
        )
        return result, workers["ours"].profile()


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    shapes = options.cases or ("8B" if options.device == "cuda" else "A,B")
    dtypes = options.dtypes or ("bfloat16" if options.device == "cuda" else "float32,bfloat16")
    for shape in shapes.split(","):
        for dtype in dtypes.split(","):
            for steps in options.ttt_steps.split(","):
                yield dataclasses.replace(
                    SHAPES[shape], ttt_steps=int(steps), dtype=dtype, device=options.device
                )


def _write(path: Path | None, figures: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps({"machine": machine()} | figures, indent=1) + "\n")


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.draft_training",
        description="One training step of ours and of the public EAGLE-3 trainers on the same "
        "random case: same torch, same core, one thread, interleaved round by round. Peers are "
        "installed into environments of their own. Progress goes to stderr, tables to stdout.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--against", default=",".join(PEERS), help="peers, separated by commas; empty for none")
    add("--cases", help=f"of {', '.join(SHAPES)}; A,B on a CPU and 8B on a GPU if not given")
    add("--dtypes", help="float32,bfloat16 on a CPU and bfloat16 on a GPU if not given")
    add("--ttt-steps", default="3,7", help="depths K of the unroll")
    add("--rounds", type=int, default=9, help="steps of each contestant that count")
    add("--warmup", type=int, default=2, help="steps of each contestant before that")
    add("--core", type=int, default=max(os.sched_getaffinity(0)), help="the one all run on")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="where the steps run")
    add("--peers-dir", type=Path, default=default_directory(), help="the peers' environments")
    add("--setting", action="append", default=[], type=_setting, metavar="PEER=SETTING",
        help="instead of the peer's fastest setting as docs/benchmarks.md has it")  # fmt: skip
    add("--tune", action="store_true", help="try every setting of every peer, take the fastest")
    add("--sweep", action="store_true", help="only ours, over tokens and TTT steps")
    add("--json", type=Path, help="write figures and targets there")
    return parser.parse_args(argv)


def _setting(text: str) -> tuple[str, str]:
    name, _, setting = text.partition("=")
    return name, setting


if __name__ == "__main__":
    sys.exit(main())
