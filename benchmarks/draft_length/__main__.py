"""``python -m benchmarks.draft_length``: is ``--speculation auto`` ever slower than a fixed one?

One rollout server for each arm: no speculation, fixed lengths 1 to 3, automatic. All run on the
same core and take turns, so a ratio within a round is of wall seconds that nothing else shares.
Every server is swapped to the same draft: the trained one, and the same with noise in its
matrices. The load is so many requests at once of the arithmetic task, at temperature 1, to their
natural end; "tail" is one step's rollouts with lognormal lengths, of which fewer and fewer run.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import httpx
import torch
from safetensors.torch import load_file

from benchmarks.harness import (
    Target,
    end_on_sigterm,
    finish,
    interleaved,
    options,
    ratios,
    say,
    spread_text,
    table,
)
from examples.arithmetic_grpo.sampling import prompt_ids
from examples.arithmetic_grpo.task import sample_problem
from examples.local_services import ARITHMETIC, RolloutServer

OFF, AUTO = "none", "auto"
LENGTHS = (1, 2, 3)
NOISE = {"fresh": 0.0, "drifted": 0.8, "ruined": 1.2}
"""Standard deviations of noise on each matrix of the draft, in its own."""

TAIL = "tail"
TAIL_REQUESTS = 64
MAX_TOKENS = 96
CORE = 0
SETTLE_SECONDS = 8.0
"""The load before a cell is measured: what an automatic arm has to learn in a minute-long step."""
REST_SECONDS = 1.5
"""The rest before each arm: for a second after its last step the worker of another arm's server
spins on the core that all of them share (``SpinCondition`` of vLLM's ``shm_broadcast``)."""


def noisy(draft: Path, share: float) -> dict[str, torch.Tensor]:
    """The draft's tensors with noise on its matrices."""
    generator = torch.Generator().manual_seed(0)
    tensors = load_file(draft / "model.safetensors")
    return {
        name: (t + share * t.float().std() * torch.randn(t.shape, generator=generator)).to(t.dtype)
        if t.ndim == 2 and t.is_floating_point()
        else t
        for name, t in tensors.items()
    }


class Load:
    """Requests of one cell; every arm serves the same ones."""

    def __init__(self, cell: str, seed: int) -> None:
        rng = random.Random(seed)
        self.count = TAIL_REQUESTS if cell == TAIL else int(cell)
        self._prompts = [prompt_ids(sample_problem(rng)) for _ in range(max(self.count, 8))]
        lengths = [max(4, min(200, int(24 * rng.lognormvariate(0, 0.9)))) for _ in self._prompts]
        self._lengths = lengths if cell == TAIL else None

    async def run(self, http: str) -> float:
        """Tokens a second."""
        async with client_of(http, self.count) as client:

            async def one(number: int) -> int:
                length = self._lengths[number] if self._lengths else None
                return await complete(client, self._prompts[number], length)

            began, tokens = time.perf_counter(), 0
            for start in range(0, len(self._prompts), self.count):
                batch = range(start, min(start + self.count, len(self._prompts)))
                tokens += sum(await asyncio.gather(*map(one, batch)))
            return tokens / (time.perf_counter() - began)


def client_of(http: str, requests: int) -> httpx.AsyncClient:
    """Make a client for so many requests at once."""
    limits = httpx.Limits(max_connections=requests)
    return httpx.AsyncClient(base_url=http, timeout=300, limits=limits)


async def complete(client: httpx.AsyncClient, prompt: list[int], length: int | None) -> int:
    """Count the tokens of a completion at temperature 1: exactly ``length``, or until it ends."""
    body = {
        "model": "policy",
        "prompt": prompt,
        "temperature": 1.0,
        "max_tokens": length or MAX_TOKENS,
        "ignore_eos": length is not None,
    }
    answer = await client.post("/v1/completions", json=body)
    answer.raise_for_status()
    return int(answer.json()["usage"]["completion_tokens"])


def measure(
    servers: dict[str, RolloutServer], cell: str, rounds: int, settle: float
) -> dict[str, list[float]]:
    """Tokens a second of each arm in each round."""
    warm = Load(cell, 999)
    until = time.monotonic() + settle
    while time.monotonic() < until:
        asyncio.run(warm.run(servers[AUTO].http))
    for name, server in servers.items():
        if name != AUTO:
            asyncio.run(warm.run(server.http))
    number = [0]

    def runner(server: RolloutServer) -> float:
        time.sleep(REST_SECONDS)
        return asyncio.run(Load(cell, number[0]).run(server.http))

    def after(done: int) -> None:
        number[0] = done

    contestants = {name: (lambda s=server: runner(s)) for name, server in servers.items()}
    return interleaved(contestants, rounds, after_round=after)


def main(argv: Sequence[str] | None = None) -> int:
    """Start the servers, measure every cell, print."""
    parser = options("draft_length", (__doc__ or "").split("\n\n")[1])
    parser.add_argument("--rounds", type=int, default=7, help="of each cell")
    parser.add_argument("--cells", nargs="+", default=["1", "8", "32", "64", TAIL])
    parsed = parser.parse_args(argv)
    end_on_sigterm()
    cells, targets = [], []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        arms = {OFF: ("--speculation", "off"), AUTO: ("--speculation", "auto")}
        arms |= {f"k = {k}": ("--draft-length", str(k)) for k in LENGTHS}
        servers = {}
        for name, given in arms.items():
            say(f"starting the server of arm {name}")
            server = RolloutServer(
                folder / f"{name}.log", "--max-num-seqs", "64", *given, core=CORE
            )
            servers[name] = stack.enter_context(server)
        for version, (draft, share) in enumerate(NOISE.items(), 1):
            tensors = noisy(ARITHMETIC / "draft", share)
            for name, server in servers.items():
                if name != OFF:
                    server.swap(version, tensors)
            for cell in parsed.cells:
                say(f"{draft} draft, {cell} requests")
                speeds = measure(servers, cell, parsed.rounds, SETTLE_SECONDS)
                fixed = [name for name in speeds if name != AUTO]
                best = max(fixed, key=lambda name: statistics.median(speeds[name]))
                over_off = ratios(speeds[AUTO], speeds[OFF])
                over_best = ratios(speeds[AUTO], speeds[best])
                cells.append(
                    {"draft": draft, "requests": cell, "tokens_per_second": speeds, "best": best}
                    | {"over_none": over_off, "over_best": over_best}
                )
                where = f"{draft} draft, {cell} requests"
                for name, values in (("none", over_off), ("the best fixed", over_best)):
                    middle = statistics.median(values)
                    targets.append(Target.at_least(f"{where}: auto / {name}", middle, 0.97))
    print(
        table(
            "Tokens a second, medians; ratios of automatic as median (min .. max)",
            ["draft", "requests", *arms, "auto / none", "best fixed", "auto / best fixed"],
            [
                [
                    c["draft"],
                    c["requests"],
                    *(f"{statistics.median(c['tokens_per_second'][name]):.0f}" for name in arms),
                    spread_text(c["over_none"]),
                    c["best"],
                    spread_text(c["over_best"]),
                ]
                for c in cells
            ],
        )
    )
    return finish(parsed.json, {"rounds": parsed.rounds, "cells": cells}, targets)


if __name__ == "__main__":
    sys.exit(main())
