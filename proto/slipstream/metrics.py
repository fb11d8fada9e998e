"""Metrics code shared by the three processes: gauges read at a scrape, and build info.

Names follow Prometheus and OpenMetrics: base units, ``_seconds`` and ``_bytes`` last. A metric
that has no value yet has no series: a zero would be a measurement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, Generic, Literal, TypeVar

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

import slipstream

COMMIT_FILE = "_commit"
"""The file that the build hook writes into a wheel."""

T = TypeVar("T")
Value = float | None | Mapping[Any, float | None]
"""The value of a fact. With one label, a mapping from the label's values; with several, from
tuples of them."""


def code_version() -> str:
    """Slipstream's version, and "+g" with the git commit where the build knew it.

    Only a wheel knows it: an editable install runs whatever the checkout holds by now.
    """
    file = resources.files("slipstream") / COMMIT_FILE
    commit = file.read_text().strip() if file.is_file() else ""
    return f"{slipstream.__version__}+g{commit}" if commit else slipstream.__version__


def unit_of(name: str) -> str:
    """The unit of a metric whose name ends in "seconds" or "bytes"; else empty."""
    last = name.rpartition("_")[2]
    return last if last in ("seconds", "bytes") else ""


@dataclass(frozen=True)
class Fact(Generic[T]):
    """A metric that is read from ``T`` at every scrape.

    Attributes:
        name: without the process's prefix; of a counter without ``_total``.
        help: one sentence, and when there is no series.
        read: the value; None for no series.
        labels: each label with all its values, or with () where they are not known beforehand. A
            counter has a series for every known value from the start on: ``increase`` does not
            see the first event of a series that appears with it.
        kind: gauge, or counter for what only grows.
    """

    name: str
    help: str
    read: Callable[[T], Value]
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    kind: Literal["gauge", "counter"] = "gauge"


class FactCollector(Collector, Generic[T]):
    """Exposes facts and the build's version to prometheus_client."""

    def __init__(
        self, prefix: str, facts: Sequence[Fact[T]], source: Callable[[], T], **build: str
    ) -> None:
        self._prefix = prefix
        self.facts = facts
        self._source = source
        version, _, commit = code_version().partition("+g")
        self._build = {"version": version, "commit": commit, **build}

    def collect(self) -> Iterator[Metric]:
        info = InfoMetricFamily(self._prefix + "build", "The code that runs.")
        info.add_metric((), self._build)
        yield info
        now = self._source()
        for fact in self.facts:
            kind = CounterMetricFamily if fact.kind == "counter" else GaugeMetricFamily
            name, names = self._prefix + fact.name, list(fact.labels)
            family = kind(name, fact.help, labels=names, unit=unit_of(fact.name))
            found = fact.read(now)
            values: dict[Any, float | None] = {}
            if fact.kind == "counter" and len(names) == 1:
                values = dict.fromkeys(fact.labels[names[0]], 0.0)
            values |= found if isinstance(found, Mapping) else {(): found}
            for labels, value in values.items():
                if value is not None:
                    family.add_metric((labels,) if isinstance(labels, str) else labels, value)
            if family.samples:
                yield family
