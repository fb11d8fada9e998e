"""Makes the example's drafts of the mechanisms beside EAGLE-3: records states, then trains.

``--draft-kind mtp`` begins with a random head of the policy in Qwen3-Next's notation,
``draft_model`` with the policy's first layers, ``dflash`` with a random draft whose mask is a token
that the task's vocabulary leaves over. A block draft is trained with as many places as it is served
with, because their number is a part of the function. Two cores need some minutes for each.

Run ``python -m examples.arithmetic_grpo.make_other --draft-kind KIND --out DIR`` from the
repository root.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

from draft_trainer.drafters import DRAFTERS
from draft_trainer.files import check_free
from examples.arithmetic_grpo import task
from examples.arithmetic_grpo.make_draft import AUX_LAYERS, DRAFT_LENGTH, record, run
from examples.arithmetic_grpo.make_mtp import first_layers, new_head, policy_with_mtp
from examples.arithmetic_grpo.tokenizer import VOCAB_SIZE

HERE = Path(__file__).parent
MASK_TOKEN = VOCAB_SIZE - 1
LAYERS = 2


def initial(kind: str, policy: Path, folder: Path, seed: int) -> Path:
    """An untrained draft in a new folder below ``folder``."""
    out = folder / "initial"
    if kind == "mtp":
        out.mkdir()
        converted = policy_with_mtp(policy, folder / "policy")
        DRAFTERS["mtp"].save(out, new_head(converted, seed), torch.float32)
    elif kind == "draft_model":
        first_layers(policy, out, LAYERS)
    else:
        aux = ",".join(map(str, AUX_LAYERS))
        shape = ("--mask-token", MASK_TOKEN, "--layers", LAYERS, "--aux-layers", aux)
        made = ("--draft-kind", kind, "--seed", seed, "--out", out)
        run("init", "--policy", policy, *shape, *made)
    return out


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(
        description="Make one of the example's drafts from scratch (CPU).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--draft-kind", choices=["mtp", "draft_model", "dflash"], required=True)
    parser.add_argument("--policy", type=Path, default=HERE / "policy", help="Qwen3 checkpoint")
    parser.add_argument("--out", type=Path, required=True, help="the draft; must not exist")
    parser.add_argument("--rollouts", type=int, default=4096, help="to train on")
    parser.add_argument("--epochs", type=int, default=4, help="passes over them")
    parser.add_argument("--seed", type=int, default=0, help="of rollouts, weights and order")
    parser.add_argument("--threads", type=int, default=1, help="torch CPU threads")
    options = parser.parse_args()

    check_free(options.out, "--out")
    torch.set_num_threads(options.threads)
    kind, seed = options.draft_kind, options.seed
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        aux = AUX_LAYERS if kind == "dflash" else ()
        record(task, options.policy, folder / "states", options.rollouts, seed, aux)
        draft = initial(kind, options.policy, folder, seed)
        # bfloat16 is twice as fast on current CPUs; master weights are float32.
        how = ("--learning-rate", 2e-3, "--batch-tokens", 512, "--compute-dtype", "bfloat16")
        more: dict[str, tuple[object, ...]] = {
            "dflash": ("--ttt-steps", DRAFT_LENGTH),
            "draft_model": ("--policy", options.policy),
        }
        length = ("--draft-length", DRAFT_LENGTH, *more.get(kind, ()))
        fit = ("--epochs", options.epochs, "--draft-kind", kind, "--seed", seed, *length, *how)
        run("fit", "--draft", draft, "--states", folder / "states", *fit, "--out", options.out)


if __name__ == "__main__":
    main()
