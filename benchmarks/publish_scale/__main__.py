"""``python -m benchmarks.publish_scale``: what publishing to many servers takes."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import Target, end_on_sigterm, finish, options, say, table
from benchmarks.publish_scale import connections, processes
from benchmarks.publish_scale.simulation import GIGABIT, scenarios, simulate
from draft_trainer.releases.fleet import Fleet
from draft_trainer.releases.spread import MOST_SENT

PARTS = ("connections", "simulation", "processes")
CONNECTIONS, SIMULATED, PROCESSES = 1_000, 10_000, 64
"""Servers of each part."""
KILLED, RUNS = 10, 50
"""Of the processes, in every run."""


def main(argv: list[str] | None = None) -> int:
    """Command line entry; the exit status is 0 only if every target is met."""
    chosen = _parse(argv)
    end_on_sigterm()
    figures: dict[str, Any] = {}
    targets: list[Target] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "connections" in chosen.parts:
            found = connections.measure(CONNECTIONS, folder / "connections")
            figures["connections"] = found
            targets += _of_connections(found)
        if "simulation" in chosen.parts:
            figures["simulation"] = _simulate(figures.get("connections"), folder, targets)
        if "processes" in chosen.parts:
            found = processes.measure(PROCESSES, KILLED, RUNS, folder / "real")
            figures["processes"] = found
            targets += _of_processes(found)
    return finish(chosen.json, figures, targets)


def _of_connections(found: dict[str, float]) -> list[Target]:
    print(table("", ["figure", "value"], [[name, f"{v:.4g}"] for name, v in found.items()]))
    more = found["metric_series_more_than_without_servers"]
    return [
        Target.at_least("servers that are watched", found["watched"], CONNECTIONS),
        Target.at_most("seconds to ask all for their state", found["state_seconds"], 2.0),
        Target.at_most(
            "bytes of a status for each server", found["status_bytes"] / CONNECTIONS, 512
        ),
        Target.at_most("metric series more than without servers", more, 0),
    ]


def _simulate(
    measured: dict[str, float] | None, folder: Path, targets: list[Target]
) -> dict[str, Any]:
    rows, lines = {}, []
    costs = _costs(measured)
    for number, (name, scenario) in enumerate(scenarios(**costs).items()):
        say(f"simulating: {name}")
        place = folder / f"registry-{number}"
        row = simulate(scenario, SIMULATED, Fleet.MAX_CALLS, place)
        rows[name] = row
        shown = ("stage_seconds", "commit_seconds", "seconds", "egress_drafts", "ready_on_it")
        lines.append([name, *(f"{row[key]:.2f}" for key in shown)])
        whole = SIMULATED - row["unreachable"]
        targets.append(Target.at_most(f"{name}: other releases", row["ready_on_another"], 0))
        targets.append(Target.at_most(f"{name}: egress", row["egress_drafts"], MOST_SENT))
        targets.append(Target.at_least(f"{name}: share", row["ready_on_it"] / whole, 0.95))
    print(table("", ["scenario", "stage s", "commit s", "seconds", "egress", "on it"], lines))
    targets.append(Target.at_most("seconds, nothing fails", rows["nothing fails"]["seconds"], 15.0))
    targets.append(Target.at_most("seconds, 1 % fail", rows["1 % fail"]["seconds"], 25.0))
    network = scenarios(**costs)["nothing fails"].network
    return {
        "servers": SIMULATED,
        "threads": Fleet.MAX_CALLS,
        "network": {name: getattr(network, name) for name in network.__dataclass_fields__},
        "link_gigabits": network.link / GIGABIT,
        "rows": rows,
    }


def _costs(measured: dict[str, float] | None) -> dict[str, float]:
    """Seconds of the trainer's interpreter for a call: measured, else as measured before."""
    if measured is None:
        return {"state_seconds": 0.00035, "stage_seconds": 0.00042, "commit_seconds": 0.0003}
    calls = measured["servers"]
    return {
        name: measured[name] / calls
        for name in ("state_seconds", "stage_seconds", "commit_seconds")
    }


def _of_processes(found: dict[str, Any]) -> list[Target]:
    seconds = found["seconds"]
    say(f"a publish takes {statistics.median(seconds):.1f} s, longest {max(seconds):.1f} s")
    return [
        Target.at_least("runs with the rest on one release", found["right"], found["runs"]),
        Target.at_most(
            "drafts sent by the trainer in a run", max(found["egress_drafts"]), MOST_SENT
        ),
        Target.at_most("the same, nobody killed", found["first_egress_drafts"], MOST_SENT),
    ]


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = options(
        "publish_scale",
        "Publishing to many servers in three parts: real gRPC connections to 1,000 servers; the "
        "real publisher over 10,000 servers in memory, with a network in virtual time; and 64 real "
        "control planes over engines in memory, of which ten are killed during every publish.",
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
