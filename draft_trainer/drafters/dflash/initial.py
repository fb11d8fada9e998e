"""A new DFlash draft for a policy: its sizes, its first weights."""

from __future__ import annotations

import torch

from draft_trainer.checkpoints.policy import PolicyCheckpoint, size_of
from draft_trainer.drafters.dflash.config import ARCHITECTURE, NESTED, DflashConfig
from draft_trainer.drafters.dflash.head import DflashHead
from draft_trainer.drafters.rope import Rope
from slipstream.errors import RefusedError
from slipstream.layers import choose_aux_layers


def init_dflash(
    policy: PolicyCheckpoint,
    mask_token_id: int,
    *,
    layers: int = 2,
    aux_layer_ids: tuple[int, ...] | None = None,
    intermediate_size: int | None = None,
    seed: int = 0,
) -> DflashHead:
    """A new draft: random layers, the policy's final norm.

    Args:
        policy: whose draft it is.
        mask_token_id: one of its tokens that no text has.
        layers: decoder layers; drafts for large policies have five.
        aux_layer_ids: auxiliary layers ("after L layers"); ``choose_aux_layers`` if None.
        intermediate_size: width of the MLPs; the policy's if None.
        seed: of the random weights.

    Returns:
        The draft, float32. ``fc`` starts as the mean of the auxiliary states.

    Raises:
        RefusedError: a size is missing, or a layer or the mask token is not the policy's.
    """
    given = policy.config
    hidden, heads = size_of(given, "hidden_size"), size_of(given, "num_attention_heads")
    depth = size_of(given, "num_hidden_layers")
    ids = aux_layer_ids or choose_aux_layers(depth)
    if list(ids) != sorted(set(ids)) or not 1 <= ids[0] <= ids[-1] < depth:
        expected = f"ascending layers from 1 to {depth - 1}"
        own = ",".join(map(str, choose_aux_layers(depth)))
        step = f"leave the option out, which chooses {own}"
        raise RefusedError("--aux-layers", list(ids), expected, step)
    rope = Rope.from_dict(given)
    document = {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": intermediate_size or size_of(given, "intermediate_size"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": int(given.get("num_key_value_heads") or heads),
        "head_dim": int(given.get("head_dim") or hidden // heads),
        "vocab_size": size_of(given, "vocab_size"),
        "max_position_embeddings": size_of(given, "max_position_embeddings"),
        "rms_norm_eps": given.get("rms_norm_eps"),
        "rope_theta": rope.theta,
        "rope_parameters": rope.to_dict(),
        "tie_word_embeddings": False,
        # Places that other tools train with, the first token's included.
        "block_size": 16,
        NESTED: {"mask_token_id": mask_token_id, "target_layer_ids": [one - 1 for one in ids]},
    }
    draft = DflashHead(DflashConfig.from_dict(document))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
        draft.fc.weight.mul_(0.1).add_(torch.eye(hidden).repeat(1, len(ids)) / len(ids))
        draft.norm.weight.copy_(policy.final_norm)
    return draft
