"""Makes an example's draft of any mechanism: begins, and warms it up on the policy's rollouts.

An EAGLE-3 draft begins as ``draft-trainer warmup`` makes it, with the commonest tokens of the
rollouts as its vocabulary; a block draft with a mask that the task's vocabulary leaves over; an
MTP head with random weights, beside the policy in Qwen3-Next's notation; a draft model with the
policy's first layers. A block draft is trained with as many places as it is served with, because
their number is a part of the function. Two cores need some minutes.

Run ``python -m examples.arithmetic_grpo.make_draft --out DIR`` from the repository root.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from draft_trainer.cli.main import main as draft_trainer
from draft_trainer.drafters import DRAFTERS
from draft_trainer.drafters.ops import cpu_precision
from draft_trainer.files import check_free
from examples.arithmetic_grpo import task as arithmetic
from examples.arithmetic_grpo.make_mtp import first_layers, new_head, policy_with_mtp
from examples.arithmetic_grpo.sampling import solutions
from examples.arithmetic_grpo.tokenizer import VOCAB_SIZE
from examples.task import Task

AUX_LAYERS = (2, 5, 7)
DRAFT_LENGTH = 3
LAYERS = 2
"""The layers of a new block draft, and of a draft model."""
MARKOV_RANK = 32
"""The rank of a new DSpark draft's Markov head: a quarter of the vocabulary."""


def write_rollouts(task: Task[Any], policy: Path, path: Path, count: int, seed: int) -> Path:
    """Solve ``count`` problems at temperature 1; the rollouts as ``draft-trainer warmup`` reads
    them."""
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
    with path.open("w") as file:
        for part in solutions(model, count, seed, task):
            for prompt, completion in part:
                print(json.dumps({"prompt": prompt, "completion": completion}), file=file)
    return path


def run(*arguments: object) -> None:
    """A command of draft-trainer; ends the program where it fails."""
    print(" ".join(("draft-trainer", *map(str, arguments))), file=sys.stderr)
    code = draft_trainer([*map(str, arguments)])
    if code:
        sys.exit(code)


def initial(kind: str, policy: Path, folder: Path, seed: int, parallel: bool = False) -> Path:
    """An untrained draft below ``folder``, of any mechanism but EAGLE-3; for MTP, of a policy that
    has such a head."""
    out = folder / "initial"
    if kind == "mtp":
        out.mkdir()
        DRAFTERS["mtp"].save(out, new_head(policy, seed), torch.float32)
        return out
    if kind == "draft_model":
        return first_layers(policy, out, LAYERS, VOCAB_SIZE - 1 if parallel else None)
    aux = ",".join(map(str, AUX_LAYERS))
    shape: tuple[object, ...] = (
        "--mask-token",
        VOCAB_SIZE - 1,
        "--layers",
        LAYERS,
        "--aux-layers",
        aux,
    )
    if kind == "dspark":
        shape += ("--markov-rank", MARKOV_RANK)
    run("init", "--policy", policy, "--draft-kind", kind, *shape, "--seed", seed, "--out", out)
    return out


def configuration(folder: Path, epochs: int, threads: int, block: bool) -> Path:
    """The trainer's configuration of a warm-up: the example's figures.

    Args:
        folder: that it is written to.
        epochs: passes over the rollouts.
        threads: of torch.
        block: whether a draft proposes all places at once.
    """
    path = folder / "warmup.toml"
    training = [f"threads = {threads}", f'compute_dtype = "{cpu_precision()}"']
    if block:
        training.append(f"ttt_steps = {DRAFT_LENGTH}")
    path.write_text(
        "\n".join(
            [
                *("[training]", *training),
                *("[replay]", f"max_epochs = {epochs}"),
                *("[publish]", f"num_speculative_tokens = {DRAFT_LENGTH}", ""),
            ]
        )
    )
    return path


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
    kind, seed, policy = options.draft_kind, options.seed, options.policy
    epochs = options.epochs or (3 if kind == "eagle3" else 4)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        file = write_rollouts(task, policy, folder / "rollouts.jsonl", options.rollouts, seed)
        config = configuration(
            folder, epochs, options.threads, block=kind in ("dflash", "dspark") or options.parallel
        )
        if kind == "mtp":
            policy = policy_with_mtp(policy, folder / "policy")
        if kind == "eagle3":
            begin: tuple[object, ...] = ("--draft-vocab", vocabulary)
            if aux is not None:
                begin += ("--aux-layers", ",".join(map(str, aux)))
        else:
            begin = ("--draft", initial(kind, policy, folder, seed, options.parallel))
        how = ("--draft-kind", kind, "--config", config, "--seed", seed, *begin)
        run("warmup", "--policy", policy, "--rollouts", file, *how, "--out", options.out)


if __name__ == "__main__":
    main()
