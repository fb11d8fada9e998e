"""Writes ``slipstream.json``, the Grafana dashboard: ``python deploy/grafana/make_dashboard.py``.

A test compares the file with what this makes of ``panels.yml`` and asks a Prometheus every query.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
FILE = HERE / "slipstream.json"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24
ROLLOUT = 'job=~"$job",instance=~"$server"'


@dataclass(frozen=True)
class Panel:
    """A panel of ``panels.yml``.

    Attributes:
        title: above it.
        queries: expression of each legend.
        text: what it shows, for the (i).
        kind: Grafana's name of the panel's type.
        unit: Grafana's name of the unit.
        width: in columns.
        stacked: series on top of each other.
    """

    title: str
    queries: Mapping[str, str]
    text: str = ""
    kind: str = "timeseries"
    unit: str = "short"
    width: int = 8
    stacked: bool = False


def rows() -> dict[str, list[Panel]]:
    """The panels of each row."""
    raw = yaml.safe_load((HERE / "panels.yml").read_text())
    return {row["row"]: [Panel(**panel) for panel in row["panels"]] for row in raw}


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana's JSON model."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in rows().items():
        place = {"x": 0, "y": top, "w": COLUMNS, "h": 1}
        panels.append(
            {"id": len(panels) + 1, "type": "row", "title": title, "gridPos": place, "panels": []}
        )
        top, left, height = top + 1, 0, 0
        for panel in row:
            if left + panel.width > COLUMNS:
                top, left, height = top + height, 0, 0
            height = max(height, 4 if panel.kind == "stat" else 8)
            place = {"x": left, "y": top, "w": panel.width, "h": height}
            panels.append(_panel(len(panels) + 1, panel, place))
            left += panel.width
        top += height
    return {
        "uid": "slipstream",
        "title": "Slipstream",
        "tags": ["slipstream"],
        "schemaVersion": 38,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": _variables()},
        "annotations": {"list": _annotations()},
        "panels": panels,
    }


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    custom: dict[str, Any] = {}
    options: dict[str, Any] = {"reduceOptions": {"calcs": ["lastNotNull"], "fields": ""}}
    if panel.kind == "timeseries":
        # Gaps stay gaps: without drafts there is no acceptance, and a line would show one.
        custom = {"fillOpacity": 20 if panel.stacked else 0, "spanNulls": False}
        custom["stacking"] = {"mode": "normal" if panel.stacked else "none", "group": "A"}
        options = {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.text,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "custom": custom}, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": DATASOURCE,
                "expr": expression,
                "legendFormat": legend,
                "range": panel.kind == "timeseries",
                "instant": panel.kind != "timeseries",
            }
            for index, (legend, expression) in enumerate(panel.queries.items())
        ],
    }


def _variables() -> list[dict[str, Any]]:
    def of(name: str, label: str, query: str) -> dict[str, Any]:
        return {
            "name": name,
            "label": label,
            "type": "query",
            "datasource": DATASOURCE,
            "query": {"query": query, "refId": name},
            "refresh": 2,
            "includeAll": True,
            "multi": True,
            "allValue": ".*",
            "current": {"text": "All", "value": "$__all"},
        }

    return [
        {
            "name": "datasource",
            "label": "Prometheus",
            "type": "datasource",
            "query": "prometheus",
            "current": {},
        },
        of("job", "Fleet", "label_values(slipstream_rollout_ready, job)"),
        of("server", "Server", 'label_values(slipstream_rollout_ready{job=~"$job"}, instance)'),
    ]


def _annotations() -> list[dict[str, Any]]:
    return [
        {
            "name": "Draft went live",
            "datasource": DATASOURCE,
            "enable": True,
            "iconColor": "blue",
            "expr": f"changes(slipstream_rollout_draft_version{{{ROLLOUT}}}[1m]) > 0",
            "step": "30s",
            "titleFormat": "Another draft on {{instance}}",
        },
        {
            "name": "Alerts",
            "datasource": DATASOURCE,
            "enable": True,
            "iconColor": "red",
            "expr": 'ALERTS{alertname=~"Slipstream.*",alertstate="firing"}',
            "titleFormat": "{{alertname}} {{instance}}",
        },
    ]


if __name__ == "__main__":
    FILE.write_text(json.dumps(dashboard(), indent=1) + "\n")
