"""Draws the curves: acceptance length over tokens and over seconds."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks.acceptance_curve.contestants import CONTESTANTS
from benchmarks.acceptance_curve.curve import Curves

_COLOURS = {
    "ours": ("#1f77b4", "#17a2b8", "#6f9fd8", "#27ae60"),
    "speculators": ("#c0392b", "#f39c12"),
}


def draw(curves: Curves, path: Path) -> None:
    """Write the figure; the suffix of ``path`` (.svg, .png) says in which format."""
    figure, (by_tokens, by_seconds) = plt.subplots(1, 2, figsize=(11, 4.2), sharey=True)
    left = {trainer: list(colours) for trainer, colours in _COLOURS.items()}
    for contestant in CONTESTANTS:
        if contestant.name not in curves:
            continue
        marks = curves[contestant.name]
        lengths = [mark.acceptance.length for mark in marks]
        # Two standard errors.
        errors = [2 * mark.acceptance.standard_error for mark in marks]
        colour = left[contestant.trainer].pop(0)
        style = "-" if contestant.trainer == "ours" else "--"
        for axes, x in (
            (by_tokens, [mark.tokens / 1000 for mark in marks]),
            (by_seconds, [mark.wall for mark in marks]),
        ):
            axes.errorbar(
                x, lengths, errors, color=colour, linestyle=style, marker="o", markersize=3,
                capsize=2, label=contestant.name,
            )  # fmt: skip
    by_tokens.set_xlabel("tokens trained on, thousands")
    by_seconds.set_xlabel("training seconds, one core")
    by_tokens.set_ylabel("acceptance length in vLLM, k = 3")
    by_tokens.legend(frameon=False)
    for axes in (by_tokens, by_seconds):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
