"""For people: a line a round, and the tables at the end."""

from __future__ import annotations

from typing import Any

from benchmarks.hot_swap.figures import Outcome


def progress(number: int, outcome: Outcome) -> str:
    """What a round found, and all of them so far."""
    rates = ", ".join(f"{w.arm} {w.rate:.0f} tokens/s" for w in outcome.windows[-4:])
    return (
        f"round {number}: {rates}; {len(outcome.swaps)} swaps, "
        f"{sum(len(s.failed) for s in outcome.seen)} failed, "
        f"{sum(s.different for s in outcome.seen)} differ, p = {outcome.p_value:.2g}, stall "
        + " and ".join(f"{1e3 * seconds:.1f} ms" for seconds in outcome.stall)
    )


def table(found: dict[str, Any]) -> str:
    """Of ``figures.figures``."""
    lines = [
        f"{found['swaps']} fleet-wide swaps of ours, {found['peer_swaps']} of vLLM's, "
        f"{found['requests']} requests, {len(found['failed'])} failed, "
        f"{found['different']} of {found['greedy']} greedy outputs differ, "
        f"p = {found['p_value']:.3g} over {found['samples']} samples at T = 1",
        "acceptance length: "
        + ", ".join(f"draft {v} {length:.2f}" for v, length in found["acceptance_length"].items()),
        f"\n{'server':<8}{'step ms':>9}{'commit ms':>11}{'p99':>8}{'steps':>8}{'p99':>7}"
        f"{'stall ms':>10}{'gap p99 ms: none':>18}{'swapping':>10}{'across':>8}{'peer':>8}",
    ]
    for index, s in enumerate(found["servers"]):
        gap = s["gap_p99"]
        across = 1e3 * gap["across_a_swap"] if gap["across_a_swap"] is not None else float("nan")
        lines.append(
            f"{index:<8}{1e3 * s['step_seconds']:>9.1f}"
            f"{1e3 * s['commit_seconds']['median']:>11.1f}{1e3 * s['commit_seconds']['p99']:>8.1f}"
            f"{s['commit_steps']['median']:>8.2f}{s['commit_steps']['p99']:>7.2f}"
            f"{1e3 * s['stall_seconds']:>10.1f}{1e3 * gap['no_swaps']:>18.1f}"
            f"{1e3 * gap['windows_with_swaps']:>10.1f}{across:>8.1f}"
            f"{1e3 * gap['peer_windows']:>8.1f}"
        )
    lines.append(f"\n{'swap every second':<22}{'tokens/s':>10}{'(min .. max)':>18}{'of none':>9}")
    for arm, rate in found["throughput"].items():
        ratio = found["throughput_ratio"].get(arm)
        text = f"({rate['min']:.0f} .. {rate['max']:.0f})"
        share = "" if ratio is None else f"{ratio['median']:>9.3f}"
        lines.append(f"{arm:<22}{rate['median']:>10.0f}{text:>18}{share}")
    swap, peer = found["swap_seconds"], found["peer_swap_seconds"]
    lines.append(
        f"a fleet-wide swap: ours {1e3 * swap['median']:.0f} ms"
        + ("" if peer is None else f", vLLM's three calls {1e3 * peer['median']:.0f} ms")
    )
    return "\n".join(lines)
