"""Interleaved rounds: rows in an order of chance, each between two steps without a bridge."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.policy_stall.affinity import confine
from benchmarks.policy_stall.policy import Policy
from benchmarks.policy_stall.progress import Progress
from benchmarks.policy_stall.row import Round, Row, Times
from policy_bridge import null_bridge

SETTLE_SECONDS = 5.0
CHECKS = 3
_COLD_BYTES = 64 << 20
_COLD_PASSES = 4


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
        """One step of every row, and one without a bridge before, between and behind them."""
        self._policy.next_batch()
        self._version += 1
        this = Round([self._step(None)])
        for row in random.Random(self._version).sample(self._rows, len(self._rows)):
            sync = self._sync(row)
            place = len(this.steps)
            if counted:
                row.taken.append((this, place))
                if row.bridge is not None:
                    row.sync.append(sync)
            this.steps.append(self._step(row))
            self._settle(row)
            this.steps.append(self._step(None))
            this.bare += [place + 1] if row.bridge is not None else [place, place + 1]
        # Nothing lies behind the last one.
        this.bare.pop()

    def _step(self, row: Row | None) -> Times:
        bridge, captures = (row.bridge, row.captures) if row else (None, False)
        self._policy.touch()
        # Nobody's step finds what its sync, or the step before it, left in the caches.
        for _ in range(_COLD_PASSES):
            self._cold.add_(1)
        self._move_threads()
        process, own = time.process_time(), time.thread_time()
        began = time.perf_counter()
        self._policy.step(bridge or null_bridge(), captures)
        wall = time.perf_counter() - began
        own = time.thread_time() - own
        return Times(wall, own, time.process_time() - process)

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
            bridge = row.bridge
            self._wait_until(lambda: bridge.stats().announced != announced)
        return ended - began

    def _settle(self, row: Row) -> None:
        if row.settles and row.bridge is not None:
            bridge = row.bridge
            self._wait_until(lambda: bridge.flush(0.0))

    def _wait_until(self, done: Callable[[], bool]) -> None:
        """Or for ``SETTLE_SECONDS``; with passes of the policy, on a core that is shared as well.

        What lies before a step shows in all parts of it, also those that no bridge has a hand in:
        rows that slept until their version was announced were about 2 % slower. So those that wait
        come from what the others come from.
        """
        deadline = time.perf_counter() + SETTLE_SECONDS
        while not done() and time.perf_counter() < deadline:
            self._policy.pass_time()

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
        newest = [(row.name, *row.taken[-1]) for row in rows]
        progress.round(", ".join(f"{name} {this.steps[at].wall:.3f}" for name, this, at in newest))
    for _ in range(CHECKS):
        rounds.check()
        progress.round("gradients compared")
    return resident


def resident_bytes() -> int:
    """Of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
