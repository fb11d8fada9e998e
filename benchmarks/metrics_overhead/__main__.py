"""``python -m benchmarks.metrics_overhead``: one real rollout server, measuring and not."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import httpx

from benchmarks.draft_training.report import Target, machine, target_table
from benchmarks.hot_swap.servers import MODEL
from benchmarks.metrics_overhead.direct import Pieces, clock_seconds, direct_figures, direct_table
from benchmarks.metrics_overhead.figures import OFF, ON, Round, figures, table
from benchmarks.metrics_overhead.load import SteadyLoad
from benchmarks.metrics_overhead.server import ROUTE
from examples.arithmetic_grpo.processes import Service, Services, free_port
from examples.arithmetic_grpo.sampling import held_out_problems, prompt_ids

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "arithmetic_grpo"
READY_SECONDS = 400.0
DRAFT_LENGTH = 3
PROMPTS = 192
COMPLETION_TOKENS = 200
SLICE_SECONDS = 1.0
"""An arm's turn, with one scrape in it: shorter than what makes a shared machine fast or slow."""

CORE = min(os.sched_getaffinity(0))
"""Of all the server's processes: vLLM's engine core spins, and where the kernel put it, beside the
worker or not, windows differed by a factor of five. What metrics take on one core is throughput."""


@dataclass(frozen=True)
class Done:
    """What the server has done, or did in a slice."""

    seconds: float
    tokens: float
    drafts: float

    def rates(self) -> dict[str, float]:
        """Per second."""
        return {"drafts": self.drafts / self.seconds, "tokens": self.tokens / self.seconds}

    def __add__(self, more: Done) -> Done:
        return Done(
            self.seconds + more.seconds, self.tokens + more.tokens, self.drafts + more.drafts
        )

    def __sub__(self, less: Done) -> Done:
        return self + Done(-less.seconds, -less.tokens, -less.drafts)


@dataclass(frozen=True)
class Turned:
    """Before measuring was turned, and after."""

    before: Done
    after: Done


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
        self._client = httpx.Client(base_url=self.http, timeout=30)
        self.service = Service("rollout-server", argv, log, f"127.0.0.1:{control}", env)

    def pieces(self, seconds: float, requests: int) -> Pieces:
        """What measuring took during the windows with it.

        Args:
            seconds: that those windows lasted.
            requests: in flight during them.
        """
        answer = self._client.get(ROUTE)
        answer.raise_for_status()
        spent = answer.json()
        return Pieces(
            step=seconds / spent["record_calls"],
            clock=clock_seconds(requests, DRAFT_LENGTH),
            record=spent["record_seconds"] / spent["record_calls"],
            exposition=spent["exposition_seconds"],
            scrape_every=SLICE_SECONDS,
        )

    def turn(self, on: bool) -> Turned:
        """Turn measuring off or on; it is when this returns."""
        answer = self._client.post(ROUTE, params={"on": int(on)})
        answer.raise_for_status()
        turned = answer.json()
        return Turned(Done(**turned["before"]), Done(**turned["after"]))

    def scrape(self) -> None:
        """As Prometheus does."""
        self._client.get("/metrics").raise_for_status()


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
    prompts = [prompt_ids(problem) for problem in held_out_problems(PROMPTS)]
    _say("starting a rollout server")
    server = Measured(folder / "rollout-server.log")
    with Services(server.service):
        server.service.wait_ready(READY_SECONDS)
        with SteadyLoad(server.http, prompts, options.in_flight, COMPLETION_TOKENS) as load:
            _say(f"{options.in_flight} requests in flight; {options.warmup:g} s of warm-up")
            # Measuring: what a plain step costs is found out now, and not in a slice.
            time.sleep(options.warmup)
            # In the first turn the benchmark puts its own counting in place.
            server.turn(on=True)
            rounds: list[Round] = []
            measured = 0.0
            began = server.turn(on=False).after
            before, began = _slice(server, began, then=ON)
            for number in range(options.rounds):
                measuring, began = _slice(server, began, then=OFF)
                after, began = _slice(server, began, then=ON)
                load.check()
                rounds.append({OFF: (before + after).rates(), ON: measuring.rates()})
                measured += measuring.seconds
                before = after
                if number % 20 == 19:
                    _say(f"round {number + 1}: " + _brief(rounds[-1]))
            return rounds, server.pieces(measured, options.in_flight)


def _slice(server: Measured, began: Done, then: str) -> tuple[Done, Done]:
    """What was done in it, and what had been done when the next one began.

    Slices alternate, so that each of them follows a turn: what turning sets off, in the engine or
    in the caches, is the same in both arms. In an order of off, on, on, off the rounds that began
    with measuring showed it six percent slower, and the others did not.
    """
    time.sleep(SLICE_SECONDS / 2)
    server.scrape()
    time.sleep(SLICE_SECONDS / 2)
    turned = server.turn(then == ON)
    return turned.before - began, turned.after


def _brief(one: Round) -> str:
    return ", ".join(f"{arm} {rates['drafts']:.0f} drafts/s" for arm, rates in one.items())


def _say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.metrics_overhead",
        description="One real vLLM server of the arithmetic example's policy under a steady load "
        "of long completions, in slices of a second with one scrape of /metrics each: with vLLM's "
        "own metrics, and with Slipstream's and its step timing beside them. Progress goes to "
        "stderr, the table to stdout.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--rounds", type=int, default=450, help="of a slice for each arm, 2 s")
    add("--in-flight", type=int, default=32, help="requests at a time")
    add("--warmup", type=float, default=30.0, help="seconds of load before the first round")
    add("--keep", type=Path, metavar="DIR", help="folder for the server's log")
    add("--json", type=Path, help="write figures and targets there")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
