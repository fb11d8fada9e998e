"""The draft vocabulary: which of the policy's tokens the head can propose.

Checkpoints hold it as d2t, int64 [draft_vocab], target id = draft id + d2t[draft id], and, for
trainers, as its inverse t2d, bool [vocab], true at the target ids.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draft_trainer.eagle3.head_config import HeadConfig
from slipstream.refusal import RefusedError


def target_ids(d2t: Tensor) -> Tensor:
    """int64 [draft_vocab]: the target id of every draft id."""
    return torch.arange(len(d2t), device=d2t.device) + d2t.long()


def d2t_of(draft_vocab_ids: Tensor) -> Tensor:
    """int64 [draft_vocab]: the inverse of ``target_ids``."""
    return draft_vocab_ids.long() - torch.arange(len(draft_vocab_ids))


def t2d_of(d2t: Tensor, vocab_size: int) -> Tensor:
    """bool [vocab]: true at every target id that the draft vocabulary has."""
    present = torch.zeros(vocab_size, dtype=torch.bool)
    present[target_ids(d2t)] = True
    return present


def check_draft_vocabulary(ids: Tensor, config: HeadConfig, field: str) -> None:
    """Raise RefusedError unless the target ids ascend strictly within the vocabulary."""
    right_size = ids.shape == (config.draft_vocab_size,)
    if not right_size or ids[0] < 0 or ids[-1] >= config.vocab_size or (ids.diff() <= 0).any():
        raise _refused(
            f"{field}: draft vocabulary",
            f"{list(ids.shape)} ids, {ids[:4].tolist()} ...",
            f"{config.draft_vocab_size} strictly ascending ids below {config.vocab_size}",
        )


def check_maps(d2t: Tensor | None, t2d: Tensor | None, config: HeadConfig, field: str) -> None:
    """Refuse maps that are not those of one draft vocabulary of ``config``.

    A full vocabulary needs none, and has either none or those that change nothing (which
    SpecForge writes).

    Raises:
        RefusedError: missing, misshapen, not integers, not ascending, or contradicting each other.
    """
    if d2t is None:
        if t2d is not None or not config.full_vocabulary:
            needed = "d2t: the draft vocabulary is a part of the vocabulary"
            raise _refused(f"{field}: d2t", "nothing", needed)
        return
    if d2t.dtype not in (torch.int64, torch.int32) or d2t.ndim != 1 or not len(d2t):
        found = f"{d2t.dtype} {list(d2t.shape)}"
        raise _refused(f"{field}: d2t", found, f"int64 [{config.draft_vocab_size}]")
    check_draft_vocabulary(target_ids(d2t), config, f"{field}: d2t")
    if t2d is None:
        return
    if t2d.shape != (config.vocab_size,) or t2d.is_floating_point():
        found = f"{t2d.dtype} {list(t2d.shape)}"
        raise _refused(f"{field}: t2d", found, f"bool [{config.vocab_size}]")
    differing = int((t2d.bool() != t2d_of(d2t, config.vocab_size)).sum())
    if differing:
        found = f"{differing} ids marked otherwise"
        raise _refused(f"{field}: t2d", found, "true exactly at the target ids of d2t")


def _refused(field: str, found: object, expected: object) -> RefusedError:
    return RefusedError(
        field, found, expected, "give the maps that the draft was trained with; d2t holds offsets"
    )
