"""The control plane's service over gRPC, over an engine in memory."""

from __future__ import annotations

import json
import logging
import math
import os
import queue
import signal
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import grpc
import pytest
import torch

from benchmarks.publish_faults.memory_server import MemoryServer
from rollout_server.control import service
from rollout_server.control.changes import UntrustedEngineError
from rollout_server.control.control import MAX_STAGED
from slipstream.client import TRAINER, open_channel, stage
from slipstream.tensors import spec_of
from slipstream.v1 import rollout_server_pb2 as pb
from slipstream.v1 import rollout_server_pb2_grpc as pb_grpc
from tests.draft_trainer.rig import write_draft
from tests.rollout_server.checkpoints import load

SECONDS = 60.0


class Plane(MemoryServer):
    """A server with memory for its draft and two policies, and a client of it."""

    def __init__(self, folder: Path) -> None:
        self.draft_dir = write_draft(folder / "draft")
        self.tensors = {n: t for n, t in load(self.draft_dir).items() if n != "t2d"}
        size = sum(tensor.nbytes for tensor in self.tensors.values())
        capacity = (self.draft_dir / "model.safetensors").stat().st_size + 2 * size
        super().__init__(self.draft_dir, stage_bytes=capacity)
        self._channel = open_channel(self.address)
        self.stub = pb_grpc.RolloutServerStub(self._channel)

    def close(self) -> None:
        self._channel.close()
        self.stop()

    def push(self, stage_id: str, version: int) -> None:
        """Stage a policy, every tensor of which is its own."""
        tensors = {name: tensor + version for name, tensor in self.tensors.items()}
        self._stage(stage_id, pb.STAGE_KIND_POLICY, version, tensors)

    def stage_draft(self, version: int, expected: Sequence[float] = ()) -> pb.StageResult:
        tensors = load(self.draft_dir)
        return self._stage(f"draft-{version}", pb.STAGE_KIND_DRAFT, version, tensors, expected)

    def _stage(
        self,
        stage_id: str,
        kind: int,
        version: int,
        tensors: dict[str, torch.Tensor],
        expected: Sequence[float] = (),
    ) -> pb.StageResult:
        specs = [spec_of(name, tensor) for name, tensor in tensors.items()]
        header = pb.StageHeader(
            stage_id=stage_id,
            kind=kind,
            version=version,
            tensors=specs,
            expected_acceptance=expected,
        )
        return stage(self.stub, header, tensors, timeout=SECONDS)


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Plane]:
    with closing(Plane(tmp_path)) as plane:
        yield plane


def test_policy_stage_of_killed_job_is_evicted(plane: Plane) -> None:
    plane.push("policy-1-live", 1)
    plane.commit("policy-1-live")
    plane.push("policy-2-killed", 2)
    plane.stage_draft(1)
    plane.push("policy-2-restarted", 3)
    assert plane.staged == ["draft-1", "policy-2-restarted"]
    plane.commit("draft-1", "policy-2-restarted")
    state = plane.state
    assert (state.draft_version, state.policy_version, list(state.staged)) == (1, 3, [])


def test_external_policy_stages_do_not_accumulate(plane: Plane) -> None:
    for version in range(MAX_STAGED + 1):
        header = pb.StageHeader(
            stage_id=f"policy-{version}",
            kind=pb.STAGE_KIND_POLICY_EXTERNAL,
            version=version,
            transfer_update=json.dumps({}),
        )
        stage(plane.stub, header, {}, timeout=SECONDS)
    assert plane.staged == [f"policy-{MAX_STAGED}"]


def test_unprepared_draft_is_logged_once_per_reason(
    plane: Plane, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "rollout_server.control.service"):
        for version, why_not in enumerate(("", "buffers", "buffers", "", "buffers", "no memory")):
            plane.engine.not_prepared = why_not
            assert plane.stage_draft(version).not_prepared == why_not
            plane.push(f"policy-{version}", version)
    assert [record.message for record in caplog.records] == [
        f"draft {version} is not prepared, so its commit takes longer: {why_not}"
        for version, why_not in ((1, "buffers"), (5, "no memory"))
    ]


def test_expected_acceptance_comes_with_the_stage(plane: Plane) -> None:
    plane.stage_draft(1, (0.7, 0.5, 0.25))
    plane.commit("draft-1")
    assert plane.control.tracker.recent.expected == (0.7, 0.5, 0.25)
    plane.stage_draft(2)
    plane.commit("draft-2")
    assert plane.control.tracker.recent.expected == (), "not known"
    plane.stub.RollBack(pb.RollBackRequest(), timeout=SECONDS)
    assert plane.control.tracker.recent.expected == (0.7, 0.5, 0.25)
    for wrong in ([math.nan], [1.5]):
        with pytest.raises(grpc.RpcError, match="acceptance by position: found"):
            plane.stage_draft(3, wrong)


def test_unknown_weights_stop_server_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals: queue.SimpleQueue[tuple[int, int]] = queue.SimpleQueue()
    monkeypatch.setattr(service, "_HEALTH_SECONDS", 100 * SECONDS)
    monkeypatch.setattr(os, "kill", lambda pid, number: signals.put((pid, number)))
    with closing(Plane(tmp_path)) as plane:
        plane.stage_draft(1)
        plane.engine.failure = UntrustedEngineError("the worker died in the middle")
        with pytest.raises(grpc.RpcError):
            plane.stub.Commit(pb.CommitRequest(stage_ids=["draft-1"]), timeout=SECONDS)
        assert signals.get(timeout=SECONDS) == (os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("interval_ms", [1, 3_600_000])
def test_watching_trainer_keeps_its_claim(
    plane: Plane, monkeypatch: pytest.MonkeyPatch, interval_ms: int
) -> None:
    """While it stages for long, or looks at them once in a while; also where nothing is drafted."""
    monkeypatch.setattr(service, "_IDLE_SECONDS", 0.01)
    control = plane.control
    heard, real = queue.SimpleQueue[str](), control.heard

    def hear(trainer: str) -> None:
        real(trainer)
        heard.put(trainer)

    control.check_claim("one", claims=True)
    monkeypatch.setattr(control, "heard", hear)
    request = pb.WatchAcceptanceRequest(min_interval_ms=interval_ms)
    reports = plane.stub.WatchAcceptance(request, timeout=SECONDS, metadata=((TRAINER, "one"),))
    next(reports)
    for _ in range(3):
        control._claimed_at = -math.inf
        while not heard.empty():
            heard.get()
        # The first may have begun before.
        assert [heard.get(timeout=SECONDS) for _ in range(2)] == ["one", "one"]
        assert control.trainer == "one"
    reports.cancel()


def test_change_during_watch_interval_is_reported(
    plane: Plane, monkeypatch: pytest.MonkeyPatch
) -> None:
    control, pauses = plane.control, list[str]()

    def pause(trainer: str) -> None:
        if not pauses:
            control.tracker.wake()
        pauses.append(trainer)

    monkeypatch.setattr(control, "heard", pause)
    request = pb.WatchAcceptanceRequest(min_interval_ms=1)
    reports = plane.stub.WatchAcceptance(request, timeout=SECONDS)
    next(reports)
    next(reports)
    reports.cancel()
