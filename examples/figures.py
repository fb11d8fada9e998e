"""Figures and their bounds, as the demos and the benchmarks print and write them."""

from __future__ import annotations

import dataclasses
import json
import math
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
    """A figure and its bound. A value that was not measured (None) meets none.

    Attributes:
        name, value, bound: of the figure.
        ok: whether it is met; None where the value's interval contains the bound: not decided.
        low, high: the 95 % interval of the value, where it has one.
    """

    name: str
    value: float | None
    bound: str
    ok: bool | None
    low: float | None = None
    high: float | None = None

    @classmethod
    def at_least(cls, name: str, value: float | None, bound: float) -> Target:
        """Met when ``value >= bound``."""
        return cls(name, value, f">= {bound:g}", value is not None and value >= bound)

    @classmethod
    def at_most(cls, name: str, value: float | None, bound: float) -> Target:
        """Met when ``value <= bound``."""
        return cls(name, value, f"<= {bound:g}", value is not None and value <= bound)

    @classmethod
    def of_ratios(
        cls, name: str, ratios: Sequence[float], least: float = 0.0, most: float = math.inf
    ) -> Target:
        """The geometric mean of paired ratios (2 to 10), with its interval by Student's t on logs.

        See ``within``.
        """
        logs = interval([math.log(ratio) for ratio in ratios])
        value, half = math.exp(logs["mean"]), math.exp(logs["half_width"])
        return cls.within(name, (value, value / half, value * half), least, most)

    @classmethod
    def within(
        cls,
        name: str,
        found: tuple[float, float, float],
        least: float = 0.0,
        most: float = math.inf,
    ) -> Target:
        """A value with the ends of its 95 % interval. Met where the whole interval is within
        ``least`` and ``most``, missed where none of it is."""
        value, low, high = found
        ok = True if least <= low and high <= most else None
        if high < least or low > most:
            ok = False
        bounds = [f">= {least:g}"] if least else []
        bounds += [f"<= {most:g}"] if most < math.inf else []
        return cls(name, value, " and ".join(bounds), ok, low, high)

    @property
    def text(self) -> str:
        """The value, for people, with its interval where it has one."""
        if self.value is None:
            return "not measured"
        between = "" if self.low is None else f" [{self.low:.4g}, {self.high:.4g}]"
        return f"{self.value:.4g}{between}"

    @property
    def verdict(self) -> str:
        """``met``, ``missed`` or ``not decided``."""
        return {True: "met", False: "missed", None: "not decided"}[self.ok]


_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""Two-sided 95 % quantiles at 1 to 9 degrees of freedom."""


def interval(values: Sequence[float]) -> dict[str, float]:
    """Mean and half-width of its 95 % interval by Student's t: 2 to 10 values."""
    half = _STUDENT[len(values) - 2] * statistics.stdev(values) / math.sqrt(len(values))
    return {"mean": statistics.fmean(values), "half_width": half}


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
        f"{t.verdict.upper() if t.ok is False else t.verdict:<11}  {t.name}: {t.text} ({t.bound})"
        for t in targets
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
    """Print the targets, write the JSON, return the exit status: 1 where one was missed."""
    print("\n" + target_table(targets))
    write(path, figures, targets)
    return 1 if any(target.ok is False for target in targets) else 0
