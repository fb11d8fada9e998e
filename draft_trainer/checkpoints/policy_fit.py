"""Whether a draft on disk is one for a given policy, and whose embeddings it carries."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from draft_trainer.checkpoints.policy_checkpoint import read_embeddings, size_of
from draft_trainer.eagle3.head_config import LAYER_IDS, OWN_EMBEDDINGS, HeadConfig
from slipstream.refusal import RefusedError


def check_fits_policy(config: HeadConfig, policy: Mapping[str, Any]) -> None:
    """Refuse a draft that is not for this policy.

    Args:
        config: the draft's.
        policy: the policy's config.json (its ``text_config`` where it has one).

    Raises:
        RefusedError: the vocabulary or the width differs, or a layer is deeper than the policy.
    """
    vocab, width = size_of(policy, "vocab_size"), size_of(policy, "hidden_size")
    depth, deepest = size_of(policy, "num_hidden_layers"), config.aux_layer_ids[-1]
    for name, found, expected, fits in (
        ("vocab_size", config.vocab_size, vocab, config.vocab_size == vocab),
        (
            "target_hidden_size",
            config.target_hidden_size,
            width,
            config.target_hidden_size == width,
        ),
        (LAYER_IDS, deepest, f"at most {depth}", deepest <= depth),
    ):
        if not fits:
            raise RefusedError(
                f"the draft's {name}",
                found,
                f"{expected}, for this policy",
                "give the draft that was trained for this policy",
            )


def is_copy_of_the_policys(embeddings: Tensor, policy: Path | None, where: str) -> bool:
    """Whether embeddings in a checkpoint are the policy's, compared as vLLM compares them.

    vLLM shares the policy's where they are equal when it loads both, and keeps the draft's own
    where they are not.

    Args:
        embeddings: [vocab, H], of the draft's checkpoint.
        policy: its folder; None if it is not at hand.
        where: the checkpoint, for a refusal.

    Raises:
        RefusedError: there is no policy to compare with.
    """
    if policy is None:
        raise RefusedError(
            f"{where}: embed_tokens.weight",
            "embeddings that may be a copy of the policy's, or not",
            "none, or the policy's folder to compare them with",
            "name the policy's folder (draft.policy of a trainer); or remove the tensor, and vLLM "
            "uses the policy's; or, if they are the draft's own, add "
            f'"{OWN_EMBEDDINGS}": true to config.json',
        )
    theirs = read_embeddings(policy)
    return embeddings.shape == theirs.shape and torch.equal(embeddings, theirs.to(embeddings.dtype))
