"""``python -m docs.make_metrics``: writes docs/metrics.md from what the processes expose."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from draft_trainer.counters import Counters
from draft_trainer.server import metrics as trainer
from policy_bridge import metrics as bridge
from rollout_server.control import metrics as rollout
from slipstream.errors import Refusals
from slipstream.metrics import Fact

PAGE = Path(__file__).with_name("metrics.md")
NOTES = Path(__file__).with_name("metrics_notes.md")
_SUFFIX = {"counter": "_total"}


@dataclass(frozen=True)
class Described:
    """A metric family.

    Attributes:
        name: as it is scraped; of a histogram that of its family.
        kind: counter, gauge, histogram or info.
        help: one sentence, and when there is no series.
        labels: each label with its values, or with () where they are not known beforehand.
    """

    name: str
    kind: str
    help: str
    labels: Mapping[str, Sequence[str]]

    @property
    def sample_names(self) -> set[str]:
        """Every sample name there can be."""
        if self.kind != "histogram":
            return {self.name}
        return {f"{self.name}_{part}" for part in ("bucket", "sum", "count")}


@dataclass(frozen=True)
class Process:
    """Every metric of one process.

    Attributes:
        title: its name for people.
        where: how it is scraped.
        metrics: by name.
    """

    title: str
    where: str
    metrics: tuple[Described, ...]


def _build_info(prefix: str, *more: str) -> Described:
    labels: dict[str, Sequence[str]] = dict.fromkeys(("version", "commit", *more), ())
    return Described(f"{prefix}build_info", "info", "The code that runs.", labels)


def _of_facts(prefix: str, facts: Sequence[Fact[Any]]) -> Iterator[Described]:
    for fact in facts:
        name = prefix + fact.name + _SUFFIX.get(fact.kind, "")
        yield Described(name, fact.kind, fact.help, fact.labels)


def _of_registry(registry: CollectorRegistry) -> Iterator[Described]:
    for metric in registry._collector_to_names:
        if not isinstance(metric, MetricWrapperBase):
            continue
        (family,) = metric.collect()
        labels: dict[str, Sequence[str]] = {
            label: tuple(dict.fromkeys(sample.labels[label] for sample in family.samples))
            for label in metric._labelnames
        }
        name = family.name + _SUFFIX.get(family.type, "")
        yield Described(name, family.type, family.documentation, labels)


def _process(title: str, where: str, *metrics: Described) -> Process:
    return Process(title, where, tuple(sorted(metrics, key=lambda metric: metric.name)))


PROCESSES = (
    _process(
        "Rollout server",
        "`/metrics` of the OpenAI API's port, beside vLLM's own (`vllm:*`)",
        _build_info(rollout.PREFIX, "vllm"),
        *_of_facts(rollout.PREFIX, rollout.FACTS),
        *_of_registry(rollout.CommitCounts().registry),
    ),
    _process(
        "Draft trainer",
        "`server.metrics_port` of the trainer, 9464 unless configured otherwise; with `process_*` "
        "of the Prometheus client",
        _build_info(trainer.PREFIX),
        *_of_facts(trainer.PREFIX, trainer.facts(Refusals())),
        *_of_registry(Counters().registry),
    ),
    _process(
        "Policy bridge",
        "the training process, where it registers `policy_bridge.metrics.BridgeCollector`; "
        "`bridge.stats()` has the same figures",
        _build_info(bridge.PREFIX),
        *_of_facts(bridge.PREFIX, bridge.FACTS),
    ),
)


def page() -> str:
    """The whole page: the notes, then a table for each process."""
    parts = [
        "<!-- Made by `python -m docs.make_metrics` from the metrics of each process and "
        "metrics_notes.md. -->",
        NOTES.read_text(encoding="utf-8").strip(),
    ]
    for process in PROCESSES:
        rows = [_row(metric) for metric in process.metrics]
        table = ["| metric | type | labels | what |", "|---|---|---|---|", *rows]
        parts += [f"## {process.title}", f"At {process.where}.", "\n".join(table)]
    return "\n\n".join(parts) + "\n"


def _row(metric: Described) -> str:
    labels = "; ".join(_label(name, values) for name, values in metric.labels.items())
    return f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |"


def _label(name: str, values: Sequence[str]) -> str:
    known = ", ".join(f"`{value}`" for value in values)
    return f"`{name}`: {known}" if known else f"`{name}`"


def main() -> int:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
