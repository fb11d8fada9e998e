"""Rollouts as the policy's own forward pass sees them, as samples for the trainer's core."""

from __future__ import annotations

from collections import defaultdict
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
    samples: dict[int, Sample] = {}
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        by_length[len(prompt) + len(completion)].append(index)
    zero = torch.zeros(1)
    before_norm: list[torch.Tensor] = []
    # The last entry of hidden_states is after the final norm: lm_head's input.
    hook = model.base_model.norm.register_forward_pre_hook(
        lambda _, states: before_norm.append(states[0])
    )
    # Those of one length share a pass, which needs no padding.
    for count, indices in by_length.items():
        ids = torch.tensor([[*prompts[index], *completions[index]] for index in indices])
        output = model(input_ids=ids, output_hidden_states=True)
        after = [*output.hidden_states[:-1], before_norm.pop()]
        logits = output.logits[:, :-1].float()
        sampled = logits.gather(2, ids[:, 1:, None])[:, :, 0]
        log_probs = sampled - logits.logsumexp(2)
        for row, index in enumerate(indices):
            samples[index] = Sample.pack(
                sample_id=f"r{index}",
                policy_version=0,
                temperature=1.0,
                aux_layers=aux_layers,
                token_ids=ids[row],
                positions=torch.arange(count),
                segment_ids=torch.zeros(count, dtype=torch.int64),
                loss_mask=torch.arange(count) >= len(prompts[index]),
                aux=torch.cat(
                    [torch.zeros(count, 0)] + [after[layer][row] for layer in aux_layers],
                    dim=1,
                ),
                final_hidden=output.hidden_states[-1][row],
                sampled_logprobs=torch.cat([zero, log_probs[row]]),
                sampled_logits=torch.cat([zero, sampled[row]]),
            )
    hook.remove()
    return [samples[index] for index in range(len(prompts))]


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
