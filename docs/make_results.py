"""``python -m docs.make_results``: the committed JSON as docs/results.md and two pages' tables.

These are the gains and costs in README.md and the architectures in docs/integrations.md.
"""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"
PAGE = Path(__file__).resolve().parent / "results.md"
BENCHMARKS = PAGE.parent / "benchmarks.md"
README = PAGE.parents[1] / "README.md"
INTEGRATIONS = PAGE.parent / "integrations.md"
DEMO = RESULTS / "demo.json"
SERVED = RESULTS / "architectures.json"
_BEGIN, _END = "<!-- make_results: begin -->\n", "<!-- make_results: end -->\n"

_HEAD = """\
# Results

Made by `python -m docs.make_results` from `benchmarks/results`, where the other figures of each run
are too. How each is measured, and the command: [benchmarks](benchmarks.md). A target that is missed
stays here as missed. No figures are committed of {missing}.
"""
_LISTED = re.compile(r"^\| `(\w+)` \|", re.MULTILINE)


def page() -> str:
    """The page's text."""
    results = sorted(RESULTS.glob("*.json"))
    table = BENCHMARKS.read_text(encoding="utf-8").partition("\n## ")[0]
    missing = [n for n in _LISTED.findall(table) if n not in {path.stem for path in results}]
    parts = [_HEAD.format(missing=", ".join(f"`{name}`" for name in missing))]
    for path in results:
        found = json.loads(path.read_text(encoding="utf-8"))
        parts.append(f"## {path.stem}\n\n{_hardware(found.get('machine', {}))}\n")
        rows = "".join(map(_row, found["targets"]))
        parts.append(f"| | measured | target | |\n|---|---:|---:|---|\n{rows}")
    return "\n".join(parts)


def _hardware(machine: dict[str, Any]) -> str:
    if not machine:
        return "The machine was not recorded."
    gpu = machine.get("gpu") or "no GPU"
    return f"{machine['cores']} cores, {machine['cpu']}, {gpu}; torch {machine['torch']}."


def _row(target: dict[str, Any]) -> str:
    value = target["value"]
    number = f"{value:.4g}" if isinstance(value, float) else str(value)
    name = target["name"].replace("|", "\\|")
    return (
        f"| {name} | {number} | {target['bound']} | {'met' if target['ok'] else '**missed**'} |\n"
    )


def readme() -> str:
    """README with the gains and the costs of the committed run of the demo."""
    return _with_table(README, _gains(json.loads(DEMO.read_text(encoding="utf-8"))))


def integrations() -> str:
    """The page of integrations with the architectures that were served, if there are results."""
    if not SERVED.exists():
        return _with_table(INTEGRATIONS, "")
    found = json.loads(SERVED.read_text(encoding="utf-8"))
    return _with_table(INTEGRATIONS, _architectures(found["architectures"]))


def _with_table(path: Path, table: str) -> str:
    before, _, rest = path.read_text(encoding="utf-8").partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not end:
        raise ValueError(f"{path}: no table between {_BEGIN.strip()} and {_END.strip()}")
    return before + _BEGIN + table + _END + after


def _architectures(found: list[dict[str, Any]]) -> str:
    text = (
        "Of these architectures a tiny trained policy was served by real vLLM on a CPU with an "
        "untrained draft; the draft that `draft-trainer init` and `fit` made from its states was "
        "swapped in while it served. Acceptance lengths are vLLM's own counts at temperature 1 "
        "with three drafted tokens, the estimate is the gate's on states of the same rollouts "
        "([benchmarks](benchmarks.md#architectures), [results](results.md#architectures)):"
    )
    rows = [
        *textwrap.wrap(text, 118, break_long_words=False, break_on_hyphens=False),
        "",
        "| policy | class | untrained draft | adapted draft | its estimate | greedy completions "
        "as without a draft |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for one in found:
        before, after, prompts = one["untrained"], one["adapted"], one["prompts"]
        equal = min(before["greedy_equal"], after["greedy_equal"])
        rows.append(
            f"| {one['name']} | `{one['model_class']}` | {before['measured']:.2f} "
            f"| {after['measured']:.2f} | {after['replayed']:.2f} | {equal} of {prompts} |"
        )
    return "\n".join((*rows, ""))


def _gains(demo: dict[str, Any]) -> str:
    figures, cost, machine = demo["figures"], demo["figures"]["cost"], demo["machine"]
    lengths, speeds = figures["acceptance_length"], figures["speed_over_no_speculation"]
    heaviest = max(speeds, key=int)
    heads = [f"speed, {batch} request{'s' if batch != '1' else ''}" for batch in speeds]
    rows = [f"| | acceptance length | {' | '.join(heads)} |", "|---|---:|" + "---:|" * len(heads)]
    rows.append("| no speculation | 1 |" + " 1 |" * len(heads))
    for arm, name in (("frozen", "frozen draft"), ("adapted", "adapted draft")):
        medians = " | ".join(f"{speed[arm]['median']:.2f}" for speed in speeds.values())
        rows.append(f"| {name} | {lengths[arm]['end']:.2f} | {medians} |")
    if "followed" in figures:
        part, loop = figures["followed"]["moving part"], figures["speed_in_the_loop"]
        moved = (
            f"While the policy moved ({part['steps']} of its steps) the adapted draft's acceptance "
            f"length was {part['over_start']:.2f} of its start and {part['over_frozen']:.2f} times "
            f"the frozen one's, at least {part['minimum_over_start']:.2f} of its start; generating "
            f"{loop['requests']} completions at once in the loop it was "
            f"{loop['adapted']['median']:.2f} times as fast as no speculation."
        )
        rows += ["", *textwrap.wrap(moved, 108)]
    swap = figures["live_swap_seconds"]["median"] * 1e3
    gain, frozen = (speeds[heaviest][arm] for arm in ("adapted", "frozen"))
    text = (
        f"At the end of the demo, whose policy moves far from where it began, {heaviest} requests "
        f"at once are generated **{gain['median']:.2f} times as fast as without speculation** by "
        f"the adapted draft ({gain['min']:.2f} to {gain['max']:.2f}) and {frozen['median']:.2f} "
        f"times by the frozen one ({frozen['min']:.2f} to {frozen['max']:.2f}): median, least and "
        f"most of interleaved rounds on {machine['cores']} cores of an {machine['cpu']}, with the "
        f"trainer stopped. For that draft the trainer took "
        f"{cost['trainer_cpu_seconds']:.0f} CPU seconds in the whole run and "
        f"{cost['trainer_peak_bytes'] / 2**30:.1f} GiB of memory, the loop sent "
        f"{cost['sent_bytes_per_step'] / 2**20:.0f} MiB of states a step, and a swap took "
        f"{swap:.0f} ms from the call to its answer."
    )
    net = figures["net"]
    if net["cost"] > net["saved"]:
        text += (
            f" On {machine['cores']} cores that policy, server and trainer share, this does not "
            f"pay: adapting saved {net['saved']:.0f} s of generation and took {net['cost']:.0f} s "
            "from the run. Whether it pays depends on what generation costs and on whose hardware "
            "trains "
            "([does it pay?](docs/economics.md))."
        )
    rows += ["", *textwrap.wrap(text, 108), ""]
    return "\n".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    README.write_text(readme(), encoding="utf-8")
    INTEGRATIONS.write_text(integrations(), encoding="utf-8")
