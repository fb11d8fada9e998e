"""What the bridge costs the policy's step, with its trainer in every state.

A step is forward, backward and optimizer, the log-prob forward captured. Rows: no bridge; one that
is idle; one that ships to a healthy trainer, to a slow one (1 MB/s), to a hung one (SIGSTOP), to a
killed one, and to one on a full /dev/shm. Every trainer is a real ``draft-trainer serve``, which
takes, checks and keeps what it is sent; it does not train meanwhile, since its arithmetic would
fall on other rows' steps than those it is for. In each round all rows take a step in an order of
chance, with a step without a bridge before and behind each, and a row's ratio is to the mean of
those two; the ratio of the row without a bridge is the noise. The weight sync before each step is
not part of it and is shown beside it. What it sets off in the background, the
announcement of the new version, is over before the step of the rows healthy and full_shm, as in
a loop whose rollouts lie between; in the other rows it runs during the step.

Run ``python -m benchmarks.policy_stall`` from the repository root.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import machine
from benchmarks.policy_stall.neighbour import Neighbour, summary
from benchmarks.policy_stall.policy import CASES, TINY, Case, Policy
from benchmarks.policy_stall.progress import Progress
from benchmarks.policy_stall.ratios import growth
from benchmarks.policy_stall.report import Target, table, target_table, targets
from benchmarks.policy_stall.rounds import CHECKS, Rounds, measure
from benchmarks.policy_stall.row import ABSENT, Row
from benchmarks.policy_stall.trainers import Trainer, write_draft
from policy_bridge import BridgeConfig, PolicyBridge

ROWS = (ABSENT, "idle", "healthy", "slow", "hung", "killed", "full_shm")
SETTLED = ("healthy", "full_shm")
WARMUP = 3
CONNECT_SECONDS = 60.0


def run_case(case: Case, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All rows of one policy."""
    progress = Progress(case.name, WARMUP + 1 + options.steps + CHECKS, options.verbose)
    cores = sorted(os.sched_getaffinity(0))
    policy_core = cores[0] if options.policy_core is None else options.policy_core
    others = [core for core in cores if core != policy_core]
    trainer_core = others[-1] if others else policy_core
    torch.set_num_threads(1)
    policy = Policy(case, options.seed)
    draft = TINY.parent / "draft"
    if case.name != "tiny":
        policy.model.save_pretrained(folder / "policy")
        draft = folder / "draft"
        write_draft(folder / "policy", draft)
    if options.cores == "shared":
        # Before any of the bridge's threads exist: they inherit it.
        os.sched_setaffinity(0, {policy_core})
    names = [name for name in ROWS if name in options.rows or name == ABSENT]
    progress.say(f"starting {len(names) - 1} trainers")
    with ExitStack() as stack:
        trainers = {
            name: stack.enter_context(
                Trainer(
                    name,
                    folder,
                    draft,
                    trainer_core,
                    full_memory=name == "full_shm",
                    slow=name == "slow",
                )
            )
            for name in names
            if name != ABSENT
        }
        rows = []
        for name in names:
            bridge = None
            if name != ABSENT:
                trainers[name].wait_ready()
                bridge = stack.enter_context(_bridge(name, policy, case, trainers[name]))
            captures = name not in (ABSENT, "idle")
            rows.append(Row(name, bridge, captures, settles=name in SETTLED))
        os.sched_setaffinity(0, {policy_core})
        # The bridge's threads have the other cores, where there is one.
        background = set(others) if options.cores == "free" and others else None

        neighbour = stack.enter_context(Neighbour(trainer_core)) if background else None
        looks: list[float] = []

        def look(number: int) -> None:
            if neighbour is not None:
                looks.append(neighbour.look(busy_first=number % 2 == 0))

        def break_trainers() -> None:
            if "hung" in trainers:
                trainers["hung"].hang()
            if "killed" in trainers:
                trainers["killed"].kill()

        resident = measure(
            Rounds(policy, rows, background),
            rows,
            warmup=WARMUP,
            steps=options.steps,
            before_counting=break_trainers,
            before_round=look,
            progress=progress,
        )
        figures = {row.name: row.figures() for row in rows}
        os.sched_setaffinity(0, set(cores))
    return {
        "case": case.name,
        "parameters": policy.parameters,
        "tokens_per_step": case.rows * case.tokens,
        "cores": options.cores,
        "steps_per_row": options.steps,
        "steps_checked_per_row": CHECKS,
        "rows": figures,
        "other_core": summary(looks) if looks else None,
        "resident_bytes": resident,
        "resident_growth": growth(resident),
    }


def _bridge(name: str, policy: Policy, case: Case, trainer: Trainer) -> PolicyBridge:
    bridge = PolicyBridge(
        policy.model,
        BridgeConfig(
            trainer=trainer.address,
            run_id=f"stall-{name}",
            bytes_per_step=case.bytes_per_step,
            states_dtype="bfloat16",
            transport="grpc" if name == "slow" else "auto",
            sync_seconds=2.0,
            # Where it is waited for, soon: the pauses between its blocks are a share of this. Two
            # seconds between a row's step and the one before made their ratio half as wide again.
            announce_seconds=1.0 if name in SETTLED else BridgeConfig.announce_seconds,
            drain_seconds=0.2,
        ),
    )
    if not bridge.wait_connected(CONNECT_SECONDS):
        reason = bridge.stats().last_error
        bridge.close()
        raise RuntimeError(f"{name}: the trainer was not reached: {reason}")
    return bridge


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; the exit status is 0 only if every target was met."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.policy_stall",
        description="The policy's step with the bridge absent, idle, shipping, and in trouble.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument(
        "--steps", type=int, default=200, help="counted ones of a row; a p99 is of the slowest few"
    )
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument(
        "--cores",
        choices=("free", "shared"),
        default="free" if len(os.sched_getaffinity(0)) > 1 else "shared",
        help="whether the bridge's threads may leave the policy's core",
    )
    parser.add_argument("--policy-core", type=int, help="the first if not given")
    parser.add_argument("--seed", type=int, default=0, help="of the batches")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--verbose", action="store_true", help="a line for every round")
    options = parser.parse_args(argv)

    results: list[dict[str, Any]] = []
    found: list[Target] = []
    for name in options.cases:
        with tempfile.TemporaryDirectory(prefix="policy-stall-") as folder:
            result = run_case(CASES[name], options, Path(folder))
        results.append(result)
        label = f"{name} policy"
        print(
            f"\n{label}: {result['parameters'] / 1e6:.1f} M parameters, "
            f"{result['tokens_per_step']} tokens a step, {result['steps_per_row']} steps a row, "
            f"{options.cores} core"
        )
        if (other := result["other_core"]) is not None:
            print(
                f"the other core was not one of its own in {other['shared']:.1%} of "
                f"{other['looks']} looks"
            )
        print(table(result["rows"]))
        found += targets(label, result["rows"], result["resident_growth"], options.cores == "free")
    print("\n" + target_table(found))
    if options.json:
        document = {
            "machine": machine(),
            "cases": results,
            "targets": [asdict(target) for target in found],
        }
        text = json.dumps(document, indent=2)
        # Thousands of steps: a line for each list of numbers, not for each of them.
        text = re.sub(r"\[[-\d.e,\s]+\]", lambda numbers: " ".join(numbers[0].split()), text)
        options.json.write_text(text + "\n")
    return 0 if all(target.ok for target in found) else 1


if __name__ == "__main__":
    sys.exit(main())
