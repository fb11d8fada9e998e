"""``python -m benchmarks.feed_faults``: the fault table of the way from policy to training."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from random import Random

from benchmarks.feed_faults.faults import FAULTS, schedule
from benchmarks.feed_faults.rig import Rig
from benchmarks.feed_faults.table import Table, run
from benchmarks.harness import Target, machine, target_table

_KILLS = 50


def main(argv: list[str] | None = None) -> int:
    """Run it; the exit status is 0 only if every target was met."""
    options = _parse(argv)
    rng = Random(options.seed)
    plan = schedule(options.rounds, rng)
    if options.runs is not None:
        plan = plan[: options.runs]
    with tempfile.TemporaryDirectory() as folder:
        rig = Rig(Path(folder), options.patience, options.pace)
        try:
            table = run(rig, plan, rng, options.longest_call, options.seconds, _say)
        finally:
            rig.stop()
    print(text_of(table))
    targets = targets_of(table)
    print("\n" + target_table(targets))
    if options.json is not None:
        found = {
            "machine": machine(),
            "seed": options.seed,
            "longest_call": options.longest_call,
            "rows": [
                {"fault": name, "transport": transport, **vars(row)}
                for (name, transport), row in table.rows.items()
            ],
            **{name: value for name, value in vars(table).items() if name != "rows"},
            "targets": [vars(target) for target in targets],
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(target.ok for target in targets) else 1


def targets_of(table: Table) -> list[Target]:
    """What issue and table promise."""
    kills_of = {fault.name: fault.kills for fault in FAULTS}
    found = []
    for index, side in enumerate(("trainer", "policy")):
        rows = table.rows.items()
        count = sum(row.runs * kills_of[name][index] for (name, _), row in rows if name in kills_of)
        found.append(Target(f"kill -9 of the {side}", count, f">= {_KILLS}", count >= _KILLS))
    columns = {
        "acknowledged and lost": "lost",
        "trained twice": "twice",
        "stalled": "stalled",
        "leaked segments": "leaked",
    }
    for name, column in columns.items():
        count = table.total(column)
        found.append(Target(name, count, "0", count == 0))
    differ = abs(table.seen - table.expected)
    good = differ == 0 and table.seen > 0
    found.append(Target("anchors that the weights saw too often or not", differ, "0", good))
    found.append(Target("anything else wrong", len(table.wrong), "0", not table.wrong))
    return found


def text_of(table: Table) -> str:
    """The table and the figures below it."""
    lines = [
        f"{'fault':<42}{'transport':<15}{'runs':>5}{'acked':>8}{'lost':>6}{'twice':>7}"
        f"{'stalled':>9}{'leaked':>8}{'longest s':>11}{'call ms':>9}{'sync ms':>9}"
    ]
    for (name, transport), row in sorted(table.rows.items()):
        lines.append(
            f"{name:<42}{transport:<15}{row.runs:>5}{row.acknowledged:>8}{row.lost:>6}"
            f"{row.twice:>7}{row.stalled:>9}{row.leaked:>8}{row.seconds:>11.1f}"
            f"{1e3 * row.own_seconds:>9.1f}{1e3 * row.sync_seconds:>9.0f}"
        )
    lines.append(
        f"\n{table.steps} steps of the policy; {table.samples} samples accepted; "
        f"{table.recognised} answers recognised one that was sent again; refused: "
        f"{table.refused or 'none'}; the weights saw {table.seen} anchors of {table.expected}"
    )
    return "\n".join(lines)


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.feed_faults",
        description="Feeds a real draft-trainer from a policy's forward passes through a real "
        "bridge while both are killed and the wire and the ring between them are damaged. After "
        "every fault samples must be acknowledged again and the ledger must have every sample "
        "that was; at the end the weights must have seen each in every epoch and no more.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--rounds", type=int, default=9, help="eight kills of trainers and six of policies in each"
    )
    parser.add_argument("--runs", type=int, help="stop after so many faults; default: all")
    parser.add_argument("--seconds", type=float, default=3600.0, help="start no fault after these")
    parser.add_argument("--seed", type=int, default=0, help="of orders and instants")
    parser.add_argument("--pace", type=float, default=0.05, help="seconds of a step of the policy")
    parser.add_argument(
        "--patience", type=float, default=120.0, help="seconds after which it counts as stalled"
    )
    parser.add_argument(
        "--longest-call",
        type=float,
        default=0.5,
        help="seconds that the bridge's calls may take in one step, without those in which the "
        "thread could run but others did",
    )
    parser.add_argument("--json", type=Path, help="write figures and targets there")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
