"""Writes ``report.html``: one self-contained page that shows what happened in a run."""

from __future__ import annotations

import base64
import html
import io
import statistics
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from examples.arithmetic_grpo.records import (
    ADAPTED,
    ARMS,
    FROZEN,
    MIXED,
    NGRAM,
    OFF,
    RunRecord,
    StepRecord,
)
from examples.arithmetic_grpo.summary import (
    END_STEPS,
    entropy,
    followed_in,
    pooled_positions,
    speed_ratios,
    surprise_against_off,
)
from examples.figures import Target

COLOURS = {
    FROZEN: "#c0392b",
    ADAPTED: "#1f77b4",
    OFF: "#7f7f7f",
    MIXED: "#8e6bbf",
    NGRAM: "#3a9a5b",
}
LABELS = {
    FROZEN: "frozen (release 0)",
    ADAPTED: "adapted (newest release)",
    OFF: "no speculation",
    NGRAM: "n-gram",
    MIXED: "swapped in flight",
}
PHASES = ("data", "generation", "log_prob", "training", "sync")
PHASE_COLOURS = ("#bdc3c7", "#1f77b4", "#f39c12", "#27ae60", "#c0392b")

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:1060px;margin:2em auto;padding:0 1em;color:#222}
h1{font-size:1.6em}h2{font-size:1.15em;margin-top:2em}img{max-width:100%}
table{border-collapse:collapse;margin:1em 0}td,th{border-bottom:1px solid #ddd;padding:.3em .8em;
text-align:left}td.n{text-align:right;font-variant-numeric:tabular-nums}
.ok{color:#1e8449;font-weight:600}.no{color:#c0392b;font-weight:600}p{max-width:50em}
"""


def write_report(run: RunRecord, targets: Sequence[Target], path: Path) -> None:
    """Write the page; no other file is needed to read it. Its first plot also goes beside it."""
    acceptance = acceptance_figure(run)
    acceptance.savefig(path.parent / "acceptance.png", dpi=110)
    sections: list[tuple[str, str, Figure]] = [
        (
            "Acceptance length",
            "Tokens per verification step, bonus token included, from vLLM's own counters. Both "
            "arms draft for the same policy at the same step; only the draft differs.",
            acceptance,
        ),
        (
            "Accepted at each draft position",
            f"Share of drafts whose token at that position was accepted, first two and last "
            f"{END_STEPS} steps.",
            position_figure(run),
        ),
        (
            "Reward",
            "Each arm's mean reward per step. Speculation does not change the distribution, so the "
            "curves lie on one another up to sampling noise.",
            reward_figure(run),
        ),
        (
            "Entropy",
            "The policy's entropy at temperature 1, in nats per sampled token of all arms.",
            entropy_figure(run),
        ),
        (
            "Where a step's time goes",
            "Policy process by phase; the line is the time that the sidecar trained meanwhile in "
            "its own process. Generation holds all four arms.",
            time_figure(run),
        ),
        (
            "Live swaps",
            "Seconds from the commit call to its answer, with the number of requests in flight.",
            swap_figure(run),
        ),
    ]
    if run.speed:
        speed = (
            "Generation speed",
            "Tokens/s over those without speculation, a server's arms interleaved, after the last "
            "step; bars are medians, whiskers the extremes.",
            speed_figure(run),
        )
        sections.insert(2, speed)
    body = [
        "<!doctype html><html lang=en><meta charset=utf-8><title>Slipstream: a GRPO run</title>",
        f"<style>{STYLE}</style><h1>Slipstream: one GRPO run, two drafts</h1>",
        _headline(run),
        _target_table(targets),
    ]
    for title, text, figure in sections:
        body.append(f"<h2>{title}</h2><p>{text}</p>{_image(figure, title)}")
    body.append(_losslessness(run))
    path.write_text("\n".join(body) + "\n</html>\n")


def acceptance_figure(run: RunRecord) -> Figure:
    """Acceptance length per step and arm, with a mark where a new release went live."""
    figure, axes = _axes("GRPO step", "acceptance length")
    x = [step.step for step in run.steps]
    for arm in (FROZEN, ADAPTED):
        y = [step.arms[arm].acceptance_length or float("nan") for step in run.steps]
        axes.plot(x, y, color=COLOURS[arm], label=LABELS[arm], linewidth=2)
    style = [
        statistics.fmean(step.arms[arm].style_share for arm in (FROZEN, ADAPTED))
        for step in run.steps
    ]
    other = axes.twinx()
    other.plot(x, style, color="#27ae60", linestyle=":", label=f"{run.style} of the policy")
    other.set_ylim(0, 1)
    other.set_ylabel(f"share of {run.style}")
    previous = None
    for step in run.steps:
        if previous is not None and step.draft_version != previous:
            axes.axvline(step.step, color="#1f77b4", alpha=0.12)
        previous = step.draft_version
    axes.set_ylim(bottom=1)
    handles = axes.get_legend_handles_labels()[0] + other.get_legend_handles_labels()[0]
    axes.legend(handles=handles, loc="lower left", frameon=False)
    return figure


def position_figure(run: RunRecord) -> Figure:
    """Acceptance share by draft position, at the start and at the end."""
    figure, axes = _axes("draft position", "share accepted")
    groups = [(FROZEN, run.steps[:2], "start"), (FROZEN, run.steps[-END_STEPS:], "end")]
    groups += [(ADAPTED, run.steps[:2], "start"), (ADAPTED, run.steps[-END_STEPS:], "end")]
    for index, (arm, steps, when) in enumerate(groups):
        shares = pooled_positions(steps, arm)
        x = [position + 1 + (index - 1.5) * 0.2 for position in range(len(shares))]
        axes.bar(
            x,
            shares,
            width=0.18,
            color=COLOURS[arm],
            alpha=0.45 if when == "start" else 1,
            label=f"{LABELS[arm]}, {when}",
        )
    axes.set_ylim(0, 1)
    axes.set_xticks([position + 1 for position in range(len(pooled_positions(run.steps, ADAPTED)))])
    axes.legend(frameon=False, fontsize=9)
    return figure


def speed_figure(run: RunRecord) -> Figure:
    """Speed-up over no speculation by batch size."""
    figure, axes = _axes("batch size", "tokens/s over no speculation")
    batches = list(run.speed)
    for offset, arm in ((-0.27, FROZEN), (0.0, ADAPTED), (0.27, NGRAM)):
        ratios = [speed_ratios(run, batch, arm) for batch in batches]
        medians = [statistics.median(r) for r in ratios]
        low = [m - min(r) for m, r in zip(medians, ratios, strict=True)]
        high = [max(r) - m for m, r in zip(medians, ratios, strict=True)]
        x = [index + offset for index in range(len(batches))]
        axes.bar(
            x, medians, 0.25, yerr=[low, high], capsize=4, color=COLOURS[arm], label=LABELS[arm]
        )
    axes.axhline(1, color="#222", linewidth=1)
    axes.set_xticks(range(len(batches)), batches)
    axes.legend(frameon=False)
    return figure


def reward_figure(run: RunRecord) -> Figure:
    """Mean reward per arm and step."""
    figure, axes = _axes("GRPO step", "mean reward")
    for arm in ARMS:
        axes.plot(
            [step.step for step in run.steps],
            [step.arms[arm].reward for step in run.steps],
            color=COLOURS[arm],
            label=LABELS[arm],
            linewidth=1.6 if arm in (FROZEN, ADAPTED) else 0.9,
        )
    axes.legend(frameon=False)
    return figure


def entropy_figure(run: RunRecord) -> Figure:
    """Mean entropy per sampled token and step."""
    figure, axes = _axes("GRPO step", "nats per token")
    axes.plot([step.step for step in run.steps], [entropy(step) for step in run.steps], linewidth=2)
    axes.set_ylim(bottom=0)
    return figure


def time_figure(run: RunRecord) -> Figure:
    """Stacked phase times per step and the sidecar's training time."""
    figure, axes = _axes("GRPO step", "seconds")
    x = [step.step for step in run.steps]
    stacks = [[step.seconds.get(phase, 0.0) for step in run.steps] for phase in PHASES]
    axes.stackplot(x, stacks, labels=PHASES, colors=PHASE_COLOURS, alpha=0.85)
    axes.plot(
        x,
        [step.draft_train_seconds for step in run.steps],
        color="#222",
        linestyle="--",
        label="draft training (sidecar)",
    )
    axes.legend(frameon=False, fontsize=9, loc="upper right", ncols=2)
    return figure


def swap_figure(run: RunRecord) -> Figure:
    """Every swap's latency over the step it happened in."""
    figure, axes = _axes("GRPO step", "milliseconds from call to answer")
    for kind, colour in (("between arms", "#7f7f7f"), ("in flight", "#8e6bbf")):
        swaps = [swap for swap in run.swaps if swap.kind == kind]
        axes.scatter(
            [swap.step for swap in swaps],
            [swap.call_seconds * 1e3 for swap in swaps],
            s=[10 + 2 * swap.requests_in_flight for swap in swaps],
            color=colour,
            alpha=0.7,
            label=f"{kind} ({len(swaps)})",
        )
    axes.axhline(150, color="#c0392b", linestyle=":", label="150 ms")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return figure


def _axes(x: str, y: str) -> tuple[Figure, Axes]:
    figure, axes = plt.subplots(figsize=(8.6, 3.6), layout="constrained")
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return figure, axes


def _image(figure: Figure, title: str) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=110)
    plt.close(figure)
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="{html.escape(title)}" src="data:image/png;base64,{data}">'


def _headline(run: RunRecord) -> str:
    last = run.steps[-1]
    parts = "; ".join(f"{part}: {found.text()}" for part, found in followed_in(run).items())
    return (
        f"<p>{len(run.steps)} GRPO steps on real vLLM in {run.total_seconds:.0f} s. The share "
        f"of {run.style} went from {_style(run.steps[0]):.2f} to {_style(last):.2f}; the newest "
        f"draft is release {last.draft_version}, trained against policy version "
        f"{last.trained_against}.</p>"
        f"<p>Acceptance length. {html.escape(parts)}. The moving part is that in which the share "
        f"of {run.style} went from 5 % to 95 % of its whole change.</p>"
    )


def _style(step: StepRecord) -> float:
    return statistics.fmean(arm.style_share for arm in step.arms.values())


def _target_table(targets: Sequence[Target]) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(t.name)}<td class=n>"
        f"{t.text}"
        f"<td class=n>{html.escape(t.bound)}<td class={'ok' if t.ok else 'no'}>{t.verdict}"
        for t in targets
    )
    return f"<table><tr><th>target<th>measured<th>bound<th>{rows}</table>"


def _losslessness(run: RunRecord) -> str:
    rows = "".join(
        f"<tr><td>{LABELS[arm]}<td class=n>{difference:+.5f}<td class=n>{z:+.2f}"
        for arm in ARMS
        if arm != OFF
        for difference, z in [surprise_against_off(run, arm)]
    )
    return (
        "<h2>Nothing of the distribution is lost</h2><p>log p(x) + H(p), summed over all sampled "
        "tokens under the policy's own log-prob forward, has mean 0 when tokens are drawn from the "
        "policy, whichever draft proposed them. The difference of each arm from generation without "
        "speculation, in nats per token and in standard errors (|z| above 3.3 happens by chance "
        "once in a thousand):</p>"
        f"<table><tr><th>arm<th>nats per token<th>z{rows}</table>"
    )
