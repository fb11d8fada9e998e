"""Interleaved rounds: every row takes a step, one after the other, in an order of chance."""

from __future__ import annotations

import os
import random
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.policy_stall.affinity import confine
from benchmarks.policy_stall.policy import Policy
from benchmarks.policy_stall.progress import Progress
from policy_bridge import PolicyBridge, null_bridge

ABSENT = ("absent", "absent again")
"""Two rows without a bridge: what divides them is the noise of the run."""

SETTLE_SECONDS = 5.0
CHECKS = 3
_COLD_BYTES = 64 << 20
_COLD_PASSES = 4
_RESAMPLES = 2_000


@dataclass
class Row:
    """One contestant.

    Attributes:
        name: of the row.
        bridge: None: there is none.
        captures: whether its steps capture.
        settles: whether what its syncs set off and what it ships is waited for, the one as in the
            time that a loop's rollouts take, the other so that it burdens no other row.
        wall: seconds of each step.
        own: CPU seconds of the policy's thread in each step: what a busy machine adds is not in it.
        process: CPU seconds of the whole process in each step.
        sync: seconds of each weight-sync window before a step.
        checked, same_bits: steps compared with the same step without a bridge, and those whose
            gradients were equal bit by bit.
    """

    name: str
    bridge: PolicyBridge | None
    captures: bool = False
    settles: bool = False
    wall: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    process: list[float] = field(default_factory=list)
    sync: list[float] = field(default_factory=list)
    checked: int = 0
    same_bits: int = 0

    def figures(self, absent: Sequence[Row], rows: Sequence[Row]) -> dict[str, Any]:
        """For JSON, with the ratios to the rows without a bridge, round by round.

        Args:
            absent: those rows.
            rows: all of them.
        """
        peers = [row for row in absent if row is not self]
        stats = self.bridge.stats() if self.bridge is not None else None
        return {
            "seconds": spread(self.wall),
            "paired_wall": paired(self.wall, [row.wall for row in peers]),
            "paired_own_cpu": paired(self.own, [row.own for row in peers]),
            "paired_process_cpu": paired(self.process, [row.process for row in peers]),
            "p99_wall": ratio_of_p99(self.wall, [row.wall for row in peers]),
            "p99_in_round": ratio_of_p99(
                self.in_round(rows), [row.in_round(rows) for row in peers]
            ),
            "p99_own_cpu": ratio_of_p99(self.own, [row.own for row in peers]),
            "wall": self.wall,
            "other_threads_cpu_seconds": spread(
                [whole - own for whole, own in zip(self.process, self.own, strict=True)]
            ),
            "sync_seconds": spread(self.sync) if self.sync else None,
            "steps_checked": self.checked,
            "steps_with_identical_gradients": self.same_bits,
            "steps": len(self.wall),
            "bridge": None if stats is None else {
                "connected": stats.connected,
                "transport": stats.transport,
                "transport_reason": stats.transport_reason,
                "captures": stats.captures,
                "chosen_samples": stats.chosen_samples,
                "announced": stats.announced,
                "sent_bytes": stats.sent_bytes,
                "accepted": stats.accepted,
                "refused": stats.refused,
                "shed": dict(stats.shed),
                "capture_off_reason": stats.capture_off_reason,
            },
        }  # fmt: skip

    def in_round(self, rows: Sequence[Row]) -> list[float]:
        """Each step's wall time over the mean of the other rows' in its round.

        A machine that others use too is slow for seconds at a time, and then for all rows alike.
        """
        others = [row.wall for row in rows if row is not self]
        return [own / statistics.fmean(its) for own, *its in zip(self.wall, *others, strict=True)]


class Rounds:
    """Takes them on one policy.

    Args:
        policy: whose steps go on from row to row; a step's time does not depend on its weights.
        rows: who takes part.
        background: cores for every thread but this one; None leaves them be.
    """

    def __init__(self, policy: Policy, rows: list[Row], background: set[int] | None) -> None:
        self._policy = policy
        self._rows = rows
        self._background = background
        self._version = 0
        # Longer than the last-level cache.
        self._cold = torch.zeros(_COLD_BYTES, dtype=torch.uint8)

    def time(self, counted: bool) -> None:
        """One step of every row."""
        self._policy.next_batch()
        self._version += 1
        for row in random.Random(self._version).sample(self._rows, len(self._rows)):
            sync = self._sync(row)
            # Nobody's step finds what its sync, or the row before it, left in the caches.
            for _ in range(_COLD_PASSES):
                self._pass_over_memory()
            self._move_threads()
            process, own = time.process_time(), time.thread_time()
            began = time.perf_counter()
            self._policy.step(row.bridge or null_bridge(), row.captures)
            wall = time.perf_counter() - began
            own = time.thread_time() - own
            process = time.process_time() - process
            self._settle(row)
            if counted:
                row.wall.append(wall)
                row.own.append(own)
                row.process.append(process)
                if row.bridge is not None:
                    row.sync.append(sync)

    def check(self) -> None:
        """The same step of every row, from the same weights: are its gradients the same bits?"""
        self._policy.next_batch()
        self._version += 1
        start = self._policy.moving()
        self._policy.step(null_bridge())
        reference = [gradient.clone() for gradient in self._policy.gradients()]
        for row in self._rows:
            self._policy.restore(start)
            self._sync(row)
            self._policy.step(row.bridge or null_bridge(), row.captures)
            row.checked += 1
            row.same_bits += all(map(torch.equal, reference, self._policy.gradients()))
            self._settle(row)

    def _sync(self, row: Row) -> float:
        """Seconds of the window, not of what is waited for behind it."""
        if row.bridge is None:
            return 0.0
        announced = row.bridge.stats().announced
        began = time.perf_counter()
        with row.bridge.sync(self._version):
            pass
        ended = time.perf_counter()
        if row.settles:
            until = ended + SETTLE_SECONDS
            while row.bridge.stats().announced == announced and time.perf_counter() < until:
                self._pass_over_memory()
        return ended - began

    def _settle(self, row: Row) -> None:
        if row.settles and row.bridge is not None:
            until = time.perf_counter() + SETTLE_SECONDS
            while not row.bridge.flush(0.0) and time.perf_counter() < until:
                self._pass_over_memory()

    def _pass_over_memory(self) -> None:
        """What this thread waits with: a virtual core that sleeps comes back slow, and stays so.

        Rows that slept until their version was announced took 2 to 3 % longer for all of the step,
        the parts included that no bridge has a hand in, for all the passes that came between.
        """
        self._cold.add_(1)

    def _move_threads(self) -> None:
        if self._background is not None:
            confine(os.getpid(), self._background, but=(threading.get_native_id(),))


def measure(
    rounds: Rounds,
    rows: list[Row],
    *,
    warmup: int,
    steps: int,
    before_counting: Callable[[], None],
    before_round: Callable[[int], None],
    progress: Progress,
) -> list[int]:
    """Warm up, break what is to be broken, take the rounds; resident bytes after each."""
    for _ in range(warmup):
        rounds.time(counted=False)
        progress.round("warm-up")
    before_counting()
    # What breaking a trainer sets off once, a first deadline for one, is not a step's.
    rounds.time(counted=False)
    progress.round("warm-up")
    resident = []
    for number in range(steps):
        before_round(number)
        rounds.time(counted=True)
        resident.append(resident_bytes())
        progress.round(", ".join(f"{row.name} {row.wall[-1]:.3f}" for row in rows))
    for _ in range(CHECKS):
        rounds.check()
        progress.round("gradients compared")
    return resident


def paired(mine: Sequence[float], peers: Sequence[Sequence[float]]) -> dict[str, float]:
    """Ratio to the mean of the peers in each round: its median, with a bootstrap interval."""
    ratios = [own / statistics.fmean(its) for own, *its in zip(mine, *peers, strict=True)]
    values = torch.tensor(ratios, dtype=torch.float64)
    # quantile, not median: that takes the lower of the two in the middle.
    medians = values[_resampled(len(values))].quantile(0.5, dim=1)
    return {
        "median": statistics.median(ratios),
        "low_95": float(medians.quantile(0.025)),
        "high_95": float(medians.quantile(0.975)),
        "min": min(ratios),
        "max": max(ratios),
    }


def ratio_of_p99(mine: Sequence[float], peers: Sequence[Sequence[float]]) -> dict[str, float]:
    """Of this row to that of the peers' steps taken together, with an interval by resampling
    rounds: of a few hundred steps it is that of the three or four slowest."""
    own = torch.tensor(mine, dtype=torch.float64)
    its = torch.tensor(peers, dtype=torch.float64).T
    rounds = _resampled(len(own))
    drawn = own[rounds].quantile(0.99, dim=1) / its[rounds].flatten(1).quantile(0.99, dim=1)
    return {
        "ratio": float(own.quantile(0.99) / its.flatten().quantile(0.99)),
        "low_95": float(drawn.quantile(0.025)),
        "high_95": float(drawn.quantile(0.975)),
    }


def _resampled(rounds: int) -> torch.Tensor:
    """Rounds of each of many runs that might as well have been, [runs, rounds]."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(rounds, (_RESAMPLES, rounds), generator=generator)


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


Figures = Mapping[str, dict[str, Any]]
