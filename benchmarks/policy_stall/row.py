"""A contestant and its times, each step beside the two without a bridge around it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from benchmarks.harness import spread
from benchmarks.policy_stall.ratios import median, ratio_of_p99
from policy_bridge import PolicyBridge

ABSENT = "absent"
"""A row without a bridge, among steps without one: its ratios are the noise of the run."""


class Times(NamedTuple):
    """Seconds of a step.

    Attributes:
        wall: by the clock.
        own: of a CPU, for the policy's thread: what a busy machine adds is not in it.
        process: of a CPU, for the whole process.
    """

    wall: float
    own: float
    process: float


@dataclass
class Round:
    """Steps one after the other: first and last without a bridge, and one after each row's.

    Attributes:
        steps: in their order.
        bare: places of those without a bridge that have a step on either side.
    """

    steps: list[Times] = field(default_factory=list)
    bare: list[int] = field(default_factory=list)

    def beside(self, place: int, kind: str) -> float:
        """One of the ``Times`` of a step, over the mean of the steps before and behind it."""
        before, own, behind = (getattr(self.steps[at], kind) for at in range(place - 1, place + 2))
        return float(own / statistics.fmean((before, behind)))


@dataclass
class Row:
    """One contestant.

    Attributes:
        name: of the row.
        bridge: None: there is none.
        captures: whether its steps capture.
        settles: whether what its syncs set off and what it ships is waited for, the one as in the
            time that a loop's rollouts take, the other so that it burdens no other step.
        taken: the rounds it took part in, which it shares with all others, and the place of its own
            step in each.
        sync: seconds of each weight-sync window before a step.
        checked, same_bits: steps compared with the same step without a bridge, and those whose
            gradients were equal bit by bit.
    """

    name: str
    bridge: PolicyBridge | None
    captures: bool = False
    settles: bool = False
    taken: list[tuple[Round, int]] = field(default_factory=list)
    sync: list[float] = field(default_factory=list)
    checked: int = 0
    same_bits: int = 0

    def figures(self) -> dict[str, Any]:
        """For JSON, with the ratios to the steps without a bridge, round by round."""
        stats = self.bridge.stats() if self.bridge is not None else None
        own = [which.steps[at] for which, at in self.taken]
        beside = {
            kind: [which.beside(at, kind) for which, at in self.taken] for kind in Times._fields
        }
        bare = [[which.beside(at, "wall") for at in which.bare] for which, _ in self.taken]
        return {
            "seconds": spread([step.wall for step in own]),
            "paired_wall": median(beside["wall"]),
            "paired_own_cpu": median(beside["own"]),
            "paired_process_cpu": median(beside["process"]),
            "p99_wall": ratio_of_p99(beside["wall"], bare),
            "other_threads_cpu_seconds": spread([step.process - step.own for step in own]),
            "sync_seconds": spread(self.sync) if self.sync else None,
            "steps_checked": self.checked,
            "steps_with_identical_gradients": self.same_bits,
            "wall": [round(step.wall, 6) for step in own],
            "wall_before": [round(which.steps[at - 1].wall, 6) for which, at in self.taken],
            "wall_after": [round(which.steps[at + 1].wall, 6) for which, at in self.taken],
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


Figures = Mapping[str, dict[str, Any]]
