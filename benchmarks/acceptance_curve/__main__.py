"""``python -m benchmarks.acceptance_curve``: acceptance in real vLLM against training."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.acceptance_curve.contestants import (
    CONTESTANTS,
    FLOAT8,
    LEARNING_RATE,
    OURS,
    PEERS,
    TTT_STEPS,
    WARMUP_STEPS,
)
from benchmarks.acceptance_curve.curve import (
    Curves,
    Mark,
    Rung,
    curve_table,
    difference,
    float8_targets,
    ladder,
    ladder_table,
    targets,
)
from benchmarks.acceptance_curve.plot import draw
from benchmarks.draft_training.contestants import default_directory, python_of
from benchmarks.harness import Target, finish, machine, options, say
from benchmarks.vllm_server import Server
from benchmarks.workers import WorkerProcess
from draft_trainer.recordings.recording import read_index
from examples.arithmetic_grpo.make_draft import record, run
from examples.arithmetic_grpo.sampling import held_out_problems, prompt_ids

POLICY = Path(__file__).resolve().parents[2] / "examples" / "arithmetic_grpo" / "policy"
BATCH_TOKENS = 1024
DRAFT_VOCABULARY = 96
SEED = 0
RUNGS = (1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 2.75, 3.0, 3.25, 3.5, 3.75)


def main(argv: list[str] | None = None) -> int:
    """Run it; the exit status is 0 only if every target was met."""
    chosen = _parse(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = chosen.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        trained = _train(chosen, folder)
        curves = _measure(chosen, folder, trained)
        shards = read_index(folder / "states").shards
    rungs = ladder(curves, OURS, PEERS, RUNGS)
    found: list[Target] = [] if set(PEERS).isdisjoint(curves) else targets(rungs)
    if {OURS, FLOAT8} <= curves.keys():
        found += float8_targets(curves[OURS], curves[FLOAT8])
    print(curve_table(curves))
    print(ladder_table(rungs, list(curves)))
    if chosen.plot is not None:
        draw(curves, chosen.plot)
    figures = _figures(chosen, curves, rungs)
    # From the index: states that were kept may be of another run.
    figures["recorded_rollouts"] = sum(shard.samples for shard in shards)
    return finish(chosen.json, figures, found)


def _train(chosen: argparse.Namespace, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Everybody's drafts at every mark; returns what the steps up to each took."""
    states, initial = folder / "states", folder / "initial"
    if not states.exists():
        record(POLICY, states, chosen.rollouts, SEED)
    if not initial.exists():
        size = ("--draft-vocab", DRAFT_VOCABULARY, "--seed", SEED)
        run("init", "--policy", POLICY, "--states", states, *size, "--out", initial)
    chosen.peers_dir.mkdir(parents=True, exist_ok=True)
    pythons = {"ours": Path(sys.executable)}
    if not set(PEERS).isdisjoint(chosen.only):
        pythons["speculators"] = python_of("speculators", chosen.peers_dir)
    given = {
        "states": str(states),
        "initial": str(initial),
        "batch_tokens": BATCH_TOKENS,
        "seed": SEED,
        "total_tokens": chosen.marks[-1],
    }
    log = folder / "workers.log"
    trained: dict[str, list[dict[str, Any]]] = {}
    with ExitStack() as stack:
        workers: dict[str, WorkerProcess] = {}
        for one in [one for one in CONTESTANTS if one.name in chosen.only]:
            arguments = [json.dumps(given | {"name": one.name})]
            module = "benchmarks.acceptance_curve.worker"
            workers[one.name] = stack.enter_context(
                WorkerProcess(one.name, module, arguments, log, pythons[one.trainer], chosen.core)
            )
            trained[one.name] = []
        # In turns, so that whatever changes on the machine meets everybody.
        for mark in chosen.marks:
            for name, worker in workers.items():
                spent = worker.ask("train", tokens=mark, folder=str(_draft(folder, name, mark)))
                trained[name].append(spent)
                say(
                    f"{name}: {spent['tokens']} tokens in {spent['wall']:.2f} s "
                    f"(CPU {spent['cpu']:.2f} s)"
                )
    return trained


def _measure(
    chosen: argparse.Namespace, folder: Path, trained: dict[str, list[dict[str, Any]]]
) -> Curves:
    """Have vLLM draft with every one of them."""
    prompts = [prompt_ids(problem) for problem in held_out_problems(chosen.problems)]
    curves: dict[str, list[Mark]] = {}
    say("starting rollout-server (real vLLM)")
    with Server(POLICY, folder / "initial", folder / "rollout-server.log") as server:
        untrained = server.acceptance(0, prompts, chosen.samples)
        version = 0
        for name, spent in trained.items():
            curves[name] = [Mark(0, 0, 0.0, 0.0, untrained)]
            for mark, took in zip(chosen.marks, spent, strict=True):
                version += 1
                server.swap(version, _draft(folder, name, mark))
                acceptance = server.acceptance(version, prompts, chosen.samples)
                curves[name].append(Mark(**took, acceptance=acceptance))
                say(
                    f"{name}, {took['tokens']} tokens: acceptance length "
                    f"{acceptance.length:.3f} ± {acceptance.standard_error:.3f}"
                )
    return curves


def _figures(chosen: argparse.Namespace, curves: Curves, rungs: list[Rung]) -> dict[str, Any]:
    hardware = machine()
    return {
        "trained_on": f"{hardware['cpu']}, 1 core of {hardware['cores']}",
        "settings": {
            "batch_tokens": BATCH_TOKENS,
            "ttt_steps": TTT_STEPS,
            "learning_rate": LEARNING_RATE,
            "warmup_steps": WARMUP_STEPS,
            "compute_dtype": "bfloat16",
            "problems": chosen.problems,
            "samples": chosen.samples,
            "draft_sample_method": "probabilistic",
            "temperature": 1.0,
        },
        "curves": {name: [mark.to_dict() for mark in marks] for name, marks in curves.items()},
        "ladder": [dataclasses.asdict(rung) for rung in rungs],
        "float8_states": _float8_effect(curves),
    }


def _float8_effect(curves: Curves) -> list[dict[str, float]]:
    """What float8 states change of ours, mark by mark."""
    if not {OURS, FLOAT8} <= curves.keys():
        return []
    marks = list(zip(curves[OURS], curves[FLOAT8], strict=True))[1:]
    return [
        {"tokens": before.tokens, "acceptance_length": found[0], "standard_error": found[1]}
        for before, after in marks
        for found in [difference(before, after)]
    ]


def _draft(folder: Path, name: str, mark: int) -> Path:
    return folder / "drafts" / name.replace(", ", "-").replace(" ", "-") / str(mark)


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = options(
        "acceptance_curve",
        "Trains one initial draft of the arithmetic example's policy on the same "
        "recorded states with ours and with speculators, each on the same core with one thread, "
        "and measures every draft on the way in a real vLLM server. Progress goes to stderr, "
        "tables to stdout.",
    )
    add = parser.add_argument
    add("--rollouts", type=int, default=4096, help="to record, and to train on, over and over")
    add("--marks", type=_marks, default="10000,20000,40000,70000,100000,200000,400000",
        help="tokens of training after which a draft is measured")  # fmt: skip
    everybody = [one.name for one in CONTESTANTS]
    add("--only", nargs="+", choices=everybody, default=everybody, metavar="NAME",
        help="some of the contestants; without a peer there is no ladder")  # fmt: skip
    add("--problems", type=int, default=64, help="that vLLM solves with every draft")
    add("--samples", type=int, default=4, help="completions of each problem")
    add("--core", type=int, default=max(os.sched_getaffinity(0)), help="the one all train on")
    add("--threads", type=int, default=1, help="torch CPU threads while states are recorded")
    add("--peers-dir", type=Path, default=default_directory(), help="the peers' environments")
    add("--keep", type=Path, metavar="DIR",
        help="folder for states, drafts and logs; states that are there are taken")  # fmt: skip
    add("--plot", type=Path, help="draw the curves there (.svg or .png)")
    chosen = parser.parse_args(argv)
    torch.set_num_threads(chosen.threads)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    return chosen


def _marks(text: str) -> list[int]:
    return sorted(int(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
