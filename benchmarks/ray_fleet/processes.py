"""Ray's head, the fleet's driver and the draft trainer, as somebody types them."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path

from examples.arithmetic_grpo.processes import Service, free_port

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "arithmetic_grpo"
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
JOB = "slipstream-fleet"
ENV = {
    "OMP_NUM_THREADS": "1",
    # vLLM would bind the workers of both servers to the same core, where one spins and one starves.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    # From 2.60 on a cluster asks for one.
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),
    "PYTHONPATH": os.pathsep.join(
        [str(ROOT), str(ROOT / "proto"), *filter(None, [os.environ.get("PYTHONPATH")])]
    ),
}


class Ports:
    """Free ones; consecutive where the fleet counts up."""

    def __init__(self) -> None:
        self.gcs, self.trainer, self.dashboard = free_port(), free_port(), free_port()
        first = free_port()
        self.http, self.control = first, first + 8


def head(folder: Path, ports: Ports, dashboard: bool) -> Service:
    """A cluster of this machine alone, on loopback."""
    argv = [*RAY, "start", "--head", "--block", "--node-ip-address=127.0.0.1"]
    argv += [f"--port={ports.gcs}", "--num-cpus=2", f"--object-store-memory={80 << 20}"]
    argv += [f"--include-dashboard={str(dashboard).lower()}"]
    argv += [f"--dashboard-port={ports.dashboard}"]
    return Service("ray", argv, folder / "ray.log", "", ENV)


def fleet(folder: Path, ports: Ports, servers: int, submit: bool) -> Service:
    """``rollout-server fleet``; submitted as a job of the cluster, or typed on its node."""
    argv = [sys.executable, "-m", "rollout_server.cli", "fleet", "--replicas", str(servers)]
    argv += ["--members", str(folder / "fleet"), "--host", "127.0.0.1"]
    argv += ["--first-port", str(ports.http), "--first-control-port", str(ports.control)]
    argv += [str(EXAMPLE / "policy"), "--draft", str(EXAMPLE / "draft"), "--draft-length", "3"]
    argv += ["--served-model-name", "policy", "--generation-config", "vllm", "--enforce-eager"]
    argv += ["--max-model-len", "256", "--max-num-seqs", "32", "--stage-bytes", str(64 << 20)]
    if submit:
        job = [*RAY, "job", "submit", "--address", dashboard_url(ports), "--submission-id", JOB]
        argv = [*job, "--", *argv]
    address = {} if submit else {"RAY_ADDRESS": f"127.0.0.1:{ports.gcs}"}
    return Service("fleet", argv, folder / "fleet.log", "", ENV | address)


def dashboard_url(ports: Ports) -> str:
    """Where jobs are submitted to."""
    return f"http://127.0.0.1:{ports.dashboard}"


def trainer(folder: Path, ports: Ports) -> Service:
    """A draft trainer that finds the fleet in its file."""
    config = folder / "trainer.toml"
    config.write_text(
        f"[server]\nport = {ports.trainer}\nmetrics_port = 0\nring_bytes = 65536\n"
        f'[draft]\ninitial = "{EXAMPLE / "draft"}"\nregistry = "registry"\n'
        "[replay]\ncapacity_bytes = 1048576\n"
        '[publish]\nrollout_servers = ["file:fleet"]\n'
    )
    script = Path(sys.executable).parent / "draft-trainer"
    return Service(
        "draft-trainer",
        [str(script), "serve", "--config", str(config)],
        folder / "trainer.log",
        f"127.0.0.1:{ports.trainer}",
        ENV,
    )
