"""From what was seen to the figures and what they are held to."""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.harness import Target, spread
from benchmarks.hot_swap.load import Seen
from benchmarks.hot_swap.swaps import Swap

NONE, OURS, PEER = "no swaps", "ours", "vLLM's three calls"
ALPHA = 1e-4
"""A correct server fails the test of its distribution one time in so many runs."""


@dataclass(frozen=True)
class Window:
    """A stretch of time in which one arm swapped.

    Args:
        arm: ``NONE``, ``OURS`` or ``PEER``.
        began: monotonic seconds.
        ended: monotonic seconds.
        tokens: generated in it by all servers.
        swaps: made in it.
    """

    arm: str
    began: float
    ended: float
    tokens: float
    swaps: int

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / (self.ended - self.began)


@dataclass(frozen=True)
class Outcome:
    """Everything that a run found.

    Args:
        windows: in the order of time; one of each arm makes a round.
        swaps: ours, all of them, those between windows too.
        peer_swaps: seconds of each of the peer's.
        seen: one per server.
        controls: address of each server's control plane.
        p_value: of the samples at temperature 1 under the policy's exact distribution.
        samples: how many there were.
        stall: mean seconds that an engine stood still for a commit of ours, by server.
        acceptance: length by draft version, of both servers.
        complete: whether the run went to its end.
    """

    windows: Sequence[Window]
    swaps: Sequence[Swap]
    peer_swaps: Sequence[float]
    seen: Sequence[Seen]
    controls: Sequence[str]
    p_value: float
    samples: int
    stall: Sequence[float]
    acceptance: dict[int, float]
    complete: bool


def quantile(values: Sequence[float], share: float) -> float:
    """Of at least one value, by the nearest rank above."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def throughput_ratios(windows: Sequence[Window], arm: str) -> list[float]:
    """Throughput of an arm over that without swaps, round by round.

    Without swaps, a round has a window with each release.
    """
    halves = [w for w in windows if w.arm == NONE]
    plain = [
        (one.tokens + other.tokens) / (one.ended - one.began + other.ended - other.began)
        for one, other in zip(halves[::2], halves[1::2], strict=False)
    ]
    return [
        w.rate / base for w, base in zip((w for w in windows if w.arm == arm), plain, strict=False)
    ]


def figures(outcome: Outcome, wanted_swaps: int) -> dict[str, Any]:
    """The figures, and targets as the last entry."""
    servers = [_server(outcome, index, control) for index, control in enumerate(outcome.controls)]
    found: dict[str, Any] = {
        "swaps": len(outcome.swaps),
        "peer_swaps": len(outcome.peer_swaps),
        "requests": sum(s.greedy + len(s.samples) for s in outcome.seen),
        "failed": [text for s in outcome.seen for text in s.failed][:20],
        "greedy": sum(s.greedy for s in outcome.seen),
        "different": sum(s.different for s in outcome.seen),
        "samples": outcome.samples,
        "p_value": outcome.p_value,
        "acceptance_length": outcome.acceptance,
        "servers": servers,
        "swap_seconds": spread([s.ended - s.began for s in outcome.swaps]),
        "peer_swap_seconds": spread(outcome.peer_swaps) if outcome.peer_swaps else None,
        "throughput": {
            arm: spread([w.rate for w in outcome.windows if w.arm == arm])
            for arm in dict.fromkeys(w.arm for w in outcome.windows)
        },
        "throughput_ratio": {
            arm: spread(throughput_ratios(outcome.windows, arm))
            for arm in (OURS, PEER)
            if any(w.arm == arm for w in outcome.windows)
        },
        "windows": [asdict(w) for w in outcome.windows],
    }
    failed = sum(len(s.failed) for s in outcome.seen)
    found["targets"] = [asdict(t) for t in _targets(found, failed, wanted_swaps)]
    return found


def _server(outcome: Outcome, index: int, control: str) -> dict[str, Any]:
    chunks = outcome.seen[index].chunks
    ends = [end for end, _ in chunks]
    quiet = _gaps(chunks, ends, outcome.windows, NONE)
    step = statistics.median(quiet)
    commits = [swap.commits[control] for swap in outcome.swaps]
    across = _across(chunks, ends, [(s.began, s.ended) for s in outcome.swaps])
    p99 = quantile(quiet, 0.99)
    return {
        "step_seconds": step,
        "commit_seconds": spread(commits) | {"p99": quantile(commits, 0.99)},
        "commit_steps": {
            "median": statistics.median(commits) / step,
            "p99": quantile(commits, 0.99) / step,
        },
        "stall_seconds": outcome.stall[index],
        "gap_p99": {
            "no_swaps": p99,
            "windows_with_swaps": quantile(
                _gaps(chunks, ends, outcome.windows, OURS) or quiet, 0.99
            ),
            "across_a_swap": quantile(across, 0.99) if across else None,
            "peer_windows": quantile(_gaps(chunks, ends, outcome.windows, PEER) or quiet, 0.99),
        },
        "gap_ratio": quantile(across, 0.99) / p99 if across else None,
    }


def _targets(found: dict[str, Any], failed: int, wanted_swaps: int) -> list[Target]:
    worst = [
        (
            s["commit_steps"]["median"],
            s["commit_steps"]["p99"],
            s["gap_ratio"] if s["gap_ratio"] is not None else float("inf"),
        )
        for s in found["servers"]
    ]
    median, p99, gap = (max(column) for column in zip(*worst, strict=True))
    ratio = found["throughput_ratio"][OURS]["median"]
    rows: list[tuple[str, float, str, bool]] = [
        ("fleet-wide swaps", found["swaps"], f">= {wanted_swaps}", found["swaps"] >= wanted_swaps),
        ("failed requests", failed, "0", failed == 0),
        ("greedy outputs that differ", found["different"], "0", found["different"] == 0),
        ("p-value at T = 1", found["p_value"], f"> {ALPHA}", found["p_value"] > ALPHA),
        ("commit, median, in steps", median, "<= 2", median <= 2),
        ("commit, p99, in steps", p99, "<= 4", p99 <= 4),
        ("gap p99 across a swap / without", gap, "<= 2", gap <= 2),
        ("throughput, a swap every second / none", ratio, ">= 0.98", ratio >= 0.98),
    ]
    return [Target(*row) for row in rows]


def _gaps(
    chunks: Sequence[tuple[float, float]],
    ends: Sequence[float],
    windows: Sequence[Window],
    arm: str,
) -> list[float]:
    """Gaps that lie in the windows of one arm."""
    found: list[float] = []
    for window in windows:
        if window.arm == arm:
            first = bisect.bisect_left(ends, window.began)
            last = bisect.bisect_right(ends, window.ended)
            found += [gap for end, gap in chunks[first:last] if end - gap >= window.began]
    return found


def _across(
    chunks: Sequence[tuple[float, float]],
    ends: Sequence[float],
    intervals: Sequence[tuple[float, float]],
) -> list[float]:
    """Gaps that overlap one of the intervals."""
    found: list[float] = []
    for began, ended in intervals:
        # No request pauses for longer than this without having failed.
        last = bisect.bisect_right(ends, ended + 5.0)
        for end, gap in chunks[bisect.bisect_left(ends, began) : last]:
            if end - gap <= ended:
                found.append(gap)
    return found
