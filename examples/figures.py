"""Figures and their bounds, as the demos and the benchmarks print and write them."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Target:
    """A figure and its bound. A value that was not measured (None) meets none."""

    name: str
    value: float | None
    bound: str
    ok: bool

    @classmethod
    def at_least(cls, name: str, value: float | None, bound: float) -> Target:
        """Met when ``value >= bound``."""
        return cls(name, value, f">= {bound:g}", value is not None and value >= bound)

    @classmethod
    def at_most(cls, name: str, value: float | None, bound: float) -> Target:
        """Met when ``value <= bound``."""
        return cls(name, value, f"<= {bound:g}", value is not None and value <= bound)

    @property
    def text(self) -> str:
        """The value, for people."""
        return "not measured" if self.value is None else f"{self.value:.4g}"


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Plain text with aligned columns: the first to the left, the others to the right."""
    built = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for number, column in enumerate(columns):
        built.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
    for row in rows:
        built.add_row(*map(str, row))
    console = Console(width=240, color_system=None)
    with console.capture() as captured:
        console.print(built, highlight=False, markup=False)
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def target_table(targets: Sequence[Target]) -> str:
    """One line a target."""
    return "\n".join(
        f"{'met   ' if t.ok else 'MISSED'}  {t.name}: {t.text} ({t.bound})" for t in targets
    )


def machine() -> dict[str, Any]:
    """The hardware and software that the figures come from."""
    models = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def write(path: Path | None, figures: Mapping[str, Any], targets: Sequence[Target]) -> None:
    """Write the JSON document, whole or not at all. Nothing if ``path`` is None.

    Long runs call this after every round, so that a run that is cut short has its figures.
    """
    if path is None:
        return
    listed = [dataclasses.asdict(target) for target in targets]
    text = json.dumps({"machine": machine(), **figures, "targets": listed}, indent=1, default=str)
    # A line for each list of numbers instead of a line for each number.
    text = re.sub(r"\[[-\d.eE,\s]+\]", lambda numbers: " ".join(numbers[0].split()), text)
    partial = path.with_suffix(".partial")
    partial.write_text(text + "\n")
    partial.replace(path)


def finish(path: Path | None, figures: Mapping[str, Any], targets: Sequence[Target]) -> int:
    """Print the targets, write the JSON, return the exit status."""
    print("\n" + target_table(targets))
    write(path, figures, targets)
    return 0 if all(target.ok for target in targets) else 1
