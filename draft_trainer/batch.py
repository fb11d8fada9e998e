"""Samples as padded rows, with everything about the policy that the objective needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from draft_trainer.policy_head import PolicyHeads
from draft_trainer.sample import Sample


@dataclass(frozen=True, eq=False)
class Batch:
    """B rows of at most T tokens; a row is one sequence, padded at its end.

    Attributes:
        token_ids: int64 [B, T].
        positions: int64 [B, T].
        lengths: int64 [B].
        loss_mask: bool [B, T], false in the padding.
        aux: float32 [B, T, A * H].
        embeds: float32 [B, T, H], the policy's embeddings of ``token_ids``.
        teacher_log_probs: float32 [B, T, draft_vocab]; at j the policy's log p(x_{j+1} = v) at
            the rollout's temperature, for v in the draft vocabulary and NOT renormalised over it.
        teacher_known: bool [B, T], where log Z was on the wire: j + 1 lies in the row.
        sampled_logprobs: float32 [B, T], log p(x_j).
        temperature: float32 [B].
        groups: B names; rows of one prompt share one (``Sample.group``).
    """

    token_ids: Tensor
    positions: Tensor
    lengths: Tensor
    loss_mask: Tensor
    aux: Tensor
    embeds: Tensor
    teacher_log_probs: Tensor
    teacher_known: Tensor
    sampled_logprobs: Tensor
    temperature: Tensor
    groups: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class _Row:
    sample: Sample
    start: int
    stop: int


def collate(
    samples: Sequence[Sample], policy_heads: PolicyHeads, device: torch.device | None = None
) -> Batch:
    """One batch of all sequences in ``samples``; a packed sample becomes a row per segment.

    The teacher is recomputed: p(v) = exp(final_hidden . lm_head[v] / temperature - log Z) with
    log Z_j = sampled_logits[j + 1] / temperature - sampled_logprobs[j + 1].

    Args:
        samples: at least one.
        policy_heads: must hold every sample's policy version.
        device: where to; the samples' own if None.

    Raises:
        RefusedError: a policy version is not held.
    """
    return _collate([row for sample in samples for row in _segments(sample)], policy_heads, device)


def batches(
    samples: Sequence[Sample],
    policy_heads: PolicyHeads,
    max_tokens: int,
    device: torch.device | None = None,
) -> Iterator[Batch]:
    """The sequences of ``samples`` in batches of at most ``max_tokens``, padding included.

    Rows of like lengths go together. A sequence longer than ``max_tokens`` is a batch of its own.
    """
    rows = [row for sample in samples for row in _segments(sample)]
    rows.sort(key=lambda row: row.stop - row.start)
    chosen: list[_Row] = []
    for row in rows:
        if chosen and (len(chosen) + 1) * (row.stop - row.start) > max_tokens:
            yield _collate(chosen, policy_heads, device)
            chosen = []
        chosen.append(row)
    if chosen:
        yield _collate(chosen, policy_heads, device)


def _segments(sample: Sample) -> list[_Row]:
    changes = (sample.segment_ids.diff() != 0).nonzero().flatten() + 1
    edges = [0, *changes.tolist(), sample.num_tokens]
    return [_Row(sample, a, b) for a, b in pairwise(edges)]


def _collate(rows: Sequence[_Row], policy_heads: PolicyHeads, device: torch.device | None) -> Batch:
    lengths = [row.stop - row.start for row in rows]
    size = (len(rows), max(lengths))
    first = policy_heads.get(rows[0].sample.policy_version)
    where = device or first.lm_head_rows.device
    hidden = first.embed_tokens.shape[1]

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(*size, *shape, dtype=dtype, device=where)

    batch = Batch(
        token_ids=empty(dtype=torch.int64),
        positions=empty(dtype=torch.int64),
        lengths=torch.tensor(lengths, device=where),
        loss_mask=empty(dtype=torch.bool),
        aux=empty(rows[0].sample.aux.shape[1]),
        embeds=empty(hidden),
        teacher_log_probs=empty(first.lm_head_rows.shape[0]),
        teacher_known=empty(dtype=torch.bool),
        sampled_logprobs=empty(),
        temperature=torch.tensor([row.sample.temperature for row in rows], device=where),
        groups=tuple(row.sample.group for row in rows),
    )
    final, log_z = empty(hidden), empty()
    by_version: dict[int, list[int]] = {}
    for b, row in enumerate(rows):
        sample, part, n = row.sample, slice(row.start, row.stop), lengths[b]
        by_version.setdefault(sample.policy_version, []).append(b)
        batch.token_ids[b, :n] = sample.token_ids[part]
        batch.positions[b, :n] = sample.positions[part]
        batch.loss_mask[b, :n] = sample.loss_mask[part]
        batch.aux[b, :n] = sample.aux[part]
        batch.sampled_logprobs[b, :n] = sample.sampled_logprobs[part]
        batch.teacher_known[b, : n - 1] = True
        final[b, :n] = sample.final_hidden[part]
        z = sample.sampled_logits[part] / sample.temperature - sample.sampled_logprobs[part]
        log_z[b, : n - 1] = z[1:]
    for version, members in by_version.items():
        head = policy_heads.get(version)
        index = torch.tensor(members, device=where)
        rows_of_head = head.lm_head_rows.to(where, torch.float32)
        embeddings = head.embed_tokens.to(where)
        batch.embeds[index] = embeddings[batch.token_ids[index]].float()
        logits = final[index] @ rows_of_head.T / batch.temperature[index, None, None]
        batch.teacher_log_probs[index] = logits - log_z[index, :, None]
    return batch
