"""Makes an example's draft of any mechanism: records the policy's states, begins, trains.

An EAGLE-3 draft begins as ``draft-trainer init`` makes it, with the tokens that were recorded most
often as its vocabulary; a DFlash draft with a mask that the task's vocabulary leaves over; an MTP
head with random weights, beside the policy in Qwen3-Next's notation; a draft model with the
policy's first layers. ``draft-trainer fit`` trains it. A block draft is trained with as many places
as it is served with, because their number is a part of the function. Two cores need some minutes.

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
from draft_trainer.drafters import DRAFTERS
from draft_trainer.files import check_free
from draft_trainer.offline.record import Recorder
from draft_trainer.offline.report import progress_of
from examples.arithmetic_grpo import task as arithmetic
from examples.arithmetic_grpo.make_mtp import first_layers, new_head, policy_with_mtp
from examples.arithmetic_grpo.sampling import solutions
from examples.arithmetic_grpo.tokenizer import VOCAB_SIZE
from examples.task import Task

AUX_LAYERS = (2, 5, 7)
DRAFT_LENGTH = 3
LAYERS = 2
"""The layers of a new DFlash draft, and of a draft model."""


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


def initial(
    kind: str, policy: Path, folder: Path, seed: int, vocabulary: int, parallel: bool = False
) -> Path:
    """An untrained draft below ``folder``, which holds the recorded states."""
    out = folder / "initial"
    if kind == "mtp":
        out.mkdir()
        converted = policy_with_mtp(policy, folder / "policy")
        DRAFTERS["mtp"].save(out, new_head(converted, seed), torch.float32)
        return out
    if kind == "draft_model":
        return first_layers(policy, out, LAYERS, VOCAB_SIZE - 1 if parallel else None)
    shape: tuple[object, ...]
    if kind == "dflash":
        aux = ",".join(map(str, AUX_LAYERS))
        shape = ("--mask-token", VOCAB_SIZE - 1, "--layers", LAYERS, "--aux-layers", aux)
    else:
        shape = ("--draft-vocab", vocabulary, "--states", folder / "states")
    run("init", "--policy", policy, "--draft-kind", kind, *shape, "--seed", seed, "--out", out)
    return out


def main(
    task: Task[Any] = arithmetic,
    policy: Path = Path(__file__).parent / "policy",
    aux: tuple[int, ...] | None = AUX_LAYERS,
    vocabulary: int = 96,
) -> None:
    """Command line entry of a task.

    Args:
        task: of the rollouts.
        policy: that solves it.
        aux: layers of an EAGLE-3 draft; vLLM's default if None.
        vocabulary: of an EAGLE-3 draft.
    """
    parser = argparse.ArgumentParser(
        description="Make an example's draft from scratch (CPU).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--draft-kind", choices=sorted(DRAFTERS), default="eagle3")
    parser.add_argument("--parallel", action="store_true", help="a draft model as PARD's")
    parser.add_argument("--policy", type=Path, default=policy, help="policy checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="the draft; must not exist")
    parser.add_argument("--rollouts", type=int, default=4096, help="to train on")
    parser.add_argument("--epochs", type=int, help="passes over them; 3 of EAGLE-3, 4 of others")
    parser.add_argument("--seed", type=int, default=0, help="of rollouts, weights and order")
    parser.add_argument("--threads", type=int, default=1, help="torch CPU threads")
    options = parser.parse_args()

    check_free(options.out, "--out")
    torch.set_num_threads(options.threads)
    kind, seed = options.draft_kind, options.seed
    epochs = options.epochs or (3 if kind == "eagle3" else 4)
    layers: dict[str, tuple[int, ...] | None] = {"eagle3": aux, "dflash": AUX_LAYERS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        states = folder / "states"
        record(task, options.policy, states, options.rollouts, seed, layers.get(kind, ()))
        draft = initial(kind, options.policy, folder, seed, vocabulary, options.parallel)
        # bfloat16 is twice as fast on current CPUs; master weights are float32.
        how = ("--learning-rate", 2e-3, "--batch-tokens", 512, "--compute-dtype", "bfloat16")
        more: dict[str, tuple[object, ...]] = {
            "dflash": ("--ttt-steps", DRAFT_LENGTH),
            "draft_model": (
                *("--policy", options.policy),
                *(("--ttt-steps", DRAFT_LENGTH) if options.parallel else ()),
            ),
        }
        length = ("--draft-length", DRAFT_LENGTH, *more.get(kind, ()))
        fit = ("--epochs", epochs, "--draft-kind", kind, "--seed", seed, *length, *how)
        run("fit", "--draft", draft, "--states", states, *fit, "--out", options.out)


if __name__ == "__main__":
    main()
