"""A draft whose lm_head equals the verifier's keeps its own memory."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch import nn

from rollout_server import vllm_patches as aliasing


class Model(nn.Module):
    """The names that vLLM's models have."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding.from_pretrained(weight.clone())
        self.lm_head = nn.Linear(4, 6, bias=False)
        self.lm_head.weight = nn.Parameter(weight.clone(), requires_grad=False)
        self.has_own_lm_head = True


def load(proposer_class: type) -> tuple[Model, Model]:
    """What vLLM does to a draft and its verifier after loading both."""
    weight = torch.randn(6, 4)
    policy, draft = Model(weight), Model(weight)
    proposer: Any = proposer_class.__new__(proposer_class)
    proposer.model = draft
    proposer.vllm_config = types.SimpleNamespace(speculative_config=None)
    proposer.use_local_argmax_reduction = False
    proposer._maybe_share_lm_head(policy)
    return policy, draft


def test_vllm_shares_equal_heads_and_ours_does_not() -> None:
    """The first half fails on a vLLM that stopped sharing: then the workaround can go."""
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    theirs = type("Theirs", (SpecDecodeBaseProposer,), {})
    policy, draft = load(theirs)
    assert draft.lm_head is policy.lm_head
    assert aliasing.shared_parameters(policy, draft) == ["lm_head.weight"]

    ours = type("Ours", (SpecDecodeBaseProposer,), {})
    aliasing.keep_own_lm_head(ours)
    policy, draft = load(ours)
    assert draft.lm_head is not policy.lm_head
    assert aliasing.shared_parameters(policy, draft) == []
    draft.lm_head.weight.fill_(0)
    assert not torch.equal(draft.lm_head.weight, policy.lm_head.weight)


def test_the_same_in_model_runner_v2() -> None:
    module = types.ModuleType("eagle_utils")
    module._should_share = lambda model, own, draft, target: True  # type: ignore[attr-defined]
    aliasing.keep_own_lm_head_v2(module)
    model = Model(torch.randn(6, 4))
    assert not module._should_share(model, "has_own_lm_head", None, None)
    assert module._should_share(model, "has_own_embed_tokens", None, None)
    model.has_own_lm_head = False
    assert module._should_share(model, "has_own_lm_head", None, None)


@pytest.mark.parametrize("share", [True, False])
def test_a_shared_embedding_is_seen_and_allowed(share: bool) -> None:
    policy, draft = Model(torch.randn(6, 4)), Model(torch.randn(6, 4))
    if share:
        draft.model.embed_tokens = policy.model.embed_tokens
    assert aliasing.shares_embedding(policy, draft) is share
    assert aliasing.shared_parameters(policy, draft) == []
