"""Figures, targets and tables from what a run observed."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy

from benchmarks.harness import Target, spread, table
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
        stall: mean seconds that an engine took no step for a commit of ours, by server.
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
    """Return a quantile of at least one value, by the nearest rank above."""
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


def figures(outcome: Outcome) -> dict[str, Any]:
    """Return the figures for JSON."""
    servers = [_server(outcome, index, control) for index, control in enumerate(outcome.controls)]
    return {
        "complete": outcome.complete,
        "swaps": len(outcome.swaps),
        "peer_swaps": len(outcome.peer_swaps),
        "requests": sum(s.greedy + len(s.samples) for s in outcome.seen),
        "failed": sum(len(s.failed) for s in outcome.seen),
        "failures": [text for s in outcome.seen for text in s.failed][:20],
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


def _server(outcome: Outcome, index: int, control: str) -> dict[str, Any]:
    chunks = numpy.array(outcome.seen[index].chunks).reshape(-1, 2)

    def inside(arm: str) -> list[float]:
        """Gaps that lie in the windows of one arm."""
        windows = [(w.began, w.ended) for w in outcome.windows if w.arm == arm]
        return _gaps(chunks, windows, overlap=False)

    quiet = inside(NONE)
    across = _gaps(chunks, [(s.began, s.ended) for s in outcome.swaps], overlap=True)
    step = statistics.median(quiet)
    commits = [swap.commits[control] for swap in outcome.swaps]
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
            "windows_with_swaps": quantile(inside(OURS) or quiet, 0.99),
            "across_a_swap": quantile(across, 0.99) if across else None,
            "peer_windows": quantile(inside(PEER) or quiet, 0.99),
        },
        "gap_ratio": quantile(across, 0.99) / p99 if across else None,
    }


def _gaps(
    chunks: numpy.ndarray[Any, Any], intervals: Sequence[tuple[float, float]], overlap: bool
) -> list[float]:
    """Gaps between chunks that overlap one of the intervals, or that lie in one."""
    ends, gaps = chunks[:, 0], chunks[:, 1]
    starts = ends - gaps
    found = []
    for began, ended in intervals:
        if overlap:
            chosen = (ends >= began) & (starts <= ended)
        else:
            chosen = (starts >= began) & (ends <= ended)
        found += gaps[chosen].tolist()
    return found


def targets(found: dict[str, Any], wanted_swaps: int) -> list[Target]:
    """Return the targets of ``figures``."""
    servers = found["servers"]
    median = max(s["commit_steps"]["median"] for s in servers)
    p99 = max(s["commit_steps"]["p99"] for s in servers)
    gap = max(float("inf") if s["gap_ratio"] is None else s["gap_ratio"] for s in servers)
    ratio = found["throughput_ratio"][OURS]["median"]
    return [
        Target.at_least("fleet-wide swaps", found["swaps"], wanted_swaps),
        Target.at_most("failed requests", found["failed"], 0),
        Target.at_most("greedy outputs that differ", found["different"], 0),
        Target.at_least("p-value at T = 1", found["p_value"], ALPHA),
        Target.at_most("commit, median, in steps", median, 2),
        Target.at_most("commit, p99, in steps", p99, 4),
        Target.at_most("gap p99 across a swap / without", gap, 2),
        Target.at_least("throughput, a swap every second / none", ratio, 0.98),
    ]


def tables(found: dict[str, Any]) -> str:
    """Format ``figures`` as tables."""

    def ms(seconds: float | None) -> str:
        return "-" if seconds is None else f"{1e3 * seconds:.1f}"

    servers = []
    for index, s in enumerate(found["servers"]):
        gap, steps = s["gap_p99"], s["commit_steps"]
        servers.append(
            [
                *(index, ms(s["step_seconds"])),
                *(ms(s["commit_seconds"]["median"]), ms(s["commit_seconds"]["p99"])),
                *(f"{steps['median']:.2f}", f"{steps['p99']:.2f}", ms(s["stall_seconds"])),
                *(ms(gap["no_swaps"]), ms(gap["windows_with_swaps"])),
                *(ms(gap["across_a_swap"]), ms(gap["peer_windows"])),
            ]
        )
    columns = ["server", "step ms", "commit ms", "p99", "steps", "p99", "stall ms"]
    columns += ["gap p99 ms: none", "swapping", "across", "peer"]
    arms = []
    for arm, rate in found["throughput"].items():
        ratio = found["throughput_ratio"].get(arm)
        share = "" if ratio is None else f"{ratio['median']:.3f}"
        spread_of = f"({rate['min']:.0f} .. {rate['max']:.0f})"
        arms.append([arm, f"{rate['median']:.0f}", spread_of, share])
    peer = found["peer_swap_seconds"]
    lengths = found["acceptance_length"].items()
    return "\n".join(
        [
            f"{found['swaps']} fleet-wide swaps of ours, {found['peer_swaps']} of vLLM's, "
            f"{found['requests']} requests, {found['failed']} failed, "
            f"{found['different']} of {found['greedy']} greedy outputs differ, "
            f"p = {found['p_value']:.3g} over {found['samples']} samples at T = 1",
            "acceptance length: " + ", ".join(f"draft {v} {n:.2f}" for v, n in lengths),
            table("", columns, servers),
            table("", ["swap every second", "tokens/s", "(min .. max)", "of none"], arms),
            f"a fleet-wide swap: ours {ms(found['swap_seconds']['median'])} ms"
            + ("" if peer is None else f", vLLM's three calls {ms(peer['median'])} ms"),
        ]
    )
