"""The chunked loss against autograd through a dense soft-max."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draft_trainer.drafters import loss as soft_targets
from draft_trainer.drafters.loss import Target, TeacherRows, soft_target_loss
from draft_trainer.drafters.policy import PolicyHead

pytestmark = pytest.mark.contract("alignment")

STEPS, ROWS, HIDDEN, VOCAB = 3, 37, 24, 50


def _case(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, TeacherRows, Tensor, Tensor]:
    """Random rows; a fifth of the policy's mass lies outside; temperatures 0.7 and 1."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    temperature = torch.where(torch.arange(ROWS) % 2 == 0, 0.7, 1.0)
    final, rows = normal(ROWS, HIDDEN), normal(VOCAB, HIDDEN) / 3
    logits = final.double() @ rows.double().T / temperature[:, None]
    log_z = (logits.logsumexp(-1) + 0.223).float()
    teacher = TeacherRows(final, PolicyHead(0, rows, rows), dtype, log_z, temperature)
    valid = torch.rand(STEPS, ROWS, generator=generator) < 0.7
    weights = torch.rand(STEPS, ROWS, generator=generator)
    return normal(STEPS, ROWS, HIDDEN), normal(VOCAB, HIDDEN) / 3, teacher, valid, weights


def _dense(
    hidden: Tensor,
    lm_head: Tensor,
    teacher: TeacherRows,
    valid: Tensor,
    weights: Tensor,
    target: Target,
) -> tuple[Tensor, Tensor]:
    """The same by the textbook, in float64, autograd's own gradient."""
    t = teacher.temperature[:, None].double()
    p = (
        (teacher.final_hidden.double() @ teacher.policy.lm_head_rows.double().T / t)
        .sub(teacher.log_z[:, None].double())
        .exp()
    )
    log_q = (hidden @ lm_head.T / t).log_softmax(-1)
    rate = torch.minimum(p, log_q.exp()).sum(-1)
    loss = {"kl": -(p * log_q).sum(-1), "tv": 1 - rate, "lk": -rate.log()}[target]
    top1 = (log_q.argmax(-1) == p.argmax(-1)).double()
    outside = (1 - p.sum(-1)).expand(STEPS, -1)
    table = torch.stack([loss, top1, rate, outside], -1)
    return (loss * weights * valid).sum(), (table * valid[..., None]).sum(1).detach()


@pytest.mark.parametrize("chunk_rows", [1, 8, 1000])
@pytest.mark.parametrize("target", ["kl", "tv", "lk"])
def test_soft_target_loss_matches_dense_softmax(
    target: Target, chunk_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They match to 1e-5 in float32, for any chunk size, at a loss weighted from outside by 3."""
    monkeypatch.setattr(soft_targets, "_CHUNK_BYTES", chunk_rows * (STEPS + 1) * VOCAB * 4)
    monkeypatch.setattr(soft_targets, "_BLOCK_ELEMENTS", 5 * VOCAB)
    hidden, lm_head, *rest = _case()
    ours = [hidden.clone().requires_grad_(), lm_head.clone().requires_grad_()]
    exact = [hidden.double().requires_grad_(), lm_head.double().requires_grad_()]
    loss, sums = soft_target_loss(*ours, *rest, target)
    expected, table = _dense(*exact, *rest, target)
    (3 * loss).backward()
    (3 * expected).backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    assert (sums - table).abs().max() < 1e-4
    for mine, theirs in zip(ours, exact, strict=True):
        assert mine.grad is not None and theirs.grad is not None
        assert (mine.grad - theirs.grad).abs().max() < 1e-5 * theirs.grad.abs().max()


@pytest.mark.parametrize("target", ["kl", "tv", "lk"])
def test_soft_target_loss_in_bfloat16(target: Target) -> None:
    """Loss within 0.5 %; gradients within 2 % of their largest entry, without a common bias."""
    hidden, lm_head, *rest = _case(torch.bfloat16)
    ours = [hidden.clone().requires_grad_(), lm_head.clone().requires_grad_()]
    exact = [hidden.double().requires_grad_(), lm_head.double().requires_grad_()]
    loss, _ = soft_target_loss(*ours, *rest, target)
    expected, _ = _dense(*exact, *rest, target)
    loss.backward()
    expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=5e-3)
    for mine, theirs in zip(ours, exact, strict=True):
        assert mine.grad is not None and theirs.grad is not None
        error = mine.grad.double() - theirs.grad
        assert error.abs().max() < 0.02 * theirs.grad.abs().max()
        assert float((error * theirs.grad).sum() / theirs.grad.square().sum()) < 5e-3
