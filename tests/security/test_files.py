"""Files are for their owner, and no name leads out of its folder."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from draft_trainer.kernels.library import _check_own
from rollout_server.control.stages import StageStore, make_directory
from slipstream.checkpoints import read_layout
from slipstream.errors import RefusedError
from slipstream.shm import SharedFile
from tests.draft_trainer.rig import SPEC, make_config, rollouts, running, write_draft

pytestmark = pytest.mark.contract("hostile peers")

OTHERS = 0o077


def modes(folder: Path) -> dict[str, int]:
    """Mode bits of group and others by path, without what lies behind a closed folder."""
    found = {}
    for path in (folder, *folder.rglob("*")):
        above = [p for p in path.parents if folder in (p, *p.parents)]
        if all(p.stat().st_mode & OTHERS for p in above):
            found[path.relative_to(folder).as_posix()] = stat.S_IMODE(path.stat().st_mode) & OTHERS
    return found


def test_sample_files_readable_by_owner_only(tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    (tmp_path / "made-before").mkdir(mode=0o755)
    config = make_config(
        tmp_path,
        server={"shared_memory": str(memory)},
        replay={"directory": str(tmp_path / "made-before")},
    )
    before = os.umask(0o022)
    try:
        with running(config, train=False) as (_, client):
            client.open()
            ring = memory / SharedFile.create(memory, 1 << 16).name
            assert stat.S_IMODE(ring.stat().st_mode) == 0o600
            client.announce(1)
            assert len(client.send(*rollouts(3))) == 3
            found = modes(tmp_path / "made-before")
            assert found.pop(".") and "slipstream-samples.json" in found
            assert not any(found.values()), found
            assert {"arena", "samples", "policies"} <= {name.split(".")[0] for name in found}
    finally:
        os.umask(before)
    # Servers of other users read releases.
    assert modes(tmp_path / "registry")["release-000000/model.safetensors"] == 0o044


def test_staged_weights_readable_by_owner_only(tmp_path: Path) -> None:
    directory = make_directory(1, tmp_path)
    assert modes(directory) == {".": 0}
    StageStore(directory, 1).close()
    assert not directory.exists()


@pytest.mark.parametrize("name", ["../up.safetensors", "/etc/passwd", "a/b", 5])
def test_checkpoint_index_cannot_leave_its_folder(tmp_path: Path, name: object) -> None:
    folder = write_draft(tmp_path / "draft")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"fc.weight": name}}))
    with pytest.raises(RefusedError, match="names of files beside it"):
        read_layout(folder)
    for broken in ("{", "[]", '{"weight_map": 5}'):
        index.write_text(broken)
        with pytest.raises(RefusedError, match="an object with a weight_map"):
            read_layout(folder)


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "slipstream-samples-" + "0" * 31,
        "slipstream-samples-" + "0" * 32 + "/x",
        "",
    ],
)
def test_ring_name_off_pattern_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(RefusedError) as caught:
        SharedFile.open(tmp_path, name, 1 << 16, b"0" * 16)
    assert caught.value.field == "shared_memory.name"


def test_ring_symlink_is_refused(tmp_path: Path) -> None:
    ring = SharedFile.create(tmp_path, 1 << 16)
    name = "slipstream-samples-" + "0" * 32
    (tmp_path / name).symlink_to(tmp_path / ring.name)
    with pytest.raises(RefusedError, match="shared_memory"):
        SharedFile.open(tmp_path, name, ring.nbytes, ring.nonce)
    ring.remove_name()
    ring.close()


def test_client_names_never_become_paths(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with running(config, train=False) as (_, client):
        client.open(run_id="../../../outside", policy=SPEC)
        client.announce(1)
        message = rollouts(1)[0].repacked(sample_id="../../sample")
        assert len(client.send(message)) == 1
    written = {p.relative_to(tmp_path).parts[0] for p in tmp_path.rglob("*")}
    assert written <= {"initial", "registry", "samples"}
    assert not list(tmp_path.parent.glob("outside*"))


def test_kernel_library_writable_by_others_is_not_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    library = folder / "kernels.so"
    library.touch(0o700)
    _check_own(library)
    library.chmod(0o707)
    with pytest.raises(PermissionError):
        _check_own(library)
    library.chmod(0o700)
    folder.chmod(0o777)
    with pytest.raises(PermissionError):
        _check_own(library)
    folder.chmod(0o700)
    (folder / "link.so").symlink_to(library)
    with pytest.raises(PermissionError):
        _check_own(folder / "link.so")
