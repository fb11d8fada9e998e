"""kill -9 of either side while states flow: nothing stays in shared memory, the other goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.draft_trainer.rig import feeding, make_config, running

from .rig import samples, sending

pytestmark = pytest.mark.contract("exactly once")


@contextmanager
def process(module: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A module of this folder, running; killed at the end."""
    command = [sys.executable, "-m", f"tests.transport.{module}", *map(str, arguments)]
    running_one = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        yield running_one
    finally:
        running_one.kill()
        running_one.communicate()


def line(running_one: subprocess.Popen[str]) -> list[str]:
    assert running_one.stdout is not None
    return running_one.stdout.readline().split()


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    folder = tmp_path / "shm"
    folder.mkdir()
    return folder


def test_killed_bridge_leaves_no_segment_and_next_is_served(tmp_path: Path, memory: Path) -> None:
    config = make_config(tmp_path, server={"shared_memory": str(memory)})
    with feeding(config, train=False) as (server, client):
        offered = {path.name for path in memory.iterdir()}
        with process("sender_process", server.address, memory, 1) as sender:
            assert line(sender)[1] == "shared_memory"
            # In the midst of the next hundred.
            sender.kill()
            sender.wait()
        # An offer that nobody takes is withdrawn after half a minute, so there may be less.
        assert {path.name for path in memory.iterdir()} <= offered
        with sending(server.address, shared_memory=str(memory)) as after:
            after.send(*samples(50, seed=3))
            after.flush()
            assert (after.stats().accepted, after.stats().transport) == (50, "shared_memory")
        assert client.status().samples_refused == 0
    assert list(memory.iterdir()) == []
    assert mapped_rings(memory) == set()


def test_killed_trainer_restart_removes_segments_loses_nothing(
    tmp_path: Path, memory: Path
) -> None:
    with process("trainer_process", tmp_path, memory) as trainer:
        (address,) = line(trainer)
        sent = samples(60, seed=4)
        with sending(address, shared_memory=str(memory), outbox_bytes=1 << 24) as sender:
            sender.send(*sent[:30])
            sender.flush()
            assert sender.stats().transport == "shared_memory"
            trainer.kill()
            trainer.wait()
            sender.send(*sent[30:])
            # Of the run that only announced the policy: a ring that nobody took.
            assert len(list(memory.iterdir())) <= 1
            port = int(address.rpartition(":")[2])
            config = make_config(
                tmp_path,
                server={"shared_memory": str(memory), "port": port},
            )
            with running(config, train=False) as (server, client):
                sender.flush()
                stats = sender.stats()
                assert (stats.accepted, stats.connects) == (60, 2)
                assert stats.transport == "shared_memory"
                assert list(memory.iterdir()) == []
                assert client.status().samples_refused == 0
                del server
    assert list(memory.iterdir()) == []


def mapped_rings(memory: Path) -> set[str]:
    """Names of the rings under ``memory`` that this process still maps, unlinked ones included."""
    maps = Path(f"/proc/{os.getpid()}/maps").read_text()
    return {
        Path(entry.removesuffix(" (deleted)")).name
        for row in maps.splitlines()
        if str(memory) in (entry := row.partition("/")[1] + row.partition("/")[2])
    }
