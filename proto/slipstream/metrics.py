"""What a process measures, as data: collectors and docs/metrics.md are both made from it.

Names follow Prometheus and OpenMetrics: base units, ``_total`` for counters, ``_seconds`` and
``_bytes`` last. Knows nothing of prometheus_client; ``metric_families`` does.

Fills a catalogue's metrics with values: what a prometheus_client collector yields.

A histogram of seconds, as plain numbers.

Which code is running, for manifests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from importlib import resources
from itertools import product

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.core import Metric as Family

import slipstream


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


@dataclass(frozen=True)
class Durations:
    """Counts per bucket, and the sum of what was observed.

    Attributes:
        bounds: upper bounds in seconds, ascending.
        counts: one for each, and one for what is beyond the last.
        total: seconds.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...] = ()
    total: float = 0.0

    def observe(self, seconds: float, times: int = 1) -> Durations:
        """This histogram with one more value, or with several equal ones."""
        counts = list(self.counts or (0,) * (len(self.bounds) + 1))
        counts[bisect_left(self.bounds, seconds)] += times
        return Durations(self.bounds, tuple(counts), self.total + seconds * times)

    def cumulative(self) -> list[tuple[str, float]]:
        """Bound and count of what is not beyond it, as Prometheus's buckets are."""
        total, found = 0, []
        counts = self.counts or (0,) * (len(self.bounds) + 1)
        for bound, count in zip([*map(str, self.bounds), "+Inf"], counts, strict=True):
            total += count
            found.append((bound, float(total)))
        return found


COMMIT_FILE = "_commit"
"""Written into a wheel by the build hook."""


def code_version() -> str:
    """Slipstream's version, and "+g" with the git commit where the build knew it.

    Only a wheel knows: an editable install runs whatever the checkout holds by now.
    """
    file = resources.files("slipstream") / COMMIT_FILE
    commit = file.read_text().strip() if file.is_file() else ""
    return f"{slipstream.__version__}+g{commit}" if commit else slipstream.__version__


_Labels = tuple[str, ...]


class Scrape:
    """The values of one scrape. What the catalogue does not know cannot be exposed.

    Args:
        catalogue: the process's.
    """

    def __init__(self, catalogue: Catalogue) -> None:
        self._catalogue = catalogue
        self._values: dict[str, dict[_Labels, float]] = {}
        self._durations: dict[str, dict[_Labels, Durations]] = {}
        self._infos: dict[str, dict[str, str]] = {}

    def put(self, name: str, value: float | None, *labels: str) -> None:
        """A counter's or gauge's value; None is no series.

        Raises:
            ValueError: other labels, or other values of them, than the catalogue says.
        """
        if value is not None:
            metric = self._metric(name, (Kind.COUNTER, Kind.GAUGE), labels)
            self._values.setdefault(metric.name, {})[labels] = float(value)

    def count(self, name: str, counts: Mapping[str, float]) -> None:
        """Values of a metric with one label, by its value."""
        for label, value in counts.items():
            self.put(name, value, label)

    def observe(self, name: str, durations: Durations, *labels: str) -> None:
        """A histogram's. Raises ValueError as ``put``."""
        metric = self._metric(name, (Kind.HISTOGRAM,), labels)
        self._durations.setdefault(metric.name, {})[labels] = durations

    def build(self, **more: str) -> None:
        """What code runs."""
        version, _, commit = code_version().partition("+g")
        self._infos["build"] = {"version": version, "commit": commit, **more}

    def families(self) -> Iterator[Family]:
        """In the catalogue's order, those that have a series."""
        for metric in self._catalogue.by_name.values():
            family = self._family(metric)
            if family.samples:
                yield family

    def _family(self, metric: Metric) -> Family:
        name, names = self._catalogue.prefix + metric.name, [label.name for label in metric.labels]
        if metric.kind is Kind.INFO:
            info = InfoMetricFamily(name, metric.help)
            if metric.name in self._infos:
                info.add_metric([], self._infos[metric.name])
            return info
        if metric.kind is Kind.HISTOGRAM:
            histogram = HistogramMetricFamily(name, metric.help, labels=names, unit=metric.unit)
            for labels, durations in self._durations.get(metric.name, {}).items():
                histogram.add_metric(labels, durations.cumulative(), durations.total)
            return histogram
        values = self._values.get(metric.name, {})
        if metric.kind is Kind.GAUGE:
            gauge = GaugeMetricFamily(name, metric.help, labels=names, unit=metric.unit)
            for labels, value in values.items():
                gauge.add_metric(labels, value)
            return gauge
        counter = CounterMetricFamily(name, metric.help, labels=names, unit=metric.unit)
        for labels, value in (self._zeros(metric) | values).items():
            counter.add_metric(labels, value)
        return counter

    @staticmethod
    def _zeros(metric: Metric) -> dict[_Labels, float]:
        """A counter whose labels' values are all known has a series for each from the start on."""
        if not metric.labels:
            return {}
        return dict.fromkeys(product(*(label.values for label in metric.labels)), 0.0)

    def _metric(self, name: str, kinds: tuple[Kind, ...], labels: _Labels) -> Metric:
        metric = self._catalogue.by_name[name]
        if metric.kind not in kinds:
            raise ValueError(f"{name} is a {metric.kind.value}")
        for label, value in zip(metric.labels, labels, strict=True):
            if label.values and value not in label.values:
                raise ValueError(f"{name}: {label.name}={value!r} is not in the catalogue")
        return metric
