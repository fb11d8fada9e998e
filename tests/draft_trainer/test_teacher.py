"""The teacher is the policy's own distribution, however the policy makes and rounds its logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draft_trainer.drafters.batch import Batch, collate
from draft_trainer.drafters.loss import step_weights, ttt_objective, valid_targets
from draft_trainer.drafters.policy import PolicyHead, PolicyHeads
from draft_trainer.kernels.library import using_kernels
from slipstream.logits import LogitForm
from slipstream.sample import Sample
from slipstream.tensors import dtype_to_wire
from tests.draft_trainer.synthetic import HIDDEN, VOCAB, head


def _batch(dtype: torch.dtype, form: LogitForm, with_bias: bool) -> Batch:
    """Rollouts of a policy with logits up to 60, which computes and rounds in ``dtype``."""
    generator = torch.Generator().manual_seed(0)
    rows = (6 * torch.randn(VOCAB, HIDDEN, generator=generator)).to(dtype)
    bias = (10 * torch.randn(VOCAB, generator=generator)).to(dtype) if with_bias else None
    tokens = torch.randint(VOCAB, (40,), generator=generator)
    hidden = torch.randn(40, HIDDEN, generator=generator).to(dtype)
    logits = form.apply(torch.nn.functional.linear(hidden, rows, bias))
    log_probs = logits.float().log_softmax(-1)
    following = tokens[1:, None]

    def of_sampled(table: Tensor) -> Tensor:
        return torch.cat([torch.zeros(1), table[:-1].float().gather(1, following)[:, 0]])

    sample = Sample.pack(
        sample_id="s",
        policy_version=1,
        temperature=1.0,
        aux_layers=(2, 4, 5),
        token_ids=tokens,
        positions=torch.arange(40),
        loss_mask=torch.arange(40) >= 4,
        aux=torch.randn(40, 3 * HIDDEN, generator=generator).to(dtype),
        final_hidden=hidden,
        sampled_logprobs=of_sampled(log_probs),
        sampled_logits=of_sampled(logits),
    )
    sample.header.logits_dtype = dtype_to_wire(dtype)
    heads = PolicyHeads(1)
    heads.add(PolicyHead(1, rows, torch.randn(VOCAB, HIDDEN), bias, form=form))
    return collate([sample], heads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_its_mass_is_one(dtype: torch.dtype) -> None:
    """Of a policy with a bias, a factor and a soft cap."""
    batch = _batch(dtype, LogitForm(scale=0.25, soft_cap=30.0), with_bias=True)
    index = torch.arange(39)
    mass = batch.teacher_log_probs(torch.zeros_like(index), index).exp().sum(-1)
    assert (mass - 1.0).abs().max() < 1e-4


@pytest.mark.parametrize("kernels", ["on", "off"])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_loss_sees_the_same_teacher(
    dtype: torch.dtype, compute: torch.dtype, kernels: str
) -> None:
    """Whatever the draft's own products are computed in, nothing lies outside a full vocabulary."""
    batch = _batch(dtype, LogitForm(), with_bias=False)
    with using_kernels(kernels):  # type: ignore[arg-type]
        outcome = ttt_objective(
            head(0, draft_vocab=VOCAB),
            batch,
            valid_targets(batch, 2),
            weights=step_weights(2, 0.8),
            compute_dtype=compute,
        )
    assert (outcome.sums[:, 3] / outcome.counts).abs().max() < 1e-4
