"""Ratios of slices of one round, and whether they keep to the target.

A slice's rate is counted in drafts, one for each request of each engine step: what metrics take
makes a step longer, while how many tokens a draft yields is chance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.policy_stall.ratios import median
from benchmarks.spread import spread

OFF, ON = "vLLM's own metrics", "and Slipstream's"
ARMS = (OFF, ON)
BOUND = 0.005
"""Share of the throughput that metrics may cost."""

Round = Mapping[str, Mapping[str, float]]
"""By arm, ``drafts`` and ``tokens`` per second."""


def figures(rounds: Sequence[Round]) -> dict[str, Any]:
    """Rates of each arm, the ratio to the round's ``OFF``, and the target.

    Args:
        rounds: at least one.
    """
    ratios = {
        unit: median([one[ON][unit] / one[OFF][unit] for one in rounds])
        for unit in ("drafts", "tokens")
    }
    lost = 1 - ratios["drafts"]["median"]
    target = {
        "name": "throughput lost to metrics, median of interleaved rounds",
        "value": lost,
        "bound": f"<= {BOUND}",
        "ok": lost <= BOUND,
    }
    return {
        "rounds": len(rounds),
        "rates": {
            arm: {unit: spread([one[arm][unit] for one in rounds]) for unit in ratios}
            for arm in ARMS
        },
        "ratio_to_off": ratios,
        "targets": [target],
    }


def table(found: Mapping[str, Any]) -> str:
    """For people."""
    head = f"{'':<26}{'drafts/s':>10}{'(min .. max)':>18}{'tokens/s':>10}"
    lines = [
        f"{found['rounds']} rounds: a slice with measuring, and those before and after it",
        head,
    ]
    for arm, rates in found["rates"].items():
        drafts, tokens = rates["drafts"], rates["tokens"]
        text = f"({drafts['min']:.0f} .. {drafts['max']:.0f})"
        lines.append(f"{arm:<26}{drafts['median']:>10.0f}{text:>18}{tokens['median']:>10.0f}")
    for unit, ratio in found["ratio_to_off"].items():
        text = f"(95 % of the median {ratio['low_95']:.4f} .. {ratio['high_95']:.4f})"
        lines.append(f"ratio of {unit}: {ratio['median']:.4f} {text}")
    return "\n".join(lines)
