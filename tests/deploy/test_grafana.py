"""The dashboard is what its generator makes."""

from __future__ import annotations

import json
import re

from deploy.grafana.make_dashboard import dashboard
from tests.deploy.expressions import DASHBOARD


def test_dashboard_file_is_current() -> None:
    made = json.dumps(dashboard(), indent=1) + "\n"
    assert DASHBOARD.read_text() == made, "run python deploy/grafana/make_dashboard.py"


def test_dashboard_variables_are_defined() -> None:
    listed = json.loads(DASHBOARD.read_text())["templating"]["list"]
    defined = {variable["name"] for variable in listed}
    used = re.findall(r"\$\{?(\w+)", DASHBOARD.read_text())
    assert set(used) - {"__rate_interval", "__all"} == defined
