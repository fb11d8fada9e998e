"""``python -m benchmarks.ray_fleet``: two real vLLM servers that Ray places lose one and heal.

Everything is a process and starts with the command of docs/deployment.md. One server is killed with
its engine, the other one answers requests all the while.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from benchmarks.harness import Target, finish, options, say, table
from draft_trainer.cli.main import main as draft_trainer
from draft_trainer.releases.registry import Registry
from examples.arithmetic_grpo.processes import Service, free_port
from examples.arithmetic_grpo.sampling import held_out_problems, prompt_ids
from tests.deploy.fleet import second_release, served

SERVERS = 2
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


def main(argv: list[str] | None = None) -> int:
    """Command line entry; the exit status is 0 only if every target is met."""
    parser = options("ray_fleet", "Two real vLLM servers that Ray places lose one and recover.")
    parser.add_argument("--submit", action="store_true", help="by `ray job submit` (ray[default])")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds, of every wait")
    parser.add_argument("--keep", type=Path, help="folder of the logs")
    chosen = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (chosen.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        figures, targets = _run(chosen, folder)
    rows = [[name, f"{value:.1f}"] for name, value in figures["seconds"].items()]
    print(table("", ["", "s"], rows))
    print(f"requests to the other one meanwhile: {figures['requests']}, {figures['failed']} failed")
    settings = {"submit": chosen.submit, "servers": SERVERS}
    return finish(chosen.json, {"settings": settings} | figures, targets)


def _run(chosen: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], list[Target]]:
    ports = Ports()
    seconds: dict[str, float] = {}
    wanted = second_release(Registry(folder / "registry"), EXAMPLE / "draft")
    ray, driver = head(folder, ports, chosen.submit), fleet(folder, ports, SERVERS, chosen.submit)
    sidecar, members = trainer(folder, ports), folder / "fleet"
    both = [f"127.0.0.1:{ports.control + index}" for index in range(SERVERS)]

    def until(name: str, what: Callable[[], bool]) -> None:
        began = time.monotonic()
        while not what():
            for service in running:
                service.check()
            if time.monotonic() - began > chosen.patience:
                raise SystemExit(f"not within {chosen.patience} s: {name}; logs in {folder}")
            time.sleep(0.2)
        seconds[name] = time.monotonic() - began
        say(f"{name}: {seconds[name]:.1f} s")

    running: list[Service] = []
    try:
        ray.start()
        running.append(ray)
        until("Ray starts", lambda: _ray_answers(ports, chosen.submit))
        driver.start()
        running.append(driver)
        until(
            f"{SERVERS} servers start, placed by Ray",
            lambda: members.exists() and members.read_text().split() == both,
        )
        sidecar.start()
        running.append(sidecar)
        sidecar.wait_ready(chosen.patience)
        began = time.monotonic()
        draft_trainer(["releases", "promote", "1", "--address", sidecar.health])
        seconds["a release goes live on the fleet"] = time.monotonic() - began
        published = [served(address) for address in both] == [wanted] * SERVERS
        old = _pids(ports.control)
        with Requests(f"http://127.0.0.1:{ports.http + 1}") as requests:
            for pid in old:
                os.kill(pid, signal.SIGKILL)
            until(
                "the fleet knows that one is gone", lambda: members.read_text().split() == both[1:]
            )
            until("Ray has started it again", lambda: members.read_text().split() == both)
            until("it serves the fleet's release", lambda: served(both[0]) == wanted)
        healed = [served(address) for address in both] == [wanted] * SERVERS
        new = _pids(ports.control)
        if chosen.submit:
            subprocess.run(
                [*RAY, "job", "stop", "--address", dashboard_url(ports), JOB],
                check=True,
                env=os.environ | ENV,
            )
        else:
            driver.stop(60)
        running.remove(driver)
        until("no server is left", lambda: not _pids(ports.control) + _pids(ports.control + 1))
    finally:
        for service in (sidecar, driver, ray):
            service.stop(60)
    values = {
        "both servers serve the release that was published": published,
        "the killed one serves it again": healed and bool(new) and not {*old} & {*new},
        "the other one answered every request": requests.done > 0 and not requests.failed,
        "the fleet's end leaves no process": True,
    }
    targets = [Target.at_least(name, float(value), 1.0) for name, value in values.items()]
    figures = {"seconds": seconds, "requests": requests.done, "failed": requests.failed}
    return figures, targets


def _ray_answers(ports: Ports, dashboard: bool) -> bool:
    argv = [*RAY, "health-check", "--address", f"127.0.0.1:{ports.gcs}"]
    if subprocess.run(argv, capture_output=True, check=False, env=os.environ | ENV).returncode:
        return False
    try:
        return not dashboard or httpx.get(f"{dashboard_url(ports)}/api/version").is_success
    except httpx.TransportError:
        return False


def _pids(control_port: int) -> list[int]:
    """The API server of one replica and the engine that it started."""
    parents: dict[int, int] = {}
    roots: list[int] = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode().split("\0")
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it ended meanwhile
        parents[int(entry.name)] = parent
        if (
            str(control_port) in words
            and "rollout_server.ray_fleet" not in words
            and "serve" in words
        ):
            roots.append(int(entry.name))
    return [*roots, *(pid for pid, parent in parents.items() if parent in roots)]


class Requests:
    """One completion after the other, on a thread.

    Args:
        url: of the server.
    """

    def __init__(self, url: str) -> None:
        self.done = self.failed = 0
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Requests:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        prompts = [prompt_ids(problem) for problem in held_out_problems(16)]
        with httpx.Client(base_url=self._url, timeout=120) as client:
            while not self._stop.wait(0.2):
                prompt = prompts[self.done % len(prompts)]
                body = {"model": "policy", "prompt": prompt, "max_tokens": 8}
                try:
                    self.failed += not client.post("/v1/completions", json=body).is_success
                except httpx.TransportError:
                    self.failed += 1
                self.done += 1


class Ports:
    """Free ports; consecutive where the fleet counts up."""

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
        f"[server]\nport = {ports.trainer}\nmetrics_port = 0\n"
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


if __name__ == "__main__":
    sys.exit(main())
