"""``python -m benchmarks.publish_faults``: the fault table."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks.draft_training.report import Target, machine, target_table
from benchmarks.publish_faults.faults import FAULTS, run
from benchmarks.publish_faults.rig import Rig


def main(argv: list[str] | None = None) -> int:
    """Run it; the exit status is 0 only if the fleet came right every time."""
    options = _parse(argv)
    good: Counter[str] = Counter()
    runs: Counter[str] = Counter()
    worst: dict[str, float] = {}
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        rig = Rig(Path(folder), options.servers)
        try:
            for turn in range(options.runs):
                fault = FAULTS[turn % len(FAULTS)]
                began = time.monotonic()
                runs[fault.name] += 1
                try:
                    run(rig, fault, turn // len(FAULTS))
                    good[fault.name] += 1
                except AssertionError as error:
                    wrong.append(f"{fault.name}: {error}")
                    print(wrong[-1], file=sys.stderr, flush=True)
                took = time.monotonic() - began
                worst[fault.name] = max(worst.get(fault.name, 0.0), took)
        finally:
            rig.stop()
    print(f"{'fault':<40}{'runs':>6}{'right':>7}{'longest s':>11}")
    for name, count in runs.items():
        print(f"{name:<40}{count:>6}{good[name]:>7}{worst[name]:>11.1f}")
    share = sum(good.values()) / sum(runs.values())
    targets = [
        Target("runs", options.runs, f">= {options.wanted}", options.runs >= options.wanted),
        Target("share of runs after which all is right", share, "1.0", share == 1.0),
    ]
    print("\n" + target_table(targets))
    if options.json is not None:
        found = {
            "machine": machine(),
            "servers": options.servers,
            "rows": {n: {"runs": runs[n], "right": good[n], "longest": worst[n]} for n in runs},
            "wrong": wrong,
            "targets": [vars(target) for target in targets],
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(target.ok for target in targets) else 1


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.publish_faults",
        description="Publishes releases to rollout servers while processes are killed and data "
        "is damaged, each a real process with the product's own control plane over an engine in "
        "memory. After every fault all servers must serve one release, the registry must be "
        "readable and the next publish must succeed.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--runs", type=int, default=150, help="in all; the rows take turns")
    parser.add_argument("--wanted", type=int, default=150, help="runs without which it fails")
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write figures and targets there")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
