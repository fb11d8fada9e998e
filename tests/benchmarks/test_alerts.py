"""The alerts' benchmark causes every alert, and shortens the rules without changing them."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from benchmarks.alerts import story
from benchmarks.alerts.sightings import named
from examples.local_prometheus import INSTALL, RULES, LocalPrometheus, shortened

ALERTS = [
    rule
    for group in yaml.safe_load((RULES / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
NAMES = {named({"alertname": rule["alert"], **rule["labels"]}) for rule in ALERTS}


def test_alert_benchmark_causes_every_alert() -> None:
    caused = re.findall(r"_seen\(\s*\"([\w ]+)\"", Path(story.__file__).read_text())
    assert len(NAMES) == len(ALERTS) == len(caused)
    assert set(caused) == NAMES


def test_shortened_rules_change_only_times() -> None:
    text = "rate(x:rate5m[5m]) > 0.1 offset 1h\n  for: 10m\n  3600 # seconds\n  > 500\n"
    assert shortened(text, 60) == (
        "rate(x:rate5m[5000ms]) > 0.1 offset 60000ms\n  for: 10000ms\n  60 # seconds\n  > 500\n"
    )
    alerts = shortened((RULES / "alerts.yml").read_text(), 60)
    assert not re.search(r"(\[|for: )\d+[smh]\b", alerts)
    assert alerts.count("ms") > len(ALERTS)


@pytest.mark.skipif(shutil.which("promtool") is None, reason=f"promtool is missing: {INSTALL}")
def test_shortened_rules_are_valid(tmp_path: Path) -> None:
    LocalPrometheus(tmp_path, {"rollout-server": ["127.0.0.1:1"]}, 0.5, 60)
    command = ["promtool", "check", "config", str(tmp_path / "prometheus.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
