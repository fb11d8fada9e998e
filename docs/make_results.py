"""``python -m docs.make_results``: writes docs/results.md from the benchmarks' committed JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
PAGE = Path(__file__).resolve().parent / "results.md"

_HEAD = """\
# Results

Made by `python -m docs.make_results` from `benchmarks/results`, where the other figures of each run
are too. How each is measured, and the command: [benchmarks](benchmarks.md). A target that is missed
stays here as missed.
"""


def page() -> str:
    """The page's text."""
    parts = [_HEAD]
    for path in sorted(RESULTS.glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        parts.append(f"## {path.stem}\n\n{_hardware(found.get('machine', {}))}\n")
        rows = "".join(map(_row, found["targets"]))
        parts.append(f"| | measured | target | |\n|---|---:|---:|---|\n{rows}")
    return "\n".join(parts)


def _hardware(machine: dict[str, Any]) -> str:
    if not machine:
        return "The machine was not recorded."
    gpu = machine.get("gpu") or "no GPU"
    return f"{machine['cores']} cores, {machine['cpu']}, {gpu}; torch {machine['torch']}."


def _row(target: dict[str, Any]) -> str:
    value = target["value"]
    number = f"{value:.4g}" if isinstance(value, float) else str(value)
    name = target["name"].replace("|", "\\|")
    return (
        f"| {name} | {number} | {target['bound']} | {'met' if target['ok'] else '**missed**'} |\n"
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
