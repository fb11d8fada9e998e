"""A new draft for a policy: its sizes, its vocabulary, its first weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draft_trainer.checkpoints.draft import check_draft_vocabulary
from draft_trainer.checkpoints.policy import PolicyCheckpoint, size_of
from draft_trainer.drafters.eagle3.head import Eagle3Head, HeadConfig
from draft_trainer.drafters.rope import Rope
from slipstream.errors import RefusedError
from slipstream.layers import choose_aux_layers


def choose_draft_vocabulary(counts: Tensor, size: int, allowed: Tensor) -> Tensor:
    """The tokens that were sampled most often; of equally frequent ones the lower ids.

    Args:
        counts: int64 [vocab], how often each token was sampled.
        size: how many to choose.
        allowed: int64, ascending: ids that may be chosen (those with a recorded lm_head row).

    Returns:
        int64 [size], ascending.

    Raises:
        RefusedError: fewer are allowed.
    """
    if not 1 <= size <= len(allowed):
        raise RefusedError(
            "--draft-vocab", size, f"1 to {len(allowed)}, the tokens to choose from", "lower it"
        )
    order = counts[allowed].sort(descending=True, stable=True).indices
    return allowed[order[:size]].sort().values


def init_draft(
    policy: PolicyCheckpoint,
    draft_vocab_ids: Tensor | None,
    *,
    aux_layer_ids: tuple[int, ...] | None = None,
    intermediate_size: int | None = None,
    seed: int = 0,
) -> Eagle3Head:
    """A new head for a policy: random layer, the policy's output rows and final norm.

    Args:
        policy: whose draft it is.
        draft_vocab_ids: int [draft_vocab], ascending target ids; None for the full vocabulary.
        aux_layer_ids: auxiliary layers ("after L layers"); ``choose_aux_layers`` if None.
        intermediate_size: width of the MLP; the policy's if None.
        seed: of the random weights.

    Returns:
        The head, float32. ``fc`` starts as the mean of the auxiliary states, so that the layer
        sees hidden states of the policy's own scale from the first step.

    Raises:
        RefusedError: a size is missing, or a layer or the vocabulary is not the policy's.
    """
    config = _head_config(
        policy.config,
        size_of(policy.config, "vocab_size") if draft_vocab_ids is None else len(draft_vocab_ids),
        aux_layer_ids,
        intermediate_size,
    )
    rows = policy.lm_head
    if draft_vocab_ids is not None:
        check_draft_vocabulary(
            draft_vocab_ids, config.draft_vocab_size, config.vocab_size, "draft_vocab_ids"
        )
        rows = rows[draft_vocab_ids.long()]
        # A full vocabulary has no map, however it was asked for.
        draft_vocab_ids = None if config.full_vocabulary else draft_vocab_ids
    generator = torch.Generator().manual_seed(seed)
    head = Eagle3Head(config, draft_vocab_ids)
    with torch.no_grad():
        for parameter in head.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
        hidden, layers = config.hidden_size, len(config.aux_layer_ids)
        mean = torch.eye(hidden).repeat(1, layers) / layers
        head.fc.weight.mul_(0.1).add_(mean)
        head.lm_head.weight.copy_(rows)
        head.norm.weight.copy_(policy.final_norm)
    return head


def _head_config(
    policy: dict[str, Any],
    draft_vocab_size: int,
    aux_layer_ids: tuple[int, ...] | None,
    intermediate_size: int | None,
) -> HeadConfig:
    hidden, heads = size_of(policy, "hidden_size"), size_of(policy, "num_attention_heads")
    layers = size_of(policy, "num_hidden_layers")
    ids = aux_layer_ids or choose_aux_layers(layers)
    # The residual stream after the last layer is the input of no layer: it cannot be captured.
    if list(ids) != sorted(set(ids)) or not 0 <= ids[0] <= ids[-1] < layers:
        expected = f"ascending layers from 0 to {layers - 1}"
        own = ",".join(map(str, choose_aux_layers(layers)))
        step = f"leave the option out, which chooses {own}"
        raise RefusedError("--aux-layers", list(ids), expected, step)
    if not isinstance(found := policy.get("rms_norm_eps"), float):
        raise RefusedError(
            "the policy's config.json rms_norm_eps", found, "a number", "write the draft's by hand"
        )
    return HeadConfig(
        hidden_size=hidden,
        target_hidden_size=hidden,
        intermediate_size=intermediate_size or size_of(policy, "intermediate_size"),
        num_attention_heads=heads,
        num_key_value_heads=int(policy.get("num_key_value_heads") or heads),
        head_dim=int(policy.get("head_dim") or hidden // heads),
        vocab_size=size_of(policy, "vocab_size"),
        draft_vocab_size=draft_vocab_size,
        aux_layer_ids=ids,
        rms_norm_eps=found,
        rope=Rope.from_dict(policy),
        max_position_embeddings=size_of(policy, "max_position_embeddings"),
    )
