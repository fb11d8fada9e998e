"""Tables for people, targets for machines."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.policy_stall.rounds import Figures

MEDIAN_FREE, MEDIAN_SHARED, P99 = 1.01, 1.03, 1.05
GROWTH = 0.01


@dataclass(frozen=True)
class Target:
    """A figure and what it is held to."""

    name: str
    value: float
    bound: str
    ok: bool


def targets(label: str, rows: Figures, growth: float, free_core: bool) -> list[Target]:
    """Of one case."""
    found = []
    median = MEDIAN_FREE if free_core else MEDIAN_SHARED
    for name, row in rows.items():
        same = row["steps_with_identical_gradients"] / row["steps"]
        found.append(
            Target(f"{label}, {name}: gradients bit-identical", same, ">= 1.0", same == 1.0)
        )
        if name == "absent":
            continue
        value = row["ratio_of_medians"]
        found.append(
            Target(f"{label}, {name}: median of the step", value, f"<= {median}", value <= median)
        )
        value = row["ratio_of_p99"]
        found.append(Target(f"{label}, {name}: p99 of the step", value, f"<= {P99}", value <= P99))
    found.append(
        Target(f"{label}: growth of resident memory", growth, f"<= {GROWTH}", growth <= GROWTH)
    )
    return found


def table(rows: Figures) -> str:
    """One line a row."""
    lines = [
        f"{'':<13}{'ms/step':>9}{'(min .. max)':>19}{'median':>8}{'p99':>7}{'own CPU':>9}"
        f"{'paired (min .. max)':>23}{'other CPU':>11}{'sync ms':>9}{'same bits':>11}  bridge"
    ]
    for name, row in rows.items():
        wall, paired, bridge = row["seconds"], row["paired_ratio"], row["bridge"]
        sync = row["sync_seconds"]
        told = ""
        if bridge is not None:
            sheds = sum(bridge["shed"].values())
            told = (
                f"{bridge['transport'] or '-'}, {bridge['accepted']} taken, {sheds} shed"
                f"{', not connected' if not bridge['connected'] else ''}"
            )
        span = f"({wall['min'] * 1e3:.1f} .. {wall['max'] * 1e3:.1f})"
        ratios = f"{paired['median']:.3f} ({paired['min']:.2f} .. {paired['max']:.2f})"
        lines.append(
            f"{name:<13}{wall['median'] * 1e3:>9.1f}{span:>19}{row['ratio_of_medians']:>8.3f}"
            f"{row['ratio_of_p99']:>7.3f}{row['ratio_of_own_cpu']:>9.3f}{ratios:>23}"
            f"{row['background_cpu_seconds']['median'] * 1e3:>8.2f} ms"
            f"{'-' if sync is None else format(sync['median'] * 1e3, '.1f'):>9}"
            f"{row['steps_with_identical_gradients']:>6}/{row['steps']:<4}  {told}"
        )
    return "\n".join(lines)


def target_table(found: list[Target]) -> str:
    """One line each."""
    return "\n".join(
        f"{'met   ' if t.ok else 'MISSED'}  {t.name}: {t.value:.4f} ({t.bound})" for t in found
    )
