"""Rollouts as the policy's own forward pass sees them, as samples for the trainer's core."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from draft_trainer.drafters.policy import PolicyHead, PolicyHeads
from slipstream.sample import Sample


@torch.no_grad()
def record(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    aux_layers: Sequence[int],
) -> list[Sample]:
    """One sample per rollout at T = 1, its states from Hugging Face's own ``hidden_states``."""
    samples = []
    for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        ids = torch.tensor([*prompt, *completion])
        output = model(input_ids=ids[None], output_hidden_states=True)
        logits = output.logits[0, :-1].float()
        sampled = logits.gather(1, ids[1:, None])[:, 0]
        zero = torch.zeros(1)
        count = len(ids)
        aux = [output.hidden_states[layer][0] for layer in aux_layers]
        samples.append(
            Sample.pack(
                sample_id=f"r{index}",
                policy_version=0,
                temperature=1.0,
                aux_layers=aux_layers,
                token_ids=ids,
                positions=torch.arange(count),
                segment_ids=torch.zeros(count, dtype=torch.int64),
                loss_mask=torch.arange(count) >= len(prompt),
                aux=torch.cat([logits[:0].new_zeros(count, 0), *aux], dim=1),
                # The last entry of hidden_states is after the final norm: lm_head's input.
                final_hidden=output.hidden_states[-1][0],
                sampled_logprobs=torch.cat([zero, sampled - logits.logsumexp(1)]),
                sampled_logits=torch.cat([zero, sampled]),
            )
        )
    return samples


def policy_heads(model: PreTrainedModel, draft_vocab_ids: torch.Tensor) -> PolicyHeads:
    """The policy's matrices as version 0."""
    heads = PolicyHeads(keep=1)
    heads.add(
        PolicyHead(
            policy_version=0,
            lm_head_rows=model.get_output_embeddings().weight.detach()[draft_vocab_ids],
            embed_tokens=model.get_input_embeddings().weight.detach(),
        )
    )
    return heads
