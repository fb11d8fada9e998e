"""A policy's states on given rollouts, captured as a bridge does it, to evaluate drafts on."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from draft_trainer.drafters import Draft
from draft_trainer.drafters.expected_acceptance import expected_acceptance
from draft_trainer.drafters.policy import PolicyHead, PolicyHeads
from draft_trainer.warmup.forward import forward, passes
from draft_trainer.warmup.rollouts import Rollout
from policy_bridge.capture import Capture
from policy_bridge.config import ModulePaths
from policy_bridge.model import find_modules
from policy_bridge.session import Session
from slipstream.layers import choose_aux_layers
from slipstream.sample import Sample

MAX_TOKENS = 2048


@dataclass(frozen=True)
class States:
    """Samples of one policy version.

    Attributes:
        samples: of its rollouts.
        head: the policy's matrices, with every row of lm_head.
    """

    samples: Sequence[Sample]
    head: PolicyHead

    def heads(self, draft_vocab_ids: torch.Tensor) -> PolicyHeads:
        """The policy version, with the lm_head rows of a draft vocabulary."""
        bias = self.head.lm_head_bias
        heads = PolicyHeads(keep=1)
        heads.add(
            replace(
                self.head,
                lm_head_rows=self.head.lm_head_rows[draft_vocab_ids],
                lm_head_bias=None if bias is None else bias[draft_vocab_ids],
            )
        )
        return heads

    def acceptance_length(self, draft: Draft, draft_length: int) -> float:
        """The expected acceptance length that vLLM would measure of a draft."""
        heads = self.heads(draft.target_ids())
        found = expected_acceptance(draft, self.samples, heads, draft_length, "probabilistic")
        return found.acceptance_length


def states_of(
    model: PreTrainedModel,
    rollouts: Sequence[tuple[list[int], list[int]]],
    aux_layers: tuple[int, ...] | None = None,
    policy_version: int = 0,
) -> States:
    """Run rollouts at temperature 1 through the policy.

    Args:
        model: the policy.
        rollouts: token ids of a prompt and of its completion, each.
        aux_layers: layers that the draft reads; ``choose_aux_layers`` if None, none if empty.
        policy_version: of the states.
    """
    modules = find_modules(model, ModulePaths())
    layers = choose_aux_layers(len(modules.layers)) if aux_layers is None else aux_layers
    session = Session("", layers, torch.arange(modules.vocab_size), MAX_TOKENS, None, ())
    samples: list[Sample] = []

    def keep(sample: Sample, priority: int) -> bool:
        samples.append(sample)
        return True

    for part in passes([Rollout(number, *one) for number, one in enumerate(rollouts)]):
        window = Capture(
            modules=modules,
            session=session,
            policy_version=policy_version,
            moved=lambda: False,
            temperature=1.0,
            budget_bytes=sys.maxsize,
            forwards=1,
            states_dtype=torch.bfloat16,
            next_id=str,
            offer=keep,
        )
        forward(model, window, part, temperature=1.0)
    named = (modules.head_weight, modules.embed_weight, modules.head_bias)
    tensors = [None if tensor is None else tensor.detach().clone() for tensor in named]
    return States(samples, PolicyHead(policy_version, *tensors, form=modules.form))  # type: ignore[arg-type]
