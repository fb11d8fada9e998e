"""Where our own step's time goes, and how much of each part lies above the floor."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.draft_training.flops import products
from benchmarks.draft_training.rounds import CaseResult

OPTIMIZER = "benchmark: optimizer"
PARTS = ("GEMM", "attention", "soft-max and loss", "optimizer", "rest")
_GEMMS = ("aten::mm", "aten::addmm", "aten::bmm", "mkldnn::_linear_pointwise")


def profile(step: Callable[[], object], cuda: bool, repeats: int = 3) -> dict[str, Any]:
    """Time of the operators of a step, by part: CPU time, or with ``cuda`` that of their kernels.

    An operator belongs to the innermost custom function (forward or backward) that called it; a
    matrix product is a GEMM wherever it is called, except by attention.

    Returns:
        "parts": seconds per step of each of ``PARTS``; "rest": the six dearest operators of the
        rest; "seconds": of a step under the profiler, Python between operators included.
    """
    step()
    activities = [torch.profiler.ProfilerActivity.CPU]
    if cuda:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as record:
        began = time.perf_counter()
        for _ in range(repeats):
            step()
        if cuda:
            torch.cuda.synchronize()
        seconds = (time.perf_counter() - began) / repeats
    parts: Counter[str] = Counter()
    rest: Counter[str] = Counter()
    for event in record.events():
        if event.device_type != torch.profiler.DeviceType.CPU:
            continue  # its time is also that of the operator that launched it
        spent = event.self_device_time_total if cuda else event.self_cpu_time_total
        own = spent / 1e6 / repeats
        part = _part(event)
        parts[part] += own
        if part == "rest":
            rest[event.name] += own
    return {
        "parts": {name: parts[name] for name in PARTS},
        "rest": dict(rest.most_common(6)),
        "seconds": seconds,
    }


def _part(event: Any) -> str:
    names = []
    at = event
    while at is not None:
        names.append(at.name)
        at = at.cpu_parent
    if any("TTTAttention" in name for name in names):
        return "attention"
    if event.name in _GEMMS:
        return "GEMM"
    if any("SoftTargetLoss" in name for name in names):
        return "soft-max and loss"
    if OPTIMIZER in names:
        return "optimizer"
    return "rest"


def account(result: CaseResult, profiled: dict[str, Any]) -> dict[str, Any]:
    """The profile scaled to the step's median time, beside the floor's parts."""
    rates = result.measured["floor"].to_dict()["flops_per_second"]
    floor = dict.fromkeys(PARTS, 0.0)
    for p in products(result.case):
        part = "attention" if p.name == "attention" else "GEMM"
        floor[part] += p.flops / rates[f"{p.name} {p.kind}"]
    known = sum(profiled["parts"].values())
    scale = result.measured["ours"].seconds / max(profiled["seconds"], known)
    seconds = {name: value * scale for name, value in profiled["parts"].items()}
    seconds["between operators"] = result.measured["ours"].seconds - sum(seconds.values())
    return {
        "case": result.case.label,
        "seconds": seconds,
        "floor_seconds": floor,
        "rest": {name: value * scale for name, value in profiled["rest"].items()},
    }


def breakdown_table(found: dict[str, Any]) -> str:
    """Parts of our step, the floor of each, and what lies above."""
    total = sum(found["seconds"].values())
    lines = [
        f"\nwhere the time of ours goes, {found['case']}",
        f"{'':<20}{'s':>9}{'share':>8}{'floor s':>9}{'above s':>9}",
    ]
    for name, seconds in found["seconds"].items():
        floor = found["floor_seconds"].get(name, 0.0)
        lines.append(
            f"{name:<20}{seconds:>9.4f}{seconds / total:>8.1%}{floor:>9.4f}{seconds - floor:>9.4f}"
        )
    floor = sum(found["floor_seconds"].values())
    lines.append(f"{'sum':<20}{total:>9.4f}{1:>8.0%}{floor:>9.4f}{total - floor:>9.4f}")
    dearest = ", ".join(f"{name} {seconds:.4f}" for name, seconds in found["rest"].items())
    lines.append(f"dearest of the rest: {dearest}")
    return "\n".join(lines)
