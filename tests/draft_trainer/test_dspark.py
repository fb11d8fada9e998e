"""DSpark drafts: their function, objective and acceptance, their files, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from draft_trainer.checkpoints import read_policy
from draft_trainer.cli.main import main as draft_trainer
from draft_trainer.config import TrainerConfig, TrainingConfig
from draft_trainer.drafters import DRAFTERS
from draft_trainer.drafters.batch import Batch
from draft_trainer.drafters.dspark import Dspark, DsparkConfig, DsparkHead
from draft_trainer.drafters.expected_acceptance import step_acceptance
from draft_trainer.drafters.initial import init_dflash
from draft_trainer.drafters.loss import step_weights, ttt_objective, valid_targets
from draft_trainer.releases.registry import Registry
from draft_trainer.training.learner import Learner
from draft_trainer.training.optimizer import DraftOptimizer
from slipstream.errors import RefusedError
from slipstream.v1 import release_pb2
from tests.draft_trainer.synthetic import (
    HIDDEN,
    VOCAB,
    Policy,
    collate,
    dspark_document,
    dspark_head,
    logits_of,
)
from tests.draft_trainer.test_dflash import Reference, moved, policy_folder, write

pytestmark = pytest.mark.contract("alignment")

STEPS = 3


def markov_logits(head: DsparkHead, policy: Policy, h: Tensor, before: Tensor) -> Tensor:
    """Logits [..., VOCAB] of normed outputs, each with the token before the proposed one."""
    tensors = head.state_dict()
    w1, w2 = (tensors[f"markov_head.markov_w{number}.weight"] for number in (1, 2))
    return h @ policy.lm_head.to(h.dtype).T + w1[before] @ w2.T


@pytest.mark.parametrize("from_anchor", [True, False])
@pytest.mark.parametrize("first_anchor", [0, 5])
def test_dspark_logits_match_reference_blocks(first_anchor: int, from_anchor: bool) -> None:
    head = dspark_head(sample_from_anchor=from_anchor)
    assert isinstance(moved(head), DsparkHead)
    reference, policy = Reference(head), Policy()
    batch = collate(policy.samples(3), policy.heads(rows=torch.arange(VOCAB)))
    with torch.no_grad():
        outputs = [*head.unroll(batch, STEPS, first_anchor)]
        logits = torch.stack([logits_of(head, output, batch.policy) for output in outputs])
        for row, length in enumerate((batch.teacher_known.sum(1) + 1).tolist()):
            for anchor in range(first_anchor, length - STEPS):
                h = reference.block(batch, row, anchor, STEPS)
                before = batch.token_ids[row, anchor + 1 : anchor + 1 + STEPS]
                expected = markov_logits(head, policy, h, before)
                found = logits[:, row, anchor - first_anchor]
                torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def dense_loss(head: DsparkHead, policy: Policy, batch: Batch, weights: list[float]) -> Tensor:
    """The authors' loss by autograd over whole tensors, with the expectation of the CE."""
    valid = valid_targets(batch, STEPS)
    total = torch.zeros((), dtype=torch.float64)
    temperature = batch.temperature[:, None].double()
    predictor = head.confidence
    teacher = (batch.final_hidden.double() @ policy.lm_head.double().T) / temperature[..., None]
    for step, output in enumerate(head.unroll(batch, STEPS)):
        normed = head.normed(output)
        row, anchor = valid[step].nonzero(as_tuple=True)
        rows = torch.cat([policy.lm_head.double(), head.markov_head["markov_w2"].weight], 1)
        z = (normed[row, anchor] @ rows.T) / temperature[row]
        q, p = z.softmax(-1), teacher[row, anchor + 1 + step].softmax(-1)
        loss = 0.1 * -(p * q.log()).sum(-1) + 0.9 * (p - q).abs().sum(-1)
        if predictor is not None:
            rate = torch.minimum(p, q).sum(-1).detach()
            seen = normed[row, anchor, : predictor.in_features]
            loss = loss + binary_cross_entropy_with_logits(
                predictor(seen)[:, 0], rate, reduction="none"
            )
        total = total + weights[step] * loss.mean()
    return total


@pytest.mark.parametrize(
    "changes",
    [{}, {"confidence_head_with_markov": False}, {"enable_confidence_head": False}],
    ids=["h and w1", "h alone", "no confidence"],
)
@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_dspark_gradient_equals_dense_reference(
    changes: dict[str, object], temperature: float
) -> None:
    head = dspark_head(3, **changes).double()
    moved(head)
    policy, weights = Policy(), step_weights(STEPS, 0.8)
    samples = policy.samples(4, temperature=temperature)
    batch = collate(samples, policy.heads(rows=torch.arange(VOCAB)))
    valid = valid_targets(batch, STEPS)

    def gradients(loss: Tensor) -> dict[str, Tensor]:
        head.zero_grad()
        loss.backward()
        return {n: p.grad.clone() for n, p in head.named_parameters() if p.grad is not None}

    kind = {"target": "dspark", "compute_dtype": torch.float64}
    ours = ttt_objective(head, batch, valid, weights=weights, **kind).loss  # type: ignore[arg-type]
    theirs = dense_loss(head, policy, batch, weights)
    # The teacher's log Z is on the wire in float32.
    assert float(ours) == pytest.approx(float(theirs), rel=1e-5)
    found, expected = gradients(ours), gradients(theirs)
    assert found.keys() == expected.keys() == dict(head.named_parameters()).keys()
    for name, gradient in found.items():
        error = (gradient - expected[name]).abs().max() / expected[name].abs().max()
        assert error < 1e-5, f"{name}: {error:.1e}"


def test_dspark_confidence_learns_acceptance_rate() -> None:
    """Its error beside the best constant's, on the rollouts that it was trained on."""
    policy, head = Policy(sharpness=4.0), dspark_head()
    samples, heads = policy.samples(24), policy.heads(rows=torch.arange(VOCAB))
    config = {"learning_rate": 5e-3, "warmup_steps": 0, "target": "dspark"}
    learner = Learner(head, TrainingConfig(ttt_steps=STEPS, **config))  # type: ignore[arg-type]
    for _ in range(80):
        learner.step(samples, heads)
    batch = collate(samples, heads)
    known = valid_targets(batch, STEPS)
    rate, _ = step_acceptance(head, batch, known, "probabilistic", torch.float32)
    predictor = head.confidence
    assert predictor is not None
    with torch.no_grad():
        outputs = [head.normed(output) for output in head.unroll(batch, STEPS)]
        said = torch.stack([predictor(output)[..., 0].sigmoid() for output in outputs])[known]
    rates = rate[known]
    error = float((said - rates).abs().mean())
    constant = float((rates - rates.median()).abs().mean())
    assert error < 0.7 * constant, (error, constant)


def test_acceptance_is_of_proposals_given_the_draft_before() -> None:
    """Summed over every recording, it is that of drafting: q at step 1 knows the draft of step 0.

    On one context, K = 2, drafts d and then e with q(d) and q(e | d). Drafting accepts both with
    sum over d of min(p(d), q(d)) times the sum over e of min(p(e | d), q(e | d)).
    """
    policy = Policy(sharpness=3.0)
    head = dspark_head(1)
    moved(head)
    start = policy.rolls(torch.Generator().manual_seed(3), 1, 7)[0]
    anchor = len(start) - 2
    recorded = torch.stack([torch.cat([start, torch.tensor([d, 0, 0])]) for d in range(VOCAB)])
    samples = [policy.sample(tokens, str(d)) for d, tokens in enumerate(recorded)]
    batch = collate(samples, policy.heads(rows=torch.arange(VOCAB)))
    known = torch.zeros(2, *batch.token_ids.shape, dtype=torch.bool)
    known[:, :, anchor] = True
    p_first = policy.log_probs(start)[-1].exp().double()
    p_then = torch.stack([policy.log_probs(row)[anchor + 2].exp() for row in recorded]).double()
    with torch.no_grad():
        h = Reference(head).block(batch, 0, anchor, 2)
        q_first = markov_logits(head, policy, h[0], start[-1]).softmax(-1).double()
        q_then = markov_logits(head, policy, h[1], torch.arange(VOCAB)).softmax(-1).double()
        not_knowing = markov_logits(head, policy, h[1], start[-1]).softmax(-1).double()
        rate, survival = step_acceptance(head, batch, known, "probabilistic", torch.float32)
        greedy_rate, greedy = step_acceptance(head, batch, known, "greedy", torch.float32)

    def drafted(q: Tensor) -> float:
        return float((torch.minimum(p_first, q_first) * torch.minimum(p_then, q).sum(-1)).sum())

    found = float((p_first * survival[0, :, anchor] * rate[1, :, anchor]).sum())
    assert found == pytest.approx(drafted(q_then), rel=1e-5)
    assert abs(found - drafted(not_knowing)) > 1e-3
    assert rate[0, :, anchor].tolist() == pytest.approx(
        [float(torch.minimum(p_first, q_first).sum())] * VOCAB, rel=1e-5
    )
    best = int(q_first.argmax())
    accepted = float(p_then[best, int(q_then[best].argmax())])
    # Both greedy drafts: the first is its likeliest token, the second the likeliest after it.
    both = float((p_first * greedy[0, :, anchor] * greedy_rate[1, :, anchor]).sum())
    assert both == pytest.approx(float(p_first[best]) * accepted, rel=1e-5)


def test_dspark_release_has_only_its_own_tensors(tmp_path: Path) -> None:
    """Fields as its authors write them, and copies of the policy's matrices, which are left out."""
    head = dspark_head()
    moved(head)
    copies = {name: torch.ones(VOCAB, HIDDEN) for name in ("embed_tokens.weight", "lm_head.weight")}
    theirs = write(tmp_path / "theirs", head, **copies)
    registry = Registry(tmp_path / "releases", DRAFTERS["dspark"])
    policy = policy_folder(tmp_path / "policy")
    assert registry.import_initial(theirs, policy).draft_kind == "dspark"
    registry.create(head, release_pb2.ReleaseManifest(), torch.float32)
    for version in (0, 1):
        stored = load_file(registry.path(version) / "model.safetensors")
        assert {n: t.shape for n, t in stored.items()} == {
            n: t.shape for n, t in head.state_dict().items()
        }
        assert json.loads((registry.path(version) / "config.json").read_text()) == dspark_document()
    again = Registry(tmp_path / "releases").drafter.read(registry.path(1), policy)
    assert again.as_stored and again.config.aux_layer_ids == (2, 4, 5)
    for name, parameter in again.draft().named_parameters():
        assert torch.equal(parameter, head.get_parameter(name))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"architectures": ["DFlashDraftModel"]}, "architectures"),
        ({"architectures": ["Gemma4DSparkModel"]}, "architectures"),
        ({"markov_head_type": "gated"}, "markov_head_type: found gated, expected vanilla"),
        ({"markov_head_type": "rnn"}, "markov_head_type: found rnn, expected vanilla"),
        ({"markov_rank": 0}, "markov_rank: found 0"),
        ({"markov_rank": 5}, r"(proj|markov_w1)\.weight: found"),
        ({"dspark_draft_topk": 8}, "dspark_draft_topk: found 8"),
        ({"dflash_config": {"mask_token_id": 5}}, "dflash_config"),
        ({"enable_confidence_head": False}, "unknown .*confidence_head.proj"),
        ({"confidence_head_with_markov": False}, "confidence_head.proj.weight: found"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"mask_token_id": VOCAB}, "mask_token_id: found 24"),
        ({"target_layer_ids": [1, 7, 8]}, "layers from 0 to 7"),
        ({"speculators_model_type": "dflash"}, "speculators_model_type: found dflash, expected ds"),
    ],
)
def test_dspark_unsupported_config_is_refused(
    changes: dict[str, object], field: str, tmp_path: Path
) -> None:
    folder = write(tmp_path / "draft", dspark_head())
    Dspark().read(folder, policy_folder(tmp_path / "policy"))
    (folder / "config.json").write_text(json.dumps(dspark_document(**changes)))
    with pytest.raises(RefusedError, match=field):
        Dspark().read(folder, policy_folder(tmp_path / "policy"))


def test_dspark_gated_head_is_refused_by_its_tensors(tmp_path: Path) -> None:
    """The config.json does not say the head's type, and vLLM does not read it there."""
    head = dspark_head(markov_head_type=None)
    folder = write(tmp_path / "draft", head, **{"markov_head.gate_proj.weight": torch.ones(6, 22)})
    with pytest.raises(RefusedError, match=r"unknown .*markov_head\.gate_proj"):
        Dspark().read(folder)


def test_dspark_init_writes_what_is_read(
    policy_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = read_policy(policy_dir)
    draft = init_dflash(policy, 127, markov_rank=16)
    assert isinstance(draft, DsparkHead) and draft.config.markov_rank == 16
    assert draft.config == DsparkConfig.from_dict(draft.config.to_dict())
    again = init_dflash(policy, 127, markov_rank=16)
    for name, parameter in draft.named_parameters():
        assert torch.equal(parameter, again.get_parameter(name)), name
    out = tmp_path / "draft"
    made = ("init", "--draft-kind", "dspark", "--policy", str(policy_dir), "--out", str(out))
    assert draft_trainer([*made, "--mask-token", "127", "--markov-rank", "0"]) == 2
    assert "--markov-rank" in capsys.readouterr().err and not out.exists()
    assert draft_trainer([*made, "--mask-token", "127", "--markov-rank", "16"]) == 0
    written = Dspark().read(out, policy_dir)
    assert written.as_stored and written.config == draft.config
    for name, tensor in written.tensors.items():
        assert torch.equal(tensor, draft.get_parameter(name).bfloat16())
    save_file({"x": torch.ones(1)}, out / "model.safetensors")
    with pytest.raises(RefusedError, match=r"missing .*markov_head\.markov_w1"):
        Dspark().read(out, policy_dir)


def test_muon_leaves_both_heads_to_adamw() -> None:
    head = dspark_head()
    optimizer = DraftOptimizer(head, TrainingConfig(optimizer="muon"))
    of_muon = {name for name in optimizer.tensors if name.endswith(".momentum_buffer")}
    between = ("fc.", "layers.")
    assert of_muon == {
        f"optimizer.{name}.momentum_buffer"
        for name, p in head.named_parameters()
        if p.ndim == 2 and name.startswith(between)
    }


@pytest.mark.parametrize(
    ("value", "expected"), [(True, True), (1, True), (False, False), (0, False), (None, False)]
)
def test_dspark_flags_are_what_vllm_takes_them_for(value: object, expected: bool) -> None:
    """vLLM asks whether they are true; the default stands for an absent one alone, not for null."""
    flags = ("sample_from_anchor", "enable_confidence_head", "confidence_head_with_markov")
    config = DsparkConfig.from_dict(dspark_document(**dict.fromkeys(flags, value)))
    found = config.sample_from_anchor, config.confidence, config.confidence_with_markov
    assert found == (expected,) * 3
    document = dspark_document()
    assert "sample_from_anchor" not in document
    assert DsparkConfig.from_dict(document).sample_from_anchor


def test_dspark_own_objective_is_its_default() -> None:
    made: Callable[..., TrainerConfig] = TrainerConfig
    for kind, given, expected in (
        ("dspark", {}, "dspark"),
        ("dspark", {"target": "lk"}, "lk"),
        ("dflash", {}, "kl"),
    ):
        draft = {"kind": kind, "initial": "/draft"}
        assert made(draft=draft, training=given).training.target == expected
