"""MTP heads: their objective, their checkpoints, and what is refused of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draft_trainer.cli.main import main as draft_trainer
from draft_trainer.config import TrainingConfig
from draft_trainer.drafters import DRAFTERS
from draft_trainer.drafters.loss import ttt_objective, valid_targets
from draft_trainer.drafters.mtp import Mtp, MtpConfig, MtpHead
from draft_trainer.drafters.policy import PolicyHeads
from draft_trainer.ingest.policies import check_fit, policy_of
from draft_trainer.releases.registry import Registry
from draft_trainer.training.learner import Learner
from slipstream.errors import RefusedError
from slipstream.v1 import draft_trainer_pb2 as pb
from slipstream.v1 import release_pb2
from tests.draft_trainer.synthetic import HIDDEN, QWEN, VOCAB, Policy, collate, learned

STEPS = 3
MIMO = {
    **{name: value for name, value in QWEN.items() if "rotary" not in name},
    "architectures": ["MiMoForCausalLM"],
    "model_type": "mimo",
    "num_nextn_predict_layers": 1,
    "head_dim": HIDDEN // 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
ERNIE = {
    **{name: value for name, value in MIMO.items() if name != "head_dim"},
    "architectures": ["Ernie4_5_MoeForCausalLM"],
    "model_type": "ernie4_5_moe",
    "moe_num_experts": 4,
}
GLM = {
    **ERNIE,
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "head_dim": 8,
    "rope_parameters": QWEN["rope_parameters"],
    "attention_bias": True,
    "use_qk_norm": True,
    "first_k_dense_replace": 1,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "n_group": 3,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}
DOCUMENTS: dict[str, dict[str, Any]] = {
    **{"qwen3_next": QWEN, "mimo": MIMO},
    **{"ernie4_5_moe": ERNIE, "glm4_moe": GLM},
}


def mtp_head(document: dict[str, Any], seed: int = 0) -> MtpHead:
    """A head whose every parameter matters."""
    generator = torch.Generator().manual_seed(seed)
    head = MtpHead(MtpConfig.from_dict(document))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
        for buffer in head.buffers():
            buffer.add_(torch.randn(buffer.shape, generator=generator) * 0.3)
    return head


def test_mtp_loss_is_kl_over_whole_vocabulary() -> None:
    head, policy = mtp_head(QWEN), Policy()
    batch = collate(policy.samples(3), policy.heads(rows=torch.arange(VOCAB)))
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


def test_init_mtp_extracts_the_policys_head(tmp_path: Path) -> None:
    checkpoint(tmp_path / "policy", QWEN, **{"lm_head.weight": torch.ones(VOCAB, HIDDEN)})
    options = ("--policy", str(tmp_path / "policy"), "--out", str(tmp_path / "head"))
    assert draft_trainer(["init", "--draft-kind", "mtp", *options]) == 0
    assert Mtp().read(tmp_path / "head", tmp_path / "policy").as_stored


def checkpoint(folder: Path, document: dict[str, Any], **others: Tensor) -> MtpHead:
    """A policy's folder: its config.json, and the head's tensors among others."""
    head = mtp_head(document)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(document))
    tensors = {head.config.stored(name): t.detach() for name, t in head.state_dict().items()}
    save_file(tensors | others, folder / "model.safetensors")
    return head


@pytest.mark.parametrize("name", DOCUMENTS)
def test_mtp_import_and_release_round_trip(name: str, tmp_path: Path) -> None:
    policy, document = tmp_path / "policy", dict(DOCUMENTS[name])
    code = {"auto_map": {"AutoConfig": "configuration.Config"}}
    copies = ("model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight")
    head = checkpoint(
        policy,
        document | code,
        **{n: torch.ones(VOCAB, HIDDEN) for n in ("lm_head.weight", *copies)},
    )
    registry = Registry(tmp_path / "releases", DRAFTERS["mtp"])
    assert registry.import_initial(policy, policy).draft_kind == "mtp"
    kept = load_file(registry.path(0) / "model.safetensors")
    assert kept.keys() == {head.config.stored(n) for n in head.state_dict()}
    if name == "mimo":
        # transformers has no class for it.
        document["model_type"] = "qwen2"
    assert json.loads((registry.path(0) / "config.json").read_text()) == document
    again = registry.drafter.read(registry.path(0), policy)
    assert again.as_stored
    moved = again.draft()
    with torch.no_grad():
        moved.get_parameter("fc.weight").add_(1.0)
    released = registry.create(moved, release_pb2.ReleaseManifest(), torch.float32)
    assert released.draft_kind == "mtp"
    # Who opens the folder alone knows what is in it.
    read = Registry(tmp_path / "releases").drafter.read(registry.path(1)).draft()
    for (ours, theirs), before in zip(
        zip(moved.parameters(), read.parameters(), strict=True), head.parameters(), strict=True
    ):
        assert torch.equal(ours, theirs)
        assert torch.equal(theirs, before) is (theirs is not read.get_parameter("fc.weight"))
    with pytest.raises(RefusedError, match=r"draft.kind: found eagle3, expected mtp"):
        Registry(tmp_path / "releases", DRAFTERS["eagle3"]).import_initial(policy)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_experts": 8}, "num_experts"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 512}, "kv_lora_rank"),
        ({"model_type": "glm4"}, "model_type"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers"),
        ({"mtp_num_hidden_layers": 3}, "mtp_num_hidden_layers"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        ({"head_dim": None}, "head_dim"),
        ({"partial_rotary_factor": None, "rope_parameters": {"rope_theta": 1e4}}, "partial_rotary"),
    ],
)
def test_mtp_unsupported_config_is_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(RefusedError, match=f"config.json {field}"):
        MtpConfig.from_dict(QWEN | changes)


@pytest.mark.parametrize(
    ("document", "changes", "field"),
    [
        (ERNIE, {"use_bias": True}, "use_bias"),
        (MIMO, {"mlp_bias": True}, "mlp_bias"),
        (MIMO, {"n_routed_experts": 8}, "n_routed_experts"),
        (GLM, {"num_mtp_layers": 2}, "num_mtp_layers"),
        (GLM, {"first_k_dense_replace": 3}, "first_k_dense_replace"),
    ],
)
def test_mtp_unsupported_family_config_is_refused(
    document: dict[str, Any], changes: dict[str, Any], field: str
) -> None:
    with pytest.raises(
        RefusedError, match=f"config.json {field}.*ernie4_5_moe, glm4_moe are supported"
    ):
        MtpConfig.from_dict(document | changes)


def test_mtp_release_keeps_router_bias_in_float32(tmp_path: Path) -> None:
    """Rounded, it would send tokens to other experts."""
    head, name = mtp_head(GLM), "layer.mlp.gate.e_score_correction_bias"
    Mtp().save(tmp_path, head, torch.bfloat16)
    stored = load_file(tmp_path / "model.safetensors")
    assert torch.equal(stored[head.config.stored(name)], head.get_buffer(name))
    assert {t.dtype for n, t in stored.items() if not n.endswith("correction_bias")} == {
        torch.bfloat16
    }
    assert torch.equal(Mtp().read(tmp_path).draft().get_buffer(name), head.get_buffer(name))


def test_mtp_ignores_experts_of_other_layers() -> None:
    dense = {"num_experts": 8, "mlp_only_layers": [0]}
    assert MtpConfig.from_dict(QWEN | dense).block.intermediate_size == 24
    nested = {"model_type": "qwen3_5", "text_config": QWEN | {"model_type": "qwen3_5_text"}}
    config = MtpConfig.from_dict(nested)
    assert (config.family, config.vocab_size) == ("qwen3_5_text", VOCAB)
    assert config.to_dict() == nested


def test_mtp_foreign_or_incomplete_head_is_refused(tmp_path: Path) -> None:
    policy = tmp_path / "policy"
    checkpoint(policy, QWEN)
    mtp, stored = Mtp(), load_file(policy / "model.safetensors")
    mtp.read(policy, policy)
    other = tmp_path / "other"
    checkpoint(other, QWEN | {"num_hidden_layers": 3})
    with pytest.raises(RefusedError, match="num_hidden_layers: found 3, expected 2"):
        mtp.read(other, policy)
    for tensors, found in (
        ({}, "none of them"),
        ({n: t for n, t in stored.items() if n != "mtp.fc.weight"}, "mtp.fc.weight"),
        (stored | {"mtp.layers.1.mlp.up_proj.weight": torch.zeros(1)}, "layers.1"),
        (stored | {"mtp.norm.weight": torch.full((HIDDEN,), float("nan"))}, "not finite"),
        (stored | {"mtp.norm.weight": torch.zeros(3)}, r"found \[3\]"),
    ):
        save_file(tensors | {"x": torch.zeros(1)}, policy / "model.safetensors")
        with pytest.raises(RefusedError, match=found):
            mtp.read(policy)
    with pytest.raises(RefusedError, match="layout"):
        mtp.save(tmp_path, mtp_head(QWEN), layout="speculators")


def test_mtp_policy_with_scaled_logits_is_refused() -> None:
    shape = MtpConfig.from_dict(QWEN)
    sizes = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_hidden_layers": 2}
    check_fit(policy_of(pb.PolicySpec(**sizes)), shape)
    for changes in ({"logit_scale": 0.5}, {"logit_soft_cap": 30.0}, {"lm_head_bias": True}):
        with pytest.raises(RefusedError, match=f"policy.{next(iter(changes))}"):
            check_fit(policy_of(pb.PolicySpec(**sizes, **changes)), shape)


def test_mtp_training_without_aux_states_raises_acceptance() -> None:
    """A head with experts, whose router's correction is not trained."""
    policy = Policy()
    heads: PolicyHeads = policy.heads(rows=torch.arange(VOCAB))
    samples = [
        sample.repacked(aux=torch.zeros(sample.tokens, 0), aux_layers=())
        for sample in policy.samples(24)
    ]
    config = TrainingConfig(ttt_steps=STEPS, learning_rate=3e-3, warmup_steps=0)
    learner = Learner(mtp_head(GLM), config)
    before = {name: tensor.clone() for name, tensor in learner.head.state_dict().items()}
    assert learned(learner, samples, heads, STEPS) > 0.5
    kept = {n for n, t in learner.head.state_dict().items() if torch.equal(t, before[n])}
    assert kept == {name for name, _ in learner.head.named_buffers()}


def test_mtp_state_without_averages_loads_with_averaging() -> None:
    plain, averaging = (TrainingConfig(weight_averaging=share) for share in (0.0, 0.9))
    state = Learner(mtp_head(GLM, seed=1), plain).state_dict()
    learner = Learner(mtp_head(GLM), averaging)
    learner.load_state_dict(state)
    for name, tensor in learner.head.state_dict().items():
        assert torch.equal(tensor, state[f"head.{name}"])
