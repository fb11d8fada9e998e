"""Where samples lie: chosen, locked, found after a kill, moved at a stop, cleared if foreign."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from draft_trainer.feed import placement
from draft_trainer.feed.placement import SampleFolder
from draft_trainer.feed.store import SampleStore
from slipstream.refusal import RefusedError, StatusCode
from tests.draft_trainer.rig import make_config, rollouts, running
from tests.draft_trainer.samples import is_intact, open_store, put

CAPACITY = 1 << 20


@pytest.fixture(autouse=True)
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    (tmp_path / "registry").mkdir()
    monkeypatch.setattr(placement, "SHARED_MEMORY", folder)
    return folder


def opened(tmp_path: Path, configured: Path | None = None, need: int = 1) -> SampleFolder:
    return SampleFolder(configured, tmp_path / "registry", need)


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


def test_in_memory_where_there_is_room_and_beside_the_registry_where_not(
    tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = opened(tmp_path)
    assert folder.path.parent == shared_memory and folder.path.stat().st_mode & 0o777 == 0o700
    folder.close(None)
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=1000, f_frsize=4096))
    folder = opened(tmp_path, need=1000 * 4096)
    assert folder.path.parent == shared_memory
    folder.close(None)
    folder = opened(tmp_path, need=1000 * 4096 + 1)
    assert folder.path == tmp_path / "registry" / "samples"
    folder.close(None)
    monkeypatch.undo()
    monkeypatch.setattr(placement, "SHARED_MEMORY", tmp_path / "none")
    assert opened(tmp_path).path == tmp_path / "registry" / "samples"


def test_without_a_run_nothing_stays(tmp_path: Path, shared_memory: Path) -> None:
    folder = opened(tmp_path)
    open_store(folder.path, CAPACITY).close()
    folder.close(None)
    assert everything(shared_memory) == []
    assert everything(tmp_path / "registry") == ["samples.json"]


def test_a_killed_trainer_finds_its_samples_where_they_are(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    store = filled(folder)
    expected = names(store)
    store.close()
    folder.leave()
    again = opened(tmp_path)
    assert again.path == folder.path
    store = open_store(again.path, CAPACITY)
    store.rewind(2, 0)
    assert names(store) == expected


def test_a_stopped_one_leaves_no_memory_and_finds_them_too(
    tmp_path: Path, shared_memory: Path
) -> None:
    folder = opened(tmp_path)
    store = filled(folder)
    live = store.live()
    expected = names(store)
    store.close()
    folder.close(live)
    assert everything(shared_memory) == []
    rest = tmp_path / "registry" / "samples"
    assert (rest / "samples").stat().st_size == CAPACITY
    assert (rest / "samples").stat().st_blocks * 512 <= 64 << 10
    again = opened(tmp_path)
    assert again.path == folder.path and not rest.exists()
    store = open_store(again.path, CAPACITY)
    store.rewind(2, 0)
    assert names(store) == expected


def test_no_room_to_move_to_leaves_them_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = opened(tmp_path)
    store = filled(folder)
    live = store.live()
    store.close()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(placement, "_copy_parts", full)
        folder.close(live)
    store = open_store(opened(tmp_path).path, CAPACITY)
    store.rewind(2, 0)
    assert len(names(store)) == 9


def test_another_directory_takes_over_what_the_last_one_held(
    tmp_path: Path, shared_memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = opened(tmp_path)
    store = filled(folder)
    store.close()
    folder.leave()
    with monkeypatch.context() as patch:
        patch.setattr(placement, "_remove", _killed)
        with pytest.raises(KeyboardInterrupt):
            opened(tmp_path, tmp_path / "here")
    # Killed before the old one was removed, or before the new one was complete.
    (tmp_path / "registry" / "samples.json").write_text(
        (tmp_path / "registry" / "samples.json")
        .read_text()
        .replace(str(tmp_path / "here"), str(folder.path))
    )
    again = opened(tmp_path, tmp_path / "here")
    assert everything(shared_memory) == []
    store = open_store(again.path, CAPACITY)
    store.rewind(2, 0)
    assert len(names(store)) == 9
    store.close()
    again.close(store.live())
    # Configured, so it stays where it is.
    assert (tmp_path / "here" / "samples").exists()


def _killed(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_second_trainer_is_refused(tmp_path: Path) -> None:
    first = opened(tmp_path, tmp_path / "here")
    with pytest.raises(RefusedError) as caught:
        opened(tmp_path, tmp_path / "here")
    assert caught.value.code is StatusCode.FAILED_PRECONDITION
    assert "another draft-trainer uses" in caught.value.found
    first.leave()
    opened(tmp_path, tmp_path / "here")


def test_what_belongs_to_a_registry_that_is_gone_is_removed_and_nothing_else(
    tmp_path: Path,
) -> None:
    here = tmp_path / "here"
    folder = opened(tmp_path, here)
    store = filled(folder)
    store.close()
    folder.leave()
    (here / "mine.txt").write_text("kept")
    (tmp_path / "registry" / "samples.json").unlink()
    folder = opened(tmp_path, here)
    assert everything(here) == ["lock", "mine.txt", "owner.json"]
    folder.close(None)
    assert everything(here) == ["mine.txt"]


def test_samples_from_before_the_machine_started_are_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = opened(tmp_path)
    filled(folder).close()
    folder.leave()
    boot = tmp_path / "boot"
    boot.write_text("another\n")
    monkeypatch.setattr(placement, "_BOOT_ID", boot)
    again = opened(tmp_path)
    assert again.path == folder.path
    assert everything(again.path) == ["lock", "owner.json"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RefusedError) as caught:
        opened(tmp_path, tmp_path / "file" / "x")
    assert caught.value.field == "replay.directory"
    assert "Not a directory" in caught.value.found


def test_the_service_leaves_memory_at_a_stop_and_goes_on(
    tmp_path: Path, shared_memory: Path
) -> None:
    config = make_config(tmp_path, replay={"directory": None})
    assert config.replay.directory is None
    with running(config, train=False) as (_, client):
        assert len(everything(shared_memory)) > 1
    assert everything(shared_memory) == []
    with running(config, train=False) as (server, client):
        client.open()
        client.announce(4)
        client.send(*rollouts(12, version=4))
        before = client.status()
    assert everything(shared_memory) == []
    with running(config, train=False) as (server, client):
        assert str(server._store.folder).startswith(str(shared_memory))
        after = client.status()
        assert after.samples_pending == before.samples_pending > 0
        assert after.policy_version == 4
        assert client.open().latest_policy_version == 4
        # Its matrices are held: their hashes are enough.
        client.announce(5, send=[])
        assert {ack.status for ack in client.send(*rollouts(12, version=4))} == {2}
