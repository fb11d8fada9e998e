"""Trains the example's initial EAGLE-3 draft from scratch on rollouts of the pretrained policy.

Rollouts are sampled at T = 1, the policy's states are recorded from a plain forward pass, and the
draft trainer's own learner fits a new head to them. The draft vocabulary holds the tokens that are
most frequent where both writing styles are, so that the head can follow the policy from one to the
other.

Run ``python -m examples.arithmetic_grpo.make_draft --out DIR`` from the repository root.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import shutil
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen3ForCausalLM

from draft_trainer.acceptance import AcceptanceEstimate, expected_acceptance
from draft_trainer.checkpoint import d2t_of, init_draft, save_draft
from draft_trainer.head import Eagle3Head
from draft_trainer.learner import Learner, LearnerConfig
from draft_trainer.policy_head import PolicyHead, PolicyHeads
from draft_trainer.sample import Sample
from examples.arithmetic_grpo.sampling import prompt_ids, sample
from examples.arithmetic_grpo.task import sample_problem, write_solution
from examples.arithmetic_grpo.tokenizer import EOS_ID, token_ids

AUX_LAYERS = (2, 5, 7)
DRAFT_LENGTH = 3
_CORPUS_DOCUMENTS = 4000
_ROLLOUTS_PER_ROUND = 1024
_EPOCHS = 3
_HELD_OUT_ROLLOUTS = 512
_HELD_OUT_SEED = 1_000_003  # away from the seeds of the training rounds
_LAST_PART = 0.25  # part of the rounds at the low learning rate
_LOW_RATE = 0.2  # low over high learning rate


@dataclass(frozen=True)
class Rollouts:
    """Completions of the policy with the states of its forward pass."""

    samples: list[Sample]
    tokens: int


def draft_vocabulary(size: int, seed: int) -> Tensor:
    """The target ids most frequent in solutions of which half the lines are ornate.

    Returns:
        int64 [size], ascending.
    """
    rng = random.Random(seed)
    ids = token_ids()
    counts: Counter[int] = Counter()
    for _ in range(_CORPUS_DOCUMENTS):
        solution = write_solution(sample_problem(rng), None, rng, ornate_share=0.5)
        counts.update([ids[word] for word in solution.split()] + [EOS_ID])
    by_frequency = sorted(ids.values(), key=lambda token: (-counts[token], token))
    return torch.tensor(sorted(by_frequency[:size]))


@torch.inference_mode()
def roll_out(model: Qwen3ForCausalLM, count: int, seed: int, name: str) -> Rollouts:
    """Samples ``count`` completions at T = 1 and records the policy's states for each."""
    rng = random.Random(seed)
    prompts = [prompt_ids(sample_problem(rng)) for _ in range(count)]
    drawn = sample(model, prompts, 1.0, generator=torch.Generator().manual_seed(seed))
    sequences = [p + c for p, c in zip(drawn.prompts, drawn.completions, strict=True)]
    order = sorted(range(count), key=lambda index: len(sequences[index]))
    samples: list[Sample] = []
    for start in range(0, count, 64):
        rows = order[start : start + 64]
        width = max(len(sequences[row]) for row in rows)
        padded = torch.zeros(len(rows), width, dtype=torch.int64)
        for line, row in enumerate(rows):
            padded[line, : len(sequences[row])] = torch.tensor(sequences[row])
        # Padding lies behind every real token, which causal attention never looks at.
        output = model(input_ids=padded, output_hidden_states=True, use_cache=False)
        states = output.hidden_states
        aux = torch.cat([states[layer] for layer in AUX_LAYERS], dim=-1)
        logits = output.logits[:, :-1].float()
        following = padded[:, 1:, None]
        chosen = logits.gather(2, following)[..., 0]
        log_probs = logits.log_softmax(-1).gather(2, following)[..., 0]
        for line, row in enumerate(rows):
            n = len(sequences[row])
            samples.append(
                Sample(
                    sample_id=f"{name}-{row}",
                    policy_version=0,
                    temperature=1.0,
                    token_ids=padded[line, :n].int(),
                    positions=torch.arange(n, dtype=torch.int32),
                    segment_ids=torch.zeros(n, dtype=torch.int32),
                    loss_mask=torch.arange(n) >= len(drawn.prompts[row]),
                    aux=aux[line, :n].clone(),
                    final_hidden=states[-1][line, :n].clone(),
                    sampled_logprobs=_after_start(log_probs[line, : n - 1]),
                    sampled_logits=_after_start(chosen[line, : n - 1]),
                )
            )
    return Rollouts(samples, sum(len(sequence) for sequence in sequences))


def train(
    head: Eagle3Head,
    model: Qwen3ForCausalLM,
    heads: PolicyHeads,
    config: LearnerConfig,
    rounds: int,
    tokens_per_step: int,
) -> int:
    """Trains on ``rounds`` batches of fresh rollouts, a few epochs on each; returns the tokens.

    The schedule follows rounds and not the clock: a seed gives the same draft on a busy machine.
    """
    learner = Learner(head, config)
    started = reported = time.monotonic()
    tokens = 0
    for index in range(rounds):
        if index >= rounds * (1.0 - _LAST_PART) and learner.config is config:
            rate = config.learning_rate * _LOW_RATE
            learner = Learner(head, replace(config, learning_rate=rate))
        rollouts = roll_out(model, _ROLLOUTS_PER_ROUND, config.seed + 1 + index, f"r{index}")
        parts = []
        for epoch in range(_EPOCHS):
            random.Random(_EPOCHS * index + epoch).shuffle(rollouts.samples)
            parts += _parts(rollouts.samples, tokens_per_step)
        for number, part in enumerate(parts):
            metrics = learner.step(part, heads)
            tokens += metrics.tokens
            if (now := time.monotonic()) - reported >= 10.0:
                reported = now
                done = (index + (number + 1) / len(parts)) / rounds
                rates = " ".join(f"{rate:.3f}" for rate in metrics.step_acceptance)
                print(
                    f"{tokens} tokens  loss {metrics.loss:.4f}  acceptance per step {rates}  "
                    f"ETA {(now - started) * (1.0 / done - 1.0):.0f} s",
                    flush=True,
                )
    return tokens


def save(head: Eagle3Head, draft_vocab_ids: Tensor, out: Path, record: dict[str, object]) -> None:
    """Writes the bf16 checkpoint and ``make_draft.json``, replacing ``out`` whole."""
    out.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    staging.chmod(0o755)
    save_draft(staging, head.config, head, d2t_of(draft_vocab_ids))
    (staging / "make_draft.json").write_text(json.dumps(record, indent=2) + "\n")
    if out.exists():
        shutil.rmtree(out)
    staging.rename(out)


def main() -> None:
    """Command line entry."""
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(
        description="Train the arithmetic example's initial EAGLE-3 draft from scratch (CPU).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--policy", type=Path, default=here / "policy", help="policy checkpoint")
    parser.add_argument("--out", type=Path, default=here / "draft", help="folder, replaced whole")
    parser.add_argument(
        "--rounds", type=int, default=4, help=f"times {_ROLLOUTS_PER_ROUND} rollouts to train on"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and rollouts")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="AdamW's, first part")
    parser.add_argument("--ttt-steps", type=int, default=5, help="depth of training-time test")
    parser.add_argument("--draft-vocabulary", type=int, default=96, help="draft vocabulary size")
    parser.add_argument("--tokens-per-step", type=int, default=1024, help="tokens per step")
    parser.add_argument("--threads", type=int, default=1, help="torch CPU threads")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    model = Qwen3ForCausalLM.from_pretrained(options.policy, dtype=torch.float32).eval()
    vocabulary = draft_vocabulary(options.draft_vocabulary, options.seed)
    lm_head = model.lm_head.weight.detach()
    head = init_draft(
        json.loads((options.policy / "config.json").read_text()),
        vocabulary,
        lm_head=lm_head,
        final_norm=model.model.norm.weight.detach(),
        aux_layer_ids=AUX_LAYERS,
        seed=options.seed,
    )
    heads = PolicyHeads(keep=1)
    heads.add(PolicyHead(0, lm_head[vocabulary], model.model.embed_tokens.weight.detach()))
    print(f"{sum(p.numel() for p in head.parameters())} parameters", flush=True)

    config = LearnerConfig(
        learning_rate=options.learning_rate,
        ttt_steps=options.ttt_steps,
        compute_dtype=torch.bfloat16,  # twice as fast on current CPUs; master weights are float32
        seed=options.seed,
    )
    weights = (options.policy / "model.safetensors").read_bytes()
    record: dict[str, object] = {
        "seed": options.seed,
        "rounds": options.rounds,
        "policy_sha256": hashlib.sha256(weights).hexdigest(),
    }
    record["tokens"] = train(head, model, heads, config, options.rounds, options.tokens_per_step)

    served = Learner(head, config).snapshot()
    held_out = roll_out(
        model, _HELD_OUT_ROLLOUTS, options.seed + _HELD_OUT_SEED, "held-out"
    ).samples
    for method in ("probabilistic", "greedy"):
        estimate = expected_acceptance(served, held_out, heads, DRAFT_LENGTH, method)
        print(f"{method}: {_describe(estimate)}", flush=True)
        record[method] = round(estimate.acceptance_length, 4)
    save(head, vocabulary, options.out, record)
    print(f"saved {options.out}", flush=True)


def _describe(estimate: AcceptanceEstimate) -> str:
    error = float(estimate.per_sequence.std()) / estimate.sequences**0.5
    positions = " ".join(f"{rate:.3f}" for rate in estimate.accepted_per_position)
    return (
        f"expected acceptance length {estimate.acceptance_length:.3f} ± {error:.3f} (s.e.) at "
        f"k = {DRAFT_LENGTH}, accepted per position {positions}"
    )


def _after_start(values: Tensor) -> Tensor:
    """[T - 1] to [T]: the first token has no prediction."""
    return torch.cat([torch.zeros(1), values])


def _parts(samples: list[Sample], tokens: int) -> list[list[Sample]]:
    """Consecutive groups of about ``tokens`` tokens."""
    parts: list[list[Sample]] = [[]]
    count = 0
    for item in samples:
        if count + item.num_tokens > tokens and parts[-1]:
            parts.append([])
            count = 0
        parts[-1].append(item)
        count += item.num_tokens
    return parts


if __name__ == "__main__":
    main()
