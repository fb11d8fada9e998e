"""Releases that servers read on storage which they share with the registry."""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from draft_trainer.config_file import parse_config
from rollout_server.control import shared
from slipstream.checkpoints import WEIGHTS_FILE
from slipstream.errors import RefusedError
from slipstream.v1 import rollout_server_pb2 as pb
from tests.draft_trainer.fleet_rig import Rig


@pytest.fixture
def rig(make_rig: Callable[..., Rig], tmp_path: Path) -> Rig:
    """Two servers that see the registry's folder, and one that does not."""
    rig = make_rig(3, shared_registry=tmp_path)
    for server in rig.servers[:2]:
        server.restart(shared_registry=tmp_path)
    for index in range(2):
        rig.reachable(index)
    return rig


def release(rig: Rig, version: int) -> Path:
    """The folder of a release."""
    return rig.root / f"release-{version:06d}"


def test_servers_read_a_release_and_are_sent_what_they_cannot_read(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    for version in (1, 2):
        assert rig.publisher.promote(version, pin=False).changes
        rig.assert_live(version)
    assert [server.bytes_received > 0 for server in rig.servers] == [False, False, True]
    said, why = " ".join(one.getMessage() for one in caplog.records), "--shared-registry"
    assert (
        f"{rig.servers[2].address} was sent draft 1: this server was started without {why}" in said
    )
    assert f"draft 1 is sent, not read there: this server was started without {why}" in said


@pytest.mark.parametrize(
    "fault",
    ["gone", "damaged", "cut", "no safetensors", "not there", "linked", "linked file", "a pipe"],
)
def test_release_that_cannot_be_read_is_sent(rig: Rig, fault: str, tmp_path: Path) -> None:
    draft = rig.publisher.payloads.get(1)
    folder = release(rig, 1)
    weights = folder / WEIGHTS_FILE
    data = weights.read_bytes()
    half = len(data) // 2
    damaged = data[:half] + bytes(byte ^ 1 for byte in data[half:])
    bad = {"damaged": damaged, "cut": data[:half], "no safetensors": b"?"}
    if fault in bad:
        # Another file: the trainer has the one that was there mapped.
        weights.unlink()
        weights.write_bytes(bad[fault])
    elif fault == "gone":
        shutil.rmtree(folder)
    elif fault == "not there":
        weights.unlink()
    elif fault == "linked":
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(tmp_path / "elsewhere")
    elif fault == "linked file":
        weights.rename(tmp_path / "elsewhere")
        weights.symlink_to(tmp_path / "elsewhere")
    else:
        weights.unlink()
        os.mkfifo(weights)
    server = rig.servers[0]
    answer = rig.fleet.client(server.address).stage(draft)
    assert isinstance(answer, pb.StageResult) and answer.not_shared != ""
    assert answer.bytes_received > 0
    rig.fleet.client(server.address).commit(["draft-1"])
    assert server.state.draft_sha256 == draft.sha256


def test_storage_that_hangs_delays_one_stage(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "OPEN_SECONDS", 0.2)
    real, go_on = shared._opened, threading.Event()

    def hangs(root: Path, folder: str) -> object:
        assert go_on.wait(30)
        return real(root, folder)

    monkeypatch.setattr(shared, "_opened", hangs)
    monkeypatch.setattr(shared, "BYTES_PER_SECOND", 1 << 40)
    client = rig.fleet.client(rig.servers[0].address)
    said = []
    for version in (1, 2):
        answer = client.stage(rig.publisher.payloads.get(version))
        assert isinstance(answer, pb.StageResult) and answer.bytes_received > 0
        said.append(answer.not_shared)
    go_on.set()
    assert "not read in time" in said[0] and "has not ended" in said[1]


def test_policy_is_never_read_there(rig: Rig) -> None:
    """A bridge has no registry."""

    class Untouched(shared.SharedRegistry):
        async def fill(self, *_: object) -> str:
            raise AssertionError

    server = rig.servers[0]
    server.service.shared = Untouched(None)
    header = pb.StageHeader(shared_folder="a")
    assert asyncio.run(server.service._read_shared(header, "policy", None)) == ""  # type: ignore[arg-type]


def test_registry_has_to_lie_on_the_shared_storage(tmp_path: Path) -> None:
    draft = {"initial": "draft", "registry": str(tmp_path / "shared" / "releases")}
    parse_config({"draft": draft, "publish": {"shared_registry": str(tmp_path / "shared")}})
    with pytest.raises(RefusedError, match=r"publish\.shared_registry: .*in it"):
        parse_config({"draft": draft, "publish": {"shared_registry": str(tmp_path / "other")}})


def test_release_below_the_root_is_named_by_its_path(rig: Rig, tmp_path: Path) -> None:
    draft = rig.publisher.payloads.get(3)
    assert draft.shared_folder == "registry/release-000003"
    assert (tmp_path / draft.shared_folder / WEIGHTS_FILE).is_file()
