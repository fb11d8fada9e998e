"""docs/metrics.md is what the processes expose, and that follows Prometheus's naming."""

from __future__ import annotations

import re

import pytest

from docs.make_metrics import NOTES, PAGE, PROCESSES, Process, page


def test_the_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m docs.make_metrics"


@pytest.mark.parametrize("process", PROCESSES, ids=lambda p: p.title)
def test_names_follow_the_convention(process: Process) -> None:
    names = [metric.name for metric in process.metrics]
    assert len(names) == len(set(names)) >= 20
    for metric in process.metrics:
        assert re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", metric.name), metric.name
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert not metric.name.endswith(("_count", "_sum", "_bucket")), metric.name
        assert metric.help.endswith("."), metric.name
        if metric.kind == "histogram":
            assert metric.name.endswith(("_seconds", "_ratio")), metric.name


def test_the_notes_name_metrics_that_exist() -> None:
    names = {metric.name for process in PROCESSES for metric in process.metrics}
    # A name with a star stands for several.
    used = re.findall(r"slipstream_(?:rollout|trainer|bridge)_\w+(?![*\w])", NOTES.read_text())
    assert {name for name in used if not name.endswith("_")} <= names
