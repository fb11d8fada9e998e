"""compose.yml: read by Compose itself where there is one, and in agreement with the programs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from draft_trainer.config_file import load_config
from examples.torch_loop.options import build_parser
from policy_bridge.config import BridgeConfig
from policy_bridge.outbox import file_bytes
from tests.deploy.manifests import DEPLOY, ROOT, port_of, size

FOLDER = DEPLOY / "compose"
COMPOSE = yaml.safe_load((FOLDER / "compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = ("draft-trainer", "rollout-0", "rollout-1", "policy")


def compose(*arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Docker's plug-in, or Debian's program."""
    for program in (["docker", "compose"], ["docker-compose"]):
        found = shutil.which(program[0])
        if found and not subprocess.run([*program, "version"], capture_output=True).returncode:
            return subprocess.run(
                [*program, "-f", str(FOLDER / "compose.yml"), *arguments],
                capture_output=True,
                text=True,
                check=False,
                timeout=120,
                env={**os.environ, **env},
            )
    pytest.skip("no Compose here: apt-get install docker-compose")


def test_compose_file_is_valid() -> None:
    arguments = ("--profile", "demo", "config")
    done = compose(*arguments, env={"GRAFANA_PASSWORD": "chosen"})
    assert done.returncode == 0, done.stderr
    read = yaml.safe_load(done.stdout)
    assert read["services"].keys() == SERVICES.keys()
    assert read["services"]["grafana"]["environment"]["GF_SECURITY_ADMIN_PASSWORD"] == "chosen"
    done = compose(*arguments, env={"GRAFANA_PASSWORD": ""})
    assert done.returncode != 0 and "choose one" in done.stderr


def test_compose_trainer_and_policy_find_servers() -> None:
    config = load_config(FOLDER / "trainer.toml")
    hosts = [address.partition(":")[0] for address in config.publish.rollout_servers]
    assert hosts == ["rollout-0", "rollout-1"]
    assert {port_of(address) for address in config.publish.rollout_servers} == {50061}
    options = build_parser().parse_args(SERVICES["policy"]["command"][3:])
    assert options.trainer == f"draft-trainer:{config.server.port}"
    assert options.servers == ",".join(f"http://{host}:8000" for host in hosts)
    assert options.shared_memory == config.server.shared_memory
    assert (
        f"--draft-length={config.publish.num_speculative_tokens}"
        in SERVICES["rollout-0"]["command"]
    )
    mounted = [volume.split(":")[1] for volume in SERVICES["draft-trainer"]["volumes"]]
    assert {str(config.draft.initial), str(config.draft.registry.parent)} <= {*mounted}


def test_compose_shared_memory_fits_the_bridge() -> None:
    config = load_config(FOLDER / "trainer.toml").server
    options = COMPOSE["volumes"]["ring"]["driver_opts"]
    assert options["type"] == "tmpfs"
    values = dict(part.split("=") for part in options["o"].split(","))
    # The file of one bridge, and what it holds in the one before while it moves there.
    outbox = BridgeConfig("trainer:1", "run").bounds("cpu")[1]
    assert size(values["size"]) >= file_bytes(outbox) + outbox
    assert values["uid"] == "10001" and values["mode"] == "0700"
    for name in ("policy", "draft-trainer"):
        assert f"ring:{config.shared_memory}" in SERVICES[name]["volumes"]
        limit = SERVICES[name]["deploy"]["resources"]["limits"]["memory"]
        assert size(limit) > size(values["size"])


def test_compose_prometheus_targets_and_rules() -> None:
    read = yaml.safe_load((FOLDER / "prometheus.yml").read_text())
    targets = {
        job["job_name"]: job["static_configs"][0]["targets"] for job in read["scrape_configs"]
    }
    metrics_port = load_config(FOLDER / "trainer.toml").server.metrics_port
    assert targets == {
        "draft-trainer": [f"draft-trainer:{metrics_port}"],
        "rollout-server": ["rollout-0:8000", "rollout-1:8000"],
    }
    assert all((DEPLOY / "prometheus" / rule).name for rule in read["rule_files"])
    assert {Path(rule).parent.name for rule in read["rule_files"]} == {"rules"}
    assert "../prometheus:/etc/prometheus/rules:ro" in SERVICES["prometheus"]["volumes"]


def test_compose_mounted_files_exist() -> None:
    for service in SERVICES.values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            if source.startswith("."):
                # Prometheus' and Grafana's files are whole folders of deploy/, or not there at all.
                part = next(p for p in Path(source).parts if p != "..")
                if source.startswith(("../../", "./")) or (DEPLOY / part).exists():
                    assert (FOLDER / source).exists(), source
            else:
                assert source in COMPOSE["volumes"], source


def test_compose_services_ordered_and_bounded() -> None:
    for name, service in SERVICES.items():
        limits = service["deploy"]["resources"]["limits"]
        assert {"cpus", "memory"} <= limits.keys()
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        assert "slipstream" in service["networks"]
        assert name == "grafana" or "ports" not in service
        assert {*service.get("depends_on", ())} <= SERVICES.keys()
    assert COMPOSE["networks"]["slipstream"] == {"internal": True}
    # Nobody but this machine sees what is published.
    assert all(p.startswith("127.0.0.1:") for p in SERVICES["grafana"]["ports"])
    waits = SERVICES["policy"]["depends_on"]
    assert {*waits} == {"draft-trainer", "rollout-0", "rollout-1"}
    assert {wait["condition"] for wait in waits.values()} == {"service_healthy"}
    dockerfile = (ROOT / SERVICES["policy"]["build"]["dockerfile"]).read_text()
    for name in OURS:
        build = SERVICES[name]["build"]
        assert (FOLDER / build["context"]).resolve() == ROOT
        assert f" AS {build['target']}\n" in dockerfile
    assert json.dumps(COMPOSE).count("latest") == 0
