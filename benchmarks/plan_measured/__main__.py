"""``python -m benchmarks.plan_measured``: does ``draft-trainer plan --server`` predict well?

For two policies, with their own draft and with a stale one (the same with noise in its matrices): a
server with `--speculation auto` takes a few seconds of load, and what ``plan --server`` reads from
it (step costs, acceptance by position) predicts the time of a step and the speed-up of generation
for every draft length that such a server can choose and 1, 8, 32 and 64 requests. Servers with that
length fixed, and one without speculation, are then measured under the same load: engine steps by
the server's own count, tokens by the wall clock of the client. One server runs at a time, on one
core. A completion is 64 tokens long, whatever the policy says, so that a step's requests are known.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx

from benchmarks.draft_length.__main__ import NOISE, client_of, complete, noisy
from benchmarks.harness import Target, end_on_sigterm, finish, options, say, table, write
from draft_trainer.cli.plan import served_costs
from examples.arithmetic_grpo import task as arithmetic
from examples.arithmetic_grpo.sampling import prompt_ids
from examples.local_services import ROOT, RolloutServer
from examples.sorting_grpo import task as sorting
from slipstream.economics.arithmetic import acceptance_length, speed_up

TASKS: dict[str, ModuleType] = {"arithmetic": arithmetic, "sorting": sorting}
DRAFTS = ("fresh", "drifted")
LONGEST = 5
BATCHES = (1, 8, 32, 64)
TOKENS = 64
SETTLE_SECONDS = 5.0
CORE = 0
Cell = tuple[str, int, int]
"""Draft, draft length (0: no speculation), requests."""


class Load:
    """So many requests at once, again and again."""

    def __init__(self, task: Any, http: str) -> None:
        rng = random.Random(0)
        problems = [task.sample_problem(rng) for _ in range(max(BATCHES))]
        self._prompts = itertools.cycle(prompt_ids(problem, task) for problem in problems)
        self._http = http

    def run(self, requests: int, seconds: float) -> float:
        """Tokens a second over at least so many seconds."""
        return asyncio.run(self._run(requests, seconds))

    async def _run(self, requests: int, seconds: float) -> float:
        async with client_of(self._http, requests) as client:
            began, tokens = time.perf_counter(), 0
            while (passed := time.perf_counter() - began) < seconds or not tokens:
                asked = (complete(client, next(self._prompts), TOKENS) for _ in range(requests))
                tokens += sum(await asyncio.gather(*asked))
            return tokens / passed


def _server(folder: Path, name: str, task: str, *given: str) -> RolloutServer:
    example = ROOT / "examples" / f"{task}_grpo"
    draft = None if "none" in given else example / "draft"
    log = folder / f"{task}-{name}.log"
    sized = ("--max-num-seqs", str(max(BATCHES)))
    return RolloutServer(log, *sized, *given, policy=example / "policy", draft=draft, core=CORE)


def _drafts(task: str) -> Mapping[str, Any]:
    draft = ROOT / "examples" / f"{task}_grpo" / "draft"
    return {name: noisy(draft, NOISE[name]) for name in DRAFTS}


def predicted(task: str, folder: Path) -> dict[Cell, tuple[float, float]]:
    """Seconds of a step and speed-up, as ``plan --server`` has them."""
    found = {}
    given = ("--draft-length", str(LONGEST), "--speculation", "auto")
    with _server(folder, "auto", task, *given) as server:
        for version, (draft, tensors) in enumerate(_drafts(task).items(), 1):
            server.swap(version, tensors)
            load = Load(TASKS[task], server.http)
            for requests in BATCHES:
                load.run(requests, SETTLE_SECONDS)
            costs, rates = served_costs(httpx.get(f"{server.http}/metrics").text)
            lengths = (k for k in costs.draft_lengths if k)
            for k, requests in itertools.product(lengths, BATCHES):
                seconds = costs.seconds(k, requests)
                gain = speed_up(costs, rates, k, requests)
                found[draft, max(k, 0), requests] = (seconds, gain)
            say(f"{task}, {draft}: acceptance length {acceptance_length(rates, LONGEST):.2f}")
    return found


def measured(
    task: str, lengths: Sequence[int], seconds: float, folder: Path
) -> dict[Cell, tuple[float, float]]:
    """Seconds of a step and tokens a second, each length on a server of its own."""
    found: dict[Cell, tuple[float, float]] = {}
    for k in lengths:
        say(f"{task}: measuring k = {k}")
        given = ("--draft-length", str(k)) if k else ("--draft-kind", "none")
        with _server(folder, f"k{k}", task, *given) as server:
            for version, (draft, tensors) in enumerate(_drafts(task).items(), 1):
                if k:
                    server.swap(version, tensors)
                load = Load(TASKS[task], server.http)
                for requests in BATCHES:
                    load.run(requests, 1.0)
                    before = _settled(server, k, requests)
                    speed = load.run(requests, seconds)
                    after = _settled(server, k, requests)
                    step = (after[1] - before[1]) / max(1.0, after[0] - before[0])
                    found[draft, k, requests] = (step, speed)
    return found


def _settled(server: RolloutServer, k: int, requests: int) -> tuple[float, float]:
    """The engine's sums of these steps, once the server has read them."""
    time.sleep(1.5)
    return server.step_sums(k, requests)


def main(argv: Sequence[str] | None = None) -> int:
    """Predict, measure, compare."""
    parser = options("plan_measured", (__doc__ or "").split("\n\n")[1])
    parser.add_argument("--policy", nargs="+", choices=[*TASKS], default=[*TASKS])
    parser.add_argument("--seconds", type=float, default=3.0, help="of load on each cell")
    parser.add_argument("--lengths", nargs="+", type=int, help="0 and these, instead of all")
    parsed = parser.parse_args(argv)
    end_on_sigterm()
    cells: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for task in parsed.policy:
            expected = predicted(task, folder)
            lengths = sorted({k for _, k, _ in expected} & {0, *(parsed.lengths or range(17))})
            found = measured(task, lengths, parsed.seconds, folder)
            for (draft, k, requests), (took, speed) in found.items():
                step, gain = expected[draft, k, requests]
                real = speed / found[draft, 0, requests][1]
                cells.append(
                    {"policy": task, "draft": draft, "k": k, "requests": requests}
                    | {"step_predicted": step, "step_measured": took}
                    | {"speed_up_predicted": gain, "speed_up_measured": real}
                )
            write(parsed.json, {"cells": cells}, [])
    print(
        table(
            "Predicted and measured",
            ["policy, draft", "requests", "k", "step ms", "measured", "speed-up", "measured"],
            [
                [
                    f"{c['policy']}, {c['draft']}",
                    c["requests"],
                    c["k"],
                    f"{1e3 * c['step_predicted']:.2f}",
                    f"{1e3 * c['step_measured']:.2f}",
                    f"{c['speed_up_predicted']:.2f}",
                    f"{c['speed_up_measured']:.2f}",
                ]
                for c in cells
            ],
        )
    )
    return finish(parsed.json, {"cells": cells}, targets_of(cells))


def targets_of(cells: Sequence[Mapping[str, Any]]) -> list[Target]:
    """Return, for every policy and draft, the share of cells that are predicted within 10 %."""
    targets = []
    for where in dict.fromkeys((c["policy"], c["draft"]) for c in cells):
        here = [c for c in cells if (c["policy"], c["draft"]) == where]
        for what in ("step", "speed_up"):
            # Without drafts the speed-up is 1 by definition.
            compared = [c for c in here if c["k"] or what == "step"]
            near = [
                abs(c[f"{what}_predicted"] / c[f"{what}_measured"] - 1) <= 0.1
                for c in compared
                if c[f"{what}_measured"]
            ]
            name = f"{', '.join(where)} draft: share of cells, {what} within 10 %"
            targets.append(Target.at_least(name, sum(near) / max(1, len(compared)), 1.0))
    return targets


if __name__ == "__main__":
    sys.exit(main())
