"""Interleaved rounds: rows in a random order, each between two steps without a bridge."""

from __future__ import annotations

import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.harness import spread
from benchmarks.policy_stall.policy import Policy
from benchmarks.policy_stall.trainers import confine
from policy_bridge import DisabledBridge, PolicyBridge

ABSENT = "absent"
"""The row without a bridge: its ratios are the noise of the run."""

SETTLE_SECONDS = 5.0
CHECKS = 3
_RESAMPLES = 2_000
_COLD_BYTES = 64 << 20
_COLD_PASSES = 4


class Times(NamedTuple):
    """Seconds of a step: wall, CPU of the policy's thread."""

    wall: float
    own: float


@dataclass
class Row:
    """One contestant.

    Attributes:
        name: of the row.
        bridge: None for ``ABSENT``.
        captures: whether its steps capture.
        settles: whether the background work of its syncs and samples is waited for, as in a loop
            whose rollouts lie between sync and step.
        taken: each step and the two without a bridge around it: (before, step, after).
        sync: seconds of each weight-sync window.
        checked: steps compared with the same step without a bridge.
        same_bits: of those, the steps whose gradients were bit-identical.
    """

    name: str
    bridge: PolicyBridge | None
    captures: bool = False
    settles: bool = False
    taken: list[tuple[Times, Times, Times]] = field(default_factory=list)
    sync: list[float] = field(default_factory=list)
    checked: int = 0
    same_bits: int = 0

    def ratios(self, kind: str) -> list[float]:
        """Each step over the mean of the steps around it; ``kind`` is a field of ``Times``."""
        return [
            getattr(step, kind) / statistics.fmean((getattr(before, kind), getattr(after, kind)))
            for before, step, after in self.taken
        ]

    def figures(self) -> dict[str, Any]:
        """Return the row's figures for JSON."""
        stats = self.bridge.stats() if self.bridge is not None else None
        return {
            "seconds": spread([step.wall for _, step, _ in self.taken]),
            "paired_wall": median(self.ratios("wall")),
            "paired_own_cpu": median(self.ratios("own")),
            "sync_seconds": spread(self.sync) if self.sync else None,
            "steps_checked": self.checked,
            "steps_with_identical_gradients": self.same_bits,
            "bridge": None if stats is None else {
                "connected": stats.connected,
                "transport": stats.transport,
                "captures": stats.captures,
                "accepted": stats.accepted,
                "refused": stats.refused,
                "shed": dict(stats.shed),
                "capture_off_reason": stats.capture_off_reason,
            },
        }  # fmt: skip


class Rounds:
    """Takes rounds on one policy.

    Args:
        policy: its steps go on from row to row; a step's time does not depend on its weights.
        rows: the contestants.
        background: cores of every thread but this one; None leaves them to the kernel.
    """

    def __init__(self, policy: Policy, rows: list[Row], background: set[int] | None) -> None:
        self._policy, self._rows, self._background = policy, rows, background
        self._version = 0
        self._cold = torch.zeros(_COLD_BYTES, dtype=torch.uint8)

    def time(self, counted: bool) -> None:
        """One step of every row, and one without a bridge before, between and after them."""
        self._policy.next_batch()
        self._version += 1
        before = self._step(None)
        for row in random.Random(self._version).sample(self._rows, len(self._rows)):
            sync = self._sync(row)
            step = self._step(row)
            self._settle(row)
            after = self._step(None)
            if counted:
                row.taken.append((before, step, after))
                if row.bridge is not None:
                    row.sync.append(sync)
            before = after

    def check(self) -> None:
        """The same step of every row, from the same weights: are its gradients bit-identical?"""
        self._policy.next_batch()
        self._version += 1
        start = self._policy.moving()
        self._policy.step(DisabledBridge())
        reference = [gradient.clone() for gradient in self._policy.gradients()]
        for row in self._rows:
            self._policy.restore(start)
            self._sync(row)
            self._policy.step(row.bridge or DisabledBridge(), row.captures)
            row.checked += 1
            row.same_bits += all(map(torch.equal, reference, self._policy.gradients()))
            self._settle(row)

    def _step(self, row: Row | None) -> Times:
        bridge, captures = (row.bridge, row.captures) if row else (None, False)
        # Every step starts with the same pages resident and with cold caches.
        self._policy.touch()
        for _ in range(_COLD_PASSES):
            self._cold.add_(1)
        if self._background is not None:
            confine(os.getpid(), self._background, but=(threading.get_native_id(),))
        own = time.thread_time()
        began = time.perf_counter()
        self._policy.step(bridge or DisabledBridge(), captures)
        wall = time.perf_counter() - began
        return Times(wall, time.thread_time() - own)

    def _sync(self, row: Row) -> float:
        """Seconds of the window, without the background work that is waited for after it."""
        bridge = row.bridge
        if bridge is None:
            return 0.0
        announced = bridge.stats().announced
        began = time.perf_counter()
        with bridge.sync(self._version):
            pass
        ended = time.perf_counter()
        if row.settles:
            self._wait_until(lambda: bridge.stats().announced != announced)
        return ended - began

    def _settle(self, row: Row) -> None:
        if row.settles and row.bridge is not None:
            bridge = row.bridge
            self._wait_until(lambda: bridge.flush(0.0))

    def _wait_until(self, done: Callable[[], bool]) -> None:
        """Wait at most ``SETTLE_SECONDS``, in policy passes: a step after a sleep is slower."""
        deadline = time.perf_counter() + SETTLE_SECONDS
        while not done() and time.perf_counter() < deadline:
            self._policy.pass_time()


def median(ratios: Sequence[float]) -> dict[str, float]:
    """Median with a 95 % interval by resampling rounds, minimum and maximum."""
    values = torch.tensor(ratios, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    runs = torch.randint(len(values), (_RESAMPLES, len(values)), generator=generator)
    # quantile and not median, which takes the lower of the two in the middle.
    medians = values[runs].quantile(0.5, dim=1)
    return spread(ratios) | {
        "low_95": float(medians.quantile(0.025)),
        "high_95": float(medians.quantile(0.975)),
    }


def growth(resident: Sequence[int]) -> float:
    """Growth over the second half of the rounds, by a straight line, as a share of the mean."""
    half = torch.tensor(resident[len(resident) // 2 :], dtype=torch.float64)
    at = torch.arange(len(half), dtype=torch.float64)
    at = at - at.mean()
    slope = float((at * (half - half.mean())).sum() / (at * at).sum().clamp_min(1.0))
    return slope * len(half) / float(half.mean())


def resident_bytes() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
