"""``python -m benchmarks.ray_fleet``: two real vLLM servers that Ray places; one is killed.

The other one answers requests all the while.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import ray

from benchmarks.harness import Target, finish, options, say, table
from draft_trainer.cli.main import main as draft_trainer
from draft_trainer.releases.registry import Registry
from examples.arithmetic_grpo.processes import Services
from examples.arithmetic_grpo.sampling import held_out_problems, prompt_ids
from examples.local_services import ARITHMETIC
from tests.deploy.fleet import kept, pids, second_release, served, start_ray, trainer_of, wait_for

ENV = {
    "OMP_NUM_THREADS": "1",
    # vLLM would bind the workers of both servers to the same core, where one spins and one starves.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
SERVER = (
    *(sys.executable, "-m", "rollout_server.cli", "serve", str(ARITHMETIC / "policy")),
    *("--draft", str(ARITHMETIC / "draft"), "--served-model-name", "policy"),
    *("--generation-config", "vllm", "--enforce-eager", "--max-model-len", "256"),
    *("--max-num-seqs", "32", "--stage-bytes", str(64 << 20)),
)


def main(argv: list[str] | None = None) -> int:
    """Command line entry; the exit status is 0 only if every target is met."""
    parser = options("ray_fleet", "Two real vLLM servers that Ray places lose one and recover.")
    parser.add_argument("--patience", type=float, default=600.0, help="seconds, of every wait")
    parser.add_argument("--keep", type=Path, help="folder of the logs")
    chosen = parser.parse_args(argv)
    os.environ |= ENV
    start_ray()
    try:
        with tempfile.TemporaryDirectory() as temporary:
            folder = (chosen.keep or Path(temporary)).resolve()
            folder.mkdir(parents=True, exist_ok=True)
            figures, targets = _run(chosen.patience, folder)
    finally:
        ray.shutdown()
    rows = [[name, f"{value:.1f}"] for name, value in figures["seconds"].items()]
    print(table("", ["", "s"], rows))
    print(f"requests to the other one meanwhile: {figures['requests']}, {figures['failed']} failed")
    return finish(chosen.json, figures, targets)


def _run(patience: float, folder: Path) -> tuple[dict[str, Any], list[Target]]:
    seconds: dict[str, float] = {}

    def until(name: str, what: Callable[[], bool]) -> None:
        seconds[name] = wait_for(what, patience)
        say(f"{name}: {seconds[name]:.1f} s")

    wanted = second_release(Registry(folder / "registry"), ARITHMETIC / "draft")
    trainer = trainer_of(folder, ARITHMETIC / "draft")
    with kept(folder, SERVER) as fleet, Services(trainer):
        both = [f"127.0.0.1:{port}" for port in fleet.controls]
        until("two servers start, placed by Ray", lambda: fleet.addresses() == both)
        trainer.wait_ready(patience)
        draft_trainer(["releases", "promote", "1", "--address", trainer.health])
        until("a release is live on both", lambda: [*map(served, both)] == [wanted] * 2)
        old = pids(fleet.controls[0])
        with Requests(f"http://127.0.0.1:{fleet.plan.first_port + 1}") as requests:
            os.kill(old["server"], signal.SIGKILL)
            until("the fleet knows that one is gone", lambda: fleet.addresses() == both[1:])
            until("Ray has started it again", lambda: fleet.addresses() == both)
            until("it serves the fleet's release", lambda: served(both[0]) == wanted)
        new = pids(fleet.controls[0])
    until("no server is left", lambda: not any(map(pids, fleet.controls)))
    values = {
        "the killed one serves the release again": not {*old.values()} & {*new.values()},
        "the other one answered every request": requests.done > 0 and not requests.failed,
    }
    targets = [Target.at_least(name, float(value), 1.0) for name, value in values.items()]
    return {"seconds": seconds, "requests": requests.done, "failed": requests.failed}, targets


class Requests:
    """One completion after the other to the server at ``url``, on a thread."""

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
