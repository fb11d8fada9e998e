"""A new draft for a warm-up: its vocabulary is the first rollouts' commonest tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from draft_trainer.checkpoints import read_policy, size_of
from draft_trainer.drafters import Draft
from draft_trainer.drafters.initial import choose_draft_vocabulary, init_draft
from draft_trainer.warmup.rollouts import Reading

DRAFT_VOCAB = 32_000
"""Tokens of a draft vocabulary, where the policy has more."""

COUNTED_TOKENS = 1 << 19
"""Completion tokens of which the commonest are chosen."""


def new_draft(
    policy: Path,
    reading: Reading,
    *,
    size: int | None,
    most_tokens: int | None,
    aux_layer_ids: tuple[int, ...] | None,
    intermediate_size: int | None,
    seed: int,
    tell: Callable[[str], None],
) -> Draft:
    """An untrained EAGLE-3 draft, as ``draft-trainer init`` makes it.

    Args:
        policy: folder of its policy.
        reading: the rollouts; looked at only where the draft cannot propose every token.
        size: of the draft vocabulary; ``DRAFT_VOCAB``, or every token, if None.
        most_tokens: completion tokens of the whole warm-up: no more are looked at.
        aux_layer_ids, intermediate_size, seed: see ``init_draft``.
        tell: says what is chosen.

    Raises:
        RefusedError: a size is not possible with this policy, or it cannot be read.
    """
    checkpoint = read_policy(policy)
    vocab = size_of(checkpoint.config, "vocab_size")
    size = size or min(DRAFT_VOCAB, vocab)
    ids = None
    if size != vocab:
        tell("reading the first rollouts, whose commonest tokens are the draft vocabulary")
        counts = torch.zeros(vocab, dtype=torch.int64)
        for one in reading.look(min(COUNTED_TOKENS, most_tokens or COUNTED_TOKENS)):
            counts += torch.bincount(torch.tensor(one.completion).long(), minlength=vocab)
        ids = choose_draft_vocabulary(counts, size)
        share = int(counts[ids].sum()) / max(int(counts.sum()), 1)
        tell(
            f"draft vocabulary {size:,} of {vocab:,} tokens, {share:.2%} of {int(counts.sum()):,} "
            "completion tokens"
        )
    return init_draft(
        checkpoint,
        ids,
        aux_layer_ids=aux_layer_ids,
        intermediate_size=intermediate_size,
        seed=seed,
    )
