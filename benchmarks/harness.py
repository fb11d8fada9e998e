"""What every benchmark shares: options, interleaved rounds, spread, targets, tables, JSON.

A benchmark is ``python -m benchmarks.NAME``. It compares contestants round by round, in the same
process or in processes that take turns, so that a machine whose speed drifts changes all of them
alike; ratios are taken within a round and reported as median, minimum and maximum. A target is a
figure with its bound; the exit status is 0 only if every target is met.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import random
import re
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
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


def options(name: str, description: str) -> argparse.ArgumentParser:
    """The parser of ``python -m benchmarks.NAME`` with the options that all benchmarks have."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{name}",
        description=description,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures here")
    return parser


def say(line: str) -> None:
    """Progress, on standard error."""
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def end_on_sigterm() -> None:
    """Turn SIGTERM into KeyboardInterrupt, so that ``timeout`` ends child processes too."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def interleaved(
    contestants: Mapping[str, Callable[[], Any]],
    rounds: int,
    seed: int = 0,
    after_round: Callable[[int], None] = lambda number: None,
) -> dict[str, list[Any]]:
    """Call every contestant once a round, in a random order.

    Args:
        contestants: by name; each returns what it measured.
        rounds: number of rounds.
        seed: of the order.
        after_round: called with the number of rounds that are done.

    Returns:
        By name, one value a round.
    """
    found: dict[str, list[Any]] = {name: [] for name in contestants}
    order = random.Random(seed)
    for number in range(rounds):
        for name in order.sample(list(contestants), len(contestants)):
            found[name].append(contestants[name]())
        after_round(number + 1)
    return found


def ratios(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """One ratio a round."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, minimum and maximum."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def spread_text(values: Sequence[float], digits: int = 2) -> str:
    """``median (min .. max)``."""
    middle, low, high = spread(values).values()
    return f"{middle:.{digits}f} ({low:.{digits}f} .. {high:.{digits}f})"


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
