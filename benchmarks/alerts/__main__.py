"""``python -m benchmarks.alerts``: gives every alert its cause once and waits until it fires."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import yaml

from benchmarks.alerts.rig import FASTER, INTERVAL, Rig
from benchmarks.alerts.sightings import named
from benchmarks.alerts.story import Row, Story
from benchmarks.harness import Target, finish, options, say, table
from examples.local_prometheus import RULES
from slipstream.errors import RefusedError


def main(argv: list[str] | None = None) -> int:
    """Command line entry; 0 only if every alert fired, and none while all was well."""
    chosen = _parse(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        try:
            rig = Rig(Path(scratch))
        except RefusedError as error:
            print(f"benchmarks.alerts: {error}", file=sys.stderr)
            return 2
        with rig:
            story = Story(rig, chosen.patience)
            for row in story.run():
                rows.append(row)
                say(f"{row.alert}: {row.cause}")
    lines = [[r.alert, "never" if r.seconds is None else f"{r.seconds:.1f}", r.cause] for r in rows]
    print(table("", ["alert", "seen after s", "cause"], lines))
    figures = {
        "faster": FASTER,
        "interval": INTERVAL,
        "rows": [vars(row) for row in rows],
        "fired_while_all_was_well": sorted(story.while_well),
    }
    return finish(chosen.json, figures, targets_of(rows, story.while_well))


def targets_of(rows: list[Row], while_well: frozenset[str]) -> list[Target]:
    """Every alert of the rules, and nothing before its reason."""
    groups = yaml.safe_load((RULES / "alerts.yml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    wanted = {named({"alertname": rule["alert"], **rule["labels"]}) for rule in rules}
    seen = {row.alert for row in rows if row.seconds is not None}
    missed = sorted(wanted - seen)
    return [
        Target.at_most("alerts not seen firing", len(missed), 0),
        Target.at_most("alerts firing while all was well", len(while_well), 0),
    ]


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = options(
        "alerts",
        "Starts two rollout servers (real vLLM), draft trainers, the policy's side and Prometheus "
        "with the rules of deploy/prometheus, and gives every alert its cause: processes are "
        "killed, a ruined draft is promoted, the feed stops. The rules' windows and waits are "
        "shortened, nothing else.",
    )
    parser.add_argument("--patience", type=float, default=90.0, help="seconds to wait for an alert")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
