"""Fills a catalogue's metrics with values: what a prometheus_client collector yields."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.core import Metric as Family

from slipstream.code_version import code_version
from slipstream.durations import Durations
from slipstream.metric_spec import Catalogue, Kind, Metric

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
