"""The training thread on a GPU: its stream, its handles, and a device that has failed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from safetensors.torch import load_file

from draft_trainer.releases.gate import Gate
from draft_trainer.server import app
from draft_trainer.server.app import TrainerServer
from draft_trainer.training import loop as loop_module
from draft_trainer.training.loop import TrainingLoop
from draft_trainer.training.optimizer import DraftOptimizer
from slipstream.client import open_channel
from slipstream.errors import RefusedError
from slipstream.v1 import release_pb2
from tests.draft_trainer.rig import (
    DEADLINE,
    Client,
    feeding,
    make_config,
    rollouts,
    running,
    train,
    write_draft,
)
from tests.draft_trainer.test_imports import header, send
from tests.gpu.shortages import illegal_address, shortage


class Stream:
    """A stream of a GPU, which knows the threads that are on it.

    Attributes:
        failed: the error of its next ``synchronize``.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.failed: RuntimeError | None = None
        self._here = threading.local()
        monkeypatch.setattr(torch.cuda, "stream", self._enter)

    @property
    def is_current(self) -> bool:
        return getattr(self._here, "inside", False)

    def synchronize(self) -> None:
        if self.failed is not None:
            raise self.failed

    @contextmanager
    def _enter(self, stream: Stream | None) -> Iterator[None]:
        before = self.is_current
        self._here.inside = stream is self or (stream is None and before)
        yield
        self._here.inside = before


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    """Have every trainer train on it, whatever its device is."""
    made = Stream(monkeypatch)
    monkeypatch.setattr(app, "own_stream", lambda device: made)
    return made


def test_training_and_gates_share_a_stream_of_their_own(
    tmp_path: Path, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The default stream is the policy's, where both are in one process."""
    found: list[tuple[str, bool]] = []
    compared, restart = Gate._compared, DraftOptimizer.restart

    def noted_restart(optimizer: DraftOptimizer) -> None:
        found.append(("moments", stream.is_current))
        restart(optimizer)

    def noted(*given: Any) -> Any:
        found.append(("gate", stream.is_current))
        return compared(*given)

    monkeypatch.setattr(Gate, "_compared", noted)
    monkeypatch.setattr(DraftOptimizer, "restart", noted_restart)
    with running(make_config(tmp_path)) as (server, client):
        step = server.loop.learner.step

        def noted_step(*given: Any) -> Any:
            found.append(("step", stream.is_current))
            return step(*given)

        monkeypatch.setattr(server.loop.learner, "step", noted_step)
        client.open()
        client.announce(1)
        train(client, 0)
        # A gate in another thread: an import's.
        source = write_draft(tmp_path / "other", 1)
        tensors = load_file(source / "model.safetensors")
        head = header((source / "config.json").read_text(), tensors, gate=True)
        send(client, head, tensors)
    names = [name for name, _ in found]
    # The first are those of the start, the second those of the run that begins.
    assert names[:3] == ["moments", "moments", "step"] and names[-1] == "gate"
    assert all(inside for _, inside in found) and not stream.is_current


def test_trainer_without_memory_for_handles_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, tried = threading.Event(), threading.Semaphore(0)
    full.set()

    def make_handles(device: torch.device) -> None:
        tried.release()
        if full.is_set():
            raise shortage("full")

    monkeypatch.setattr(loop_module, "make_handles", make_handles)
    monkeypatch.setattr(TrainingLoop, "_retry_s", 0.05)
    with feeding(make_config(tmp_path)) as (server, client):
        status = client.wait_for(lambda s: s.training_error)
        assert "cublasCreate" in status.training_error
        assert status.training_waits_for == release_pb2.REFUSAL_REASON_DEVICE_MEMORY
        assert tried.acquire(timeout=DEADLINE) and tried.acquire(timeout=DEADLINE)
        full.clear()
        client.wait_for(lambda s: not s.training_error)
        train(client, 0)
        assert not server.died.is_set()


def test_start_on_a_full_device_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise shortage("beside the allocator")

    config = make_config(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(app, "Learner", full)
        with pytest.raises(RefusedError, match=r"training\.device: found cpu with too little free"):
            TrainerServer(config)
    with running(config):
        pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("where", ["step", "idle", "import"])
def test_failed_device_ends_the_trainer_by_name(
    tmp_path: Path, stream: Stream, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """No part of it goes on without the others, whichever met the failure."""
    server = TrainerServer(make_config(tmp_path))
    server.start()
    try:
        with open_channel(server.address) as channel:
            client = Client(channel)
            client.open()
            client.announce(1)
            if where == "idle":
                # Found out behind the last step, by nobody yet.
                stream.failed = illegal_address()
            if where == "step":
                monkeypatch.setattr(server.loop.learner, "_backward", _fail)
            if where != "import":
                client.send(*rollouts(60))
            else:
                train(client, 0)
                source = write_draft(tmp_path / "other", 1)
                tensors = load_file(source / "model.safetensors")
                head = header((source / "config.json").read_text(), tensors, gate=True)
                stream.failed = illegal_address()
                monkeypatch.setattr(Gate, "_compared", _fail)
                with pytest.raises(grpc.RpcError):
                    send(client, head, tensors)
            assert server.died.wait(DEADLINE)
            assert client.status().training_error == (
                "the training thread ended with an error: CUDA error: an illegal memory access was "
                "encountered"
            )
    finally:
        assert server.stop()


def _fail(*_: object, **__: object) -> None:
    raise illegal_address()
