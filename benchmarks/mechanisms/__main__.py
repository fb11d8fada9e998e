"""``python -m benchmarks.mechanisms``: what each draft mechanism learns from the same rollouts.

Drafts of every trained mechanism, as ``examples.arithmetic_grpo.make_draft`` begins them, learn
from the same recorded rollouts of the example's policy in the same order, by the trainer's own
steps with its defaults. Acceptance is that of the replay on held-out rollouts, with the weights
that would be released. CPU seconds are those of the steps, on one thread.
"""

from __future__ import annotations

import random
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.harness import finish, options, say, spread_text, table, write
from benchmarks.learning.scratch import HELD_OUT, learned
from draft_trainer.checkpoints import read_policy
from draft_trainer.config import ReplayConfig, TrainingConfig
from draft_trainer.drafters import DRAFTERS, Draft
from draft_trainer.drafters.expected_acceptance import expected_acceptance
from draft_trainer.drafters.initial import choose_draft_vocabulary, init_draft
from draft_trainer.drafters.ops import cpu_precision
from draft_trainer.kernels.library import use_kernels
from examples.arithmetic_grpo import task
from examples.arithmetic_grpo.make_draft import AUX_LAYERS, DRAFT_LENGTH, initial
from examples.arithmetic_grpo.make_mtp import policy_with_mtp
from examples.arithmetic_grpo.sampling import solutions
from examples.arithmetic_grpo.states import States, states_of
from examples.local_services import ARITHMETIC

KINDS = ("eagle3", "dflash", "dspark", "mtp", "draft_model")
MARKS = (50_000, 100_000, 200_000)
"""Tokens of rollouts after which acceptance is measured."""
ROLLOUTS = 5120
DRAFT_VOCABULARY = 96
"""The draft vocabulary of EAGLE-3; the others have the whole one."""


def mechanism(
    kind: str, seed: int, policy: Path, train: States, held: States, order: Sequence[int]
) -> dict[str, Any]:
    """One mechanism, one seed.

    Returns:
        ``marks``: tokens, CPU seconds, acceptance length and acceptance by position at each;
        ``parameters`` that are trained.
    """
    with tempfile.TemporaryDirectory() as folder:
        start = _start(kind, seed, policy, train, Path(folder))
        heads = train.heads(start().target_ids())
        of_held = held.heads(start().target_ids())

        def mark(tokens: int, seconds: float, draft: Draft) -> dict[str, Any]:
            found = expected_acceptance(draft, held.samples, of_held, DRAFT_LENGTH, "probabilistic")
            return {
                "tokens": tokens,
                "cpu_seconds": seconds,
                "acceptance_length": found.acceptance_length,
                "accepted_per_position": list(found.accepted_per_position),
            }

        config = TrainingConfig(
            ttt_steps=DRAFT_LENGTH,
            compute_dtype=cpu_precision(),
            target="dspark" if kind == "dspark" else "kl",
        )
        samples = [train.samples[number] for number in order]
        passes = ReplayConfig().max_epochs
        marks = learned(start, config, passes, samples, heads, MARKS, mark)
        trained = [value.numel() for value in start().parameters() if value.requires_grad]
    return {"marks": marks, "parameters": sum(trained)}


def _start(kind: str, seed: int, policy: Path, train: States, folder: Path) -> Callable[[], Draft]:
    checkpoint = read_policy(policy)
    if kind == "eagle3":
        counts = torch.zeros(len(train.head.lm_head_rows), dtype=torch.int64)
        for sample in train.samples:
            tokens = sample.token_ids[sample.loss_mask]
            counts += torch.bincount(tokens, minlength=len(counts))
        ids = choose_draft_vocabulary(counts, DRAFT_VOCABULARY)
        return partial(init_draft, checkpoint, ids, aux_layer_ids=AUX_LAYERS, seed=seed)
    draft = initial(kind, policy, folder, seed)
    return lambda: DRAFTERS[kind].read(draft, policy).draft()


def main(argv: Sequence[str] | None = None) -> int:
    """Train every mechanism with every seed, print."""
    parser = options("mechanisms", (__doc__ or "").split("\n\n")[1])
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], help="of heads and order"
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    parsed = parser.parse_args(argv)
    torch.set_num_threads(1)
    use_kernels("auto")
    model = AutoModelForCausalLM.from_pretrained(ARITHMETIC / "policy", dtype=torch.float32).eval()
    say("rollouts")
    train, held = (
        [one for part in solutions(model, count, seed, task) for one in part]
        for count, seed in ((ROLLOUTS, 0), (HELD_OUT, 1))
    )
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        with_head = policy_with_mtp(ARITHMETIC / "policy", Path(folder) / "policy")
        for kind in parsed.kinds:
            policy = with_head if kind == "mtp" else ARITHMETIC / "policy"
            aux = () if kind in ("mtp", "draft_model") else AUX_LAYERS
            states, of_held = states_of(model, train, aux), states_of(model, held, aux)
            stored = sum(one.nbytes for one in states.samples)
            runs = []
            for seed in parsed.seeds:
                say(f"{kind}, seed {seed}")
                order = random.Random(seed).sample(range(len(train)), len(train))
                runs.append(mechanism(kind, seed, policy, states, of_held, order))
            found[kind] = {
                "runs": runs,
                "bytes_per_token": stored / sum(one.tokens for one in states.samples),
            }
            write(parsed.json, found, [])
    columns = ["", "million parameters", *(f"{tokens:,} tokens" for tokens in MARKS)]
    columns += ["by position", "CPU ms a token", "bytes a token"]
    print(
        table(
            f"Acceptance length at k = {DRAFT_LENGTH}, median (min .. max)", columns, _rows(found)
        )
    )
    return finish(parsed.json, found, [])


def _rows(found: dict[str, dict[str, Any]]) -> list[list[str]]:
    rows = []
    for kind, one in found.items():
        runs = [run["marks"] for run in one["runs"]]
        positions = zip(*(run[-1]["accepted_per_position"] for run in runs), strict=True)
        milliseconds = [1000 * run[-1]["cpu_seconds"] / run[-1]["tokens"] for run in runs]
        rows.append(
            [
                kind,
                f"{one['runs'][0]['parameters'] / 1e6:.2f}",
                *(
                    spread_text([run[place]["acceptance_length"] for run in runs])
                    for place in range(len(MARKS))
                ),
                ", ".join(f"{statistics.median(position):.2f}" for position in positions),
                spread_text(milliseconds),
                f"{one['bytes_per_token']:,.0f}",
            ]
        )
    return rows


if __name__ == "__main__":
    sys.exit(main())
