"""Where samples lie: locked, found after a stop or a kill, cleared if foreign."""

from __future__ import annotations

from pathlib import Path

import pytest

from draft_trainer.ingest import store as placement
from draft_trainer.ingest.store import SampleFolder, SampleStore
from slipstream.errors import RefusedError, StatusCode
from tests.draft_trainer.rig import make_config, rollouts, running
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
def test_samples_stay_where_they_are_and_are_found(tmp_path: Path, configured: str | None) -> None:
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


def test_without_a_run_nothing_stays(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    open_store(folder.path, CAPACITY).close()
    folder.close(keep=False)
    assert everything(tmp_path / "registry") == ["samples.json"]


def test_a_second_trainer_is_refused(tmp_path: Path) -> None:
    first = opened(tmp_path, tmp_path / "here")
    with pytest.raises(RefusedError) as caught:
        opened(tmp_path, tmp_path / "here")
    assert caught.value.code is StatusCode.FAILED_PRECONDITION
    assert "another draft-trainer uses" in caught.value.found
    first.close(keep=True)
    opened(tmp_path, tmp_path / "here")


def test_what_belongs_to_a_registry_that_is_gone_is_removed_and_nothing_else(
    tmp_path: Path,
) -> None:
    here = tmp_path / "here"
    folder = opened(tmp_path, here)
    filled(folder).close()
    folder.close(keep=True)
    (here / "mine.txt").write_text("kept")
    (tmp_path / "registry" / "samples.json").unlink()
    folder = opened(tmp_path, here)
    assert everything(here) == ["lock", "mine.txt", "owner.json"]
    folder.close(keep=False)
    assert everything(here) == ["mine.txt"]


def test_samples_from_before_the_machine_started_are_not_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = opened(tmp_path)
    filled(folder).close()
    folder.close(keep=True)
    boot = tmp_path / "boot"
    boot.write_text("another\n")
    monkeypatch.setattr(placement, "_BOOT_ID", boot)
    assert everything(opened(tmp_path).path) == ["lock", "owner.json"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RefusedError) as caught:
        opened(tmp_path, tmp_path / "file" / "x")
    assert caught.value.field == "replay.directory"
    assert "Not a directory" in caught.value.found


def test_the_service_goes_on_with_its_samples_after_a_stop(tmp_path: Path) -> None:
    config = make_config(tmp_path, replay={"directory": None})
    samples = config.draft.registry / "samples"
    with running(config, train=False):
        assert samples.exists()
    assert not samples.exists()
    with running(config, train=False) as (_, client):
        client.open()
        client.announce(4)
        client.send(*rollouts(12, version=4))
        before = client.status()
    with running(config, train=False) as (server, client):
        assert server._store.folder == samples
        after = client.status()
        assert after.samples_pending == before.samples_pending > 0
        assert after.policy_version == 4
        assert client.open().latest_policy_version == 4
        # Its matrices are held: their hashes are enough.
        client.announce(5, send=[])
        assert {ack.status for ack in client.send(*rollouts(12, version=4))} == {2}
