"""Measures what the bridge costs the policy's step, with its trainer in every state.

A step is forward, backward and optimizer, its training forward captured
(``capture(training=True)``), as in a loop without a log-prob pass. Rows: no bridge; an idle
bridge; one that ships to a healthy trainer, to a slow (1 MB/s), a hung (SIGSTOP) and a killed one,
and one with a full /dev/shm. Every trainer is a real ``draft-trainer serve`` that takes, checks
and keeps samples and does not train. In each round all rows take a step in a random order, with a
step without a bridge before and after each; a row's ratio is to the mean of those two, and the
ratios of the row without a bridge are the noise. The bridge's threads and the trainers run on the
other cores. The weight sync before a step is not part of it and is shown beside it.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import Target, finish, options, say, table, write
from benchmarks.policy_stall.policy import CASES, TINY, Case, Policy
from benchmarks.policy_stall.rounds import ABSENT, CHECKS, Rounds, Row, growth, resident_bytes
from benchmarks.policy_stall.trainers import Trainer, write_draft
from policy_bridge import BridgeConfig, PolicyBridge

ROWS = (ABSENT, "idle", "healthy", "slow", "hung", "killed", "full_shm")
SETTLED = ("healthy", "full_shm")
WARMUP = 3
CONNECT_SECONDS = 60.0
MEDIAN = 1.01
GROWTH = 0.01


def run_case(case: Case, chosen: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """All rows of one policy."""
    cores = sorted(os.sched_getaffinity(0))
    policy_core, others = cores[0], cores[1:]
    trainer_core = others[-1] if others else policy_core
    torch.set_num_threads(1)
    policy = Policy(case)
    draft = TINY.parent / "draft"
    if case.name != "tiny":
        policy.model.save_pretrained(folder / "policy")
        draft = folder / "draft"
        write_draft(folder / "policy", draft)
    say(f"{case.name}: starting {len(ROWS) - 1} trainers")
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
            for name in ROWS
            if name != ABSENT
        }
        rows = []
        for name in ROWS:
            bridge = None
            if name != ABSENT:
                trainers[name].wait_ready()
                bridge = stack.enter_context(_bridge(name, policy, case, trainers[name]))
            captures = name not in (ABSENT, "idle")
            rows.append(Row(name, bridge, captures, settles=name in SETTLED))
        os.sched_setaffinity(0, {policy_core})
        rounds = Rounds(policy, rows, set(others) or None)
        for _ in range(WARMUP):
            rounds.time(counted=False)
        trainers["hung"].hang()
        trainers["killed"].kill()
        # The first deadline after a trainer broke belongs to no step.
        rounds.time(counted=False)
        resident = []
        for number in range(chosen.steps):
            rounds.time(counted=True)
            resident.append(resident_bytes())
            say(f"{case.name}: round {number + 1} of {chosen.steps}")
        for _ in range(CHECKS):
            rounds.check()
        figures = {row.name: row.figures() for row in rows}
        os.sched_setaffinity(0, set(cores))
    return {
        "case": case.name,
        "parameters": policy.parameters,
        "tokens_per_step": case.rows * case.tokens,
        "steps_per_row": chosen.steps,
        "rows": figures,
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
            # A short deadline where it is waited for: it sets the pauses between the blocks.
            announce_seconds=1.0 if name in SETTLED else BridgeConfig.announce_seconds,
            drain_seconds=0.2,
        ),
    )
    if not bridge.wait_connected(CONNECT_SECONDS):
        reason = bridge.stats().last_error
        bridge.close()
        raise RuntimeError(f"{name}: the trainer was not reached: {reason}")
    return bridge


def targets(label: str, rows: Mapping[str, Any], growth: float) -> list[Target]:
    """Return the targets of one case."""
    found = []
    for name, row in rows.items():
        same = row["steps_with_identical_gradients"] / row["steps_checked"]
        found.append(Target.at_least(f"{label}, {name}: gradients bit-identical", same, 1.0))
        if name != ABSENT:
            for key, what in (("paired_wall", "wall time"), ("paired_own_cpu", "thread CPU time")):
                title = f"{label}, {name}: median of the step's {what}"
                found.append(Target.at_most(title, row[key]["median"], MEDIAN))
    found.append(Target.at_most(f"{label}: growth of resident memory", growth, GROWTH))
    return found


def rows_table(title: str, rows: Mapping[str, Any]) -> str:
    """One line a row."""
    columns = [
        "",
        "ms a step",
        "wall (95 %)",
        "thread CPU (95 %)",
        "sync ms",
        "same bits",
        "bridge",
    ]
    lines = []
    for name, row in rows.items():
        bridge, sync = row["bridge"], row["sync_seconds"]
        told = ""
        if bridge is not None:
            told = f"{bridge['transport'] or '-'}, {bridge['accepted']} accepted, "
            told += f"{sum(bridge['shed'].values())} shed"
            told += "" if bridge["connected"] else ", not connected"
        lines.append(
            [
                name,
                f"{row['seconds']['median'] * 1e3:.1f}",
                _interval(row["paired_wall"]),
                _interval(row["paired_own_cpu"]),
                "-" if sync is None else f"{sync['median'] * 1e3:.1f}",
                f"{row['steps_with_identical_gradients']}/{row['steps_checked']}",
                told,
            ]
        )
    return table(title, columns, lines)


def _interval(ratio: Mapping[str, float]) -> str:
    return f"{ratio['median']:.3f} ({ratio['low_95']:.3f}-{ratio['high_95']:.3f})"


def main(argv: Sequence[str] | None = None) -> int:
    """Command line entry; the exit status is 0 only if every target is met."""
    parser = options(
        "policy_stall", "The policy's step with the bridge absent, idle, shipping, and in trouble."
    )
    parser.add_argument("--steps", type=int, default=60, help="counted steps of a row")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    chosen = parser.parse_args(argv)
    results: list[dict[str, Any]] = []
    found: list[Target] = []
    for name in chosen.cases:
        with tempfile.TemporaryDirectory(prefix="policy-stall-") as folder:
            result = run_case(CASES[name], chosen, Path(folder))
        results.append(result)
        found += targets(f"{name} policy", result["rows"], result["resident_growth"])
        title = (
            f"\n{name} policy: {result['parameters'] / 1e6:.1f} M parameters, "
            f"{result['tokens_per_step']} tokens a step, {result['steps_per_row']} steps a row"
        )
        print(rows_table(title, result["rows"]))
        write(chosen.json, {"cases": results}, found)
    return finish(chosen.json, {"cases": results}, found)


if __name__ == "__main__":
    sys.exit(main())
