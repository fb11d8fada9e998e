"""The folder of samples: locked, found after a stop or a kill, never cleared if it is not ours."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from draft_trainer.ingest import folder as placement
from draft_trainer.ingest.folder import MARKER, SampleFolder
from draft_trainer.ingest.policies import POLICIES
from draft_trainer.ingest.store import SampleStore
from slipstream.errors import RefusedError, StatusCode
from tests.draft_trainer.samples import is_intact, open_store, put

CAPACITY = 1 << 20


def opened(tmp_path: Path, configured: Path | None = None) -> SampleFolder:
    (tmp_path / "registry").mkdir(exist_ok=True)
    return SampleFolder(configured, tmp_path / "registry")


def filled(folder: SampleFolder) -> SampleStore:
    store = open_store(folder.path, CAPACITY)
    store.begin("run", {})
    for i in range(9):
        put(store, f"s{i}")
    store.draw("run", 3 * 16)
    store.draw("run", 3 * 16)
    return store


def names(store: SampleStore) -> set[str]:
    samples = store.draw("run", 10**6).samples
    assert all(is_intact(sample) for sample in samples)
    return {sample.sample_id for sample in samples}


def everything(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("configured", [None, "here"])
def test_samples_are_found_after_restart(tmp_path: Path, configured: str | None) -> None:
    directory = tmp_path / configured if configured else None
    folder = opened(tmp_path, directory)
    assert folder.path == directory or folder.path == tmp_path / "registry" / "samples"
    assert folder.path.stat().st_mode & 0o777 == 0o700
    store = filled(folder)
    expected = names(store)
    store.close()
    folder.close(keep=True)
    again = opened(tmp_path, directory)
    assert again.path == folder.path
    store = open_store(again.path, CAPACITY)
    store.rewind(2, 0)
    assert names(store) == expected


def test_samples_folder_without_a_run_is_removed(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    open_store(folder.path, CAPACITY).close()
    folder.close(keep=False)
    assert everything(tmp_path / "registry") == ["samples.json"]


def test_samples_folder_of_running_trainer_is_refused(tmp_path: Path) -> None:
    first = opened(tmp_path, tmp_path / "here")
    with pytest.raises(RefusedError) as caught:
        opened(tmp_path, tmp_path / "here")
    assert caught.value.code is StatusCode.FAILED_PRECONDITION
    assert "another draft-trainer uses" in caught.value.found
    first.close(keep=True)
    opened(tmp_path, tmp_path / "here")


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def refused(tmp_path: Path, here: Path) -> RefusedError:
    """The refusal of a folder that stays as it is, to the byte."""
    before = contents(here)
    with pytest.raises(RefusedError) as caught:
        opened(tmp_path, here)
    assert contents(here) == before
    assert (caught.value.field, caught.value.code) == (
        "replay.directory",
        StatusCode.FAILED_PRECONDITION,
    )
    assert str(here) in caught.value.found
    return caught.value


def test_samples_folder_with_foreign_files_is_refused(tmp_path: Path) -> None:
    here = tmp_path / "here"
    # Names that a trainer would write itself.
    for name in ("samples/first.txt", "policies/lead.txt", "arena", "samples.db", "notes.txt"):
        path = here / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("precious")
    error = refused(tmp_path, here)
    assert "other files" in error.found and "nothing was removed" in error.next_step
    # Not with an empty marker beside them either, as a kill may leave one in an empty folder.
    (here / MARKER).touch()
    assert "an empty" in refused(tmp_path, here).found


def test_samples_of_another_registry_are_refused(tmp_path: Path) -> None:
    here = tmp_path / "here"
    folder = opened(tmp_path, here)
    filled(folder).close()
    folder.close(keep=True)
    (tmp_path / "registry" / "samples.json").unlink()
    error = refused(tmp_path, here)
    assert "another registry" in error.found and "set another" in error.next_step


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 3, "registry": 1}'])
def test_samples_folder_invalid_marker_is_refused(tmp_path: Path, text: str) -> None:
    here = tmp_path / "here"
    opened(tmp_path, here).close(keep=True)
    (here / "samples.db").write_text("maybe ours")
    (here / MARKER).write_text(text)
    assert MARKER in refused(tmp_path, here).found


def test_samples_folder_of_another_format_is_refused(tmp_path: Path) -> None:
    here = tmp_path / "here"
    opened(tmp_path, here).close(keep=True)
    facts = json.loads((here / MARKER).read_text())
    (here / MARKER).write_text(json.dumps(facts | {"format": 2}))
    assert "format 2" in refused(tmp_path, here).found


def test_samples_folder_symlink_is_refused(tmp_path: Path) -> None:
    here = tmp_path / "here"
    opened(tmp_path, here).close(keep=True)
    link = tmp_path / "link"
    link.symlink_to(here)
    assert "symbolic link" in refused(tmp_path, link).found
    # Of a marker, and of what would be opened beside it.
    (here / MARKER).rename(tmp_path / "elsewhere")
    (here / MARKER).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RefusedError, match="symbolic links"):
        opened(tmp_path, here)


def test_samples_folder_close_keeps_foreign_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "here"
    folder = opened(tmp_path, here)
    filled(folder).close()
    matrices = here / POLICIES
    matrices.mkdir(exist_ok=True)
    digest = "0" * 64
    for path in (
        here / "mine.txt",
        matrices / "mine.safetensors",
        matrices / f"{digest}.safetensors",
    ):
        path.write_text("kept")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / f"{digest}.safetensors").write_text("kept")
    folder.close(keep=False)
    assert everything(here) == ["mine.txt", POLICIES, f"{POLICIES}/mine.safetensors"]
    # A link in place of our own folder is not followed.
    for path in (here / "mine.txt", matrices / "mine.safetensors"):
        path.unlink()
    matrices.rmdir()
    folder = opened(tmp_path, here)
    matrices.symlink_to(outside)
    folder.close(keep=False)
    assert everything(outside) == [f"{digest}.safetensors"]


def test_samples_folder_left_by_kill_is_taken(tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    opened(tmp_path, here).close(keep=True)
    (here / MARKER).write_text("")
    folder = opened(tmp_path, here)
    filled(folder).close()
    folder.close(keep=False)
    assert not here.exists()


def test_samples_from_before_a_reboot_are_discarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = opened(tmp_path)
    filled(folder).close()
    folder.close(keep=True)
    boot = tmp_path / "boot"
    boot.write_text("another\n")
    monkeypatch.setattr(placement, "_BOOT_ID", boot)
    assert everything(opened(tmp_path).path) == [MARKER]


@pytest.mark.parametrize(("name", "said"), [("nfs4", True), ("fuse.juicefs", True), ("xfs", False)])
def test_folder_on_a_network_is_named(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    said: bool,
) -> None:
    mounts, registry = tmp_path / "mounts", str(tmp_path / "registry").replace(" ", "\\040")
    mounts.write_text(
        f"none / ext4 rw 0 0\nhost:/a\\040b {registry} {name} rw 0 0\n"
        f"none {registry}/other tmpfs rw 0 0\n"
    )
    monkeypatch.setattr(placement, "_MOUNTS", mounts)
    opened(tmp_path).close(keep=False)
    text = f"is on a network ({name}), to which every sample is written: set replay.directory"
    assert (text in caplog.text) is said


@pytest.mark.parametrize("boot", ["first", "another"])
def test_samples_marker_is_synced_before_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, boot: str
) -> None:
    """Without it, a folder that a crash of the machine left would be refused as another's."""
    here = tmp_path / "here"
    opened(tmp_path, here).close(keep=True)
    monkeypatch.setattr(placement, "_BOOT_ID", tmp_path / "boot")
    (tmp_path / "boot").write_text(boot)
    if boot == "first":
        (here / MARKER).unlink()
    synced, fsync = {}, os.fsync

    def noted(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced[path] = path.read_text() if path.is_file() else everything(path)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    opened(tmp_path, here)
    assert json.loads(str(synced[here / MARKER]))["boot"] == boot
    assert synced[here] == [MARKER]


def test_samples_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RefusedError) as caught:
        opened(tmp_path, tmp_path / "file" / "x")
    assert caught.value.field == "replay.directory"
    assert "Not a directory" in caught.value.found
