"""A contestant and its times, each step beside the two without a bridge around it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from benchmarks.policy_stall.ratios import paired, ratio_of_p99, spread
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
class Row:
    """One contestant.

    Attributes:
        name: of the row.
        bridge: None: there is none.
        captures: whether its steps capture.
        settles: whether what its syncs set off and what it ships is waited for, the one as in the
            time that a loop's rollouts take, the other so that it burdens no other step.
        rounds: all steps of each round, in their order: one without a bridge first and last, and
            one after each row's.
        places: of its own step in each.
        sync: seconds of each weight-sync window before a step.
        checked, same_bits: steps compared with the same step without a bridge, and those whose
            gradients were equal bit by bit.
    """

    name: str
    bridge: PolicyBridge | None
    captures: bool = False
    settles: bool = False
    rounds: list[Sequence[Times]] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    sync: list[float] = field(default_factory=list)
    checked: int = 0
    same_bits: int = 0

    def figures(self) -> dict[str, Any]:
        """For JSON, with the ratios to the steps without a bridge, round by round."""
        stats = self.bridge.stats() if self.bridge is not None else None
        wall, own, process = self._beside("wall"), self._beside("own"), self._beside("process")
        absent = [[step.wall for step in steps[::2]] for steps in self.rounds]
        return {
            "seconds": spread(wall[0]),
            "paired_wall": paired(wall[0], wall[1:]),
            "paired_own_cpu": paired(own[0], own[1:]),
            "paired_process_cpu": paired(process[0], process[1:]),
            "p99_wall": ratio_of_p99(wall[0], absent),
            "other_threads_cpu_seconds": spread(
                [whole - mine for whole, mine in zip(process[0], own[0], strict=True)]
            ),
            "sync_seconds": spread(self.sync) if self.sync else None,
            "steps_checked": self.checked,
            "steps_with_identical_gradients": self.same_bits,
            "wall": _microseconds(wall[0]),
            "wall_before": _microseconds(wall[1]),
            "wall_after": _microseconds(wall[2]),
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

    def _beside(self, kind: str) -> list[list[float]]:
        """One of the ``Times`` of its steps, and of those before and behind them."""
        return [
            [
                getattr(steps[at + away], kind)
                for steps, at in zip(self.rounds, self.places, strict=True)
            ]
            for away in (0, -1, 1)
        ]


def _microseconds(seconds: list[float]) -> list[float]:
    return [round(one, 6) for one in seconds]


Figures = Mapping[str, dict[str, Any]]
