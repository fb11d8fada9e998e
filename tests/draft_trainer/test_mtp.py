"""MTP heads: their function and gradients, their checkpoints, and what is refused of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen3NextConfig
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RotaryEmbedding as Qwen2Rotary
from transformers.models.qwen3_next.modeling_qwen3_next import (
    Qwen3NextDecoderLayer,
    Qwen3NextRMSNorm,
    Qwen3NextRotaryEmbedding,
)

from draft_trainer.drafters.batch import Batch, collate
from draft_trainer.drafters.loss import ttt_objective, valid_targets
from draft_trainer.drafters.mtp.config import FAMILIES, MtpConfig
from draft_trainer.drafters.mtp.head import MtpHead
from tests.draft_trainer.synthetic import HIDDEN, VOCAB, Policy

STEPS = 3
QWEN = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "layer_types": ["full_attention"] * 2,
    "num_experts": 0,
    "partial_rotary_factor": 0.5,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
}
MIMO = {
    **{name: value for name, value in QWEN.items() if "rotary" not in name},
    "architectures": ["MiMoForCausalLM"],
    "model_type": "mimo",
    "num_nextn_predict_layers": 1,
    "head_dim": HIDDEN // 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
DOCUMENTS: dict[str, dict[str, Any]] = {"qwen3_next": QWEN, "mimo": MIMO}


def mtp_head(document: dict[str, Any], seed: int = 0) -> MtpHead:
    """A head whose every parameter matters."""
    generator = torch.Generator().manual_seed(seed)
    head = MtpHead(MtpConfig.from_dict(document))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return head


def batch_of(policy: Policy, count: int = 3) -> Batch:
    return collate(policy.samples(count), policy.heads(rows=torch.arange(VOCAB)))


class Reference(nn.Module):
    """The same head of transformers' own modules, run as a server runs it: one chain an anchor."""

    def __init__(self, head: MtpHead) -> None:
        super().__init__()
        self.family, state = FAMILIES[head.config.family], head.state_dict()
        self.qwen = self.family.zero_centred
        names = {n: v for n, v in head.config.document.items() if n != "architectures"}
        kind = Qwen3NextConfig if self.qwen else Qwen2Config
        names.pop("model_type")
        self.config = kind(**names, attn_implementation="eager")
        norm = Qwen3NextRMSNorm if self.qwen else Qwen2RMSNorm
        self.embed_norm, self.hidden_norm, self.norm = (norm(HIDDEN, 1e-6) for _ in range(3))
        self.fc = nn.Linear(2 * HIDDEN, HIDDEN, bias=False)
        self.layer = (Qwen3NextDecoderLayer if self.qwen else Qwen2DecoderLayer)(self.config, 0)
        self.rotary = (Qwen3NextRotaryEmbedding if self.qwen else Qwen2Rotary)(self.config)
        self.load_state_dict(state)

    def fused(self, embeds: Tensor, hidden: Tensor, position: int) -> Tensor:
        if not self.qwen and position == 0:
            embeds = torch.zeros_like(embeds)
        halves = [self.embed_norm(embeds), self.hidden_norm(hidden)]
        return self.fc(torch.cat(halves if self.qwen else halves[::-1], -1))

    def chain(self, embeds: Tensor, final: Tensor, anchor: int, steps: int) -> list[Tensor]:
        """Outputs of the anchor's steps; ``embeds`` and ``final`` are the row's, [T, H]."""
        inputs = [self.fused(embeds[i + 1], final[i], i) for i in range(anchor + 1)]
        outputs: list[Tensor] = []
        for step in range(steps):
            if step:
                position = anchor + step
                inputs.append(self.fused(embeds[position + 1], outputs[-1], position))
            x = torch.stack(inputs)[None]
            count = x.shape[1]
            mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
            angles = self.rotary(x, torch.arange(count)[None])
            out = self.layer(x, position_embeddings=angles, attention_mask=mask)
            out = out[0] if isinstance(out, tuple) else out
            outputs.append(self.norm(out)[0, -1])
        return outputs


@pytest.mark.parametrize("name", DOCUMENTS)
@pytest.mark.parametrize("first_anchor", [0, 5])
def test_outputs_and_gradients_are_those_of_a_chain_run_anchor_by_anchor(
    name: str, first_anchor: int
) -> None:
    head = mtp_head(DOCUMENTS[name])
    reference = Reference(head)
    batch = batch_of(Policy())
    outputs = list(head.unroll(batch, STEPS, first_anchor))
    generator = torch.Generator().manual_seed(1)
    ours, theirs = torch.zeros(()), torch.zeros(())
    for row, length in enumerate(batch.lengths.tolist()):
        for anchor in range(first_anchor, length - STEPS - 1):
            chain = reference.chain(batch.embeds[row], batch.final_hidden[row], anchor, STEPS)
            for step, expected in enumerate(chain):
                found = outputs[step][row, anchor - first_anchor]
                torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
                weight = torch.randn(HIDDEN, generator=generator)
                ours, theirs = ours + found @ weight, theirs + expected @ weight
    ours.backward()
    theirs.backward()
    expected_grads = dict(reference.named_parameters())
    for parameter_name, parameter in head.named_parameters():
        expected = expected_grads[parameter_name].grad
        scale = float(expected.abs().max())
        torch.testing.assert_close(parameter.grad, expected, atol=2e-4 * scale, rtol=1e-3)


def test_the_loss_is_the_divergence_over_the_whole_vocabulary_and_leaves_lm_head_alone() -> None:
    head, policy = mtp_head(QWEN), Policy()
    batch = batch_of(policy)
    lm_head = batch.policy.lm_head_rows
    valid = valid_targets(batch, STEPS)
    counts = valid.flatten(1).sum(1)
    weights = [1.0] * STEPS
    objective = ttt_objective(head, batch, valid, weights=weights, denominators=counts * STEPS)
    objective.loss.backward()
    expected = torch.zeros(())
    for step, output in enumerate(head.unroll(batch, STEPS)):
        row, anchor = valid[step].nonzero(as_tuple=True)
        log_q = (output[row, anchor] @ lm_head.T).log_softmax(-1)
        p = (batch.final_hidden[row, anchor + step + 1] @ lm_head.T).softmax(-1)
        expected = expected - (p * log_q).sum() / (counts[step] * STEPS)
    torch.testing.assert_close(objective.loss, expected, atol=1e-4, rtol=1e-5)
    grads = {name: p.grad.clone() for name, p in head.named_parameters()}
    head.zero_grad()
    expected.backward()
    for name, parameter in head.named_parameters():
        torch.testing.assert_close(grads[name], parameter.grad, atol=1e-5, rtol=1e-3)
    assert lm_head.grad is None
