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

PARTS = ("connections", "processes")
CONNECTIONS, PROCESSES = 1_000, 64
"""Servers of each part."""
KILLED, RUNS = 10, 50
"""The processes killed in every run, and the runs."""


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


def _of_processes(found: dict[str, Any]) -> list[Target]:
    seconds = found["seconds"]
    say(f"a publish takes {statistics.median(seconds):.1f} s, longest {max(seconds):.1f} s")
    return [
        Target.at_least("runs with the rest on one release", found["right"], found["runs"]),
        Target.at_most("drafts sent, nobody killed", found["first_egress_drafts"], PROCESSES),
    ]


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = options(
        "publish_scale",
        "Publishing to many servers in two parts: real gRPC connections to 1,000 servers; and 64 "
        "real control planes over engines in memory, of which ten are killed during every publish.",
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
