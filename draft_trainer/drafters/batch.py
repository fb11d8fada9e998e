"""Samples as padded rows, with the policy data that the objective needs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from draft_trainer.drafters.policy import PolicyHead, PolicyHeads, policy_logits
from slipstream.sample import Sample
from slipstream.v1 import draft_trainer_pb2 as pb


@dataclass(frozen=True, eq=False)
class Batch:
    """B rows of at most T tokens of ONE policy version; a row is one sequence, padded at its end.

    The teacher is not in it: its log-probs over the draft vocabulary are the largest tensor of
    all, so they are recomputed chunk by chunk where they are used (``teacher_log_probs``).

    It is assembled on the CPU, where reading a mask waits for no GPU, and moves to the device as a
    whole (``to``).

    Attributes:
        token_ids: int64 [B, T].
        positions: int64 [B, T].
        loss_mask: bool [B, T], false in the padding.
        anchors: bool [B, T], positions that this row trains; false in the context of a window,
            whose own anchors are another row's.
        aux: [B, T, A * H], in the samples' type.
        embeds: [B, T, H], the policy's embeddings of ``token_ids``, in the policy's type.
        final_hidden: [B, T, H], in the samples' type.
        policy: how the policy makes its logits; see ``policy_logits``.
        heads: the policy versions that ``policy`` is one of.
        logits_dtype: type of the policy's logits.
        log_z: float32 [B, T]; at j the log of the sum, over the WHOLE vocabulary, of
            exp(y_j / temperature), as the policy's own log-probs say.
        teacher_known: bool [B, T], where log Z is known: j + 1 is in the row.
        sampled_logprobs: float32 [B, T], log p(x_j).
        temperature: float32 [B].
        groups: B names; rows of one prompt share one (``Sample.group``).
        completions: B names; rows of one completion share one (``Sample.completion``).
        sampling: each row's parameters besides the temperature; empty where no row had any.
    """

    token_ids: Tensor
    positions: Tensor
    loss_mask: Tensor
    anchors: Tensor
    aux: Tensor
    embeds: Tensor
    final_hidden: Tensor
    policy: PolicyHead
    heads: PolicyHeads
    logits_dtype: torch.dtype
    log_z: Tensor
    teacher_known: Tensor
    sampled_logprobs: Tensor
    temperature: Tensor
    groups: tuple[str, ...]
    completions: tuple[str, ...] = ()
    sampling: tuple[pb.SamplingParameters, ...] = ()

    def to(self, device: torch.device) -> Batch:
        """Move every tensor to ``device``; the host waits only for a policy's first copy there.

        Raises torch.OutOfMemoryError.
        """
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        there: dict[str, Any] = {
            name: moved(x, device) for name, x in values.items() if isinstance(x, Tensor)
        }
        there["policy"] = self.heads.on(self.policy, device)
        return Batch(**(values | there))

    def teacher_log_probs(self, row: Tensor, index: Tensor) -> Tensor:
        """The policy's log p(x_{j+1} = v) at the rollout's temperature.

        Args:
            row: int64 [N], b of every (b, j).
            index: int64 [N], j; ``teacher_known`` there.

        Returns:
            float32 [N, draft_vocab], NOT renormalised over the draft vocabulary: what is missing
            to 1 is the policy's mass outside it.
        """
        logits = policy_logits(self.final_hidden[row, index], self.policy, self.logits_dtype)
        return logits.float() / self.temperature[row, None] - self.log_z[row, index, None]


@dataclass(frozen=True, eq=False)
class _Row:
    """Tokens ``start`` to ``stop`` of a sample; anchors from ``first`` up to ``end``."""

    sample: Sample
    start: int
    stop: int
    first: int
    end: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def common(self) -> tuple[int, str, str]:
        """The key that all rows of a batch share: policy version, types of states and logits."""
        sample = self.sample
        return sample.policy_version, str(sample.layout.dtype), str(sample.logits_dtype)


def batches(
    samples: Sequence[Sample],
    policy_heads: PolicyHeads,
    max_tokens: int,
    device: torch.device | None = None,
    window_steps: int | None = None,
) -> Iterator[Batch]:
    """The sequences of ``samples`` in batches of at most ``max_tokens``, padding included.

    Rows of one policy version and of like lengths go together. A sequence longer than
    ``max_tokens`` is a batch of its own, or several: see ``window_steps``.

    Args:
        samples: at least one.
        policy_heads: must hold their policy versions.
        max_tokens: most tokens of a batch.
        device: where the batches will go; the CPU if None.
        window_steps: K, to split a longer sequence into windows of ``max_tokens`` anchors. A
            window has all of the sequence before it as context, so its anchors see what they
            would see in the whole sequence, and the K + 1 tokens after it as targets: sums over
            the windows are the sums over the sequence. None: it stays whole.
    """
    rows = [row for sample in samples for row in _segments(sample)]
    if window_steps is not None:
        rows = [part for row in rows for part in _windows(row, max_tokens, window_steps)]
    rows.sort(key=lambda row: (*row.common, row.size))
    chosen: list[_Row] = []
    for row in rows:
        if (chosen and chosen[0].common != row.common) or (
            chosen and (len(chosen) + 1) * row.size > max_tokens
        ):
            yield _collate(chosen, policy_heads, device)
            chosen = []
        chosen.append(row)
    if chosen:
        yield _collate(chosen, policy_heads, device)


def _segments(sample: Sample) -> list[_Row]:
    changes = (sample.segment_ids.diff() != 0).nonzero().flatten() + 1
    edges = [0, *changes.tolist(), sample.tokens]
    return [_Row(sample, a, b, a, b) for a, b in pairwise(edges)]


def _windows(row: _Row, size: int, steps: int) -> list[_Row]:
    if row.size <= size:
        return [row]
    firsts = range(row.start, row.stop, size)
    return [
        _Row(row.sample, row.start, min(first + size + steps + 1, row.stop), first, first + size)
        for first in firsts
    ]


def _collate(rows: Sequence[_Row], policy_heads: PolicyHeads, device: torch.device | None) -> Batch:
    """One batch of rows of one policy. Raises RefusedError: its version is not held."""
    first = rows[0].sample
    head = policy_heads.get(first.policy_version)
    # A copy from pinned memory does not block the host.
    locked = device is not None and device.type == "cuda"
    size = (len(rows), max(row.size for row in rows))

    def zeros(dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(size, dtype=dtype, pin_memory=locked)

    def empty(width: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(*size, width, dtype=dtype, pin_memory=locked)

    token_ids, positions = zeros(torch.int64), zeros(torch.int64)
    loss_mask, known, anchors = zeros(torch.bool), zeros(torch.bool), zeros(torch.bool)
    aux = empty(first.aux.shape[1], dtype=first.aux.dtype)
    final = empty(first.final_hidden.shape[1], dtype=first.final_hidden.dtype)
    log_z, logprobs = zeros(), zeros()
    for b, row in enumerate(rows):
        sample, part, n = row.sample, slice(row.start, row.stop), row.size
        token_ids[b, :n] = sample.token_ids[part]
        positions[b, :n] = sample.positions[part]
        loss_mask[b, :n] = sample.loss_mask[part]
        # Nearly all bytes of a batch: only the padding is zeroed.
        aux[b, :n], aux[b, n:] = sample.aux[part], 0
        final[b, :n], final[b, n:] = sample.final_hidden[part], 0
        logprobs[b, :n] = sample.sampled_logprobs[part]
        # log Z_j = y_j[x_{j+1}] / temperature - log p(x_{j+1}), both on the wire with x_{j+1}.
        z = sample.sampled_logits[part] / sample.temperature - sample.sampled_logprobs[part]
        log_z[b, : n - 1] = z[1:]
        known[b, : n - 1] = True
        anchors[b, row.first - row.start : min(row.end - row.start, n)] = True
    table = head.embed_tokens
    embeds = empty(table.shape[1], dtype=table.dtype)
    torch.index_select(table, 0, token_ids.flatten(), out=embeds.flatten(0, 1))
    return Batch(
        token_ids=token_ids,
        positions=positions,
        loss_mask=loss_mask,
        anchors=anchors,
        aux=aux,
        embeds=embeds,
        final_hidden=final,
        policy=head,
        heads=policy_heads,
        logits_dtype=first.logits_dtype,
        log_z=log_z,
        teacher_known=known,
        sampled_logprobs=logprobs,
        temperature=torch.tensor([row.sample.temperature for row in rows], dtype=torch.float32),
        groups=tuple(row.sample.group for row in rows),
        completions=tuple(row.sample.completion for row in rows),
        sampling=tuple(row.sample.sampling for row in rows),
    )


def moved(x: Tensor, device: torch.device) -> Tensor:
    """``x`` on a device; the host does not wait for the copy."""
    if x.is_cpu and device.type == "cuda":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)


def ahead(x: Tensor, count: int) -> Tensor:
    """x[:, i + count] at index i, zeros past the end; [B, T, ...] to the same shape."""
    if count >= x.shape[1]:
        return torch.zeros_like(x)
    return torch.cat([x[:, count:], torch.zeros_like(x[:, :count])], dim=1)
