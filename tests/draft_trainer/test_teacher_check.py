"""The teacher is the policy's distribution; a sample without one is refused, with the cause."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draft_trainer.drafters.loss import step_weights, ttt_objective, valid_targets
from draft_trainer.drafters.policy import PolicyHead, PolicyHeads
from draft_trainer.ingest import teacher
from draft_trainer.ingest.teacher import ROWS, TeacherCheck
from draft_trainer.kernels.library import Mode, using_kernels
from slipstream.sample import Sample
from slipstream.sampling import LogitForm
from slipstream.tensors import dtype_to_wire
from slipstream.v1 import draft_trainer_pb2 as pb
from tests.draft_trainer.rig import SPEC, feeding, make_config, rollouts
from tests.draft_trainer.synthetic import HIDDEN, VOCAB, Policy, collate, draft_vocab_ids
from tests.draft_trainer.synthetic import head as eagle3_head

TOKENS = 32
EVERY = torch.arange(VOCAB)
FORM = LogitForm(scale=0.5, soft_cap=20.0)
PLAIN = LogitForm()


def made(
    rows: Tensor,
    bias: Tensor | None = None,
    form: LogitForm = PLAIN,
    *,
    dtype: torch.dtype = torch.float32,
    temperature: float = 1.0,
    said_temperature: float | None = None,
) -> Sample:
    """A rollout of a policy that computes and rounds in ``dtype``."""
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator).to(dtype)
    table = None if bias is None else bias.to(dtype)
    logits = form.apply(torch.nn.functional.linear(hidden, rows.to(dtype), table)).float()
    log_probs = (logits / temperature).log_softmax(-1)
    tokens = torch.zeros(TOKENS, dtype=torch.int64)
    tokens[1:] = torch.multinomial(log_probs[:-1].exp(), 1, generator=generator)[:, 0]

    def of_sampled(table: Tensor) -> Tensor:
        return torch.cat([torch.zeros(1), table[:-1].gather(1, tokens[1:, None])[:, 0]])

    sample = Sample.pack(
        sample_id="s",
        policy_version=1,
        temperature=said_temperature or temperature,
        aux_layers=(2, 4, 5),
        token_ids=tokens,
        positions=torch.arange(TOKENS),
        loss_mask=torch.arange(TOKENS) >= 4,
        aux=torch.zeros(TOKENS, 3 * HIDDEN, dtype=dtype),
        final_hidden=hidden,
        sampled_logprobs=of_sampled(log_probs),
        sampled_logits=of_sampled(logits),
    )
    sample.header.logits_dtype = dtype_to_wire(dtype)
    return sample


def weights(scale: float = 1.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    rows = scale * torch.randn(VOCAB, HIDDEN, generator=generator)
    return rows, torch.randn(VOCAB, generator=generator)


def head(rows: Tensor, bias: Tensor | None = None, form: LogitForm = PLAIN) -> PolicyHead:
    return PolicyHead(1, rows, torch.randn(VOCAB, HIDDEN), bias, form=form)


@pytest.mark.parametrize("form", [PLAIN, FORM], ids=["plain", "formed and biased"])
@pytest.mark.parametrize(
    ("dtype", "scale"),
    [
        (torch.float32, 6.0),
        (torch.bfloat16, 6.0),
        (torch.float16, 6.0),
        (torch.bfloat16, 0.3),
    ],
)
def test_announced_teacher_has_mass_one(dtype: torch.dtype, form: LogitForm, scale: float) -> None:
    """Logits from about 1 to about 60, at two temperatures; as it is checked, and trained on."""
    rows, bias = weights(scale)
    announced = bias if form is FORM else None
    own = head(rows.to(dtype), None if announced is None else announced.to(dtype), form)
    samples = [
        made(rows, announced, form, dtype=dtype, temperature=temperature)
        for temperature in (1.0, 0.6)
    ]
    found = TeacherCheck(EVERY).check(samples, own)
    assert [each.refusal for each in found] == [None, None]
    assert all(abs(each.mass - 1) < 2e-3 for each in found)
    heads = PolicyHeads(1)
    heads.add(own)
    index = torch.arange(TOKENS - 1)
    batch = collate(samples, heads)
    for row in range(len(samples)):
        mass = batch.teacher_log_probs(torch.full_like(index, row), index).exp().sum(-1)
        assert (mass - 1.0).abs().max() < 1e-4


@pytest.mark.parametrize("kernels", ["on", "off"])
@pytest.mark.parametrize("compute", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_uses_the_checked_teacher(
    dtype: torch.dtype, compute: torch.dtype, kernels: Mode
) -> None:
    """Whatever the draft's own products are computed in, nothing lies outside a full vocabulary."""
    rows, _ = weights(6.0)
    heads = PolicyHeads(1)
    heads.add(head(rows.to(dtype)))
    batch = collate([made(rows, dtype=dtype)], heads)
    with using_kernels(kernels):
        outcome = ttt_objective(
            eagle3_head(0, draft_vocab=VOCAB),
            batch,
            valid_targets(batch, 2),
            weights=step_weights(2, 0.8),
            compute_dtype=compute,
        )
    assert (outcome.sums[:, 3] / outcome.counts).abs().max() < 1e-4


WRONG: dict[str, tuple[Callable[[], Sample], str, str]] = {
    "bias": (lambda: made(weights()[0], weights()[1]), "teacher.logits", "bias"),
    "equal bias": (lambda: made(weights()[0], torch.full((VOCAB,), 3.0)), "teacher.logits", "bias"),
    "factor": (lambda: made(weights()[0], form=LogitForm(0.5)), "teacher.logits", "factor of 0.5"),
    "soft cap": (
        lambda: made(weights(4.0)[0] / 4, form=LogitForm(soft_cap=3.0)),
        "teacher.logits",
        "soft cap",
    ),
    "another version": (lambda: made(weights()[0].roll(1, 0)), "teacher.logits", "version 1"),
    "temperature": (
        lambda: made(weights()[0], temperature=1.0, said_temperature=0.7),
        "teacher.mass",
        r"temperature \(0.7\)",
    ),
    "top_k": (lambda: _renormalised(made(weights()[0])), "teacher.mass", "top_k"),
}


def _renormalised(sample: Sample) -> Sample:
    """Log-probabilities of the tokens that top_p kept, 0.8 of the mass."""
    return sample.repacked(sampled_logprobs=sample.sampled_logprobs - torch.log(torch.tensor(0.8)))


@pytest.mark.parametrize(
    ("what", "vocabulary"),
    [
        (what, vocabulary)
        for what, (_, field, _) in WRONG.items()
        for vocabulary in ("whole", "tied", "draft")
        # A mass over a part of the vocabulary can only be found to be too large.
        if vocabulary != "draft" or field != "teacher.mass"
    ],
)
def test_unannounced_sampling_is_refused(what: str, vocabulary: str) -> None:
    make, field, cause = WRONG[what]
    rows, _ = weights()
    own, ids = head(rows), EVERY
    if vocabulary != "whole":
        ids = draft_vocab_ids()
        embeddings = rows if vocabulary == "tied" else own.embed_tokens
        own = replace(own, lm_head_rows=rows[ids], embed_tokens=embeddings)
    check = TeacherCheck(ids)
    assert (check.whole_lm_head(own) is None) == (vocabulary == "draft")
    (good,) = check.check([made(rows)], own)
    assert good.refusal is None
    (found,) = check.check([make()], own)
    assert found.refusal is not None and found.refusal.field == field
    assert cause in found.refusal.next_step or cause.replace("\\", "") in found.refusal.next_step


def test_small_unannounced_bias_is_refused() -> None:
    rows, _ = weights()
    bias = torch.where(torch.arange(VOCAB) % 2 == 0, 0.015, -0.3)
    sample = made(rows, bias)
    (found,) = TeacherCheck(EVERY).check([sample], head(rows))
    assert found.refusal is not None


def test_one_rounded_logit_is_accepted() -> None:
    rows, _ = weights(2.0)
    sample = made(rows)
    logits = sample.sampled_logits.clone()
    logits[4] += 1.0
    (found,) = TeacherCheck(EVERY).check([sample.repacked(sampled_logits=logits)], head(rows))
    assert found.refusal is None


def test_teacher_check_judges_samples_one_by_one() -> None:
    rows, bias = weights()
    samples = [made(rows), made(rows, bias), made(rows)]
    found = TeacherCheck(EVERY).check(samples, head(rows))
    assert [each.refusal is None for each in found] == [True, False, True]
    short = made(rows).repacked(loss_mask=torch.arange(TOKENS) == 9)
    (one,) = TeacherCheck(EVERY).check([short], head(rows))
    assert one.refusal is None and ROWS > 1


def test_lm_head_is_converted_in_small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy keeps bfloat16 and has float32 logits."""
    kept, pieces, logits = weights()[0].bfloat16(), list[int](), teacher.policy_logits
    sample = made(kept.float())

    def noted(hidden: Tensor, piece: PolicyHead, dtype: torch.dtype) -> Tensor:
        pieces.append(len(piece.lm_head_rows))
        return logits(hidden, piece, dtype)

    monkeypatch.setattr(teacher, "policy_logits", noted)
    monkeypatch.setattr(teacher, "_CONVERTED_BYTES", 5 * HIDDEN * 4 + 3)
    (found,) = TeacherCheck(EVERY).check([sample], head(kept))
    assert found.refusal is None and abs(found.mass - 1) < 2e-3
    assert max(pieces) == 5 and sum(pieces) == VOCAB
    pieces.clear()
    (same,) = TeacherCheck(EVERY).check([sample], head(kept.float()))
    assert same.mass == pytest.approx(found.mass, rel=1e-6)
    assert pieces == [VOCAB], "nothing to convert"


def test_service_refuses_wrong_teacher_and_goes_on(tmp_path: Path) -> None:
    """Over the wire: a bias that OpenRun announced is applied, one that it did not is refused."""
    bias = torch.randn(VOCAB, generator=torch.Generator().manual_seed(1))
    policy = Policy()

    def biased(sample: Sample) -> Sample:
        logits = sample.final_hidden @ policy.lm_head.T + bias
        following = sample.token_ids[1:, None].long()
        picked: dict[str, Any] = {}
        for name, table in (("logits", logits), ("logprobs", logits.log_softmax(-1))):
            sampled = table[:-1].gather(1, following)[:, 0]
            picked[f"sampled_{name}"] = torch.cat([torch.zeros(1), sampled])
        return sample.repacked(**picked)

    with feeding(make_config(tmp_path), train=False) as (server, client):
        good = rollouts(4)
        acks = client.send(good[0], biased(good[1]), good[2])
        assert [ack.refusal.field for ack in acks] == ["", "teacher.logits", ""]
        assert "bias" in acks[1].refusal.next_step
        status = client.status()
        assert (status.samples_accepted, dict(status.refused_by_field)) == (2, {"teacher": 1})
        assert (
            server._counters.registry.get_sample_value(
                "slipstream_trainer_teacher_mass_ratio_count", {"vocabulary": "draft"}
            )
            == 3
        )
        spec = pb.PolicySpec()
        spec.CopyFrom(SPEC)
        spec.lm_head_bias = True
        client.open("biased", spec)
        tensors = {
            "lm_head.weight": policy.lm_head[draft_vocab_ids()],
            "embed_tokens.weight": policy.embed,
            "lm_head.bias": bias[draft_vocab_ids()],
        }
        client.announce(1, tensors=tensors)
        # Again, as after a lost answer, without a tensor: all are held.
        client.announce(1, tensors=tensors, send=())
        acks = client.send(biased(good[0]), good[1])
        assert [ack.refusal.field for ack in acks] == ["", "teacher.logits"]


def test_refused_sample_keeps_mass_metric_finite(tmp_path: Path) -> None:
    first, second, third = rollouts(3)
    with feeding(make_config(tmp_path), train=False) as (server, client):
        acks = client.send(
            # A mass that is not a number, and one that is infinite.
            first.repacked(temperature=1e-39),
            second.repacked(sampled_logits=second.sampled_logits - 200.0),
            third,
        )
        assert [ack.refusal.field.partition(".")[0] for ack in acks] == ["teacher", "teacher", ""]
        name, labels = "slipstream_trainer_teacher_mass_ratio_sum", {"vocabulary": "draft"}
        total = server._counters.registry.get_sample_value(name, labels)
        assert total is not None and 0.0 < total < 1000.0
