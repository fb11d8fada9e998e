"""The host store: bounded in bytes, nothing that is retained is evicted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

from rollout_server.store import ContentStore, Key, StagedTensor, WeightSource, make_directory
from slipstream.errors import RefusedError


def put(store: ContentStore, name: str, values: int = 25) -> Key:
    tensor = torch.full((values,), 1.5)
    key = Key(name, "float32", values * 4)
    with store.reserve(key.size) as reservation:
        store.write(key, tensor)
        store.add(key, reservation)
    return key


def test_store_evicts_least_recently_used_never_retained(tmp_path: Path) -> None:
    store = ContentStore(tmp_path, 300)
    a, b, c = (put(store, name) for name in "abc")
    store.retain([a])
    d = put(store, "d")
    assert a in store and c in store and d in store
    assert b not in store and not store.path(b).exists()
    store.retain([c, d])
    with pytest.raises(RefusedError, match="--stage-bytes"):
        put(store, "e")
    assert store.bytes == 300
    store.release([c])
    put(store, "e")
    assert c not in store


def test_dropped_content_leaves_no_file(tmp_path: Path) -> None:
    store = ContentStore(tmp_path, 300)
    key = put(store, "a")
    store.drop([key])
    assert store.bytes == 0 and list(tmp_path.iterdir()) == []


def test_weight_source_reads_stored_tensors(tmp_path: Path) -> None:
    store = ContentStore(tmp_path, 10_000)
    tensor = torch.randn(5, 7).bfloat16()
    key = Key("x", "bfloat16", 70)
    empty = Key("y", "int64", 0)
    for k, t in ((key, tensor), (empty, torch.empty(0, dtype=torch.int64))):
        with store.reserve(k.size) as reservation:
            store.write(k, t)
            store.add(k, reservation)
    source = WeightSource(
        tensors=(
            StagedTensor("w", key, (5, 7), str(store.path(key))),
            StagedTensor("e", empty, (0,), str(store.path(empty))),
        )
    )
    read = dict(WeightSource.from_message(source.to_message()).weights())
    assert torch.equal(read["w"], tensor) and read["e"].shape == (0,)
    store.path(key).write_bytes(b"short")
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
        "from rollout_server.store import make_directory\n"
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
