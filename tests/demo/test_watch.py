"""``--watch`` prints addresses; the demo itself is not run."""

from __future__ import annotations

import shutil
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from examples.arithmetic_grpo.watch import ACCEPTANCE, addresses, prometheus_beside
from examples.local_prometheus import INSTALL

PORTS = {"http": 8000, "metrics": 9464, "bridge": 9465}


def log(folder: Path, *more: str) -> Path:
    """A trainer's log, of one that was started twice."""
    path = folder / "log"
    ready = ("draft-trainer ready: grpc=127.0.0.1:1 metrics=http://127.0.0.1:2/metrics", *more)
    path.write_text(f"noise\ndraft-trainer ready: grpc=old metrics=old\n{' '.join(ready)}\nnoise\n")
    return path


@pytest.mark.skipif(shutil.which("prometheus") is None, reason=f"prometheus is missing: {INSTALL}")
def test_watch_with_prometheus_prints_addresses(tmp_path: Path) -> None:
    prometheus = prometheus_beside(tmp_path, PORTS)
    assert prometheus is not None
    config = (tmp_path / "prometheus" / "prometheus.yml").read_text()
    assert all(f"127.0.0.1:{port}" in config for port in PORTS.values())
    found = addresses(log(tmp_path, "web=http://127.0.0.1:2/"), prometheus)
    assert list(found) == ["web page", "acceptance", "alerts", "metrics"]
    assert found["web page"] == "http://127.0.0.1:2/"
    asked = parse_qs(urlsplit(found["acceptance"]).query)
    assert asked["g0.expr"] == [ACCEPTANCE]
    assert found["acceptance"].startswith(prometheus.url)
