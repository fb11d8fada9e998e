"""``python -m benchmarks.alerts``: every alert is given its reason once and must fire."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import yaml

from benchmarks.alerts.rig import Rig
from benchmarks.alerts.sightings import named
from benchmarks.alerts.story import Row, Story
from benchmarks.harness import Target, machine, target_table
from examples.local_prometheus import RULES
from slipstream.errors import RefusedError


def main(argv: list[str] | None = None) -> int:
    """Run it; the exit status is 0 only if every alert fired, and none while all was well."""
    options = _parse(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    began = time.monotonic()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        try:
            rig = Rig(folder, options.faster, options.interval)
        except RefusedError as error:
            print(f"benchmarks.alerts: {error}", file=sys.stderr)
            return 2
        with rig:
            story = Story(rig, options.patience)
            print(f"{'alert':<34}{'seen after s':>13}  cause", flush=True)
            for row in story.run():
                rows.append(row)
                seconds = "never" if row.seconds is None else f"{row.seconds:.1f}"
                print(f"{row.alert:<34}{seconds:>13}  {row.cause}", flush=True)
    targets = targets_of(rows, story.while_well)
    print("\n" + target_table(targets))
    if options.json is not None:
        found = {
            "machine": machine(),
            "faster": options.faster,
            "interval": options.interval,
            "seconds": time.monotonic() - began,
            "rows": [vars(row) for row in rows],
            "fired_while_all_was_well": sorted(story.while_well),
            "targets": [vars(target) for target in targets],
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if all(target.ok for target in targets) else 1


def targets_of(rows: list[Row], while_well: frozenset[str]) -> list[Target]:
    """Every alert of the rules, and nothing before its reason."""
    groups = yaml.safe_load((RULES / "alerts.yml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    wanted = {named({"alertname": rule["alert"], **rule["labels"]}) for rule in rules}
    seen = {row.alert for row in rows if row.seconds is not None}
    missed = sorted(wanted - seen)
    return [
        Target("alerts not seen firing", len(missed), "0", not missed),
        Target("alerts firing while all was well", len(while_well), "0", not while_well),
    ]


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.alerts",
        description="Starts two rollout servers (real vLLM), draft trainers, the policy's side and "
        "Prometheus with the rules of deploy/prometheus, and gives every alert its reason: "
        "processes are killed, a ruined draft is promoted, the feed stops. The rules' windows and "
        "waits are shorter, nothing else is.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--faster", type=float, default=60.0, help="5 minutes take 5 seconds")
    parser.add_argument("--interval", type=float, default=0.5, help="seconds between two scrapes")
    parser.add_argument(
        "--patience", type=float, default=90.0, help="seconds that an alert is waited for"
    )
    parser.add_argument("--keep", type=Path, help="keep logs and Prometheus's data there")
    parser.add_argument("--json", type=Path, help="write figures and targets there")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
