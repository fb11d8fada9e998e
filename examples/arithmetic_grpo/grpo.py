"""GRPO maths of the demo: advantages, the clipped token loss, and one optimizer update."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

CLIP = 0.2
"""Half-width of the ratio's trust interval around 1."""
MAX_GRADIENT_NORM = 1.0


@dataclass(frozen=True)
class GrpoBatch:
    """One step's samples, right-padded.

    Attributes:
        input_ids: prompts and completions, int64 (samples, tokens).
        attention_mask: 1 on real tokens, int64 (samples, tokens).
        completion_mask: True on completion tokens (``<eos>`` included), bool (samples, tokens).
        advantages: one per sample, float32 (samples,).
        old_log_probs: log-probabilities of ``input_ids`` under the policy that sampled them,
            float32 (samples, tokens), read only where ``completion_mask`` holds; None for a single
            on-policy update, whose ratio is 1.
        rollout_versions: policy version that sampled each row, the oldest of them where it were
            several, int64 (samples,); None: that of the update.
    """

    input_ids: Tensor
    attention_mask: Tensor
    completion_mask: Tensor
    advantages: Tensor
    old_log_probs: Tensor | None = None
    rollout_versions: Tensor | None = None

    def rows(self, chosen: Tensor) -> GrpoBatch:
        """Some of the samples."""
        old, versions = self.old_log_probs, self.rollout_versions
        return GrpoBatch(
            self.input_ids[chosen],
            self.attention_mask[chosen],
            self.completion_mask[chosen],
            self.advantages[chosen],
            None if old is None else old[chosen],
            None if versions is None else versions[chosen],
        )


def group_advantages(rewards: Tensor, group_size: int, epsilon: float = 1e-4) -> Tensor:
    """Rewards (samples,) minus their group's mean, over its deviation; groups are contiguous."""
    groups = rewards.float().view(-1, group_size)
    centred = groups - groups.mean(dim=1, keepdim=True)
    return (centred / (groups.std(dim=1, correction=0, keepdim=True) + epsilon)).flatten()


def pad_batch(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    advantages: Tensor,
    pad_id: int,
    log_probs: Sequence[Sequence[float]] | None = None,
) -> GrpoBatch:
    """Joins each prompt to its completion and right-pads the rows to one length.

    ``log_probs``: of each completion's tokens, by the policy that sampled them.
    """
    width = max(len(p) + len(c) for p, c in zip(prompts, completions, strict=True))
    input_ids = torch.full((len(prompts), width), pad_id)
    attention_mask = torch.zeros_like(input_ids)
    completion_mask = torch.zeros_like(input_ids, dtype=torch.bool)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        end = len(prompt) + len(completion)
        input_ids[row, :end] = torch.tensor([*prompt, *completion])
        attention_mask[row, :end] = 1
        completion_mask[row, len(prompt) : end] = True
    old = None
    if log_probs is not None:
        old = torch.zeros(input_ids.shape)
        old[completion_mask] = torch.tensor([value for row in log_probs for value in row])
    return GrpoBatch(input_ids, attention_mask, completion_mask, advantages, old)


def by_length(
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    advantages: Tensor,
    pad_id: int,
) -> tuple[GrpoBatch, list[int]]:
    """``pad_batch`` with the shortest sequence first, and the order: of each row, which it was.

    A micro-batch is as wide as its longest sequence: of an update's time that saves a sixth.
    """
    rows = range(len(prompts))
    order = sorted(rows, key=lambda row: len(prompts[row]) + len(completions[row]))
    sorted_prompts, sorted_rows = ([of[row] for row in order] for of in (prompts, completions))
    return pad_batch(sorted_prompts, sorted_rows, advantages[order], pad_id), order


def log_prob_forward(model: PreTrainedModel, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
    """Log-probability of every token given those before it, at temperature 1.

    Args:
        model: the causal language model.
        input_ids: int64 (samples, tokens), right-padded.
        attention_mask: int64 (samples, tokens).

    Returns:
        float32 (samples, tokens); the first column, which nothing precedes, is 0.
    """
    logits = model(input_ids=input_ids, attention_mask=attention_mask, use_cache=False).logits
    log_probs = logits[:, :-1].float().log_softmax(-1)
    chosen = log_probs.gather(-1, input_ids[:, 1:, None]).squeeze(-1)
    return torch.nn.functional.pad(chosen, (1, 0))


def old_log_probs(
    model: PreTrainedModel, batch: GrpoBatch, at_once: int, captured: Any = None
) -> Tensor:
    """``log_prob_forward`` of a batch without gradients, so many rows at a time.

    Args:
        model: the policy.
        batch: rows.
        at_once: rows of a pass.
        captured: an open capture of the bridge, which ships every pass; None: nothing is shipped.
    """
    found = []
    with torch.no_grad():
        for start in range(0, len(batch.input_ids), at_once):
            some = slice(start, start + at_once)
            ids, mask = batch.input_ids[some], batch.attention_mask[some]
            found.append(log_prob_forward(model, ids, mask))
            if captured is not None:
                captured.ship(
                    ids,
                    attention_mask=mask,
                    loss_mask=batch.completion_mask[some],
                    sampled_logprobs=found[-1],
                )
    return torch.cat(found)


def policy_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, clip: float
) -> Tensor:
    """Clipped policy-gradient loss, summed over the masked tokens (0-d).

    Args:
        log_probs, old_log_probs: float32 (samples, tokens).
        advantages: float32 (samples,).
        mask: bool (samples, tokens).
        clip: half-width of the ratio's trust interval around 1.
    """
    ratio = (log_probs - old_log_probs).masked_fill(~mask, 0.0).exp()
    advantage = advantages[:, None]
    free, bounded = ratio * advantage, ratio.clamp(1.0 - clip, 1.0 + clip) * advantage
    return -torch.minimum(free, bounded).masked_fill(~mask, 0.0).sum()


def update(
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    batch: GrpoBatch,
    *,
    micro_batch: int = 32,
    capture: AbstractContextManager[Any] | None = None,
) -> float:
    """One optimizer step on the batch, token-mean loss, gradients summed over micro-batches.

    Returns the gradient norm before clipping. ``capture``: a ``bridge.capture(training=True)``,
    told of every micro-batch's pass and left before the optimizer's step.
    """
    total = int(batch.completion_mask.sum())
    optimizer.zero_grad(set_to_none=True)
    with capture or nullcontext() as taken:
        for start in range(0, len(batch.input_ids), micro_batch):
            part = batch.rows(torch.arange(len(batch.input_ids))[start : start + micro_batch])
            width = int(part.attention_mask.sum(1).max())
            ids, attention = part.input_ids[:, :width], part.attention_mask[:, :width]
            mask = part.completion_mask[:, :width]
            log_probs = log_prob_forward(model, ids, attention)
            if part.old_log_probs is None:
                old = log_probs.detach()
            else:
                old = part.old_log_probs[:, :width]
            loss = policy_loss(log_probs, old, part.advantages, mask, CLIP)
            if taken is not None:
                taken.ship(
                    ids,
                    attention_mask=attention,
                    loss_mask=mask,
                    sampled_logprobs=log_probs.detach(),
                    rollout_versions=part.rollout_versions,
                )
            (loss / total).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT_NORM)
    optimizer.step()
    return float(norm)
