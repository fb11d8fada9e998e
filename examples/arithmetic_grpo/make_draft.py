"""Makes an example's initial EAGLE-3 draft: records the policy's states, then two commands.

``draft-trainer init`` makes a draft whose vocabulary holds the tokens that were recorded most
often, ``draft-trainer fit`` trains it. Two cores need some minutes.

Run ``python -m examples.arithmetic_grpo.make_draft --out DIR`` from the repository root.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from draft_trainer.cli.main import main as draft_trainer
from draft_trainer.offline.record import Recorder
from draft_trainer.offline.report import progress_of
from examples.arithmetic_grpo import task as arithmetic
from examples.arithmetic_grpo.sampling import solutions
from examples.task import Task

AUX_LAYERS = (2, 5, 7)
DRAFT_LENGTH = 3


def record(
    task: Task[Any], policy: Path, states: Path, count: int, seed: int, aux: tuple[int, ...] | None
) -> None:
    """Solve ``count`` problems at temperature 1 and record the policy's states for each."""
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
    console, done = Console(stderr=True), 0
    with (
        Recorder(model, states, aux_layer_ids=aux) as recorder,
        progress_of(console, "recording rollouts") as (bar, bar_id),
    ):
        for rollouts in solutions(model, count, seed, task):
            recorder.add(rollouts)
            done += len(rollouts)
            bar.update(bar_id, completed=done, total=count)


def run(*arguments: object) -> None:
    """A command of draft-trainer; ends the program where it fails."""
    print(" ".join(("draft-trainer", *map(str, arguments))), file=sys.stderr)
    code = draft_trainer([*map(str, arguments)])
    if code:
        sys.exit(code)


def main(
    task: Task[Any] = arithmetic,
    policy: Path = Path(__file__).parent / "policy",
    aux: tuple[int, ...] | None = AUX_LAYERS,
    vocabulary: int = 96,
) -> None:
    """Command line entry of a task; ``aux`` are its policy's layers, vLLM's default if None."""
    parser = argparse.ArgumentParser(
        description="Make an example's initial EAGLE-3 draft from scratch (CPU).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--policy", type=Path, default=policy, help="policy checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="the draft; must not exist")
    parser.add_argument("--rollouts", type=int, default=4096, help="to train on")
    parser.add_argument("--epochs", type=int, default=3, help="passes over them")
    parser.add_argument(
        "--draft-vocabulary", type=int, default=vocabulary, help="draft vocabulary size"
    )
    parser.add_argument("--seed", type=int, default=0, help="of rollouts, weights and order")
    parser.add_argument("--threads", type=int, default=1, help="torch CPU threads")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        states, initial = Path(folder) / "states", Path(folder) / "initial"
        record(task, options.policy, states, options.rollouts, options.seed, aux)
        made = ("--states", states, "--seed", options.seed, "--out")
        size = options.draft_vocabulary
        run("init", "--policy", options.policy, "--draft-vocab", size, *made, initial)
        # bfloat16 is twice as fast on current CPUs; master weights are float32.
        how = ("--learning-rate", 2e-3, "--batch-tokens", 512, "--compute-dtype", "bfloat16")
        length = ("--epochs", options.epochs, "--draft-length", DRAFT_LENGTH)
        run("fit", "--draft", initial, *length, *how, *made, options.out)


if __name__ == "__main__":
    main()
