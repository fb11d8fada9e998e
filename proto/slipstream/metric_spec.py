"""What a process measures, as data: collectors and docs/metrics.md are both made from it.

Names follow Prometheus and OpenMetrics: base units, ``_total`` for counters, ``_seconds`` and
``_bytes`` last. Knows nothing of prometheus_client; ``metric_families`` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum


class Kind(Enum):
    """Of a metric; the suffix is that of the name that is scraped."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"
    INFO = "info"

    @property
    def suffix(self) -> str:
        """What the exposition formats put behind the family's name."""
        return {Kind.COUNTER: "_total", Kind.INFO: "_info"}.get(self, "")


@dataclass(frozen=True)
class Label:
    """A label.

    Attributes:
        name: of it.
        values: all there can be, where they are known beforehand. A counter then has a series for
            each from the start on: ``increase`` does not see the first event of one that appears
            with it.
        text: what the values are, where they are not known.
    """

    name: str
    values: tuple[str, ...] = ()
    text: str = ""


@dataclass(frozen=True)
class Metric:
    """One metric family.

    Attributes:
        name: without the catalogue's prefix and the kind's suffix.
        kind: of it.
        help: one sentence.
        labels: in the order in which they are exposed.
        absent: when it has no series; empty when it always has. No series is no measurement: a
            zero would be one.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[Label, ...] = ()
    absent: str = ""

    @property
    def unit(self) -> str:
        """ "seconds" or "bytes" where the name ends so; else empty."""
        last = self.name.rpartition("_")[2]
        return last if last in ("seconds", "bytes") else ""


@dataclass(frozen=True)
class Group:
    """Metrics under one heading."""

    title: str
    metrics: tuple[Metric, ...]


@dataclass(frozen=True)
class Catalogue:
    """Every metric of one process.

    Attributes:
        process: for people.
        prefix: of every name.
        where: how it is scraped.
        groups: the metrics.
    """

    process: str
    prefix: str
    where: str
    groups: tuple[Group, ...]
    by_name: Mapping[str, Metric] = field(init=False)

    def __post_init__(self) -> None:
        metrics = [metric for group in self.groups for metric in group.metrics]
        by_name = {metric.name: metric for metric in metrics}
        assert len(by_name) == len(metrics), "a name is there twice"
        object.__setattr__(self, "by_name", by_name)

    def scraped_name(self, metric: Metric) -> str:
        """The name as it is scraped; of a histogram that of its family."""
        return f"{self.prefix}{metric.name}{metric.kind.suffix}"

    def sample_names(self) -> set[str]:
        """Every sample name there can be, a histogram's three included."""
        names = set()
        for metric in self.by_name.values():
            name = self.scraped_name(metric)
            if metric.kind is Kind.HISTOGRAM:
                names |= {f"{name}_bucket", f"{name}_sum", f"{name}_count"}
            else:
                names.add(name)
        return names


def counter(name: str, text: str, *labels: Label, absent: str = "") -> Metric:
    """For whatever is to be rated."""
    return Metric(name, Kind.COUNTER, text, labels, absent)


def gauge(name: str, text: str, *labels: Label, absent: str = "") -> Metric:
    """A value now."""
    return Metric(name, Kind.GAUGE, text, labels, absent)


def histogram(name: str, text: str, *labels: Label, absent: str = "") -> Metric:
    """Counts in buckets, and a sum."""
    return Metric(name, Kind.HISTOGRAM, text, labels, absent)


def build_info(*more: Label) -> Metric:
    """What runs: every process has one."""
    labels = (
        Label("version", text="of Slipstream"),
        Label("commit", text="that it was built from; empty where the build did not know it"),
        *more,
    )
    return Metric("build", Kind.INFO, "What code runs.", labels)
