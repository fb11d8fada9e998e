"""docs/metrics.md is what the catalogues say, and they follow Prometheus's naming."""

from __future__ import annotations

import re

import pytest

from docs.make_metrics import CATALOGUES, NOTES, PAGE, page
from slipstream.metrics import Catalogue, Kind


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m docs.make_metrics"


@pytest.mark.parametrize("catalogue", CATALOGUES, ids=lambda c: c.process)
def test_names_follow_the_convention(catalogue: Catalogue) -> None:
    assert len(catalogue.by_name) >= 20
    for metric in catalogue.by_name.values():
        assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", metric.name), metric.name
        assert not metric.name.endswith(("_total", "_count", "_sum", "_bucket", "_info")), metric
        assert metric.help.endswith("."), metric.name
        if metric.kind is Kind.HISTOGRAM:
            assert metric.unit == "seconds", metric.name
        for label in metric.labels:
            assert re.fullmatch(r"[a-z]+(_[a-z]+)*", label.name), metric.name
            assert bool(label.values) != bool(label.text), metric.name


def test_the_notes_name_metrics_that_exist() -> None:
    names = {c.scraped_name(metric) for c in CATALOGUES for metric in c.by_name.values()}
    # A name with a star stands for several.
    used = re.findall(r"slipstream_(?:rollout|trainer|bridge)_\w+(?![*\w])", NOTES.read_text())
    assert {name for name in used if not name.endswith("_")} <= names
