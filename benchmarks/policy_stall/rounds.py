"""Interleaved rounds: every row takes the same step from the same state, one after the other."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.policy_stall.policy import Policy
from policy_bridge import PolicyBridge, null_bridge

SETTLE_SECONDS = 1.0


@dataclass
class Row:
    """One contestant.

    Attributes:
        name: of the row.
        bridge: None: there is none.
        captures: whether its steps capture.
        settles: whether what it ships is waited for, so that it burdens no other row.
        wall: seconds of each step.
        own: CPU seconds of the policy's thread in each step: what a busy machine adds is not in it.
        background: CPU seconds of every other thread of the process, during each step.
        sync: seconds of each weight-sync window before a step.
        same_bits: steps whose gradients equal the reference's, bit by bit.
    """

    name: str
    bridge: PolicyBridge | None
    captures: bool = False
    settles: bool = False
    wall: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    background: list[float] = field(default_factory=list)
    sync: list[float] = field(default_factory=list)
    same_bits: int = 0

    def figures(self, absent: Row) -> dict[str, Any]:
        """For JSON, with the ratios to the row without a bridge."""
        paired = [mine / its for mine, its in zip(self.wall, absent.wall, strict=True)]
        stats = self.bridge.stats() if self.bridge is not None else None
        return {
            "seconds": spread(self.wall),
            "ratio_of_medians": statistics.median(self.wall) / statistics.median(absent.wall),
            "paired_ratio": spread(paired),
            "ratio_of_p99": percentile(self.wall, 0.99) / percentile(absent.wall, 0.99),
            "ratio_of_own_cpu": statistics.median(self.own) / statistics.median(absent.own),
            "background_cpu_seconds": spread(self.background),
            "sync_seconds": spread(self.sync) if self.sync else None,
            "steps_with_identical_gradients": self.same_bits,
            "steps": len(self.wall),
            "bridge": None if stats is None else {
                "connected": stats.connected,
                "transport": stats.transport,
                "transport_reason": stats.transport_reason,
                "captures": stats.captures,
                "chosen_samples": stats.chosen_samples,
                "sent_bytes": stats.sent_bytes,
                "accepted": stats.accepted,
                "refused": stats.refused,
                "shed": dict(stats.shed),
                "capture_off_reason": stats.capture_off_reason,
            },
        }  # fmt: skip


def take_round(policy: Policy, rows: list[Row], version: int, counted: bool) -> None:
    """Every row's step of one batch. All begin from the same weights and moments."""
    policy.next_batch()
    policy.keep_start()
    policy.step(null_bridge())
    reference = [gradient.clone() for gradient in policy.gradients()]
    # Nobody is always first, or always behind the same one.
    for row in random.Random(version).sample(rows, len(rows)):
        policy.restore_start()
        sync = 0.0
        if row.bridge is not None:
            began = time.perf_counter()
            with row.bridge.sync(version):
                pass
            sync = time.perf_counter() - began
        # Again, for the caches: no row's step finds what its sync left there.
        policy.restore_start()
        cpu, own = time.process_time(), time.thread_time()
        began = time.perf_counter()
        policy.step(row.bridge, row.captures)
        wall = time.perf_counter() - began
        own = time.thread_time() - own
        background = time.process_time() - cpu - own
        same = all(map(torch.equal, reference, policy.gradients()))
        if row.settles and row.bridge is not None:
            row.bridge.flush(SETTLE_SECONDS)
        if counted:
            row.wall.append(wall)
            row.own.append(own)
            row.background.append(background)
            row.same_bits += same
            if row.bridge is not None:
                row.sync.append(sync)


def measure(
    policy: Policy,
    rows: list[Row],
    *,
    warmup: int,
    steps: int,
    before_counting: Callable[[], None],
    say: Callable[[str], None],
) -> list[int]:
    """Warm up, break what is to be broken, take the rounds; resident bytes after each."""
    version = 0
    for _ in range(warmup):
        take_round(policy, rows, version := version + 1, counted=False)
    before_counting()
    # What breaking a trainer sets off once, a first deadline for one, is not a step's.
    take_round(policy, rows, version := version + 1, counted=False)
    resident = []
    for number in range(steps):
        take_round(policy, rows, version := version + 1, counted=True)
        resident.append(resident_bytes())
        last = ", ".join(f"{row.name} {row.wall[-1]:.3f}" for row in rows)
        say(f"round {number + 1} of {steps}: {last}")
    return resident


def resident_bytes() -> int:
    """Of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def growth(resident: list[int]) -> float:
    """Growth over the second half of the rounds, by a straight line, as a share of the mean."""
    half = torch.tensor(resident[len(resident) // 2 :], dtype=torch.float64)
    at = torch.arange(len(half), dtype=torch.float64)
    at = at - at.mean()
    slope = float((at * (half - half.mean())).sum() / (at * at).sum().clamp_min(1.0))
    return slope * len(half) / float(half.mean())


def spread(values: list[float]) -> dict[str, float]:
    """Median, lowest and highest."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def percentile(values: list[float], share: float) -> float:
    """By linear interpolation."""
    return float(torch.tensor(values, dtype=torch.float64).quantile(share))


Figures = Mapping[str, dict[str, Any]]
