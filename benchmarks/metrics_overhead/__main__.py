"""``python -m benchmarks.metrics_overhead``: one real rollout server, measuring and not."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from benchmarks.draft_training.report import Target, machine, target_table
from benchmarks.hot_swap.load import complete_all
from benchmarks.hot_swap.servers import MODEL
from benchmarks.metrics_overhead.direct import Pieces, clock_seconds, direct_figures, direct_table
from benchmarks.metrics_overhead.figures import ARMS, OFF, Round, figures, table
from benchmarks.metrics_overhead.server import ROUTE
from examples.arithmetic_grpo.processes import Service, Services, free_port
from examples.arithmetic_grpo.sampling import held_out_problems, prompt_ids

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "arithmetic_grpo"
READY_SECONDS = 400.0
DRAFT_LENGTH = 3
SCRAPE_SECONDS = 1.0
CORE = min(os.sched_getaffinity(0))
"""Of all the server's processes: vLLM's engine core spins, and where the kernel put it, beside the
worker or not, windows differed by a factor of five. What metrics take on one core is throughput."""


class Measured:
    """The server.

    Args:
        log: its output.
    """

    def __init__(self, log: Path) -> None:
        port, control = free_port(), free_port()
        argv = [
            *("taskset", "-c", str(CORE)),
            *(sys.executable, "-m", "benchmarks.metrics_overhead.server", "serve"),
            *(str(EXAMPLE / "policy"), "--draft", str(EXAMPLE / "draft"), "--draft-length"),
            str(DRAFT_LENGTH),
            *("--host", "127.0.0.1", "--port", str(port), "--control-port", str(control)),
            *("--served-model-name", MODEL, "--generation-config", "vllm", "--enforce-eager"),
            *("--max-model-len", "256", "--max-num-seqs", "64", "--dtype", "float32"),
        ]
        paths = [str(ROOT), str(ROOT / "proto"), os.environ.get("PYTHONPATH", "")]
        env = {
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": str(CORE),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        }
        self.http = f"http://127.0.0.1:{port}"
        self.service = Service("rollout-server", argv, log, f"127.0.0.1:{control}", env)

    def pieces(self, seconds: float, requests: int) -> Pieces:
        """What measuring took during the windows with it.

        Args:
            seconds: that those windows lasted.
            requests: in flight during them.
        """
        answer = httpx.get(f"{self.http}{ROUTE}", timeout=30)
        answer.raise_for_status()
        spent = answer.json()
        return Pieces(
            step=seconds / spent["record_calls"],
            clock=clock_seconds(requests, DRAFT_LENGTH),
            record=spent["record_seconds"] / spent["record_calls"],
            exposition=spent["exposition_seconds"],
            scrape_every=SCRAPE_SECONDS,
        )

    def measure(self, on: bool) -> None:
        """Turn measuring off or on; it is when this returns."""
        answer = httpx.post(f"{self.http}{ROUTE}", params={"on": int(on)}, timeout=30)
        answer.raise_for_status()

    @contextmanager
    def scraped(self) -> Iterator[None]:
        """A Prometheus in small: the first scrape at once."""
        over = threading.Event()

        def scrape() -> None:
            with httpx.Client(base_url=self.http, timeout=30) as client:
                while not over.is_set():
                    client.get("/metrics").raise_for_status()
                    over.wait(SCRAPE_SECONDS)

        thread = threading.Thread(target=scrape, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join(30)


def main(argv: list[str] | None = None) -> int:
    """Run it; the exit status is 0 only if the target was met."""
    options = _parse(argv)
    os.sched_setaffinity(0, os.sched_getaffinity(0) - {CORE} or {CORE})
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        rounds, pieces = _measure(options, folder)
    found, timed = figures(rounds), direct_figures(pieces)
    print(f"{table(found)}\n\n{direct_table(timed)}")
    found["targets"] += timed.pop("targets")
    found["piece_by_piece"] = timed
    print("\n" + target_table([Target(**target) for target in found["targets"]]))
    if options.json is not None:
        settings = {name: value for name, value in vars(options).items() if name != "json"}
        everything = {"machine": machine(), "settings": settings} | found | {"each_round": rounds}
        options.json.write_text(json.dumps(everything, indent=1, default=str) + "\n")
    return 0 if all(target["ok"] for target in found["targets"]) else 1


def _measure(options: argparse.Namespace, folder: Path) -> tuple[list[Round], Pieces]:
    prompts = [prompt_ids(problem) for problem in held_out_problems(options.requests)]
    _say("starting a rollout server")
    server = Measured(folder / "rollout-server.log")
    with Services(server.service):
        server.service.wait_ready(READY_SECONDS)
        for _ in range(options.warmup):
            complete_all(server.http, prompts, options.in_flight)
        rounds = []
        measured = 0.0
        for number in range(options.rounds):
            rates, seconds = _round(server, prompts, options.in_flight, number)
            rounds.append(rates)
            measured += seconds
            _say(f"round {number + 1}: " + ", ".join(f"{rate:.0f}" for rate in rounds[-1].values()))
        return rounds, server.pieces(measured, options.in_flight)


def _round(
    server: Measured, prompts: Sequence[Sequence[int]], in_flight: int, number: int
) -> tuple[Round, float]:
    """The same greedy requests in each arm; whose turn comes first changes from round to round.

    Returns:
        Tokens per second of each arm, and the seconds of those with measuring.
    """
    rates, measured = {}, 0.0
    for arm in ARMS if number % 2 == 0 else reversed(ARMS):
        server.measure(arm != OFF)
        with server.scraped():
            began = time.perf_counter()
            completions = complete_all(server.http, prompts, in_flight)
            seconds = time.perf_counter() - began
        measured += seconds if arm != OFF else 0.0
        rates[arm] = sum(map(len, completions)) / seconds
    return {arm: rates[arm] for arm in ARMS}, measured


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.metrics_overhead",
        description="One real vLLM server of the arithmetic example's policy answers the same "
        "greedy requests over and over while /metrics is scraped every second: with vLLM's own "
        "metrics, and with Slipstream's and its step timing beside them. Progress goes to stderr, "
        "the table to stdout.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--rounds", type=int, default=80, help="of a window for each arm")
    add("--requests", type=int, default=192, help="in a window")
    add("--in-flight", type=int, default=32, help="requests at a time")
    add("--warmup", type=int, default=3, help="windows before the first round")
    add("--keep", type=Path, metavar="DIR", help="folder for the server's log")
    add("--json", type=Path, help="write figures and targets there")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
