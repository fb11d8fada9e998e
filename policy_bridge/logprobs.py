"""The sampled tokens' logits and log-probabilities from the final hidden state.

For a sequence x with final hidden states h: logit_t = h_{t-1} . W[x_t], and
log p(x_t | x_<t) = logit_t / temperature - log Z_{t-1}. The wire carries logit
and log-probability of every token, which fixes log Z without a full row of
logits (slipstream.v1.VerifierStates).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

_ROWS_PER_BLOCK = 256


def sampled_logits(
    final: torch.Tensor,
    token_ids: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The logit of each token given those before it, rounded as the policy rounds its own.

    The sum is taken in float32 and rounded to ``dtype``, as a matrix product with
    float32 accumulation does: a log-probability that the policy derived from its
    bfloat16 logits then gives back its own log Z.

    Args:
        final: [T, H].
        token_ids: [T], whole numbers below V, on the same device.
        weight: lm_head [V, H].
        bias: lm_head [V] or None.
        dtype: of the policy's logits.

    Returns:
        float32 [T]; the first is 0.
    """
    target = token_ids[1:].long()
    rows = weight[target].to(dtype).float()
    logits = (final[:-1].to(dtype).float() * rows).sum(-1)
    if bias is not None:
        logits = logits + bias[target].to(dtype).float()
    return F.pad(logits.to(dtype).float(), (1, 0))


def sampled_logprobs(
    final: torch.Tensor,
    token_ids: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    temperature: float,
) -> torch.Tensor:
    """The log-probability of each token given those before it, at ``temperature``.

    Goes through the full vocabulary in blocks of rows, so that a long sequence does
    not need [T, V] floats at once. Arguments and result as ``sampled_logits``.
    """
    blocks = [final.new_zeros(1, dtype=torch.float32)]
    head = weight.to(dtype)
    head_bias = bias.to(dtype) if bias is not None else None
    for start in range(0, len(token_ids) - 1, _ROWS_PER_BLOCK):
        end = min(start + _ROWS_PER_BLOCK, len(token_ids) - 1)
        logits = F.linear(final[start:end].to(dtype), head, head_bias).float() / temperature
        target = token_ids[start + 1 : end + 1].long()
        blocks.append(logits.log_softmax(-1).gather(-1, target[:, None]).squeeze(-1))
    return torch.cat(blocks)


def picked_logits(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """The logits [B, S] of the tokens [B, S] out of all [B, S, V]; column 0 is 0. Float32."""
    target = token_ids[:, 1:, None].long().to(logits.device)
    return F.pad(logits[:, :-1].gather(-1, target).squeeze(-1).float(), (1, 0))


def picked_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, temperature: float
) -> torch.Tensor:
    """The log-probabilities [B, S] of the tokens at ``temperature``; as ``picked_logits``."""
    blocks = [
        (logits[:, start : start + _ROWS_PER_BLOCK].float() / temperature).logsumexp(-1)
        for start in range(0, logits.shape[1], _ROWS_PER_BLOCK)
    ]
    log_z = F.pad(torch.cat(blocks, 1)[:, :-1], (1, 0))
    return picked_logits(logits, token_ids) / temperature - log_z
