"""``python -m docs.make_metrics``: writes docs/metrics.md from the processes' catalogues."""

from __future__ import annotations

import sys
from pathlib import Path

from draft_trainer.server.metrics import CATALOGUE as TRAINER
from policy_bridge.metrics import CATALOGUE as BRIDGE
from rollout_server.metrics import CATALOGUE as ROLLOUT
from slipstream.metrics import Catalogue, Label, Metric

CATALOGUES = (ROLLOUT, TRAINER, BRIDGE)
PAGE = Path(__file__).with_name("metrics.md")
NOTES = Path(__file__).with_name("metrics_notes.md")


def page() -> str:
    """The whole page: the notes, then a table for each group of each process."""
    parts = [
        "<!-- Made by `python -m docs.make_metrics` from the metrics_catalogue of each room and "
        "metrics_notes.md. -->",
        NOTES.read_text(encoding="utf-8").strip(),
        *(_process(catalogue) for catalogue in CATALOGUES),
    ]
    return "\n\n".join(parts) + "\n"


def _process(catalogue: Catalogue) -> str:
    parts = [f"## {catalogue.process}", f"At {catalogue.where}."]
    for group in catalogue.groups:
        rows = [_row(catalogue, metric) for metric in group.metrics]
        table = ["| metric | type | labels | what |", "|---|---|---|---|", *rows]
        parts += [f"### {catalogue.process}: {group.title.lower()}", "\n".join(table)]
    return "\n\n".join(parts)


def _row(catalogue: Catalogue, metric: Metric) -> str:
    labels = "; ".join(_label(label) for label in metric.labels)
    absent = f" No series {metric.absent}." if metric.absent else ""
    name = catalogue.scraped_name(metric)
    return f"| `{name}` | {metric.kind.value} | {labels} | {metric.help}{absent} |"


def _label(label: Label) -> str:
    values = ", ".join(f"`{value}`" for value in label.values) or label.text
    return f"`{label.name}`: {values}"


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
