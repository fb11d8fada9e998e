"""Rules, alerts and runbook fit one another and the metrics there are; promtool tries them."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest
import yaml

from docs.make_metrics import PROCESSES
from draft_trainer.cli.main import parse
from tests.deploy import expressions
from tests.deploy.expressions import PROMETHEUS, RUNBOOK, Expression

needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None,
    reason="promtool is missing: apt-get install --no-install-recommends prometheus",
)
ALL = [
    *expressions.recorded(),
    *expressions.alerts(),
    *expressions.panels(),
    *expressions.annotations(),
    *expressions.documented(),
]
LABELS = {
    name: metric.labels
    for process in PROCESSES
    for metric in process.metrics
    for name in metric.sample_names
}


@pytest.mark.parametrize("expression", ALL, ids=lambda e: e.where)
def test_queried_metrics_and_labels_exist(expression: Expression) -> None:
    known = set(LABELS)
    known |= {rule.where for rule in expressions.recorded()}
    names = re.findall(r"[\w:]*slipstream_[\w:]+", expression.text)
    assert names or re.search(r"\b(up|ALERTS)\b", expression.text)
    assert set(names) <= known
    for name, matchers in re.findall(r"(slipstream_\w+)\{(.*?)\}", expression.text):
        if name not in LABELS:
            continue  # a rule
        for label, operator, values in re.findall(r'(\w+)(=~|!=|=)"(.*?)"', matchers):
            if label in ("job", "instance"):
                continue
            assert label in LABELS[name], expression.text
            wanted = values.split("|") if operator == "=~" else [values]
            assert set(wanted) <= set(LABELS[name][label]), expression.text


def test_alerts_have_severity_summary_and_runbook() -> None:
    for rule in expressions.rules("alerts.yml"):
        name, notes = rule["alert"], rule["annotations"]
        assert rule["labels"]["severity"] in ("critical", "warning"), name
        assert set(notes) == {"summary", "description", "runbook_url"}, name
        assert "{{" in notes["summary"] + notes["description"], f"{name} says no value"
        # Grafana and GitHub make a heading's anchor of it in lower case.
        assert notes["runbook_url"] == f"docs/runbook.md#{name.lower()}"


def test_runbook_has_a_section_for_every_alert() -> None:
    text = RUNBOOK.read_text()
    sections = re.findall(r"^## (\w+)$", text, re.MULTILINE)
    assert sections == list(dict.fromkeys(alert.where for alert in expressions.alerts()))
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        for part in ("**Means.**", "**Confirm.**", "**Do.**"):
            assert section.count(part) == 1, section.splitlines()[0]
    for anchor in re.findall(r"\]\(#(\w+)\)", text):
        assert anchor in [section.lower() for section in sections]


def test_runbook_commands_parse() -> None:
    commands = re.findall(r"`draft-trainer ([^`]+)`", RUNBOOK.read_text())
    assert len(commands) >= 3
    for command in commands:
        parse(re.sub(r"\b[NM]\b", "1", command).split())


def succeeds(*arguments: str) -> None:
    """``promtool`` with these arguments."""
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_prometheus_config_and_rules_are_valid() -> None:
    config = PROMETHEUS / "prometheus.yml"
    succeeds("check", "config", "--lint=all", "--lint-fatal", str(config))


@needs_promtool
@pytest.mark.parametrize("text", [text for _, text in expressions.code_blocks("yaml")])
def test_documented_scrape_config_is_valid(text: str, tmp_path: Path) -> None:
    path = tmp_path / "prometheus.yml"
    path.write_text(text)
    succeeds("check", "config", "--syntax-only", str(path))


@needs_promtool
@pytest.mark.parametrize("name", ["recording_test.yml", "alerts_test.yml"])
def test_promtool_rule_tests_pass(name: str) -> None:
    succeeds("test", "rules", str(PROMETHEUS / "tests" / name))


def test_every_rule_has_a_promtool_test() -> None:
    tests = yaml.safe_load((PROMETHEUS / "tests" / "recording_test.yml").read_text())["tests"]
    tried = {case["expr"] for test in tests for case in test["promql_expr_test"]}
    for rule in expressions.recorded():
        assert any(rule.where in expression for expression in tried), rule.where
    fires, silent = set(), defaultdict(int)
    tests = yaml.safe_load((PROMETHEUS / "tests" / "alerts_test.yml").read_text())["tests"]
    for test in tests:
        for case in test["alert_rule_test"]:
            silent[case["alertname"]] += not case["exp_alerts"]
            for alert in case["exp_alerts"]:
                fires.add((case["alertname"], *own_labels(alert["exp_labels"])))
    for rule in expressions.rules("alerts.yml"):
        assert (rule["alert"], *own_labels(rule["labels"])) in fires
        assert silent[rule["alert"]] >= 2, rule["alert"]


def own_labels(labels: dict[str, str]) -> list[tuple[str, str]]:
    """Return the labels by which rules of one alert differ."""
    names = ("severity", "measure", "versions", "seen_by", "given_up_by")
    return sorted((name, labels[name]) for name in names if name in labels)
