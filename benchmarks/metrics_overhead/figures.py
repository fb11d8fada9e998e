"""Ratios of windows of one round, and whether they keep to the target."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.policy_stall.rounds import paired

OFF, ON = "vLLM's own metrics", "and Slipstream's"
ARMS = (OFF, ON)
BOUND = 0.005
"""Share of the throughput that metrics may cost."""

Round = Mapping[str, float]
"""Tokens per second of the same requests, by arm."""


def figures(rounds: Sequence[Round]) -> dict[str, Any]:
    """Throughput of each arm, its ratio to the round's ``OFF``, and the target.

    Args:
        rounds: at least one.
    """
    rates = {arm: spread([one[arm] for one in rounds]) for arm in ARMS}
    ratio = paired([one[ON] for one in rounds], [[one[OFF] for one in rounds]])
    lost = 1 - ratio["high_95"]
    target = {
        "name": "throughput lost to metrics, low end of the median's 95 % interval",
        "value": lost,
        "bound": f"<= {BOUND}",
        "ok": lost <= BOUND,
    }
    return {
        "rounds": len(rounds),
        "tokens_per_second": rates,
        "ratio_to_off": {ON: ratio},
        "targets": [target],
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, and the ends."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def table(found: Mapping[str, Any]) -> str:
    """For people."""
    head = f"{'':<26}{'tokens/s':>10}{'(min .. max)':>18}{'ratio':>9}{'(95 % of the median)':>23}"
    lines = [f"{found['rounds']} rounds of a window in each arm", head]
    for arm, rate in found["tokens_per_second"].items():
        text = f"({rate['min']:.0f} .. {rate['max']:.0f})"
        line = f"{arm:<26}{rate['median']:>10.0f}{text:>18}"
        ratio = found["ratio_to_off"].get(arm)
        if ratio is not None:
            text = f"({ratio['low_95']:.4f} .. {ratio['high_95']:.4f})"
            line += f"{ratio['median']:>9.4f}{text:>23}"
        lines.append(line)
    return "\n".join(lines)
