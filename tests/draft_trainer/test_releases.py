"""The registry that never shows half a release."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draft_trainer.checkpoints.checkpoint import d2t_of, save_draft
from draft_trainer.releases.registry import Registry
from slipstream.refusal import RefusedError
from slipstream.v1 import release_pb2
from tests.draft_trainer.synthetic import draft_vocab_ids, head


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
    assert registry.tensors(4).keys() == head().state_dict().keys() | {"d2t", "t2d"}


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
