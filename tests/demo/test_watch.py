"""``--watch`` prints addresses and serves metrics; the demo itself is not run."""

from __future__ import annotations

import shutil
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest

from examples.arithmetic_grpo.processes import free_port
from examples.arithmetic_grpo.watch import ACCEPTANCE, addresses, prometheus_beside, served
from examples.local_prometheus import INSTALL
from policy_bridge import PolicyBridge

PORTS = {"http": 8000, "metrics": 9464, "bridge": 9465}


def log(folder: Path, *more: str) -> Path:
    """A trainer's log, of one that was started twice."""
    path = folder / "log"
    ready = ("draft-trainer ready: grpc=127.0.0.1:1 metrics=http://127.0.0.1:2/metrics", *more)
    path.write_text(f"noise\ndraft-trainer ready: grpc=old metrics=old\n{' '.join(ready)}\nnoise\n")
    return path


def test_watch_without_prometheus_says_how_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert prometheus_beside(tmp_path, PORTS) is None
    assert INSTALL in capsys.readouterr().out
    assert addresses(log(tmp_path), None) == {"metrics": "http://127.0.0.1:2/metrics"}


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


def test_watch_serves_bridge_metrics_during_run() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}/metrics"
    with served(PolicyBridge.disabled(), port):
        assert "slipstream_bridge_shed_samples_total" in httpx.get(url, timeout=10).text
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, timeout=10)
    with served(PolicyBridge.disabled(), None):
        pass
