"""``python -m benchmarks.ray_fleet``: two real vLLM servers that Ray places lose one and heal.

Everything is a process and starts with the command of docs/deployment.md. One server is killed with
its engine, the other one answers requests all the while.
"""

from __future__ import annotations

import argparse
import json
import os
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

from benchmarks.harness import Target, machine, target_table
from benchmarks.ray_fleet.processes import (
    ENV,
    EXAMPLE,
    JOB,
    RAY,
    Ports,
    dashboard_url,
    fleet,
    head,
    trainer,
)
from draft_trainer.cli.main import main as draft_trainer
from draft_trainer.releases.registry import Registry
from examples.arithmetic_grpo.processes import Service
from examples.arithmetic_grpo.sampling import held_out_problems, prompt_ids
from tests.deploy.fleet import second_release, served

SERVERS = 2


def main(argv: list[str] | None = None) -> int:
    """Run it; the exit status is 0 only if every target was met."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ray_fleet")
    parser.add_argument("--submit", action="store_true", help="by `ray job submit` (ray[default])")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds, of every wait")
    parser.add_argument("--keep", type=Path, help="folder of the logs")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        found = _run(options, folder)
    for name, value in found["seconds"].items():
        print(f"{name:<44}{value:>8.1f} s")
    print(f"requests to the other one meanwhile: {found['requests']}, {found['failed']} failed")
    print("\n" + target_table([Target(**target) for target in found["targets"]]))
    if options.json is not None:
        settings = {"submit": options.submit, "servers": SERVERS}
        everything = {"machine": machine(), "settings": settings} | found
        options.json.write_text(json.dumps(everything, indent=1) + "\n")
    return 0 if all(target["ok"] for target in found["targets"]) else 1


def _run(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    ports = Ports()
    seconds: dict[str, float] = {}
    wanted = second_release(Registry(folder / "registry"), EXAMPLE / "draft")
    ray, driver = head(folder, ports, options.submit), fleet(folder, ports, SERVERS, options.submit)
    sidecar, members = trainer(folder, ports), folder / "fleet"
    both = [f"127.0.0.1:{ports.control + index}" for index in range(SERVERS)]

    def until(name: str, what: Callable[[], bool]) -> None:
        began = time.monotonic()
        while not what():
            for service in running:
                service.check()
            if time.monotonic() - began > options.patience:
                raise SystemExit(f"not within {options.patience} s: {name}; logs in {folder}")
            time.sleep(0.2)
        seconds[name] = time.monotonic() - began
        print(f"{name}: {seconds[name]:.1f} s", file=sys.stderr, flush=True)

    running: list[Service] = []
    try:
        ray.start()
        running.append(ray)
        until("Ray starts", lambda: _ray_answers(ports, options.submit))
        driver.start()
        running.append(driver)
        until(
            f"{SERVERS} servers start, placed by Ray",
            lambda: members.exists() and members.read_text().split() == both,
        )
        sidecar.start()
        running.append(sidecar)
        sidecar.wait_ready(options.patience)
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
        if options.submit:
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
    targets = [
        {"name": name, "value": float(value), "bound": "1", "ok": bool(value)}
        for name, value in values.items()
    ]
    return {
        "seconds": seconds,
        "requests": requests.done,
        "failed": requests.failed,
        "targets": targets,
    }


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


if __name__ == "__main__":
    sys.exit(main())
