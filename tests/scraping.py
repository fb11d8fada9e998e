"""Reads what a collector exposes, as Prometheus does."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.registry import Collector

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def scrape(collector: Collector) -> Samples:
    """Every sample, by name and labels; both exposition formats must say the same.

    What is collected may change at any time, so both formats are of one collection.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(list(collector.collect())))
    text = _samples(parse_text(generate_latest(registry).decode()))
    assert _samples(parse_openmetrics(openmetrics.generate_latest(registry).decode())) == text
    return text


class _Collected(Collector):
    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> list[Metric]:
        return self._families


def value(samples: Samples, name: str, **labels: str) -> float | None:
    """One sample; None where there is no such series."""
    return samples.get((name, tuple(sorted(labels.items()))))


def of(samples: Samples, name: str) -> dict[tuple[str, ...], float]:
    """Every series of a name, by its labels' values in the order of their names."""
    return {
        tuple(value for _, value in labels): found
        for (sample, labels), found in samples.items()
        if sample == name
    }


def _samples(families: Any) -> Samples:
    found: Samples = {}
    for family in families:
        for sample in family.samples:
            key = sample.name, tuple(sorted(sample.labels.items()))
            assert key not in found, key
            found[key] = sample.value
    return found


__all__ = ["Samples", "of", "scrape", "value"]
