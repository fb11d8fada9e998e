"""The dashboard is what its generator makes, and nothing in it is covered or empty."""

from __future__ import annotations

import json
import re

import yaml

from deploy.grafana.make_dashboard import dashboard
from tests.deploy.expressions import DASHBOARD, ROOT

GRAFANA = ROOT / "deploy" / "grafana"


def test_dashboard_file_is_current() -> None:
    made = json.dumps(dashboard(), indent=1) + "\n"
    assert DASHBOARD.read_text() == made, "run python deploy/grafana/make_dashboard.py"


def test_dashboard_panels_have_queries_and_no_overlap() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) > 30
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        assert (panel["type"] == "row") != bool(panel.get("targets")), panel["title"]
        references = [target["refId"] for target in panel.get("targets", ())]
        assert len(set(references)) == len(references), panel["title"]


def test_dashboard_variables_are_defined() -> None:
    listed = json.loads(DASHBOARD.read_text())["templating"]["list"]
    defined = {variable["name"] for variable in listed}
    used = re.findall(r"\$\{?(\w+)", DASHBOARD.read_text())
    assert set(used) - {"__rate_interval", "__all"} == defined


def test_grafana_provisioning() -> None:
    provisioning = GRAFANA / "provisioning"
    datasources = yaml.safe_load((provisioning / "datasources" / "prometheus.yml").read_text())
    assert datasources["datasources"][0]["type"] == "prometheus"
    providers = yaml.safe_load((provisioning / "dashboards" / "slipstream.yml").read_text())
    assert providers["providers"][0]["options"]["path"].startswith("/var/lib/grafana/")
