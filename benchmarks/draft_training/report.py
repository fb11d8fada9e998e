"""Tables for people, JSON for machines."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.draft_training.flops import products
from benchmarks.draft_training.rounds import CaseResult
from benchmarks.spread import spread

# (shape, dtype): ours must be so many times as fast as the fastest peer, for every K.
SPEED_BOUNDS = {
    ("A", "bfloat16"): 2.0,
    ("B", "bfloat16"): 1.4,
    ("A", "float32"): 1.4,
    ("B", "float32"): 1.1,
}


@dataclass(frozen=True)
class Target:
    """A figure and what it is held to."""

    name: str
    value: float
    bound: str
    ok: bool


def targets(results: Sequence[CaseResult]) -> list[Target]:
    """Speed against the fastest peer and memory against the leanest, case by case."""
    found = []
    for result in results:
        case = result.case
        if not result.peers():
            continue
        bound = SPEED_BOUNDS.get((case.name, case.dtype))
        if bound is not None:
            peer = result.fastest_peer()
            value = spread(result.ratios(peer, "ours"))["median"]
            name = f"{case.label}: speed against the fastest peer ({peer})"
            found.append(Target(name, value, f">= {bound}", value >= bound))
        peer = result.leanest_peer()
        value = result.measured["ours"].peak / result.measured[peer].peak
        name = f"{case.label}: peak memory against the leanest peer ({peer})"
        found.append(Target(name, value, "<= 1.0", value <= 1.0))
    return found


def case_table(result: CaseResult) -> str:
    """Everybody in one case."""
    case = result.case
    tokens = case.rows * case.tokens
    head = (
        f"{'':<13}{'tokens/s':>9}{'(min .. max)':>17}{'s/step':>9}{'CPU s':>8}{'peak MiB':>10}"
        f"{'x floor':>9}{'(min .. max)':>15}{'ours is':>9}{'(min .. max)':>15}  setting"
    )
    lines = [f"\n{case.label}: {case.rows} x {case.tokens} tokens a step", head]
    for name in ("ours", *result.peers()):
        m = result.measured[name]
        wall, floor = spread(m.wall), spread(result.ratios(name, "floor"))
        line = (
            f"{name:<13}{tokens / wall['median']:>9.0f}"
            f"{_range(tokens / wall['max'], tokens / wall['min'], 0):>17}{wall['median']:>9.3f}"
            f"{spread(m.cpu)['median']:>8.3f}{m.peak / 2**20:>10.0f}"
            f"{floor['median']:>9.2f}{_range(floor['min'], floor['max'], 2):>15}"
        )
        if name == "ours":
            line += f"{'':>24}"
        else:
            ratio = spread(result.ratios(name, "ours"))
            line += f"{ratio['median']:>8.2f}x{_range(ratio['min'], ratio['max'], 2):>15}"
        lines.append(f"{line}  {m.setting}")
    seconds = result.measured["floor"].seconds
    lines.append(f"{'floor':<13}{tokens / seconds:>9.0f}{'':>17}{seconds:>9.3f}")
    waited = max(sum(m.wall) / sum(m.cpu) for m in result.measured.values())
    if case.device == "cpu" and waited > 1.05:
        lines.append(f"the core was shared: up to {waited:.2f} wall seconds per CPU second")
    return "\n".join(lines)


def floor_table(result: CaseResult) -> str:
    """Products of the step, the rate of each, and the seconds that they add up to."""
    rates = result.measured["floor"].to_dict()["flops_per_second"]
    lines = [
        f"\nfloor of {result.case.label}, products at the rate of the best kernel on this core",
        f"{'':<13}{'product':<13}{'shape':<22}{'GFLOP':>9}{'GFLOP/s':>9}{'s':>9}",
    ]
    for p in products(result.case):
        rate = rates[f"{p.name} {p.kind}"]
        shape = " x ".join(map(str, p.shape))
        lines.append(
            f"{p.name:<13}{p.kind:<13}{shape:<22}{p.flops / 1e9:>9.2f}{rate / 1e9:>9.1f}"
            f"{p.flops / rate:>9.4f}"
        )
    return "\n".join(lines)


def target_table(found: Sequence[Target]) -> str:
    """One line each."""
    return "\n".join(
        f"{'met   ' if t.ok else 'MISSED'}  {t.name}: {t.value:.3f} ({t.bound})" for t in found
    )


def machine() -> dict[str, Any]:
    """Where the figures come from."""
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


def _range(low: float, high: float, digits: int) -> str:
    return f"({low:.{digits}f} .. {high:.{digits}f})"
