"""Makes the example's draft: ``draft-trainer warmup`` on rollouts of the policy that vLLM serves.

``python -m examples.smollm_grpo.make_draft --out DIR``; after an interruption the same command goes
on. It writes the prompts, starts a server without a draft, and gives both to the command, which it
prints. A million tokens take hours on two cores.
"""

from __future__ import annotations

import argparse
import json
import os
from itertools import islice
from pathlib import Path

from transformers import AutoTokenizer

from draft_trainer.drafters.ops import cpu_precision
from examples.arithmetic_grpo.make_draft import run
from examples.local_services import DRAFT_LENGTH, RolloutServer
from examples.smollm_grpo import model as smollm
from examples.smollm_grpo.task import Tasks, problems, prompt_ids

EPOCHS = 3
CONFIG = f"""[training]
compute_dtype = "{cpu_precision()}"
ttt_steps = {DRAFT_LENGTH}
[replay]
max_epochs = {EPOCHS}
[publish]
num_speculative_tokens = {DRAFT_LENGTH}
"""


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.smollm_grpo.make_draft",
        description="Make the example's draft from scratch (CPU).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="the draft")
    parser.add_argument("--policy", type=Path, help="checkpoint (default: with supervised start)")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="to train on, passes counted")
    parser.add_argument("--prompts", type=int, default=4096, help="distinct ones")
    parser.add_argument("--samples", type=int, default=4, help="completions of each prompt")
    parser.add_argument("--draft-vocab", type=int, default=8192, help="tokens that it can propose")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and draft")
    options = parser.parse_args()

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    policy = options.policy or smollm.policy()
    work = options.out.with_name(f"{options.out.name}-work")
    work.mkdir(parents=True, exist_ok=True)
    prompts, config = work / "prompts.jsonl", work / "warmup.toml"
    if not prompts.exists():
        tokenizer = AutoTokenizer.from_pretrained(policy)
        drawn = islice(problems(f"draft-{options.seed}"), options.prompts)
        lines = [json.dumps({"prompt": prompt_ids(tokenizer, one)}) for one in drawn]
        prompts.write_text("\n".join(lines) + "\n")
    config.write_text(CONFIG)
    log = work / "rollout-server.log"
    given = (*smollm.SERVED, "--max-num-seqs", "64", "--draft-kind", "none")
    with RolloutServer(log, *given, policy=policy, draft=None) as server:
        run(
            *("warmup", "--policy", policy, "--prompts", prompts, "--endpoint", server.http),
            *("--model", "policy", "--max-tokens", Tasks.max_tokens, "--tokens", options.tokens),
            *("--samples", options.samples, "--draft-vocab", options.draft_vocab),
            *("--config", config, "--seed", options.seed),
            *("--out", options.out),
        )


if __name__ == "__main__":
    main()
