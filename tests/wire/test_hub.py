"""A name on the hub in place of a folder: found, fetched, or refused with what to do."""

from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest

from slipstream.errors import RefusedError
from slipstream.hub import local_folder


def test_local_folder_prefers_existing_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert local_folder("org/name", "--policy") == Path("org/name")
    assert local_folder("org/name", "draft.initial", tmp_path) == tmp_path / "org" / "name"
    for path in ("absent", "./org/absent", "/org/absent", "../org/absent", "a/b/c", ".a/b"):
        assert local_folder(path, "--policy") == Path(path)


def test_hub_name_is_fetched_at_revision_without_pickles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def snapshot(name: str, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        assert not any(pattern.endswith(("bin", "pt", "*")) for pattern in allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    assert local_folder("org/Name-1.5B", "--policy") == tmp_path
    assert local_folder(Path("org/name@v1"), "--policy") == tmp_path
    assert asked == [("org/Name-1.5B", None), ("org/name", "v1")]


def test_hub_name_offline_refused_with_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(RefusedError, match="no such folder here, and the hub") as refused:
        local_folder("slipstream-test/absent", "draft.initial")
    assert refused.value.field == "draft.initial"
    assert "hf download slipstream-test/absent" in refused.value.next_step
