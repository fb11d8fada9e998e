"""A new draft for a policy: its sizes, its vocabulary, its first weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from draft_trainer.checkpoints import PolicyCheckpoint, size_of
from draft_trainer.drafters.block import Norm
from draft_trainer.drafters.dflash import ARCHITECTURE, NESTED, DflashConfig, DflashHead
from draft_trainer.drafters.draft import Draft
from draft_trainer.drafters.dspark import ARCHITECTURE as DSPARK
from draft_trainer.drafters.dspark import DsparkConfig, DsparkHead
from draft_trainer.drafters.eagle3.head import Eagle3Head, HeadConfig
from draft_trainer.drafters.rope import Rope
from slipstream.checkpoints import check_draft_vocabulary
from slipstream.errors import RefusedError
from slipstream.layers import check_layers, choose_aux_layers

_ZERO_CENTRED = (
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "minimax_m3_vl_text"),
    *("gemma", "gemma2", "gemma3_text"),
)
"""The ``model_type`` of policies whose final norm multiplies by 1 + its weight."""


_EPSILONS = ("rms_norm_eps", "layer_norm_epsilon", "norm_eps", "layer_norm_eps")
"""Names of the norms' epsilon: most policies', Nemotron-H's, LFM2's, Cohere's."""


def choose_draft_vocabulary(counts: Tensor, size: int) -> Tensor:
    """The tokens that were sampled most often; of equally frequent ones the lower ids.

    Args:
        counts: int64 [vocab], how often each token was sampled.
        size: how many to choose.

    Returns:
        int64 [size], ascending.

    Raises:
        RefusedError: there are fewer.
    """
    if not 1 <= size <= len(counts):
        raise RefusedError("--draft-vocab", size, f"1 to {len(counts)}, all tokens", "lower it")
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


def init_draft(
    policy: PolicyCheckpoint,
    draft_vocab_ids: Tensor | None,
    *,
    aux_layer_ids: tuple[int, ...] | None = None,
    intermediate_size: int | None = None,
    norms: Collection[str] = (),
    seed: int = 0,
) -> Eagle3Head:
    """A new EAGLE-3 head: random layer, the policy's output rows and final norm.

    Args:
        policy: whose draft it is.
        draft_vocab_ids: int [draft_vocab], ascending target ids; None for the full vocabulary.
        aux_layer_ids: auxiliary layers ("after L layers"); ``choose_aux_layers`` if None.
        intermediate_size: width of the MLP; the policy's if None.
        norms: further ones, by their switches in ``HeadConfig``.
        seed: of the random weights.

    Returns:
        The head, float32.

    Raises:
        RefusedError: a size is missing, or a layer or the vocabulary is not the policy's.
    """
    sizes = _sizes(policy.config, intermediate_size)
    vocab, hidden, heads = (
        sizes[name] for name in ("vocab_size", "hidden_size", "num_attention_heads")
    )
    if hidden % heads and "qk_norm" not in norms:
        expected = f"a divisor of hidden_size, {hidden}, for a draft of vLLM's Llama class"
        step = "add --norms qk_norm: drafts of its Qwen3 class have any number of heads"
        raise RefusedError("the policy's config.json num_attention_heads", heads, expected, step)
    config = HeadConfig(
        **sizes,
        target_hidden_size=sizes["hidden_size"],
        draft_vocab_size=vocab if draft_vocab_ids is None else len(draft_vocab_ids),
        aux_layer_ids=aux_layers(policy.config, aux_layer_ids, first=0),
        rope=Rope.of_draft(policy.config)[0],
        **dict.fromkeys(norms, True),
    )
    rows = policy.lm_head
    if draft_vocab_ids is not None:
        check_draft_vocabulary(draft_vocab_ids, config.draft_vocab_size, vocab, "draft_vocab_ids")
        rows = rows[draft_vocab_ids.long()]
        # A full vocabulary has no map, however it was asked for.
        draft_vocab_ids = None if config.full_vocabulary else draft_vocab_ids
    head = Eagle3Head(config, draft_vocab_ids)
    _fill(head, head.fc, head.norm, policy, seed)
    with torch.no_grad():
        head.lm_head.weight.copy_(rows)
    return head


def init_dflash(
    policy: PolicyCheckpoint,
    mask_token_id: int,
    *,
    layers: int = 2,
    aux_layer_ids: tuple[int, ...] | None = None,
    intermediate_size: int | None = None,
    markov_rank: int | None = None,
    seed: int = 0,
) -> DflashHead:
    """A new DFlash or DSpark draft: random layers, the policy's final norm.

    Args:
        policy: whose draft it is.
        mask_token_id: one of its tokens that occurs in no text.
        layers: decoder layers; drafts for large policies have five.
        aux_layer_ids: auxiliary layers ("after L layers"); ``choose_aux_layers`` if None.
        intermediate_size: width of the MLPs; the policy's if None.
        markov_rank: rank of a DSpark draft's Markov head; None: a DFlash draft.
        seed: of the random weights.

    Returns:
        The draft, float32.

    Raises:
        RefusedError: a size is missing, or a layer or the mask token is not the policy's.
    """
    ids = aux_layers(policy.config, aux_layer_ids, first=1)
    rope, _ = Rope.of_draft(policy.config)
    block = {"mask_token_id": mask_token_id, "target_layer_ids": [one - 1 for one in ids]}
    document = {
        "architectures": [ARCHITECTURE if markov_rank is None else DSPARK],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        **_sizes(policy.config, intermediate_size),
        "num_hidden_layers": layers,
        "rope_theta": rope.theta,
        "rope_parameters": rope.to_dict(),
        "tie_word_embeddings": False,
        # Places that other tools train with, the first token's included.
        "block_size": 16,
    }
    if markov_rank is None:
        draft = DflashHead(DflashConfig.from_dict(document | {NESTED: block}))
    else:
        markov = {"markov_rank": markov_rank, "markov_head_type": "vanilla"}
        confidence = {"enable_confidence_head": True, "confidence_head_with_markov": True}
        draft = DsparkHead(DsparkConfig.from_dict(document | block | markov | confidence))
    _fill(draft, draft.fc, draft.norm, policy, seed)
    return draft


def aux_layers(
    policy: Mapping[str, Any], given: tuple[int, ...] | None, first: int
) -> tuple[int, ...]:
    """The auxiliary layers that ``--aux-layers`` asks for, or else ``choose_aux_layers``.

    Args:
        policy: its config.json.
        given: ascending, L meaning "after L decoder layers"; None to choose.
        first: the lowest that may be asked for.

    Raises:
        RefusedError: not ascending, or outside the policy's layers.
    """
    depth = size_of(policy, "num_hidden_layers")
    chosen = choose_aux_layers(depth)
    next_step = f"leave the option out, which chooses {','.join(map(str, chosen))}"
    return check_layers(given or chosen, "--aux-layers", next_step, first, depth)


def _sizes(policy: Mapping[str, Any], intermediate_size: int | None) -> dict[str, Any]:
    """Return a draft's sizes and epsilon by config.json's names, those of the policy's layers."""
    hidden, heads = size_of(policy, "hidden_size"), size_of(policy, "num_attention_heads")

    def optional(name: str) -> int | None:
        return size_of(policy, name) if policy.get(name) else None

    eps = next(filter(None, map(policy.get, _EPSILONS)), None)
    if not isinstance(eps, float):
        raise RefusedError(
            "the policy's config.json rms_norm_eps", eps, "a number", "write the draft's by hand"
        )
    if intermediate_size is None and policy.get("intermediate_size") is None:
        expected = "a width: the policy's config.json names none, as its layers have experts"
        raise RefusedError("--intermediate-size", "nothing", expected, "give that of the MLP")
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate_size or size_of(policy, "intermediate_size"),
        "num_attention_heads": heads,
        "num_key_value_heads": optional("num_key_value_heads") or heads,
        "head_dim": optional("head_dim") or hidden // heads,
        "vocab_size": size_of(policy, "vocab_size"),
        "max_position_embeddings": size_of(policy, "max_position_embeddings"),
        "rms_norm_eps": eps,
    }


def _fill(draft: Draft, fc: nn.Linear, norm: Norm, policy: PolicyCheckpoint, seed: int) -> None:
    """Fill the matrices at random, but ``fc`` with nearly the mean of the auxiliary states.

    So the layers see hidden states of the policy's own scale from the first step.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5, generator=generator)
        hidden, layers = fc.out_features, fc.in_features // fc.out_features
        fc.weight.mul_(0.1).add_(torch.eye(hidden, dtype=torch.float32).repeat(1, layers) / layers)
        offset = 1.0 if policy.config.get("model_type") in _ZERO_CENTRED else 0.0
        norm.weight.copy_(policy.final_norm.float() + offset)
