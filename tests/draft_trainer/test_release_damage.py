"""A release that is not what was released is refused by what differs."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest
import torch

from draft_trainer.releases.pointer import promote_offline
from draft_trainer.releases.registry import Registry, open_pointer
from draft_trainer.state import STATE_FILE
from draft_trainer.training.training_state import FOLDER
from slipstream.errors import RefusedError, StatusCode
from tests.draft_trainer.registry_rig import create, flip, flip_bit
from tests.draft_trainer.rig import (
    feeding,
    make_config,
    running,
    train_until_released,
    write_draft,
)
from tests.draft_trainer.synthetic import head

pytestmark = pytest.mark.contract("all or none")


def test_every_kind_of_damage_is_noticed(tmp_path: Path) -> None:
    registry = Registry(tmp_path)
    for seed in range(8):
        create(registry, seed)
    flip_bit(registry.path(0) / "model.safetensors")  # one bit of the last tensor
    flip(registry.path(1) / "config.json", "1e-05", "1e-06")
    (registry.path(2) / "model.safetensors").unlink()
    (registry.path(3) / "manifest.json").write_text("{")
    with (registry.path(4) / "model.safetensors").open("ab") as file:
        file.write(b"more")
    (registry.path(5) / "manifest.json").write_bytes(
        (registry.path(6) / "manifest.json").read_bytes()
    )
    flip(registry.path(6) / "manifest.json", '"weights_bytes"', '"weights_byte"')
    reasons = {
        0: "is not the one released",
        1: "not the text in the manifest",
        2: "No such file",
        3: "manifest.json",
        4: "as in the manifest",
        5: "draft_version 6, expected 5",
        6: "weights_byte",
    }
    for version, reason in reasons.items():
        with pytest.raises(RefusedError, match=reason) as caught:
            registry.tensors(version)
        assert caught.value.code is StatusCode.DATA_LOSS
    # A flipped bit costs a read of the weights to find; the rest shows when a release is looked at.
    registry.get(0)
    for version in range(1, 7):
        with pytest.raises(RefusedError):
            registry.get(version)
    assert registry.tensors(7).keys() == head().state_dict().keys() | {"d2t", "t2d"}


def test_a_damaged_release_0_is_no_other_checkpoint(tmp_path: Path) -> None:
    registry, initial = Registry(tmp_path / "registry"), write_draft(tmp_path / "initial")
    registry.import_initial(initial)
    registry.import_initial(initial)
    flip_bit(registry.path(0) / "model.safetensors")
    with pytest.raises(RefusedError, match="is not the one released") as caught:
        registry.import_initial(initial)
    assert caught.value.code is StatusCode.DATA_LOSS


def test_release_pruned_during_list_is_not_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry(tmp_path)
    for seed in range(3):
        create(registry, seed)
    read = registry.get

    def removed_first(version: int) -> object:
        if version == 1:
            shutil.rmtree(registry.path(1))
        return read(version)

    monkeypatch.setattr(registry, "get", removed_first)
    manifests, uses = registry.uses()
    assert [m.draft_version for m in manifests] == [u.draft_version for u in uses] == [0, 2]
    assert [use.damage for use in uses] == ["", ""]


def test_a_folder_that_cannot_be_read_is_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry = Registry(tmp_path)
    create(registry, 0)

    def fails(path: Path) -> object:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(Path, "iterdir", fails)
    with pytest.raises(RefusedError, match="Input/output error") as caught:
        registry.get(0)
    assert caught.value.code is StatusCode.DATA_LOSS


@pytest.mark.parametrize(
    ("key", "old", "new", "reason"),
    [
        ("hash", '"sha256": "', '"sha256": "A', "is not the one released"),
        ("name", '"name": "fc.weight"', '"name": "fc.weights"', "tensors"),
        ("size", '"weights_bytes": "', '"weights_bytes": "1', "as in the manifest"),
        ("version", '"draft_version": "1"', '"draft_version": "2"', "as the folder"),
        ("shape", '"16"', '"17"', "is not the one released"),
    ],
)
def test_a_manifest_that_lies_is_refused(
    tmp_path: Path, key: str, old: str, new: str, reason: str
) -> None:
    registry = Registry(tmp_path)
    create(registry)
    create(registry, 1)
    path = registry.path(1) / "manifest.json"
    text = path.read_text()
    assert old in text
    text = text.replace(old, new, 1)
    if key == "hash":
        start = text.index(new) + len(new) - 1
        text = text[: start + 1] + text[start + 2 :]  # as long as before
    path.write_text(text)
    with pytest.raises(RefusedError, match=reason):
        registry.verify(1)
    registry.verify(0)


def test_links_pickles_and_foreign_paths_are_refused(tmp_path: Path) -> None:
    registry = Registry(tmp_path / "registry")
    other = Registry(tmp_path / "other")
    create(registry)
    create(registry)
    create(other, 1)
    (tmp_path / "registry" / "release-000007").symlink_to(other.path(0))
    with pytest.raises(RefusedError, match="symbolic link"):
        registry.path(7)
    file = registry.path(0) / "model.safetensors"
    file.unlink()
    file.symlink_to(other.path(0) / "model.safetensors")
    with pytest.raises(RefusedError, match="symbolic link"):
        registry.tensors(0)
    for name in ("pytorch_model.bin", "optimizer.PT", "weights.ckpt"):
        pickle = registry.root / "release-000001" / name
        pickle.write_bytes(b"\x80\x04N.")
        with pytest.raises(RefusedError, match="a pickle"):
            registry.get(1)
        pickle.unlink()
    (registry.path(1) / "notes.txt").write_text("")
    registry.tensors(1)
    with pytest.raises(RefusedError, match="not released"):
        registry.verify(1)
    for version in (-1, 99):
        with pytest.raises(RefusedError, match="draft_version"):
            registry.path(version)
    # Neither another spelling of a number nor a file is a release.
    shutil.copytree(registry.path(1), registry.root / "release-0000001")
    (registry.root / "release-000009").write_text("")
    assert registry.versions() == (0, 1, 7)
    # Retention does not follow the link, and what it points at stays.
    assert registry.prune(1) == (0, 1)
    assert other.tensors(0)


def test_training_goes_on_where_the_newest_release_is_damaged(tmp_path: Path) -> None:
    """Once another one is promoted; the training state is sound."""
    config = make_config(tmp_path)
    with feeding(config) as (server, client):
        newest = train_until_released(client)
    before = server.loop.learner.state_dict()
    states = {path.name for path in (config.draft.registry / FOLDER).iterdir()}
    weights = config.draft.registry / f"release-{newest:06d}" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    registry = Registry(config.draft.registry)
    promote_offline(registry, 0, pin=False)
    for repaired in (False, True):
        with running(config, train=False) as (server, _):
            after, position = server.loop.learner.state_dict(), server.loop.position
            assert before["counter.steps"] > 0 and before.keys() == after.keys()
            assert all(torch.equal(before[name], after[name]) for name in before)
            assert (position.newest_release, position.run_id) == (newest, "run"), repaired
        assert states <= {path.name for path in (config.draft.registry / FOLDER).iterdir()}
        weights.write_bytes(whole)


@pytest.mark.parametrize("empty", [False, True])
def test_lost_state_db_beside_trained_releases_is_refused(tmp_path: Path, empty: bool) -> None:
    """The fleet would go back to the initial draft, without a word."""
    registry = Registry(tmp_path)
    create(registry, 0)
    assert open_pointer(registry).now.live == 0, "nothing was trained here yet"
    create(registry, 1, parent_version=0)
    registry.close()
    (tmp_path / STATE_FILE).unlink()
    if empty:
        (tmp_path / STATE_FILE).write_bytes(b"")
    registry = Registry(tmp_path)
    with pytest.raises(RefusedError, match="no pointer, beside releases") as caught:
        open_pointer(registry)
    assert "releases promote N --registry" in caught.value.next_step
    registry.close()
    promote_offline(registry, 1, pin=False)
    assert open_pointer(registry).now.live == 1
    registry.close()
