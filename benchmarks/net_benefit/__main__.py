"""``python -m benchmarks.net_benefit``: do speculation and adapting the draft pay?

Whole GRPO runs on real vLLM, wall time from the first rollout to the end of the last step. Policy,
rollout server and trainer share this machine's cores. Every arm starts its own processes and has
the same seeds, problems, turns, steps and cores: "none" is vLLM without speculation, "frozen"
serves the example's draft with `--speculation auto` and trains nothing, "always" and "when-it-pays"
are `economy.mode` of a trainer whose file has nothing else beyond the draft and the server.

Workloads: "short" has one turn a rollout, 96 at once, the demo's task and learning rate; "tail" has
24 rollouts with a lognormal number of turns (median 4, sigma 0.9, at most 40), so that few run for
most of a step; "still" is "tail" at a learning rate of 1e-7. A turn ends where the policy ends it.
A policy step is a log-prob forward and one pass of updates, in four mini-batches, over all turns of
"short" and over twelve drawn ones of the others: that leaves generation about two thirds of their
plain step, as in published loops. The share that it really was is printed.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.harness import (
    Target,
    end_on_sigterm,
    finish,
    interleaved,
    options,
    ratios,
    say,
    spread,
    spread_text,
    table,
    write,
)
from benchmarks.net_benefit.policy_loop import Workload, train
from draft_trainer.training.cores import CoreSeconds, core_seconds
from examples.arithmetic_grpo.processes import Service, Services, free_port
from examples.local_services import (
    ARITHMETIC,
    ONE_THREAD,
    READY_TIMEOUT,
    RolloutServer,
    script,
)
from policy_bridge import BridgeConfig, PolicyBridge
from policy_bridge.sync import policy_tensors
from slipstream.client import open_channel
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import draft_trainer_pb2_grpc as pb_grpc

NONE, FROZEN, ALWAYS, PAYS = ARMS = ("none", "frozen", "always", "when-it-pays")
TAIL = (4.0, 0.9, 40)
WORKLOADS = {
    "short": Workload("short rollouts, small policy", 12, 8, (1.0, 0.0, 1), 12, 8e-4, 4, 12),
    "tail": Workload("long-tailed rollouts", 6, 4, TAIL, 12, 8e-4, 4, 20),
    "still": Workload("a policy that hardly moves", 6, 4, TAIL, 12, 1e-7, 4, 12),
}
CALL_SECONDS = 30.0


def _toml(folder: Path, mode: str, server: str, port: int) -> str:
    return (
        f"[server]\nport = {port}\nmetrics_port = {free_port()}\n"
        f'[draft]\ninitial = "{ARITHMETIC / "draft"}"\n'
        f'registry = "{(folder / "releases").resolve()}"\n'
        f'[publish]\nrollout_servers = ["{server}"]\n[economy]\nmode = "{mode}"\n'
    )


@contextmanager
def _trainer(folder: Path, mode: str, server: str) -> Iterator[Service]:
    port, config = free_port(), folder / "trainer.toml"
    config.write_text(_toml(folder, mode, server, port))
    command = [script("draft-trainer"), "serve", "--config", str(config)]
    log = folder / "trainer.log"
    service = Service("draft-trainer", command, log, f"127.0.0.1:{port}", ONE_THREAD)
    with Services(service):
        service.wait_ready(READY_TIMEOUT)
        yield service


def run_arm(name: str, arm: str, workload: Workload, seed: int, folder: Path) -> dict[str, Any]:
    """One run with processes of its own; what it took."""
    folder.mkdir(parents=True)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(
        ARITHMETIC / "policy", dtype=torch.float32, attn_implementation="eager"
    )
    draft = None if arm == NONE else ARITHMETIC / "draft"
    given = ("--draft-kind", "none") if arm == NONE else ("--speculation", "auto")
    at_start: list[CoreSeconds] = []
    with ExitStack() as stack:
        server = RolloutServer(folder / "rollout-server.log", *given, draft=draft)
        stack.enter_context(server)
        trainer, bridge = None, None
        if arm in (ALWAYS, PAYS):
            trainer = stack.enter_context(_trainer(folder, arm, server.control))
            config = BridgeConfig(trainer.health, f"{name}-{seed}", (server.control,))
            bridge = stack.enter_context(PolicyBridge(model, config))
            bridge.wait_connected(CALL_SECONDS)

        def push(version: int) -> None:
            if bridge is not None:
                with bridge.sync(version) as window:
                    window.push_policy()
                return
            server.stage("policy", f"policy-{version}", version, policy_tensors(model, "bfloat16"))
            server.commit(f"policy-{version}")

        def begun() -> None:
            at_start.append(_cores(trainer))

        found = asdict(train(model, workload, seed, server.http, push, bridge, begun))
        if trainer is not None:
            cores = _cores(trainer)
            found["trainer_cpu_seconds"] = cores.ran - at_start[0].ran
            found["trainer_took_seconds"] = cores.taken_since(at_start[0])
            found["releases"] = _releases(trainer.health)
    return found


def _cores(trainer: Service | None) -> CoreSeconds:
    found = core_seconds(trainer.pid) if trainer else None
    return found or CoreSeconds(0.0, 0.0)


def _releases(address: str) -> int:
    """The newest release of a trainer."""
    with open_channel(address) as channel:
        stub = pb_grpc.DraftTrainerStub(channel)
        status = stub.GetStatus(pb.GetStatusRequest(), timeout=CALL_SECONDS)
    return int(status.newest_release)


def measure(
    name: str, workload: Workload, arms: Sequence[str], rounds: int, folder: Path
) -> dict[str, list[dict[str, Any]]]:
    """Every arm's runs, one a round; the arms of a round have its number as their seed."""
    number = [0]

    def contestant(arm: str) -> dict[str, Any]:
        say(f"{name}, round {number[0] + 1}, {arm}")
        found = run_arm(name, arm, workload, number[0], folder / f"{name}-{number[0]}-{arm}")
        phases = ", ".join(f"{n} {s:.1f}" for n, s in found["phases"].items())
        say(f"  {found['seconds']:.1f} s: {phases}; ornate lines {found['ornate']:.2f}")
        return found

    def after(done: int) -> None:
        number[0] = done

    return interleaved({arm: partial(contestant, arm) for arm in arms}, rounds, after_round=after)


def targets_of(name: str, found: dict[str, list[dict[str, Any]]]) -> list[Target]:
    """Return the targets of a workload's runs: ratios of wall time within a round."""
    if set(ARMS) - set(found):
        return []
    seconds = {arm: [run["seconds"] for run in runs] for arm, runs in found.items()}

    def over(arm: str) -> float:
        return statistics.median(ratios(seconds[arm], seconds[PAYS]))

    # The best arm of all rounds: the least of each round would be an arm that nobody can choose.
    best = min((NONE, FROZEN, ALWAYS), key=lambda arm: statistics.median(seconds[arm]))
    targets = [Target.at_most(f"{name}: when-it-pays / {best}, the best", 1 / over(best), 1.02)]
    if name == "tail":
        targets.append(Target.at_least(f"{name}: speed, when-it-pays / none", over(NONE), 1.25))
        targets.append(Target.at_least(f"{name}: speed, when-it-pays / frozen", over(FROZEN), 1.1))
    if name == "still":
        cpu = {a: [run["trainer_cpu_seconds"] for run in found[a]] for a in (ALWAYS, PAYS)}
        share = statistics.median(ratios(cpu[PAYS], cpu[ALWAYS]))
        targets.append(Target.at_most(f"{name}: trainer's CPU, share of always", share, 0.03))
    return targets


def rows_of(name: str, found: dict[str, list[dict[str, Any]]]) -> list[list[str]]:
    """Return the rows of the printed table, one for each arm."""
    rows = []
    for arm, runs in found.items():
        generation = [run["phases"]["generation"] for run in runs]
        seconds = [run["seconds"] for run in runs]
        plain = [run["seconds"] for run in found.get(NONE, runs)]
        cpu = [run.get("trainer_cpu_seconds", 0.0) for run in runs]
        rows.append(
            [
                f"{name}, {arm}",
                spread_text(seconds, 1),
                spread_text(ratios(plain, seconds)),
                f"{statistics.median(ratios(generation, seconds)):.2f}",
                f"{statistics.median(generation):.1f}",
                f"{statistics.median(cpu):.1f}",
                f"{statistics.median(run.get('trainer_took_seconds', 0.0) for run in runs):.1f}",
                str(runs[-1].get("releases", "")),
            ]
        )
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run every workload, print, write."""
    parser = options("net_benefit", (__doc__ or "").split("\n\n")[1])
    parser.add_argument("--rounds", type=int, default=1, help="of each workload")
    parser.add_argument("--workload", nargs="+", choices=[*WORKLOADS], default=[*WORKLOADS])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=[*ARMS])
    parsed = parser.parse_args(argv)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    torch.set_num_threads(1)
    end_on_sigterm()
    figures: dict[str, Any] = {"rounds": parsed.rounds, "workloads": {}}
    targets, rows = [], []
    with tempfile.TemporaryDirectory() as temporary:
        for name in parsed.workload:
            workload = WORKLOADS[name]
            found = measure(name, workload, parsed.arms, parsed.rounds, Path(temporary))
            figures["workloads"][name] = asdict(workload) | {
                "runs": found,
                "seconds": {a: spread([r["seconds"] for r in runs]) for a, runs in found.items()},
            }
            targets += targets_of(name, found)
            rows += rows_of(name, found)
            write(parsed.json, figures, targets)
    columns = [
        "",
        "s of the run",
        "speed / none",
        "generation",
        "s of it",
        "trainer CPU s",
        "drafts",
    ]
    print(table("Whole GRPO runs, median (min .. max)", columns, rows))
    return finish(parsed.json, figures, targets)


if __name__ == "__main__":
    sys.exit(main())
