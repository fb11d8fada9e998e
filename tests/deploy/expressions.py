"""Every PromQL expression that is delivered: rules, dashboard, documentation."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
PROMETHEUS = ROOT / "deploy" / "prometheus"
DASHBOARD = ROOT / "deploy" / "grafana" / "slipstream.json"
RUNBOOK = ROOT / "docs" / "runbook.md"


@dataclass(frozen=True)
class Expression:
    """PromQL and where it is from."""

    where: str
    text: str


def rules(name: str) -> list[dict[str, Any]]:
    """The rules of ``recording.yml`` or ``alerts.yml``."""
    groups = yaml.safe_load((PROMETHEUS / name).read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def recorded() -> list[Expression]:
    """Recording rules; ``where`` is what they record."""
    return [Expression(rule["record"], rule["expr"]) for rule in rules("recording.yml")]


def alerts() -> list[Expression]:
    """Alerts; ``where`` is their name."""
    return [Expression(rule["alert"], rule["expr"]) for rule in rules("alerts.yml")]


def panels() -> list[Expression]:
    """Queries of the dashboard's panels; ``where`` is title and legend."""
    found = []
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", ()):
            where = f"{panel['title']}: {target['legendFormat']}"
            found.append(Expression(where, filled_in(target["expr"])))
    return found


def annotations() -> list[Expression]:
    """Queries of the dashboard's annotations."""
    listed = json.loads(DASHBOARD.read_text())["annotations"]["list"]
    return [Expression(entry["name"], filled_in(entry["expr"])) for entry in listed]


def documented() -> list[Expression]:
    """Queries of the documentation; ``where`` is the section."""
    return [Expression(where, text) for where, text in code_blocks("promql")]


def code_blocks(language: str) -> Iterator[tuple[str, str]]:
    """Section and text of each code block of the documentation in a language."""
    block = re.compile(rf"^ *```{language}\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
    for page in sorted((ROOT / "docs").glob("*.md")):
        for section in re.split(r"^## ", page.read_text(), flags=re.MULTILINE):
            for text in block.findall(section):
                yield section.splitlines()[0], text


def filled_in(expression: str) -> str:
    """Replace Grafana's variables as when everything is chosen."""
    return (
        expression.replace("$__rate_interval", "1m").replace("$job", ".*").replace("$server", ".*")
    )
