"""Tables for people, targets for machines."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.policy_stall.row import ABSENT, Figures

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
    most = MEDIAN_FREE if free_core else MEDIAN_SHARED
    for name, row in rows.items():
        same = row["steps_with_identical_gradients"] / row["steps_checked"]
        found.append(
            Target(f"{label}, {name}: gradients bit-identical", same, ">= 1.0", same == 1.0)
        )
        if name == ABSENT:
            continue
        for key, kind, what, bound in (
            ("paired_wall", "median", "median of the step's wall time", most),
            ("paired_own_cpu", "median", "median of the policy thread's CPU time", most),
            ("p99_wall", "ratio", "p99 of the step's wall time", P99),
        ):
            value = row[key][kind]
            found.append(Target(f"{label}, {name}: {what}", value, f"<= {bound}", value <= bound))
    found.append(
        Target(f"{label}: growth of resident memory", growth, f"<= {GROWTH}", growth <= GROWTH)
    )
    return found


def table(rows: Figures) -> str:
    """One line a row."""
    lines = [
        f"{'':<14}{'ms/step':>8}{'wall (95 % interval)':>22}{'policy thread CPU':>22}"
        f"{'process':>9}{'p99':>22}{'other ms':>10}{'sync ms':>9}"
        f"{'same bits':>11}  bridge"
    ]
    for name, row in rows.items():
        bridge, sync = row["bridge"], row["sync_seconds"]
        told = ""
        if bridge is not None:
            told = (
                f"{bridge['transport'] or '-'}, {bridge['accepted']} taken, "
                f"{sum(bridge['shed'].values())} shed"
                f"{', not connected' if not bridge['connected'] else ''}"
            )
        lines.append(
            f"{name:<14}{row['seconds']['median'] * 1e3:>8.1f}{_interval(row['paired_wall']):>22}"
            f"{_interval(row['paired_own_cpu']):>22}{row['paired_process_cpu']['median']:>9.3f}"
            f"{_interval(row['p99_wall'], 'ratio'):>22}"
            f"{row['other_threads_cpu_seconds']['median'] * 1e3:>10.2f}"
            f"{'-' if sync is None else format(sync['median'] * 1e3, '.1f'):>9}"
            f"{row['steps_with_identical_gradients']:>7}/{row['steps_checked']:<3}  {told}"
        )
    return "\n".join(lines)


def _interval(ratio: dict[str, float], kind: str = "median") -> str:
    return f"{ratio[kind]:.3f} ({ratio['low_95']:.3f}-{ratio['high_95']:.3f})"


def target_table(found: list[Target]) -> str:
    """One line each."""
    return "\n".join(
        f"{'met   ' if t.ok else 'MISSED'}  {t.name}: {t.value:.4f} ({t.bound})" for t in found
    )
