"""Makes the example's initial EAGLE-3 draft: records the policy's states, then two commands.

``draft-trainer init`` makes a draft whose vocabulary holds the tokens that were recorded most
often, ``draft-trainer fit`` trains it. Two cores need some minutes.

Run ``python -m examples.arithmetic_grpo.make_draft --out DIR`` from the repository root.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from draft_trainer.cli.main import main as draft_trainer
from draft_trainer.offline.report import progress_of
from examples.arithmetic_grpo.record import Recorder, solutions

AUX_LAYERS = (2, 5, 7)
DRAFT_LENGTH = 3


def record(policy: Path, states: Path, count: int, seed: int) -> None:
    """Solve ``count`` problems at temperature 1 and record the policy's states for each."""
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
    console, done = Console(stderr=True), 0
    with (
        Recorder(model, states, aux_layer_ids=AUX_LAYERS) as recorder,
        progress_of(console, "recording rollouts") as (bar, task),
    ):
        for rollouts in solutions(model, count, seed):
            recorder.add(rollouts)
            done += len(rollouts)
            bar.update(task, completed=done, total=count)


def run(*arguments: object) -> None:
    """A command of draft-trainer; ends the program where it fails."""
    print(" ".join(("draft-trainer", *map(str, arguments))), file=sys.stderr)
    code = draft_trainer([*map(str, arguments)])
    if code:
        sys.exit(code)


def main() -> None:
    """Command line entry."""
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(
        description="Make the arithmetic example's initial EAGLE-3 draft from scratch (CPU).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--policy", type=Path, default=here / "policy", help="policy checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="the draft; must not exist")
    parser.add_argument("--rollouts", type=int, default=4096, help="to train on")
    parser.add_argument("--epochs", type=int, default=3, help="passes over them")
    parser.add_argument("--draft-vocabulary", type=int, default=96, help="draft vocabulary size")
    parser.add_argument("--seed", type=int, default=0, help="of rollouts, weights and order")
    parser.add_argument("--threads", type=int, default=1, help="torch CPU threads")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        states, initial = Path(folder) / "states", Path(folder) / "initial"
        record(options.policy, states, options.rollouts, options.seed)
        made = ("--states", states, "--seed", options.seed, "--out")
        size = options.draft_vocabulary
        run("init", "--policy", options.policy, "--draft-vocab", size, *made, initial)
        # bfloat16 is twice as fast on current CPUs; master weights are float32.
        how = ("--learning-rate", 2e-3, "--batch-tokens", 512, "--compute-dtype", "bfloat16")
        length = ("--epochs", options.epochs, "--draft-length", DRAFT_LENGTH)
        run("fit", "--draft", initial, *length, *how, *made, options.out)


if __name__ == "__main__":
    main()
