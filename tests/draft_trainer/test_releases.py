"""The registry that never shows half a release."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import slipstream
from draft_trainer.drafters.eagle3.checkpoint import Eagle3
from draft_trainer.releases.commits import Payloads
from draft_trainer.releases.pointer import PointerStore
from draft_trainer.releases.registry import Registry, newest_own
from slipstream.errors import RefusedError
from slipstream.v1 import release_pb2
from tests.draft_trainer.registry_rig import create, flip, names
from tests.draft_trainer.synthetic import head

IMPORTED = release_pb2.RELEASE_SOURCE_IMPORTED


def test_releases_count_up_and_describe_themselves(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    gate = release_pb2.GateFigures(
        candidate_acceptance_length=2.5,
        passed=True,
        candidate_acceptance_per_position=(0.9, 0.6),
    )
    first = create(registry)
    second = create(registry, 1, parent_version=0, trained_against_policy_version=12, gate=gate)
    assert (first.draft_version, second.draft_version) == (0, 1)
    assert not first.HasField("parent_version") and not first.HasField("gate")
    assert second.parent_version == 0 and second.trained_against_policy_version == 12
    assert registry.path(1).name == "release-000001"
    assert registry.uses()[0] == [first, second] and registry.get(1) == second
    sent = [Payloads(registry).get(version).expected_acceptance for version in (0, 1)]
    assert sent == [(), (0.9, 0.6)], "to servers"
    assert {p.name for p in registry.path(1).iterdir()} == {
        "config.json",
        "model.safetensors",
        "manifest.json",
    }
    assert "draft_version" in json.loads((registry.path(1) / "manifest.json").read_text())
    assert second.weights_bytes == (registry.path(1) / "model.safetensors").stat().st_size
    assert second.source == release_pb2.RELEASE_SOURCE_TRAINED
    assert second.code_version.split("+")[0] == slipstream.__version__
    tensors = registry.tensors(1)
    assert torch.equal(tensors["fc.weight"], head(1).fc.weight.bfloat16())


def test_import_is_byte_for_byte_and_idempotent(tmp_path: Path) -> None:
    source = tmp_path / "draft"
    source.mkdir()
    model = head(1)
    Eagle3().save(source, model, torch.float32)
    registry = Registry(tmp_path / "registry")
    manifest = registry.import_initial(source)
    assert manifest.draft_version == 0
    assert (manifest.source, manifest.origin) == (release_pb2.RELEASE_SOURCE_INITIAL, str(source))
    assert registry.import_initial(source) == manifest
    for name in ("config.json", "model.safetensors"):
        assert (registry.path(0) / name).read_bytes() == (source / name).read_bytes()
    Eagle3().save(source, head(2), torch.float32)
    with pytest.raises(RefusedError, match="release 0"):
        registry.import_initial(source)
    assert len(registry.uses()[0]) == 1


def test_a_half_written_release_is_never_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fail at the rename, as a killed process would; then leave what one leaves behind."""
    registry = Registry(tmp_path)
    create(registry)

    def fail(self: Path, target: Path) -> Path:
        raise OSError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        with pytest.raises(OSError, match="killed"):
            create(registry, 1)
    assert names(tmp_path) == {"release-000000"}
    for leftover in (".staging-abc", ".release-000001-abc", ".removed-release-000003-1-2"):
        (tmp_path / leftover).mkdir()
        (tmp_path / leftover / "config.json").write_text("{}")
    assert [m.draft_version for m in Registry(tmp_path).uses()[0]] == [0]
    assert create(registry, 1).draft_version == 1
    assert registry.remove_leftovers() == 3
    assert names(tmp_path) == {"release-000000", "release-000001"}


def test_prune_by_bytes_and_use(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    for seed in range(6):
        create(registry, seed)
    size = registry.nbytes(3)
    assert size > registry.get(3).weights_bytes
    with registry.using(1), registry.using(2):
        # Six are there, room is for three and a half: the three oldest that may go, go.
        assert registry.prune(16, size * 7 // 2, {0}) == (3, 4)
        assert registry.busy() == {1, 2}
    assert registry.busy() == frozenset()
    # The newest stays, whatever the bounds.
    assert registry.prune(1, keep_bytes=1) == (0, 1, 2)
    assert registry.versions() == (5,)


def test_prune_keeps_what_the_fleet_may_be_put_on(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    for seed in range(7):
        create(registry, seed)
    with registry.writing() as state:
        pointer = PointerStore(state, registry.get)
        for good in (0, 1):
            pointer.go_live(good)
        pointer.begin_trial(3)
        pointer.promote(4, pin=True)
        pointer.begin_commit(5)
    # A registry that is opened again: only the newest, 6, is kept for its number.
    assert Registry(tmp_path).prune(1, keep_bytes=1) == (2,)
    assert registry.versions() == (0, 1, 3, 4, 5, 6)


def test_prune_goes_on_after_failed_removal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that another machine has open on NFS."""
    registry = Registry(tmp_path)
    for seed in range(4):
        create(registry, seed)
    remove = shutil.rmtree

    def busy(path: Path) -> None:
        if "release-000000" in path.name:
            raise OSError("Directory not empty")
        remove(path)

    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", busy)
        with pytest.raises(OSError, match="not empty"):
            registry.prune(1)
        assert registry.remove_leftovers() == 1, "a trainer that starts goes on"
    left = {name for name in names(tmp_path) if name.startswith(".removed-release-000000-")}
    assert len(left) == 1 and names(tmp_path) == {"release-000003", *left}
    assert registry.prune(1) == ()
    assert names(tmp_path) == {"release-000003"}


def test_training_goes_on_from_the_newest_that_was_trained(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    for seed, source in enumerate((1, 2, IMPORTED, IMPORTED)):
        create(registry, seed, source=source)
    assert newest_own(registry).draft_version == 1
    create(registry, 4)
    flip(registry.path(4) / "config.json", "1e-05", "1e-06")
    assert newest_own(registry).draft_version == 1


def test_registry_owner_survives_restart(tmp_path: Path) -> None:
    owners = []
    for name in ("a", "a", "b", "copy of a", "a"):
        if name == "copy of a":
            shutil.copytree(tmp_path / "a", tmp_path / name)
        registry = Registry(tmp_path / name)
        owners.append(registry.hold().owner)
        registry.close()
    assert owners[0] == owners[1] == owners[4] and len({*owners}) == 3
    assert all(int(owner, 16) for owner in owners)
