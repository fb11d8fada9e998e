"""The parts that benchmarks share: options, interleaved rounds, spread, targets, tables, JSON.

A benchmark is ``python -m benchmarks.NAME``. It compares contestants round by round, in the same
process or in processes that take turns, so that a machine whose speed drifts changes all of them
alike; ratios are taken within a round and reported with their spread or a 95 % interval. A target
is a figure with its bound; one whose interval contains the bound is not decided. The exit status is
1 if a target is missed.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.figures import Target, finish, spread, table, write

__all__ = [
    "Target",
    "end_on_sigterm",
    "finish",
    "interleaved",
    "options",
    "ratios",
    "say",
    "spread",
    "spread_text",
    "table",
    "write",
]


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


def spread_text(values: Sequence[float], digits: int = 2) -> str:
    """``median (min .. max)``."""
    middle, low, high = spread(values).values()
    return f"{middle:.{digits}f} ({low:.{digits}f} .. {high:.{digits}f})"
