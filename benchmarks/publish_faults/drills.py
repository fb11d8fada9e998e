"""Disturbances that take turns: their table, figures and targets."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.harness import Target, finish, say, spread, table, write


@dataclass
class Row:
    """The runs of one disturbance.

    Args:
        run: inflicts it and looks at everything; told how often the row was taken, it returns how
            that ended. Raises AssertionError or RuntimeError: not well.

    Attributes:
        seconds: of each run.
        ended: number of runs by how they ended.
        wrong: what was wrong with the others.
    """

    run: Callable[[int], str]
    seconds: list[float] = field(default_factory=list)
    ended: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def take(self) -> str:
        """Take one run; return how it ended, or what was wrong."""
        began = time.monotonic()
        try:
            said = self.run(len(self.seconds))
            self.ended[said] += 1
        except (AssertionError, RuntimeError) as failure:
            said = str(failure)
            self.wrong.append(said)
        self.seconds.append(time.monotonic() - began)
        return said

    def figures(self) -> dict[str, Any]:
        """Return the row's figures for JSON."""
        return {
            "runs": len(self.seconds),
            "ended": self.ended,
            "seconds": spread(self.seconds) if self.seconds else None,
            "wrong": self.wrong,
        }


def drill(chosen: argparse.Namespace, servers: str, rows: Mapping[str, Row]) -> int:
    """Take ``chosen.runs`` runs, print and write them; return 0 only if all ended well."""
    names = list(rows)
    for turn in range(chosen.runs):
        name = names[turn % len(names)]
        say(f"{turn + 1}: {name}: {rows[name].take()} in {rows[name].seconds[-1]:.1f} s")
        write(chosen.json, _figures(servers, rows), _targets(chosen, rows))
    lines = []
    for name, row in rows.items():
        ended = ", ".join(f"{count} {how}" for how, count in row.ended.items())
        longest = f"{max(row.seconds, default=0.0):.1f}"
        lines.append([name, len(row.seconds), ended, len(row.wrong), longest])
    print(table("", ["", "runs", "ended", "wrong", "longest s"], lines))
    return finish(chosen.json, _figures(servers, rows), _targets(chosen, rows))


def _figures(servers: str, rows: Mapping[str, Row]) -> dict[str, Any]:
    return {"servers": servers, "rows": {name: row.figures() for name, row in rows.items()}}


def _targets(chosen: argparse.Namespace, rows: Mapping[str, Row]) -> list[Target]:
    runs = sum(len(row.seconds) for row in rows.values())
    wrong = sum(len(row.wrong) for row in rows.values())
    return [
        Target.at_least("runs", runs, chosen.runs),
        Target.at_most("runs that ended wrong, a failed request included", wrong, 0),
    ]
