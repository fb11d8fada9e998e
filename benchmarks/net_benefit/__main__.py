"""``python -m benchmarks.net_benefit``: do speculation and an adapted draft pay in a whole loop?

GRPO runs of SmolLM2-135M-Instruct as ``examples.smollm_grpo`` begins it, on real vLLM: rollouts,
log-probs, update, weight sync. Each starts processes of its own, on two cores: without
speculation, with the frozen draft and ``--speculation auto``, and with a trainer whose
``economy.mode`` is ``always`` or ``when-it-pays``. Where they run is what is compared: loop and
trainer share both cores; or the loop has one and the trainer the other, as a trainer with its own
device. The latter is compared with a loop that has both cores, and with one on a single core.

Workload "few" has 16 rollouts a step, two at a time; "many" 32, all at once. A run's speed is
tokens over seconds, from the first rollout to the end of a step; ratios are taken between steps on
the same problems. Last comes what the acceptance and the lengths that were measured would give on
an A100, computed from published step times.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.harness import Target, end_on_sigterm, finish, options, say, table, write
from benchmarks.plan_published.__main__ import read_rows
from benchmarks.plan_published.rules import table_of
from draft_trainer.drafters.ops import cpu_precision
from examples.arithmetic_grpo.grpo import by_length, group_advantages, old_log_probs, update
from examples.arithmetic_grpo.loop import timed
from examples.arithmetic_grpo.processes import Services
from examples.local_services import (
    DRAFT_LENGTH,
    READY_TIMEOUT,
    RolloutServer,
    Settings,
    draft_trainer,
)
from examples.smollm_grpo.masters import MasterAdamW
from examples.smollm_grpo.model import SERVED, check, policy
from examples.smollm_grpo.run import HERE
from examples.smollm_grpo.task import Tasks
from policy_bridge import BridgeConfig, PolicyBridge
from policy_bridge.sync import policy_tensors
from slipstream.economics.arithmetic import best_length, generate
from slipstream.economics.costs import OFF

DRAFT = HERE / "draft"
NONE, FROZEN, ALWAYS, PAYS = ARMS = ("none", "frozen", "always", "when-it-pays")
SHARED, SPLIT, ONE = "both cores", "a core each", "one core"
RUNS: dict[str, tuple[str, str]] = {
    f"{arm}, {place}": (arm, place)
    for arm, places in {
        NONE: (SHARED, ONE),
        FROZEN: (SHARED, ONE),
        ALWAYS: (SHARED, SPLIT),
        PAYS: (SHARED, SPLIT),
    }.items()
    for place in places
}
COMPARED = (
    (f"{FROZEN}, {SHARED}", f"{NONE}, {SHARED}"),
    *((f"{arm}, {SHARED}", f"{plain}, {SHARED}") for arm in (ALWAYS, PAYS) for plain in ARMS[:2]),
    *((f"{arm}, {SPLIT}", f"{NONE}, {SHARED}") for arm in (ALWAYS, PAYS)),
    *((f"{arm}, {SPLIT}", f"{plain}, {ONE}") for arm in (ALWAYS, PAYS) for plain in ARMS[:2]),
)
"""Runs whose speed is compared: whether it pays, and whether adapting does."""
LEARNING_RATE = 2e-5
ROWS = 4
"""Sequences of a pass: a row's float32 log-probs over 49,152 tokens take 50 MB."""
GPU_POLICIES = ("Qwen2.5-7B", "Llama-3.1-8B")
GPU_REQUESTS = 32
CALL_SECONDS = 60.0


@dataclass(frozen=True)
class Workload:
    """The rollouts of a step: of ``prompts``, ``samples`` each, at most ``in_flight`` at once."""

    prompts: int
    samples: int
    in_flight: int


WORKLOADS = {"few": Workload(4, 4, 2), "many": Workload(8, 4, 32)}


@dataclass
class Run:
    """The course of one run.

    Attributes:
        steps: seconds and tokens of each step.
        phases: seconds of all steps: generation, log_prob, update, sync.
        lengths: tokens of each completion.
        tried, accepted: tokens drafted and accepted at each position, by vLLM's counters.
        reward: mean of the last step.
        release: draft version that is served at the end.
        trainer_cpu_seconds: of the trainer, its start included.
    """

    steps: list[tuple[float, int]] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    lengths: list[int] = field(default_factory=list)
    tried: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    reward: float = 0.0
    release: int = 0
    trainer_cpu_seconds: float = 0.0


async def _rollouts(
    http: str, prompts: Sequence[list[int]], workload: Workload
) -> list[list[list[int]]]:
    """Token ids of every completion, by prompt and sample."""
    found: list[list[list[int]]] = [[] for _ in prompts]
    # The samples of a prompt are not neighbours: they would end together.
    left: Iterator[int] = iter([*range(len(prompts))] * workload.samples)
    limits = httpx.Limits(max_connections=workload.in_flight)
    async with httpx.AsyncClient(base_url=http, timeout=600, limits=limits) as client:

        async def worker() -> None:
            for number in left:
                body = {
                    "model": "policy",
                    "prompt": prompts[number],
                    "max_tokens": Tasks.max_tokens,
                    "temperature": 1.0,
                    "return_token_ids": True,
                }
                answer = await client.post("/v1/completions", json=body)
                answer.raise_for_status()
                found[number].append(list(answer.json()["choices"][0]["token_ids"]))

        await asyncio.gather(*(worker() for _ in range(workload.in_flight)))
    return found


def run(
    name: str, workload: Workload, steps: int, seed: int, folder: Path, cores: Sequence[int]
) -> Run:
    """One run of ``RUNS`` with processes of its own."""
    arm, place = RUNS[name]
    folder.mkdir(parents=True)
    loop_cores = cores if place == SHARED else cores[:1]
    os.sched_setaffinity(0, loop_cores)
    torch.set_num_threads(len(loop_cores))
    torch.manual_seed(seed)
    start = policy()
    model = AutoModelForCausalLM.from_pretrained(start, dtype=getattr(torch, cpu_precision()))
    optimizer = MasterAdamW(model, LEARNING_RATE)
    tasks = Tasks(AutoTokenizer.from_pretrained(start), seed)
    sizes = (*SERVED, "--max-num-seqs", "32")
    drafting = ("--draft-kind", "none") if arm == NONE else ("--speculation", "auto")
    server = RolloutServer(
        *(folder / "rollout-server.log", *sizes, *drafting),
        policy=start,
        draft=None if arm == NONE else DRAFT,
        # vLLM's own choice leaves a core idle for the API server.
        env={"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, loop_cores))},
    )
    found = Run()
    with ExitStack() as stack:
        stack.enter_context(server)
        bridge = trainer = None
        if arm in (ALWAYS, PAYS):
            settings: Settings = {
                "draft": {"policy": str(start)},
                "training": {
                    "compute_dtype": cpu_precision(),
                    "ttt_steps": DRAFT_LENGTH,
                    "seed": seed,
                },
                "publish": {"num_speculative_tokens": DRAFT_LENGTH},
                "economy": {"mode": arm},
            }
            trainer = draft_trainer(folder, server.control, settings, draft=DRAFT)
            # A child has the cores of the thread that starts it.
            os.sched_setaffinity(0, cores if place == SHARED else cores[1:])
            stack.enter_context(Services(trainer))
            os.sched_setaffinity(0, loop_cores)
            trainer.wait_ready(READY_TIMEOUT)
            config = BridgeConfig(
                *(trainer.health, folder.name, (server.control,)),
                states_dtype="bfloat16",
                policy_dtype=cpu_precision(),
            )
            bridge = stack.enter_context(PolicyBridge(model, config))
            bridge.wait_connected(CALL_SECONDS)

        def push(version: int) -> None:
            if bridge is not None:
                with bridge.sync(version) as window:
                    window.push_policy()
                return
            server.stage(
                "policy", f"policy-{version}", version, policy_tensors(model, cpu_precision())
            )
            server.commit(f"policy-{version}")

        push(0)
        for version in range(steps):
            began = time.perf_counter()
            tokens = _step(model, optimizer, tasks, workload, server.http, bridge, found)
            with timed(found.phases, "sync"):
                push(version + 1)
            found.steps.append((time.perf_counter() - began, tokens))
        counters = [*server.counters().values()]
        found.tried = _sums(version.tried_per_position for version in counters)
        found.accepted = _sums(version.accepted_per_position for version in counters)
        found.release = server.state().draft_version
        if trainer is not None:
            found.trainer_cpu_seconds = trainer.usage()[0]
    return found


def _sums(counts: Iterable[Sequence[int]]) -> list[int]:
    return [sum(place) for place in zip_longest(*counts, fillvalue=0)]


def _step(
    model: Any,
    optimizer: MasterAdamW,
    tasks: Tasks,
    workload: Workload,
    http: str,
    bridge: PolicyBridge | None,
    found: Run,
) -> int:
    """One GRPO step up to its update; the tokens that it generated."""
    problems = [tasks.problem() for _ in range(workload.prompts)]
    prompts = [tasks.prompt_ids(problem) for problem in problems]
    with timed(found.phases, "generation"):
        completions = asyncio.run(_rollouts(http, prompts, workload))
    rows = [
        (prompt, row, tasks.score(problem, row).reward)
        for problem, prompt, rows in zip(problems, prompts, completions, strict=True)
        for row in rows
    ]
    rewards = torch.tensor([reward for _, _, reward in rows])
    advantages = group_advantages(rewards, workload.samples)
    batch, _ = by_length(
        [prompt for prompt, _, _ in rows], [row for _, row, _ in rows], advantages, tasks.pad_id
    )
    capture: Any = bridge.capture() if bridge else nullcontext()
    with timed(found.phases, "log_prob"), capture as captured:
        old = old_log_probs(model, batch, ROWS, captured)
    with timed(found.phases, "update"):
        update(model, optimizer, replace(batch, old_log_probs=old), micro_batch=ROWS)
    lengths = [len(row) for _, row, _ in rows]
    found.lengths += lengths
    found.reward = float(rewards.mean())
    return sum(lengths)


def speeds(runs: Sequence[dict[str, Any]]) -> list[float]:
    """Tokens a second of each step: the geometric mean over the rounds."""
    by_step = zip(*(run["steps"] for run in runs), strict=True)
    return [statistics.geometric_mean(n / s for s, n in step) for step in by_step]


def compared(name: str, found: dict[str, list[dict[str, Any]]]) -> list[Target]:
    """Return how fast the runs of a workload are over others; when-it-pays alone has a bound."""
    targets = []
    for ours, other in COMPARED:
        if not (found.get(ours) and found.get(other)):
            continue
        both = [
            speeds(found[one][: min(len(found[ours]), len(found[other]))]) for one in (ours, other)
        ]
        pairs = [a / b for a, b in zip(*both, strict=True)]
        least = 0.98 if ours.startswith(PAYS) else 0.0
        targets.append(Target.of_ratios(f"{name}: {ours} / {other}", pairs, least))
    return targets


def _rates(runs: Sequence[dict[str, Any]]) -> list[float]:
    """Share of the drafted tokens of each position that were accepted."""
    tried, accepted = (_sums(run[which] for run in runs) for which in ("tried", "accepted"))
    return [a / t for a, t in zip(accepted, tried, strict=True) if t]


def on_a_gpu(found: dict[str, list[dict[str, Any]]]) -> list[list[str]]:
    """Rows of what the measured acceptance would give: speed over no drafts, computed.

    The lengths are of all completions, the best draft length of each batch size is taken.
    """
    lengths = [n for runs in found.values() for run in runs for n in run["lengths"]]
    random.Random(0).shuffle(lengths)
    rows = []
    for name, runs in found.items():
        rates = _rates(runs)
        if not rates:
            continue
        row = [name, f"{1 + sum(rates):.2f}"]
        for model in GPU_POLICIES:
            costs = table_of(read_rows(), model)

            def seconds(choose: Any, costs: Any = costs, rates: Any = rates) -> float:
                return generate(costs, rates, lengths, choose, GPU_REQUESTS).seconds

            drafted = seconds(lambda n, costs=costs, rates=rates: best_length(costs, rates, n))
            row.append(f"{seconds(lambda n: OFF) / drafted:.2f}")
        rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run every workload, print, write."""
    parser = options("net_benefit", (__doc__ or "").split("\n\n")[1])
    parser.add_argument("--rounds", type=int, default=2, help="of each run; a round's seed is one")
    parser.add_argument("--steps", type=int, default=8, help="of each run, 2 to 10")
    parser.add_argument("--workload", nargs="+", choices=[*WORKLOADS], default=[*WORKLOADS])
    parser.add_argument("--runs", nargs="+", choices=[*RUNS], default=[*RUNS], metavar="RUN")
    parsed = parser.parse_args(argv)
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        parser.error("found one core, expected two: the trainer and the loop have one each")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    end_on_sigterm()
    check()
    figures: dict[str, Any] = {"steps": parsed.steps, "workloads": {}}
    if parsed.json is not None and parsed.json.exists():
        # A run takes minutes: what was measured is not measured again.
        figures = {**figures, "workloads": json.loads(parsed.json.read_text())["workloads"]}
    targets: list[Target] = []
    with tempfile.TemporaryDirectory() as temporary:
        for number in range(parsed.rounds):
            for name in parsed.workload:
                workload = WORKLOADS[name]
                cell = figures["workloads"].setdefault(name, asdict(workload) | {"runs": {}})
                for one in random.Random(number).sample(parsed.runs, len(parsed.runs)):
                    measured = cell["runs"].setdefault(one, [])
                    if len(measured) > number:
                        continue
                    folder = Path(temporary) / f"{name}-{number}-{len(measured)}-{one}".replace(
                        ", ", "-"
                    ).replace(" ", "-")
                    taken = run(one, workload, parsed.steps, number, folder, cores)
                    measured.append(asdict(taken))
                    phases = ", ".join(f"{what} {s:.0f}" for what, s in taken.phases.items())
                    say(f"{name}, round {number + 1}, {one}: {phases} s")
                    targets = [
                        target
                        for what, known in figures["workloads"].items()
                        for target in compared(what, known["runs"])
                        if target.bound
                    ]
                    write(parsed.json, figures, targets)
    for name, cell in figures["workloads"].items():
        print(_table(name, cell["runs"]))
        over = [[target.name, target.text] for target in compared(name, cell["runs"])]
        print(table(f"{name}: speed over another run's", ["", "ratio"], over))
        title = f"{name}: on an A100, computed: generation over no drafts, {GPU_REQUESTS} at once"
        print(table(title, ["acceptance of", "length", *GPU_POLICIES], on_a_gpu(cell["runs"])))
    return finish(parsed.json, figures, targets)


def _table(name: str, found: dict[str, list[dict[str, Any]]]) -> str:
    rows = []
    for one, runs in found.items():
        seconds = sum(s for run in runs for s, _ in run["steps"])
        generation = sum(run["phases"]["generation"] for run in runs)
        rows.append(
            [
                one,
                f"{statistics.geometric_mean(speeds(runs)):.1f}",
                f"{seconds / len(runs):.0f}",
                f"{generation / seconds:.2f}",
                f"{1 + sum(_rates(runs)):.2f}" if _rates(runs) else "",
                "/".join(str(run["release"]) for run in runs),
                f"{statistics.fmean(run['trainer_cpu_seconds'] for run in runs):.0f}",
            ]
        )
    columns = ["", "tokens/s", "s", "generation", "length", "release", "trainer CPU s"]
    return table(f"{name}: whole runs", columns, rows)


if __name__ == "__main__":
    sys.exit(main())
