"""Checkpoints that vLLM loads, and the registry that never shows half a release."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draft_trainer.checkpoint import d2t_of, init_draft, load_draft, load_head, save_draft
from draft_trainer.head_config import HeadConfig
from draft_trainer.releases import Registry
from slipstream.refusal import RefusedError
from slipstream.v1 import release_pb2
from tests.draft_trainer.synthetic import VOCAB, draft_vocab_ids, head

VLLM_NAMES = {
    "fc.weight",
    "lm_head.weight",
    "norm.weight",
    *(
        f"midlayer.{name}.weight"
        for name in (
            "hidden_norm",
            "input_layernorm",
            "post_attention_layernorm",
            *(f"self_attn.{p}_proj" for p in "qkvo"),
            *(f"mlp.{p}_proj" for p in ("gate", "up", "down")),
        )
    ),
}


def _d2t() -> Tensor:
    return d2t_of(draft_vocab_ids())


def _create(registry: Registry, seed: int = 0, **changes: Any) -> release_pb2.ReleaseManifest:
    model = head(seed)
    options: dict[str, Any] = {
        "parent": None,
        "trained_against": None,
        "run_id": "run",
        "ttt_steps": 3,
        "gate": None,
    }
    return registry.create(model, model.config, _d2t(), **(options | changes))


def test_checkpoint_has_vllm_names_and_round_trips(tmp_path: Path) -> None:
    model = head(1)
    save_draft(tmp_path, model.config, model, _d2t())
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors.keys() == VLLM_NAMES | {"d2t", "t2d"}
    assert tensors["fc.weight"].dtype == torch.bfloat16
    assert tensors["t2d"].nonzero().flatten().tolist() == draft_vocab_ids().tolist()
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["architectures"] == ["LlamaForCausalLMEagle3"]
    assert written["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    config, _, d2t = load_draft(tmp_path)
    assert config == model.config and d2t is not None and d2t.tolist() == _d2t().tolist()
    loaded, _ = load_head(tmp_path)
    for a, b in zip(loaded.parameters(), model.parameters(), strict=True):
        assert torch.equal(a, b.bfloat16().float())
    assert loaded.draft_ids_of(torch.tensor([0, 2, 3])).tolist() == [0, -1, 2]


def test_full_vocabulary_checkpoint_has_no_d2t(tmp_path: Path) -> None:
    model = head(1, draft_vocab=VOCAB)
    save_draft(tmp_path, model.config, model, None)
    assert load_file(tmp_path / "model.safetensors").keys() == VLLM_NAMES
    assert load_draft(tmp_path)[2] is None
    with pytest.raises(RefusedError, match="d2t"):
        save_draft(tmp_path, model.config, model, torch.zeros(VOCAB, dtype=torch.int64))


def test_old_rope_field_and_nested_layer_ids_are_read() -> None:
    config = head().config.to_dict()
    del config["rope_parameters"], config["num_aux_hidden_states"]
    config["rope_theta"] = 5e5
    ids = config.pop("eagle_aux_hidden_state_layer_ids")
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids}
    read = HeadConfig.from_dict(config)
    assert read.rope_theta == 5e5 and read.aux_layer_ids == (2, 4, 5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architectures", ["LlamaForCausalLM"]),
        ("num_hidden_layers", 2),
        ("attention_bias", True),
        ("fc_norm", True),
        ("rope_scaling", {"rope_type": "llama3"}),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e4}),
        ("hidden_act", "gelu"),
        ("logit_scale", 0.5),
        ("target_hidden_size", 32),
        ("num_aux_hidden_states", 4),
        ("hidden_size", None),
        ("eagle_config", {"use_aux_hidden_state": False}),
    ],
)
def test_a_config_that_the_head_cannot_be_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(RefusedError, match=field):
        HeadConfig.from_dict(head().config.to_dict() | {field: value})


def _spoil(tensors: dict[str, Tensor], how: str) -> None:
    if how == "missing":
        del tensors["fc.weight"]
    elif how == "unknown":
        tensors["layers.1.weight"] = torch.zeros(1)
    elif how == "shape":
        tensors["fc.weight"] = tensors["fc.weight"][:, 1:].contiguous()
    elif how == "not finite":
        tensors["fc.weight"][0, 0] = torch.nan
    elif how == "ascending":
        tensors["d2t"][3] += 5
    elif how == "no d2t":
        del tensors["d2t"]
    elif how == "embeddings":
        tensors["embed_tokens.weight"] = torch.zeros(VOCAB, 16)


@pytest.mark.parametrize(
    "how", ["missing", "unknown", "shape", "not finite", "ascending", "no d2t", "embeddings"]
)
def test_weights_that_do_not_fit_are_refused(tmp_path: Path, how: str) -> None:
    model = head(1)
    save_draft(tmp_path, model.config, model, _d2t())
    tensors = load_file(tmp_path / "model.safetensors")
    _spoil(tensors, how)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(RefusedError):
        load_draft(tmp_path)


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"config\.json"):
        load_draft(tmp_path)
    model = head(1)
    save_draft(tmp_path, model.config, model, _d2t())
    (tmp_path / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0garbage!")
    with pytest.raises(RefusedError, match=r"model\.safetensors"):
        load_draft(tmp_path)


def test_init_draft_takes_the_policys_rows() -> None:
    policy = {
        "hidden_size": 16,
        "num_attention_heads": 2,
        "head_dim": 8,
        "num_hidden_layers": 10,
        "intermediate_size": 32,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 123.0},
    }
    rows, norm = torch.randn(VOCAB, 16), torch.rand(16)
    made = init_draft(policy, draft_vocab_ids(), lm_head=rows, final_norm=norm)
    assert torch.equal(made.lm_head.weight, rows[draft_vocab_ids()])
    assert torch.equal(made.norm.weight, norm)
    assert made.config.aux_layer_ids == (2, 5, 7) and made.config.rope_theta == 123.0
    again = init_draft(policy, draft_vocab_ids(), lm_head=rows, final_norm=norm)
    assert torch.equal(made.fc.weight, again.fc.weight)


def test_releases_count_up_and_describe_themselves(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    gate = release_pb2.GateFigures(candidate_acceptance_length=2.5, passed=True)
    first = _create(registry)
    second = _create(registry, 1, parent=0, trained_against=12, gate=gate)
    assert (first.draft_version, second.draft_version) == (0, 1)
    assert not first.HasField("parent_version") and not first.HasField("gate")
    assert second.parent_version == 0 and second.trained_against_policy_version == 12
    assert registry.path(1).name == "release-000001"
    assert registry.list() == [first, second] and registry.get(1) == second
    assert {p.name for p in registry.path(1).iterdir()} == {
        "config.json",
        "model.safetensors",
        "manifest.json",
    }
    assert "draft_version" in json.loads((registry.path(1) / "manifest.json").read_text())
    tensors = registry.tensors(1)
    assert torch.equal(tensors["fc.weight"], head(1).fc.weight.bfloat16())


def test_import_is_byte_for_byte_and_idempotent(tmp_path: Path) -> None:
    source = tmp_path / "draft"
    source.mkdir()
    model = head(1)
    save_draft(source, model.config, model, _d2t(), torch.float32)
    registry = Registry(tmp_path / "registry")
    manifest = registry.import_initial(source)
    assert manifest.draft_version == 0
    assert registry.import_initial(source) == manifest
    for name in ("config.json", "model.safetensors"):
        assert (registry.path(0) / name).read_bytes() == (source / name).read_bytes()
    save_draft(source, model.config, head(2), _d2t(), torch.float32)
    with pytest.raises(RefusedError, match="release 0"):
        registry.import_initial(source)
    assert len(registry.list()) == 1


def test_a_half_written_release_is_never_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fail at the rename, as a killed process would; then leave a staging directory behind."""
    registry = Registry(tmp_path)
    _create(registry)

    def fail(self: Path, target: Path) -> Path:
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        with pytest.raises(OSError, match="killed"):
            _create(registry, 1)
    assert [m.draft_version for m in registry.list()] == [0]
    leftover = tmp_path / ".staging-abc"
    leftover.mkdir()
    (leftover / "config.json").write_text("{}")
    assert [m.draft_version for m in Registry(tmp_path).list()] == [0]
    assert _create(registry, 1).draft_version == 1
    assert registry.remove_leftovers() == 1 and not leftover.exists()


def test_every_kind_of_damage_is_noticed(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    for seed in range(5):
        _create(registry, seed)
    weights = registry.path(0) / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1  # one bit of the last tensor
    weights.write_bytes(data)
    config = registry.path(1) / "config.json"
    config.write_text(config.read_text().replace("1e-05", "1e-06"))
    (registry.path(2) / "model.safetensors").unlink()
    (registry.path(3) / "manifest.json").write_text("{")
    for version in range(4):
        with pytest.raises(RefusedError):
            registry.tensors(version)
    assert registry.tensors(4).keys() == VLLM_NAMES | {"d2t", "t2d"}


def test_links_and_foreign_paths_are_refused(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "registry")
    other = Registry(tmp_path / "other")
    _create(registry)
    _create(other, 1)
    (tmp_path / "registry" / "release-000007").symlink_to(other.path(0))
    with pytest.raises(RefusedError, match="symbolic link"):
        registry.path(7)
    file = registry.path(0) / "model.safetensors"
    file.unlink()
    file.symlink_to(other.path(0) / "model.safetensors")
    with pytest.raises(RefusedError, match="symbolic link"):
        registry.tensors(0)
    for version in (-1, 99):
        with pytest.raises(RefusedError, match="draft_version"):
            registry.path(version)


def test_prune_keeps_the_newest_and_the_protected(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    for seed in range(5):
        _create(registry, seed)
    assert registry.prune(2, {0}) == (1, 2)
    assert [m.draft_version for m in registry.list()] == [0, 3, 4]
    assert {p.name for p in tmp_path.iterdir()} == {f"release-{v:06d}" for v in (0, 3, 4)}
    assert _create(registry).draft_version == 5
    with pytest.raises(RefusedError, match="keep"):
        registry.prune(0, set())
