"""An actor reports a start that fails; no cluster is needed."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollout_server.ray.fleet import FleetPlan, Replica
from slipstream.serving.identity import ClientCredentials
from tests.deploy.fleet import free_ports, pids, wait_for

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'slipstream-rl[ray]'")


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FleetPlan:
    """A fleet of one server, whose actor is started for the first time."""
    first_start = SimpleNamespace(was_current_actor_reconstructed=False)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: first_start)
    port = free_ports(2)
    command = (sys.executable, "-c", "import time; time.sleep(60)")
    return FleetPlan(command, 1, tmp_path / "fleet", 1.0, 0.0, port, port + 1, host="127.0.0.1")


def test_replica_without_ca_file_is_refused(
    plan: FleetPlan, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    credentials = ClientCredentials(ca=tmp_path / "absent.pem")
    replica = Replica(replace(plan, credentials=credentials), 0)
    wait_for(lambda: replica.report().refused, 60)
    assert "absent.pem" in capfd.readouterr().err
    assert not pids(plan.first_control_port), "no server that nothing watches"
