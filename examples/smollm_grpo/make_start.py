"""Makes the supervised start: a LoRA adapter on worked solutions that ``task`` writes.

``python -m examples.smollm_grpo.make_start --out DIR`` needs 20 minutes on two cores. The
untouched model has 2 nats of entropy a token at temperature 1, which no draft can guess. The
solutions are those of problems that no run is trained or measured on; a part of them is the answer
without steps.
"""

from __future__ import annotations

import argparse
import random
from itertools import islice
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from draft_trainer.drafters.ops import cpu_precision
from draft_trainer.files import check_free
from examples.arithmetic_grpo.grpo import pad_batch
from examples.smollm_grpo import model as smollm
from examples.smollm_grpo.task import problems, prompt_ids, solution

MICRO_BATCH = 4


def main() -> None:
    """Command line entry."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.smollm_grpo.make_start",
        description="Make the supervised start of the example's policy (CPU).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="the adapter; must not exist")
    parser.add_argument("--solutions", type=int, default=1600, help="to train on, each once")
    parser.add_argument("--worked", type=float, default=0.4, help="share that shows its steps")
    parser.add_argument("--batch", type=int, default=8, help="solutions of a step")
    parser.add_argument("--rank", type=int, default=8, help="of the adapter")
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="at its highest")
    parser.add_argument("--seed", type=int, default=0, help="of solutions and adapter")
    options = parser.parse_args()

    check_free(options.out, "--out")
    torch.manual_seed(options.seed)
    folder = smollm.untouched()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, cpu_precision()))
    config = LoraConfig(
        r=options.rank, lora_alpha=2 * options.rank, target_modules="all-linear", lora_dropout=0.0
    )
    model = get_peft_model(base, config)
    rng = random.Random(options.seed)
    pairs = []
    for problem in islice(problems(f"start-{options.seed}"), options.solutions):
        text = solution(problem, rng, worked=rng.random() < options.worked)
        answer = tokenizer(text + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
        pairs.append((prompt_ids(tokenizer, problem), answer))
    steps = len(pairs) // options.batch
    trained = [value for value in model.parameters() if value.requires_grad]
    optimizer = torch.optim.AdamW(trained, options.learning_rate, (0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, options.learning_rate, steps, pct_start=0.1
    )
    for step in range(steps):
        some = pairs[step * options.batch :][: options.batch]
        # A micro-batch is as wide as its longest sequence.
        some.sort(key=lambda pair: len(pair[0]) + len(pair[1]))
        total, nats = sum(len(answer) for _, answer in some), 0.0
        for begin in range(0, len(some), MICRO_BATCH):
            part = some[begin : begin + MICRO_BATCH]
            prompts, answers = zip(*part, strict=True)
            batch = pad_batch(prompts, answers, torch.zeros(len(part)), 0)
            states = base.model(batch.input_ids, attention_mask=batch.attention_mask)
            # The head alone is a fifth of the model: it sees the solutions' tokens only.
            states = states.last_hidden_state[:, :-1][batch.completion_mask[:, 1:]]
            logits = base.lm_head(states).float()
            targets = batch.input_ids[batch.completion_mask]
            loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
            (loss / total).backward()
            nats += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        print(f"step {step + 1}/{steps}: {nats / total:.3f} nats a token", flush=True)
    for value in trained:
        value.data = value.data.bfloat16()
    model.peft_config["default"].base_model_name_or_path = smollm.NAME
    model.save_pretrained(options.out)
    (options.out / "README.md").unlink()  # a template with nothing filled in
    print(f"{options.out}: {(options.out / 'adapter_model.safetensors').stat().st_size} bytes")


if __name__ == "__main__":
    main()
