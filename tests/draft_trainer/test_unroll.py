"""The unroll against the plainest reference: one anchor, one explicit key-value list."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draft_trainer.drafters.attention import ttt_attention
from draft_trainer.drafters.batch import Batch, collate
from draft_trainer.drafters.eagle3.head import Eagle3Head
from tests.draft_trainer.dense_head import enter, leave, rotate
from tests.draft_trainer.synthetic import Policy, head


def _dense(q: Tensor, k0: Tensor, v0: Tensor, *own: Tensor) -> Tensor:
    """Attention over [T, (S + 1) * T] keys with a dense mask."""
    group, length = q.shape[2] // k0.shape[2], q.shape[1]
    keys = torch.cat([k0, *own[::2]], dim=1).repeat_interleave(group, dim=2)
    values = torch.cat([v0, *own[1::2]], dim=1).repeat_interleave(group, dim=2)
    causal = torch.ones(length, k0.shape[1]).tril(k0.shape[1] - length).bool()
    mask = torch.cat([causal, *[torch.eye(length).bool()] * (len(own) // 2)], dim=1)
    scores = torch.einsum("bihd,bjhd->bhij", q, keys) * q.shape[-1] ** -0.5
    p = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", p, values)


def _inputs(own: int, length: int, dtype: torch.dtype, context: int = 0) -> list[Tensor]:
    torch.manual_seed(own)
    prefix = (2, context + length, 2, 8)
    shapes = [(2, length, 4, 8), prefix, prefix, *[(2, length, 2, 8)] * (2 * own)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def _ours(q: Tensor, k0: Tensor, v0: Tensor, *own: Tensor) -> Tensor:
    return ttt_attention(q, k0, v0, list(zip(own[::2], own[1::2], strict=True)))


@pytest.mark.parametrize("context", [0, 1, 7])
@pytest.mark.parametrize("own", [0, 1, 3])
def test_attention_equals_dense_mask(own: int, context: int) -> None:
    """Output and all gradients in float64, with and without keys before the first anchor."""
    inputs = _inputs(own, 13, torch.float64, context)
    weight = torch.randn(2, 13, 4, 8, dtype=torch.float64)
    ours, dense = _ours(*inputs), _dense(*inputs)
    assert (ours - dense).abs().max() < 1e-12
    our_grads = torch.autograd.grad((ours * weight).sum(), inputs)
    dense_grads = torch.autograd.grad((dense * weight).sum(), inputs)
    for ours_g, dense_g in zip(our_grads, dense_grads, strict=True):
        assert (ours_g - dense_g).abs().max() < 1e-12


def test_attention_in_bfloat16_stays_near() -> None:
    inputs = [t.detach() for t in _inputs(2, 40, torch.float32)]
    low = _ours(*[t.bfloat16() for t in inputs])
    assert low.dtype == torch.bfloat16
    assert (low.float() - _dense(*inputs)).abs().max() < 0.05


def _naive_outputs(model: Eagle3Head, batch: Batch, row: int, anchor: int, steps: int) -> list:
    """Serving's view of one chain: prefill up to the anchor, then one token at a time."""
    layer, group = model.midlayer, 2
    outputs, keys, values = [], [], []

    def attend(token: int, position: int, hidden: Tensor) -> Tensor:
        x, residual = enter(
            layer, batch.embeds[row, token], hidden, model.config.norm_before_residual
        )
        angles = position * model.rotary.inverse_frequencies.float()
        q, k, v = (
            proj(x).view(-1, 8)
            for proj in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
        )
        cos, sin = angles.cos(), angles.sin()
        keys.append(rotate(k, cos, sin).repeat_interleave(group, 0))
        values.append(v.repeat_interleave(group, 0))
        scores = torch.stack([(rotate(q, cos, sin) * key).sum(-1) for key in keys]) * 8**-0.5
        mixed = (scores.softmax(0)[..., None] * torch.stack(values)).sum(0)
        return leave(layer, mixed.flatten(), residual)

    for i in range(anchor + 1):
        output = attend(i + 1, int(batch.positions[row, i]), model.fc(batch.aux[row, i]))
    outputs.append(output)
    for step in range(1, steps):
        position = int(batch.positions[row, anchor]) + step
        output = attend(anchor + 1 + step, position, model.feedback(output))
        outputs.append(output)
    return outputs


@pytest.mark.parametrize("variant", [{}, {"norm_before_residual": True}, {"norm_output": True}])
def test_unroll_equals_serving_one_chain_at_a_time(variant: dict[str, bool]) -> None:
    """Every anchor and step of two padded rows, one of them starting at position 7."""
    policy, model, steps = Policy(), head(3, **variant), 4
    samples = policy.samples(3)
    samples[1] = samples[1].repacked(positions=samples[1].positions + 7)
    batch = collate(samples, policy.heads())
    with torch.no_grad():
        unrolled = torch.stack(list(model.unroll(batch, steps)))
        compared = 0
        for row in (0, 1):
            for anchor in range(int(batch.teacher_known[row].sum()) + 1 - steps):
                expected = torch.stack(_naive_outputs(model, batch, row, anchor, steps))
                assert (unrolled[:, row, anchor] - expected).abs().max() < 1e-4
                compared += 1
    assert compared == 12 + 13


@pytest.mark.parametrize("first", [1, 3])
def test_positions_before_the_first_anchor_cost_and_change_nothing(first: int) -> None:
    policy, model = Policy(), head(3)
    batch = collate(policy.samples(3), policy.heads())
    with torch.no_grad():
        whole = torch.stack(list(model.unroll(batch, 3)))
        part = torch.stack(list(model.unroll(batch, 3, first)))
    assert part.shape[2] == whole.shape[2] - first
    assert (part - whole[:, :, first:]).abs().max() < 1e-6


def test_padding_and_packing_change_nothing() -> None:
    """A sequence alone, in a padded batch, and packed with another one: the same outputs."""
    policy, model = Policy(), head(1)
    a, b = policy.samples(2)
    names = ("token_ids", "positions", "loss_mask", "aux", "final_hidden")
    names = (*names, "sampled_logprobs", "sampled_logits")
    joined = {name: torch.cat([getattr(a, name), getattr(b, name)]) for name in names}
    segments = torch.cat([torch.zeros(a.tokens), torch.ones(b.tokens)]).int()
    packed = a.repacked(sample_id="packed", segment_ids=segments, **joined)
    with torch.no_grad():
        alone = [
            list(model.unroll(collate([s], policy.heads()), 3))[2][0, : s.tokens - 3]
            for s in (a, b)
        ]
        padded = list(model.unroll(collate([a, b], policy.heads()), 3))[2]
        split = list(model.unroll(collate([packed], policy.heads()), 3))[2]
    for row, expected in enumerate(alone):
        assert (padded[row, : len(expected)] - expected).abs().max() < 1e-5
        assert (split[row, : len(expected)] - expected).abs().max() < 1e-5
