"""``python -m benchmarks.speculation``: what drafts gain on a real model, and who predicts it.

SmolLM2-135M-Instruct as ``examples.smollm_grpo`` begins with it, its draft as it is ("fresh") and
with noise in its matrices, on one vLLM server for each arm: no speculation, draft lengths 1 to 3,
``--speculation auto``, n-gram drafts. They share the cores and take turns in a random order. A cell
has so many requests in flight at all times, at temperature 1, each to its natural end; the prompts
are the same in every round, so that their keys and values are cached and steps decode. A first
clock stops when no prompt is left to begin, a second when the last request has ended, as a GRPO
step does; tokens are vLLM's own count.

Three questions: is ``auto`` ever slower than no speculation, or than the best fixed length? What do
the draft lengths gain? Does ``draft-trainer plan --server`` predict from the automatic server's
metrics the seconds of a step and the speed-up of the others?
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Any

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
    table,
    write,
)
from draft_trainer.cli.plan import served_costs
from examples.arithmetic_grpo.rollouts import SpecCounters
from examples.local_services import RolloutServer
from examples.smollm_grpo.model import SERVED, check, policy
from examples.smollm_grpo.run import HERE
from examples.smollm_grpo.task import Tasks
from slipstream.economics.arithmetic import acceptance_length, speed_up
from slipstream.errors import RefusedError

DRAFT = HERE / "draft"
OFF, AUTO, NGRAM = "none", "auto", "n-gram"
LENGTHS = (1, 2, 3)
ARMS: dict[str, tuple[str, ...]] = {
    OFF: ("--draft-kind", "none"),
    **{f"k = {k}": ("--draft-length", str(k), "--speculation", "fixed") for k in LENGTHS},
    AUTO: ("--draft-length", str(LENGTHS[-1]), "--speculation", "auto"),
    NGRAM: ("--draft-kind", "ngram", "--draft-length", str(LENGTHS[-1])),
}
FIXED = {OFF: 0, **{f"k = {k}": k for k in LENGTHS}}
"""Tokens drafted in every step, where that does not change."""
DRAFTED = [name for name in ARMS if name not in (OFF, NGRAM)]
"""Arms that serve the draft."""
ALWAYS = (OFF, f"k = {LENGTHS[-1]}", AUTO)
"""Arms that are measured with every draft; the others with the first alone."""
NOISE = {"fresh": 0.0, "drifted": 0.3, "ruined": 1.2}
"""Standard deviations of noise on each matrix of the draft, in its own."""
BATCHES = {1: 5, 4: 12, 16: 40, 32: 72}
"""Requests of a measurement, by requests in flight."""
PROMPTS = 32
SIZES = (*SERVED, "--max-num-seqs", str(max(BATCHES)), "--num-gpu-blocks-override", "320")
"""Room for the prompts and the most requests, 32 tokens a block: six servers need much memory."""
MAX_TOKENS = 128
LEAST = 0.97
"""Speed of ``auto`` over the other arm's."""
NEAR = 0.1
"""The error of a prediction."""
REST_SECONDS = 1.5
"""The rest before each arm: for a second after its last step the worker of another arm's server
spins on the cores that all of them share (``SpinCondition`` of vLLM's ``shm_broadcast``)."""


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


def generate(
    server: RolloutServer, prompts: Sequence[list[int]], requests: int, count: int
) -> tuple[float, float]:
    """Complete so many prompts, ``requests`` at a time.

    Returns:
        Tokens a second until no prompt is left to begin, and until the last request has ended.
    """
    return asyncio.run(_generate(server.http, islice(cycle(prompts), count), requests))


async def _generate(http: str, left: Iterator[list[int]], requests: int) -> tuple[float, float]:
    limits = httpx.Limits(max_connections=requests + 1)
    speeds: list[float] = []
    async with httpx.AsyncClient(base_url=http, timeout=600, limits=limits) as client:

        async def tokens() -> float:
            lines = (await client.get("/metrics")).text.splitlines()
            return sum(float(x.rpartition(" ")[2]) for x in lines if x.startswith(_TOKENS))

        async def one() -> None:
            for prompt in left:
                body = {"model": "policy", "prompt": prompt, "max_tokens": MAX_TOKENS}
                answer = await client.post("/v1/completions", json=body)
                answer.raise_for_status()
            if not speeds:
                speeds.append(0.0)  # the others do not measure it again
                seconds = time.perf_counter() - began
                speeds[0] = (await tokens() - before) / seconds

        before, began = await tokens(), time.perf_counter()
        await asyncio.gather(*(one() for _ in range(requests)))
        seconds = time.perf_counter() - began
        return speeds[0], (await tokens() - before) / seconds


_TOKENS = "vllm:generation_tokens_total"


def measure(
    servers: Mapping[str, RolloutServer], prompts: Sequence[list[int]], requests: int, rounds: int
) -> dict[str, dict[str, Any]]:
    """One cell.

    Returns:
        By arm: tokens a second in each round, by both clocks; seconds of a step of so many
        requests; acceptance length in vLLM's counters.
    """
    fixed = {name: k for name, k in FIXED.items() if name in servers}
    steps = {name: servers[name].step_sums(k, requests) for name, k in fixed.items()}
    counters = {name: server.counters() for name, server in servers.items()}

    def run(server: RolloutServer) -> tuple[float, float]:
        time.sleep(REST_SECONDS)
        return generate(server, prompts, requests, BATCHES[requests])

    found = interleaved({name: partial(run, s) for name, s in servers.items()}, rounds)
    # The servers read the engine's sums once a second.
    time.sleep(REST_SECONDS)
    seconds, lengths = {}, {}
    for name, k in fixed.items():
        (count, took), (count_now, took_now) = steps[name], servers[name].step_sums(k, requests)
        if count_now > count:
            seconds[name] = (took_now - took) / (count_now - count)
    for name, server in servers.items():
        length = SpecCounters.between(counters[name], server.counters()).acceptance_length
        if length is not None:
            lengths[name] = length
    full, whole = (
        {name: [speeds[clock] for speeds in rows] for name, rows in found.items()}
        for clock in (0, 1)
    )
    return {
        "tokens_per_second": full,
        "whole_tokens_per_second": whole,
        "step_seconds": seconds,
        "acceptance_length": lengths,
    }


def targets_of(cells: Sequence[Mapping[str, Any]]) -> list[Target]:
    """Return the targets of all cells: the automatic arm, and the predictions."""
    targets, near = [], dict[str, list[Target]]()
    for cell in cells:
        speeds = cell["tokens_per_second"]
        where = f"{cell['draft']} draft, {cell['requests']} requests"
        for other in dict.fromkeys((OFF, cell["best"])):
            found = ratios(speeds[AUTO], speeds[other])
            targets.append(Target.of_ratios(f"{where}: auto / {other}", found, LEAST))
        whole = cell["whole_tokens_per_second"]
        found = ratios(whole[AUTO], whole[OFF])
        targets.append(Target.of_ratios(f"{where} to the last: auto / {OFF}", found, LEAST))
        for arm, (step, gain) in cell["predicted"].items():
            measured = ratios(speeds[arm], speeds[OFF])
            of_gain = [ratio / gain for ratio in measured]
            near.setdefault("speed-up", []).append(
                Target.of_ratios(f"{where}, {arm}", of_gain, 1 - NEAR, 1 + NEAR)
            )
            if arm in cell["step_seconds"]:
                error = cell["step_seconds"][arm] / step - 1
                near.setdefault("step", []).append(
                    Target.at_most(f"{where}, {arm}", abs(error), NEAR)
                )
    for what, all_of in near.items():
        decided = [target for target in all_of if target.ok is not None]
        name = (
            f"plan --server: share of {len(decided)} decided cells of {len(all_of)}, {what} within"
        )
        share = sum(bool(target.ok) for target in decided) / max(1, len(decided))
        target = Target.at_least(f"{name} {NEAR:.0%}", share, 0.9)
        targets.append(target if decided else replace(target, value=None, ok=None))
    return targets


def main(argv: Sequence[str] | None = None) -> int:
    """Start the servers, measure every cell, print."""
    parser = options("speculation", (__doc__ or "").split("\n\n")[1])
    parser.add_argument("--rounds", type=int, default=5, help="of each cell, 2 to 10")
    parser.add_argument("--requests", nargs="+", type=int, choices=[*BATCHES], default=[*BATCHES])
    parser.add_argument("--drafts", nargs="+", choices=[*NOISE], default=[*NOISE])
    arms = [name for name in ARMS if name not in (OFF, AUTO)]
    parser.add_argument(
        "--arms", nargs="*", choices=arms, default=arms, help="beside none and auto"
    )
    parsed = parser.parse_args(argv)
    end_on_sigterm()
    check()
    from transformers import AutoTokenizer

    folder = policy()
    tasks = Tasks(AutoTokenizer.from_pretrained(folder), "speculation")
    prompts = [tasks.prompt_ids(tasks.problem()) for _ in range(PROMPTS)]
    cells: list[dict[str, Any]] = []
    with ExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        servers = {}
        for name in [n for n in ARMS if n in (OFF, AUTO, *parsed.arms)]:
            say(f"starting the server of arm {name}")
            draft = DRAFT if name in DRAFTED else None
            given = (*SIZES, *ARMS[name])
            server = RolloutServer(logs / f"{name}.log", *given, policy=folder, draft=draft)
            servers[name] = stack.enter_context(server)
        compared = [name for name in servers if name != OFF]
        for version, kind in enumerate(parsed.drafts, 1):
            tensors = noisy(DRAFT, NOISE[kind])
            measured = {n: s for n, s in servers.items() if version == 1 or n in ALWAYS}
            for name in [n for n in measured if n in DRAFTED]:
                servers[name].swap(version, tensors)
            for cell in _cells(kind, measured, prompts, parsed.requests, parsed.rounds):
                cells.append(cell)
                write(parsed.json, {"rounds": parsed.rounds, "cells": cells}, targets_of(cells))
    print(
        table(
            "Tokens a second over no speculation's; to the last request's end; acceptance length",
            ["draft", "requests", "none, tokens/s", *compared, "auto to the last", "at k = 3"],
            [
                [
                    c["draft"],
                    c["requests"],
                    f"{statistics.median(c['tokens_per_second'][OFF]):.0f}",
                    *(_gain(c["tokens_per_second"], name) for name in compared),
                    _gain(c["whole_tokens_per_second"], AUTO),
                    f"{c['acceptance_length'].get('k = 3', float('nan')):.2f}",
                ]
                for c in cells
            ],
        )
    )
    return finish(parsed.json, {"rounds": parsed.rounds, "cells": cells}, targets_of(cells))


def _gain(speeds: Mapping[str, Sequence[float]], name: str) -> str:
    return Target.of_ratios(name, ratios(speeds[name], speeds[OFF])).text if name in speeds else ""


def _cells(
    kind: str,
    servers: Mapping[str, RolloutServer],
    prompts: Sequence[list[int]],
    batches: Sequence[int],
    rounds: int,
) -> Iterator[dict[str, Any]]:
    """Measure one draft with every number of requests."""
    for server in servers.values():
        # Every prompt once, for the cache; then what the automatic arm has to measure.
        generate(server, prompts, max(batches), PROMPTS)
        for requests in batches:
            generate(server, prompts, requests, BATCHES[requests])
    costs, rates = served_costs(httpx.get(f"{servers[AUTO].http}/metrics").text)
    say(f"{kind} draft: acceptance length {acceptance_length(rates, LENGTHS[-1]):.2f} at k = 3")
    for requests in batches:
        say(f"{kind} draft, {requests} requests")
        predicted = {}
        for k in [k for k in LENGTHS if f"k = {k}" in servers]:
            # Steps that the server has not timed with so many requests are not predicted.
            with suppress(RefusedError):
                found = costs.seconds(k, requests), speed_up(costs, rates, k, requests)
                predicted[f"k = {k}"] = found
        measured = measure(servers, prompts, requests, rounds)
        speeds = measured["tokens_per_second"]
        yield {
            "draft": kind,
            "requests": requests,
            **measured,
            "best": max(FIXED.keys() & servers, key=lambda name: statistics.median(speeds[name])),
            "predicted": predicted,
        }


if __name__ == "__main__":
    sys.exit(main())
