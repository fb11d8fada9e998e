"""The host store: bounded in bytes, a folder for each stage, what is held is linked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from rollout_server.control.stages import (
    Key,
    StagedTensor,
    StageStore,
    WeightSource,
    make_directory,
)
from slipstream.errors import RefusedError
from slipstream.tensors import spec_of
from tests.waiting import until


def put(store: StageStore, *tensors: torch.Tensor) -> tuple[Path, list[Key]]:
    """A stage of these tensors: its folder, and what had to be written."""
    folder, contents = store.new_folder(), {Key.of(spec_of("w", t)): t for t in tensors}
    with store.receiving(folder, contents) as missing:
        for key in missing:
            store.write(folder, key, contents[key])
    return folder, sorted(missing, key=lambda key: key.size)


def test_stage_links_what_is_held_and_outlives_it(tmp_path: Path) -> None:
    store = StageStore(tmp_path, 10_000)
    frozen, old, new = torch.ones(100), torch.zeros(50), torch.zeros(60)
    first, written = put(store, frozen, old)
    assert [key.size for key in written] == [200, 400]
    second, written = put(store, frozen, new)
    assert [key.size for key in written] == [240]
    assert store.bytes == 840, "what is linked counts once"
    store.remove(first)
    until(lambda: not first.exists())
    assert store.bytes == 640
    assert sorted(path.stat().st_size for path in second.iterdir()) == [240, 400]
    third, written = put(store, old)
    assert [key.size for key in written] == [200], "nothing is kept that is not held"
    store.close()
    assert not third.exists() and not tmp_path.exists()


def test_stage_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    store = StageStore(tmp_path, 300)
    first, _ = put(store, torch.zeros(25))
    with pytest.raises(RefusedError, match="--stage-bytes"):
        put(store, torch.zeros(51))
    with store.receiving(store.new_folder(), [Key("a", "float32", 150)]):
        assert store.bytes == 250, "it is set aside before it arrives"
        with pytest.raises(RefusedError, match="152 bytes beside 250"):
            put(store, torch.ones(1), torch.zeros(37))
    store.remove(first)
    assert store.bytes == 150


def test_refused_stage_leaves_nothing(tmp_path: Path) -> None:
    store = StageStore(tmp_path, 300)
    with pytest.raises(ZeroDivisionError), store.receiving(store.new_folder(), []):
        raise ZeroDivisionError
    assert store.bytes == 0
    until(lambda: list(tmp_path.iterdir()) == [])


def test_weight_source_reads_stored_tensors(tmp_path: Path) -> None:
    store, folder = StageStore(tmp_path, 10_000), tmp_path / "folder"
    tensor = torch.randn(5, 7).bfloat16()
    key = Key("x", "bfloat16", 70)
    empty = Key("y", "int64", 0)
    with store.receiving(folder, (key, empty)):
        store.write(folder, key, tensor)
        store.write(folder, empty, torch.empty(0, dtype=torch.int64))
    source = WeightSource(
        tensors=(
            StagedTensor("w", key, (5, 7), str(key.below(folder))),
            StagedTensor("e", empty, (0,), str(empty.below(folder))),
        )
    )
    read = dict(WeightSource.from_message(source.to_message()).weights())
    assert torch.equal(read["w"], tensor) and read["e"].shape == (0,)
    key.below(folder).write_bytes(b"short")
    with pytest.raises(OSError, match="70 needed"):
        dict(source.weights())
    store.close()
    assert not tmp_path.exists()


@pytest.mark.parametrize("shared", [True, False], ids=["shared memory", "TMPDIR"])
def test_store_directory_of_killed_server_is_swept(
    shared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other = tmp_path / "folder", tmp_path / "other"
    folder.mkdir()
    other.mkdir()
    memory, temporary = (folder, other) if shared else (tmp_path / "none", folder)
    monkeypatch.setenv("TMPDIR", str(temporary))
    monkeypatch.setattr(tempfile, "tempdir", None)
    living = make_directory(1, memory)
    (living / "tensor").write_bytes(b"1")
    code = (
        "import os, pathlib, sys\n"
        "from rollout_server.control.stages import make_directory\n"
        "folder = make_directory(1, pathlib.Path(sys.argv[1]))\n"
        "(folder / 'tensor').write_bytes(b'1')\n"
        "os.kill(os.getpid(), 9)\n"
    )
    killed = subprocess.run([sys.executable, "-c", code, str(memory)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert len(list(folder.glob("slipstream-rollout-*/tensor"))) == 2
    new = make_directory(1, memory)
    assert {path.name for path in folder.iterdir()} == {living.name, new.name}
    assert (living / "tensor").exists()


def test_store_directory_of_other_host_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock on a shared file system may hold on its own host alone."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    made = make_directory(1, tmp_path / "none")
    host, name = os.uname().nodename, made.name
    assert f"{host}@" in name
    for other in (f"{host}-2", f"2-{host}"):
        (tmp_path / name.replace(f"{host}@", f"{other}@")).mkdir()
    make_directory(1, tmp_path / "none")
    assert len(list(tmp_path.iterdir())) == 4
