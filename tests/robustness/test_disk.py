"""A disk that is full, and folders that cannot be written: refused by name, the rest goes on."""

from __future__ import annotations

import errno
import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
import torch

from draft_trainer.cli.main import main
from draft_trainer.drafters.eagle3.checkpoint import Eagle3
from draft_trainer.server.app import TrainerServer
from rollout_server.control.stages import Key, StageStore
from slipstream.errors import RefusedError, refused_from
from slipstream.tensors import bytes_of, digest
from slipstream.v1 import draft_trainer_pb2 as pb
from tests.draft_trainer.rig import feeding, make_config, refusal, rollouts
from tests.draft_trainer.synthetic import Policy
from tests.transport.rig import samples, sending
from tests.waiting import until

pytestmark = pytest.mark.contract("hostile peers")

Mount = Callable[[Path, str], Path]


@pytest.fixture
def mount() -> Iterator[Mount]:
    """``mount(folder, options)``: a tmpfs there, until the test ends."""
    mounted: list[Path] = []

    def make(folder: Path, options: str) -> Path:
        folder.mkdir(exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"cannot mount a tmpfs here, run as root: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield make
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """A file that takes all that is left."""
    path = folder / "filler"
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError as error:
            assert error.errno == errno.ENOSPC
    return path


def test_trainer_full_disk_refused_by_name_then_recovers(tmp_path: Path, mount: Mount) -> None:
    disk = mount(tmp_path / "disk", "size=8m")
    config = make_config(
        tmp_path,
        draft={"registry": str(disk / "registry")},
        replay={"directory": str(disk / "samples"), "capacity_bytes": 1 << 20},
    )
    accepted, refused = pb.ACK_STATUS_ACCEPTED, pb.ACK_STATUS_REFUSED
    with feeding(config, train=False) as (_, client):
        assert [ack.status for ack in client.send(*rollouts(3, 1))] == [accepted] * 3
        filler = fill(disk)
        # What fits into pages that are there already is taken; the rest by name.
        acks = client.send(*rollouts(120, 2), *rollouts(120, 3))
        short = [ack for ack in acks if ack.status == refused]
        assert {ack.refusal.field for ack in short} == {"replay.directory"}
        assert {ack.status for ack in acks} <= {accepted, refused}
        error = refusal(lambda: client.announce(2, Policy(seed=1)))
        assert error.field == "replay.directory" and no_space(error), error
        # A change of state.db that fits into its pages is made, too; a larger one is refused.
        try:
            client.promote(0, pin=True)
        except grpc.RpcError as failed:
            found = refused_from(failed)
            assert found is not None and found.field == "draft.registry", failed
            assert no_space(found), found
        assert client.status().policy_version == 1
        assert [
            r.draft_version for r in client.stub.ListReleases(pb.ListReleasesRequest()).releases
        ] == [0]
        filler.unlink()
        client.announce(2, Policy(seed=1))
        moved = Policy(seed=1).samples(5, 4)
        again = client.send(*(sample.repacked(policy_version=2) for sample in moved))
        assert [ack.status for ack in again] == [accepted] * 5


@pytest.mark.slow
def test_warmup_full_disk_refused_by_name_then_goes_on(
    tmp_path: Path, mount: Mount, policy_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    disk = mount(tmp_path / "disk", "size=22m")
    config, file = tmp_path / "warmup.toml", tmp_path / "rollouts.jsonl"
    config.write_text(
        "[training]\nttt_steps = 3\nbatch_tokens = 128\nsteps_per_candidate = 8\n"
        "state_every_steps = 4\n[replay]\ncapacity_bytes = 8388608\n"
    )
    lines = [{"prompt": [1, 7, one], "completion": [*range(8, 40)]} for one in range(8, 72)]
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    command = ["warmup", "--policy", policy_dir, "--rollouts", file, "--config", config]
    command += ["--out", disk / "draft"]
    assert main([*map(str, command)]) != 0
    line = capsys.readouterr().err.splitlines()[-1]
    assert "No space left" in line and "Next step: " in line
    assert Eagle3().read(disk / "draft").draft()
    subprocess.run(["mount", "-o", "remount,size=80m", str(disk)], check=True)
    assert main([*map(str, command)]) == 0
    found = json.loads((disk / "draft" / "acceptance.json").read_text())
    assert found["finished"] and found["acceptance_length"] > 1.2


def no_space(error: RefusedError) -> bool:
    return "No space left" in error.found or "full" in error.found


@pytest.mark.parametrize(
    ("section", "key", "field"),
    [
        ("draft", "registry", "draft.registry"),
        ("replay", "directory", "replay.directory"),
    ],
)
def test_read_only_folder_refused_at_start(
    tmp_path: Path, mount: Mount, section: str, key: str, field: str
) -> None:
    sealed = mount(tmp_path / "sealed", "ro,size=64k")
    config = make_config(tmp_path, **{section: {key: str(sealed / "folder")}})
    with pytest.raises(RefusedError) as refused:
        TrainerServer(config)
    assert refused.value.field == field or str(sealed) in refused.value.field
    assert "Read-only file system" in refused.value.found
    assert refused.value.next_step


def test_read_only_shared_memory_falls_back_to_grpc(tmp_path: Path, mount: Mount) -> None:
    sealed = mount(tmp_path / "sealed", "ro,size=64k")
    config = make_config(tmp_path, server={"shared_memory": str(sealed)})
    with feeding(config, train=False) as (server, client):
        with sending(server.address, shared_memory=str(sealed)) as sender:
            sender.send(*samples(1, seed=1))
            sender.flush()
            assert "Read-only file system" in sender.stats().transport_reason
        assert client.send(*rollouts(1))[0].status == pb.ACK_STATUS_ACCEPTED


def test_full_shared_memory_loses_no_sample(tmp_path: Path, mount: Mount) -> None:
    memory = mount(tmp_path / "memory", "size=512k")
    config = make_config(tmp_path, server={"shared_memory": str(memory)})
    sent = samples(60, seed=1)
    with feeding(config, train=False) as (server, _):
        settings = {"shared_memory": str(memory), "outbox_bytes": 1 << 17}
        with sending(server.address, **settings) as sender:
            sender.send(*sent[:20])
            sender.flush()
            assert sender.stats().transport == "shared_memory"
            (memory / "another").write_bytes(bytes(440 << 10))
            with sender.outbox._changed:
                sender.send(*sent[20:])
            sender.flush()
            assert (sender.stats().accepted, sender.stats().shed) == (60, {})
            assert "No space left" in sender.stats().transport_reason


def test_full_stage_store_keeps_no_partial_file(tmp_path: Path, mount: Mount) -> None:
    disk = mount(tmp_path / "store", "size=256k")
    store = StageStore(disk, 1 << 30)
    large, small = torch.ones(1 << 20), torch.ones(16)
    with pytest.raises(RefusedError) as refused:
        put(store, large)
    assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "No space left" in refused.value.found
    until(lambda: list(disk.iterdir()) == [])
    folder = put(store, small)
    assert key(small).below(folder).read_bytes() == bytes(bytes_of(small))


def test_concurrent_writes_of_same_content_are_whole(tmp_path: Path) -> None:
    store = StageStore(tmp_path, 1 << 30)
    tensor = torch.arange(1 << 18)
    failed: list[BaseException] = []
    start = threading.Barrier(4)

    def write(folder: Path) -> None:
        start.wait()
        for _ in range(20):
            try:
                store.write(folder, key(tensor), tensor)
                assert key(tensor).below(folder).stat().st_size == tensor.nbytes
            except (RefusedError, AssertionError) as error:
                failed.append(error)

    folders = [store.new_folder() for _ in range(4)]
    with ExitStack() as stages:
        for folder in folders:
            assert stages.enter_context(store.receiving(folder, [key(tensor)]))
        threads = [threading.Thread(target=write, args=(folder,)) for folder in folders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failed == []
    for folder in folders:
        assert [path.read_bytes() for path in folder.iterdir()] == [bytes(bytes_of(tensor))]
    assert store.bytes == tensor.nbytes


def put(store: StageStore, tensor: torch.Tensor) -> Path:
    """A stage of one tensor."""
    folder = store.new_folder()
    with store.receiving(folder, [key(tensor)]) as missing:
        for content in missing:
            store.write(folder, content, tensor)
    return folder


def key(tensor: torch.Tensor) -> Key:
    return Key(digest(tensor).hex(), str(tensor.dtype).removeprefix("torch."), tensor.nbytes)
