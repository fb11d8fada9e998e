"""A new draft for a policy, whose vocabulary is the commonest tokens of the policy's rollouts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from draft_trainer.checkpoints import PolicyCheckpoint, size_of
from draft_trainer.drafters.eagle3.head import Eagle3Head
from draft_trainer.drafters.initial import choose_draft_vocabulary, init_draft
from draft_trainer.warmup.rollouts import Reading, Rollout
from slipstream.sample import is_held_out

COVERAGE = 0.999
"""Share of tokens that a draft vocabulary covers. At a position where the policy samples another
one, no draft is accepted."""

MULTIPLE, MOST = 1024, 32_000
"""Number of which a draft vocabulary is a multiple, for kernels; and most tokens of one that is not
asked for: drafting costs more with each."""

COUNTED_TOKENS = 1 << 16, 1 << 19
"""The fewest and the most completion tokens of which the commonest are chosen."""

COUNTED_SHARE = 16
"""Part of the warm-up that is read before it begins. Other rollouts than those have tokens that
they lack: more of them for a text of many subjects, whose warm-up is longer."""

FOLDS = 4

TELL_SECONDS = 30.0


def new_draft(
    policy: PolicyCheckpoint,
    reading: Reading,
    *,
    size: int | None,
    most_tokens: int | None,
    tell: Callable[[str], None],
    **shape: Any,
) -> Eagle3Head:
    """An untrained EAGLE-3 draft, as ``draft-trainer init`` makes it.

    Args:
        policy: its policy.
        reading: the rollouts; looked at only where the draft cannot propose every token.
        size: of the draft vocabulary; the smallest that covers ``COVERAGE`` if None.
        most_tokens: completion tokens of the whole warm-up, every pass counted; None: not known.
        tell: says what is chosen.
        shape: see ``init_draft``.

    Raises:
        RefusedError: a size is not possible with this policy, or rollouts cannot be read.
    """
    vocab = size_of(policy.config, "vocab_size")
    if size is None and vocab <= MULTIPLE:
        size = vocab
    if size == vocab:
        return init_draft(policy, None, **shape)
    counted = tokens_to_count(most_tokens)
    tell(f"reading {counted:,} completion tokens, whose commonest ones are the draft vocabulary")
    counts = count_tokens(_with_progress(reading.look(counted), counted, tell), vocab)
    size = size or smallest_size(counts)
    ids = choose_draft_vocabulary(counts.sum(0), size)
    draft = init_draft(policy, ids, **shape)
    parameters, covered = sum(p.numel() for p in draft.parameters()), coverage(counts)
    whole = parameters + (vocab - size) * draft.lm_head.in_features

    def described(tokens: int) -> str:
        cost = (whole - (vocab - tokens) * draft.lm_head.in_features) / whole
        return f"{tokens:,} tokens cover {covered[tokens - 1]:.2%} at {cost:.2f}"

    smaller = "".join(f"; {described(size // part)}" for part in (2, 4) if size >= part)
    tell(
        f"draft vocabulary {size:,} of {vocab:,} tokens, {parameters:,} parameters. Of "
        f"{int(counts.sum()):,} completion tokens, each of a prompt that did not choose, at the "
        f"cost of training relative to all tokens: {described(size)}{smaller}"
    )
    return draft


def tokens_to_count(most_tokens: int | None) -> int:
    """The completion tokens by which a warm-up of so many chooses its draft vocabulary."""
    fewest, most = COUNTED_TOKENS
    if most_tokens is None:
        return most
    return min(most_tokens, max(fewest, min(most, most_tokens // COUNTED_SHARE)))


def count_tokens(rollouts: Iterable[Rollout], vocab: int) -> Tensor:
    """Count how often each token was sampled, int64 [FOLDS, vocab]; a prompt is in one fold."""
    counts = torch.zeros(FOLDS, vocab, dtype=torch.int64)
    for one in rollouts:
        fold = sum(is_held_out(one.group, part / FOLDS) for part in range(1, FOLDS))
        counts[fold] += torch.bincount(torch.tensor(one.completion).long(), minlength=vocab)
    return counts


def _with_progress(
    rollouts: Iterable[Rollout], counted: int, tell: Callable[[str], None]
) -> Iterator[Rollout]:
    tokens, told_at = 0, time.monotonic()
    for one in rollouts:
        yield one
        tokens += len(one.completion)
        if time.monotonic() - told_at >= TELL_SECONDS:
            told_at = time.monotonic()
            tell(f"read {tokens:,} of {counted:,} completion tokens")


def coverage(counts: Tensor) -> Tensor:
    """The share of tokens covered by a vocabulary of each size, float64 [vocab] from size 1 on.

    Each fold's tokens are looked up in the commonest ones of the other folds: those that nobody
    has seen before count as they will in later rollouts.
    """
    found = torch.zeros_like(counts[0])
    for fold in counts:
        order = (counts.sum(0) - fold).sort(descending=True, stable=True).indices
        found += fold[order]
    return found.cumsum(0).double() / max(int(counts.sum()), 1)


def smallest_size(counts: Tensor) -> int:
    """The smallest multiple of ``MULTIPLE`` that surely covers ``COVERAGE``; at most ``MOST``.

    Where none of n tokens is missing, up to 3 / n of the next ones may be (95 %, the rule of
    three): so fewer than 3,000 tokens are too few to choose by.
    """
    vocab, tokens = counts.shape[1], max(int(counts.sum()), 1)
    missing = 1.0 - coverage(counts) + 3 / tokens
    most = min(MOST, vocab)
    sizes = range(MULTIPLE, most, MULTIPLE)
    return next((size for size in sizes if missing[size - 1] <= 1.0 - COVERAGE), most)
