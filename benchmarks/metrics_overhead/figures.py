"""Ratios of windows of one round, and whether they keep to the target."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

OFF, UNSCRAPED, ON = "off", "on, not scraped", "on, scraped every second"
ARMS = (OFF, UNSCRAPED, ON)
BOUND = 0.005
"""Share of the throughput that metrics may cost."""

Round = Mapping[str, float]
"""Tokens per second of the same requests, by arm."""


def figures(rounds: Sequence[Round]) -> dict[str, Any]:
    """Throughput of each arm, its ratio to the round's "off", and the target.

    Args:
        rounds: at least one.
    """
    rates = {arm: spread([one[arm] for one in rounds]) for arm in ARMS}
    ratios = {arm: spread([one[arm] / one[OFF] for one in rounds]) for arm in ARMS[1:]}
    cost = 1 - ratios[ON]["median"]
    target = {
        "name": "throughput lost to metrics (median of rounds)",
        "value": cost,
        "bound": f"<= {BOUND}",
        "ok": cost <= BOUND,
    }
    return {
        "rounds": len(rounds),
        "tokens_per_second": rates,
        "ratio_to_off": ratios,
        "targets": [target],
    }


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, and the ends."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def table(found: Mapping[str, Any]) -> str:
    """For people."""
    head = f"{'':<26}{'tokens/s':>10}{'(min .. max)':>18}{'of off':>9}{'(min .. max)':>20}"
    lines = [f"{found['rounds']} rounds of a window in each arm", head]
    for arm, rate in found["tokens_per_second"].items():
        text = f"({rate['min']:.0f} .. {rate['max']:.0f})"
        line = f"{arm:<26}{rate['median']:>10.0f}{text:>18}"
        ratio = found["ratio_to_off"].get(arm)
        if ratio is not None:
            text = f"({ratio['min']:.4f} .. {ratio['max']:.4f})"
            line += f"{ratio['median']:>9.4f}{text:>20}"
        lines.append(line)
    return "\n".join(lines)
