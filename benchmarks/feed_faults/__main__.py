"""``python -m benchmarks.feed_faults``: the fault table of the way from policy to training."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from random import Random

from benchmarks.feed_faults.faults import FAULTS, schedule
from benchmarks.feed_faults.rig import Rig
from benchmarks.feed_faults.table import Table, run
from benchmarks.harness import Target, finish, options, say, table

_KILLS = 50


def main(argv: list[str] | None = None) -> int:
    """Command line entry; the exit status is 0 only if every target is met."""
    chosen = _parse(argv)
    rng = Random(0)
    plan = schedule(chosen.rounds, rng)
    with tempfile.TemporaryDirectory() as folder:
        rig = Rig(Path(folder), chosen.patience)
        try:
            found = run(rig, plan, rng, chosen.longest_call, say)
        finally:
            rig.stop()
    print(text_of(found))
    figures = {
        "longest_call": chosen.longest_call,
        "rows": [
            {"fault": name, "transport": transport, **vars(row)}
            for (name, transport), row in found.rows.items()
        ],
        **{name: value for name, value in vars(found).items() if name != "rows"},
    }
    return finish(chosen.json, figures, targets_of(found))


def targets_of(result: Table) -> list[Target]:
    """Return the targets: what must not happen, and how often each fault was tried."""
    kills_of = {fault.name: fault.kills for fault in FAULTS}
    found = []
    for index, side in enumerate(("trainer", "policy")):
        rows = result.rows.items()
        count = sum(row.runs * kills_of[name][index] for (name, _), row in rows if name in kills_of)
        found.append(Target.at_least(f"kill -9 of the {side}", count, _KILLS))
    columns = {
        "acknowledged and lost": "lost",
        "trained twice": "twice",
        "stalled": "stalled",
        "leaked segments": "leaked",
    }
    for name, column in columns.items():
        found.append(Target.at_most(name, result.total(column), 0))
    differ = abs(result.seen - result.expected)
    good = differ == 0 and result.seen > 0
    found.append(Target("anchors that the weights saw too often or not", differ, "0", good))
    found.append(Target.at_most("anything else wrong", len(result.wrong), 0))
    return found


def text_of(result: Table) -> str:
    """The table and the figures below it."""
    columns = ["fault", "transport", "runs", "acked", "lost", "twice", "stalled", "leaked"]
    lines = [
        [
            *(name, transport, row.runs, row.acknowledged, row.lost, row.twice),
            *(row.stalled, row.leaked, f"{row.seconds:.1f}"),
            *(f"{1e3 * row.own_seconds:.1f}", f"{1e3 * row.sync_seconds:.0f}"),
        ]
        for (name, transport), row in sorted(result.rows.items())
    ]
    return (
        table("", [*columns, "longest s", "call ms", "sync ms"], lines)
        + f"\n{result.steps} steps of the policy; {result.samples} samples accepted; "
        f"{result.recognised} answers recognised a sample that was sent again; refused: "
        f"{result.refused or 'none'}; the weights saw {result.seen} anchors of {result.expected}"
    )


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = options(
        "feed_faults",
        "Feeds a real draft-trainer from a policy's forward passes through a real bridge while "
        "both are killed and the connection and the shared memory between them are damaged. After "
        "every fault samples must be acknowledged again and the database must have every sample "
        "that was; at the end the weights must have seen each in every epoch and no more.",
    )
    add = parser.add_argument
    add("--rounds", type=int, default=9, help="eight kills of trainers and six of policies in each")
    add("--patience", type=float, default=120.0, help="seconds after which it counts as stalled")
    add(
        "--longest-call",
        type=float,
        default=0.5,
        help="seconds that the bridge's calls may take in one step, without those in which the "
        "thread could run but others did",
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
