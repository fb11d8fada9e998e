"""Forward passes of the policy on rollouts, under the bridge's capture."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from transformers import PreTrainedModel

from draft_trainer.warmup.rollouts import Rollout
from policy_bridge.capture import Capture, NullCapture
from policy_bridge.extraction import picked_logprobs
from slipstream.errors import RefusedError
from slipstream.sampling import LogitForm
from slipstream.shortage import raise_unless_shortage

PASS_TOKENS = 8192
"""The most tokens of one pass, padding included, but for a rollout that is longer."""

COMPARED = 8, 256
"""Rollouts, and tokens of each, whose log-probabilities are compared with the server's."""

MOST_APART = 1.0
"""Mean difference in nats, between a server and this process, up to which both have one policy.
Other kernels and types differ by hundredths; another policy by several."""


def passes(
    rollouts: Sequence[Rollout], most: Callable[[], int] = lambda: PASS_TOKENS
) -> Iterator[list[Rollout]]:
    """Parts of rollouts that share a forward pass: neighbours in length.

    Args:
        rollouts: all of them.
        most: tokens of the next pass, padding included; asked for every time.
    """
    part: list[Rollout] = []
    for one in sorted(rollouts, key=lambda each: each.tokens):
        if part and (len(part) + 1) * one.tokens > most():
            yield part
            part = []
        part.append(one)
    if part:
        yield part


@torch.no_grad()
def forward(
    model: PreTrainedModel,
    window: Capture | NullCapture,
    rollouts: Sequence[Rollout],
    temperature: float,
) -> None:
    """Run rollouts through the policy in a window of its bridge.

    Args:
        model: the policy, in evaluation mode.
        window: for one pass.
        rollouts: of one pass.
        temperature: they were sampled at.

    Raises:
        RefusedError: the policy cannot be captured, its device has too little memory, or a server
            that reports log-probabilities samples another policy.
    """
    width = max(one.tokens for one in rollouts)
    ids = torch.zeros(len(rollouts), width, dtype=torch.int64)
    mask, completion_mask = ids.bool(), ids.bool()
    for row, one in enumerate(rollouts):
        ids[row, : one.tokens] = torch.tensor(one.prompt + one.completion)
        mask[row, : one.tokens] = True
        completion_mask[row, len(one.prompt) : one.tokens] = True
    ids, mask = ids.to(model.device), mask.to(model.device)
    try:
        with window as capture:
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            capture.ship(
                ids,
                loss_mask=completion_mask,
                attention_mask=mask,
                sampled_logprobs=_sampled_logprobs(logits, ids, rollouts, temperature),
                prompt_lengths=[len(one.prompt) for one in rollouts],
                sample_ids=[str(one.number) for one in rollouts],
            )
        _check_same_policy(logits, rollouts, temperature)
    except RuntimeError as error:
        raise_unless_shortage(error)
        raise no_memory(ids.numel()) from error


def _sampled_logprobs(
    logits: torch.Tensor, ids: torch.Tensor, rollouts: Sequence[Rollout], temperature: float
) -> torch.Tensor:
    """The log-probabilities of completions, float32 [B, S], by logits [B, S, V]; 0 for prompts.

    Without them, the bridge would run lm_head a second time.
    """
    found = logits.new_zeros(logits.shape[:2], dtype=torch.float32)
    for row, one in enumerate(rollouts):
        at = slice(max(1, len(one.prompt)) - 1, one.tokens)
        part = logits[row, None, at], ids[row, None, at]
        found[row, at] = picked_logprobs(*part, LogitForm(), temperature)[0]
    return found


def no_memory(tokens: int) -> RefusedError:
    """The error for a policy's device that has too little memory for a pass."""
    found = f"no memory for a pass of {tokens:,} tokens"
    next_step = "free some of the device's memory, or give another device (cpu)"
    return RefusedError("--device", found, "memory for every pass", next_step)


def _check_same_policy(
    logits: torch.Tensor, rollouts: Sequence[Rollout], temperature: float
) -> None:
    """Raise RefusedError where the server's log-probabilities are not this policy's: neither the
    raw ones nor those at ``temperature``, of which a server reports either."""
    rows, tokens = COMPARED
    apart: list[torch.Tensor] = []
    for row, one in enumerate(rollouts[:rows]):
        told = torch.tensor([float("nan") if p is None else p for p in one.logprobs[:tokens]])
        begin = len(one.prompt) - 1
        if not len(told) or begin < 0:
            continue
        own = logits[row, begin : begin + len(told)].float().cpu()
        sampled = torch.tensor(one.completion[: len(told)])[:, None]
        both = torch.stack([own, own / temperature]).log_softmax(-1)
        apart.append(told - both.gather(-1, sampled.expand(2, -1, -1))[..., 0])
    if not apart:
        return
    means = torch.cat(apart, dim=1).nanmean(dim=1).abs()
    if float(means.min()) > MOST_APART:
        found = f"log-probabilities that differ from --policy's by {float(means.min()):.1f} nats"
        expected = f"at most {MOST_APART:g} on average: the same policy"
        step = "serve --policy there, or give the policy that is served as --policy"
        raise RefusedError("--endpoint", found, expected, step)
