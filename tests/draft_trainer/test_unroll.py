"""The unroll against the plainest reference: one anchor, one explicit key-value list."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draft_trainer.drafters.attention import ttt_attention
from draft_trainer.drafters.batch import batches
from tests.draft_trainer.synthetic import Policy, collate, head

pytestmark = pytest.mark.contract("alignment")


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


@pytest.mark.parametrize("first", [1, 3])
def test_unroll_first_anchor_changes_no_output(first: int) -> None:
    policy, model = Policy(), head(3)
    batch = collate(policy.samples(3), policy.heads())
    with torch.no_grad():
        whole = torch.stack(list(model.unroll(batch, 3)))
        part = torch.stack(list(model.unroll(batch, 3, first)))
    assert part.shape[2] == whole.shape[2] - first
    assert (part - whole[:, :, first:]).abs().max() < 1e-6


def test_unroll_padding_and_packing_change_no_output() -> None:
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


@pytest.mark.parametrize("ids", [(0, 1), (1, 0)])
def test_packed_sequences_are_rows_whatever_their_ids(ids: tuple[int, int]) -> None:
    policy = Policy()
    (sample,) = policy.samples(1)
    half = sample.tokens // 2
    segments = torch.tensor(ids).repeat_interleave(torch.tensor([half, sample.tokens - half]))
    packed = sample.repacked(sample_id="packed", segment_ids=segments.int())
    (batch,) = batches([packed], policy.heads(), 1 << 20)
    assert sorted(batch.anchors.sum(1).tolist()) == sorted([half, sample.tokens - half])
