"""One MTP head under three formulations of its objective, on the same states.

All arms have the same head, rollouts in the same order, batches and optimizer, and compute in
float32; they differ in what is compared with what. Acceptance is that of serving: vLLM's V1 runner
keeps the keys of step 0 for positions before the anchor, and the replay follows it.

- "slipstream": ``ttt_objective``, the served alignment against the policy's exact distribution.
- "speculators": cross-entropy on the sampled tokens, weights 0.6^s (FastMTP, arXiv 2509.18362,
  equation 2); step s attends to the step-s keys of all earlier positions
  (vllm-project/speculators, models/mtp/core.py).
- "Megatron": what NeMo RL trains with, one layer for all depths. As speculators', but every depth
  weighs the same (NVIDIA/Megatron-LM, transformer/multi_token_prediction.py). It also rolls the
  positions with the tokens, which rotary embeddings of one depth's keys do not notice.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.harness import Target, say, spread_text, table
from benchmarks.learning.states import read_states
from draft_trainer.config import TrainingConfig
from draft_trainer.drafters.attention import ttt_attention
from draft_trainer.drafters.batch import Batch, ahead, batches
from draft_trainer.drafters.loss import step_weights, ttt_objective, valid_targets
from draft_trainer.drafters.mtp import MtpHead
from draft_trainer.drafters.policy import PolicyHeads
from draft_trainer.training.optimizer import DraftOptimizer, Schedule
from examples.arithmetic_grpo.make_mtp import new_head, policy_with_mtp
from slipstream.sample import Sample

STEPS = 3
BATCH_TOKENS = 512
RATES = (1e-3, 2e-3, 4e-3)
"""Run every arm; the best one of each counts."""


def served_loss(head: MtpHead, batch: Batch) -> Tensor:
    """Slipstream's."""
    weights = step_weights(STEPS, TrainingConfig().step_weight_decay)
    return ttt_objective(head, batch, valid_targets(batch, STEPS), weights=weights).loss


def depth_loss(head: MtpHead, batch: Batch, weights: Sequence[float]) -> Tensor:
    """Cross-entropy of every depth on the sampled tokens, each depth causal over its own keys.

    Args:
        head: of Qwen3-Next's family, whose projection takes the embedding first.
        batch: padded rows.
        weights: of the depths.
    """
    hidden = batch.final_hidden.float()
    embeds, rows = batch.embeds.float(), head.lm_head_rows(batch.policy).float()
    loss = hidden.new_zeros(())
    for depth, weight in enumerate(weights):
        embeds = ahead(embeds, 1)
        both = torch.cat([head.embed_norm(embeds), head.hidden_norm(hidden)], dim=-1)
        fused = head.fc(both)
        q, k, v, gate = head.layer.project(fused, batch.positions)
        hidden = head.norm(head.layer.finish(fused, ttt_attention(q, k, v, []), gate))
        counted = ahead(batch.loss_mask, depth + 2)
        targets = ahead(batch.token_ids, depth + 2)[counted]
        loss = loss + weight * F.cross_entropy(F.linear(hidden[counted], rows), targets)
    return loss


Loss = Callable[[MtpHead, Batch], Tensor]
OURS = "slipstream"
ARMS: Mapping[str, Loss] = {
    OURS: served_loss,
    "speculators": lambda head, batch: depth_loss(head, batch, step_weights(STEPS, 0.6)),
    "Megatron": lambda head, batch: depth_loss(head, batch, step_weights(STEPS, 1.0)),
}


def trained(
    head: MtpHead, loss: Loss, parts: Sequence[Sequence[Sample]], heads: PolicyHeads, rate: float
) -> MtpHead:
    """The head after a step on each part, rounded as a release is."""
    config = TrainingConfig(weight_averaging=0.0, compute_dtype="float32")
    optimizer, schedule = DraftOptimizer(head, config), Schedule(rate, config.warmup_steps)
    for number, samples in enumerate(parts):
        optimizer.clear_gradients()
        (batch,) = batches(samples, heads, max_tokens=1 << 30)
        loss(head, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step(schedule.rate(number), optimizer.gradient_norm())
    return head.to(torch.bfloat16).float()


def formulations(
    policy: Path, train: Path, held: Path, tokens: int, seeds: Sequence[int]
) -> dict[str, dict[float, list[float]]]:
    """Served acceptance length by arm, learning rate and seed, after so many tokens."""
    states, held_out = read_states(train), read_states(held)
    with tempfile.TemporaryDirectory() as name:
        converted = policy_with_mtp(policy, Path(name) / "policy")
        starts = {seed: new_head(converted, seed) for seed in seeds}
    ids = starts[seeds[0]].target_ids()
    heads = states.heads(ids)
    found: dict[str, dict[float, list[float]]] = {}
    for seed, start in starts.items():
        say(f"formulations of the MTP objective, seed {seed}")
        parts = _parts(states.samples, tokens, seed)
        for arm, loss in ARMS.items():
            for rate in RATES:
                head = MtpHead(start.config)  # type: ignore[arg-type]
                head.load_state_dict(start.state_dict())
                head = trained(head, loss, parts, heads, rate)
                length = held_out.acceptance_length(head, STEPS)
                found.setdefault(arm, {}).setdefault(rate, []).append(length)
    columns = ["", *(f"learning rate {rate:g}" for rate in RATES)]
    rows = [[arm, *(spread_text(found[arm][rate]) for rate in RATES)] for arm in ARMS]
    print(table(f"\nMTP head after {tokens:,} tokens: acceptance length, k = 3", columns, rows))
    return found


def _parts(samples: Sequence[Sample], tokens: int, seed: int) -> list[list[Sample]]:
    """Rollouts in a seed's order, in updates of at least ``BATCH_TOKENS``."""
    order = random.Random(seed).sample(range(len(samples)), len(samples))
    parts: list[list[Sample]] = [[]]
    for number in order:
        if sum(sample.tokens for sample in parts[-1]) >= BATCH_TOKENS:
            tokens -= sum(sample.tokens for sample in parts[-1])
            if tokens <= 0:
                break
            parts.append([])
        parts[-1].append(samples[number])
    return parts


def formulation_targets(found: Mapping[str, Mapping[float, Sequence[float]]]) -> list[Target]:
    """Ours against the better of the two, seed by seed, each at its best rate."""
    best = {
        arm: [max(of_seed) for of_seed in zip(*by_rate.values(), strict=True)]
        for arm, by_rate in found.items()
    }
    peers = [max(of_seed) for of_seed in zip(*(best[a] for a in best if a != OURS), strict=True)]
    least = min(mine / peer for mine, peer in zip(best[OURS], peers, strict=True))
    label = "MTP head: served acceptance length over the better peer formulation's, least seed"
    return [Target.at_least(label, least, 1.0)]
