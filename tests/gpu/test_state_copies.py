"""Training states leave a GPU beside the next step: streams and events stubbed, in order."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draft_trainer.config import TrainingConfig
from draft_trainer.training import training_state as state_module
from draft_trainer.training.learner import Learner
from draft_trainer.training.training_state import HostCopies, LearnerStates, Position, StateStore
from tests.draft_trainer.synthetic import Policy, head
from tests.gpu.shortages import shortage

CONFIG = TrainingConfig(ttt_steps=3, warmup_steps=0)


class Stream:
    """Writes down what happens on it."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self.log.append(f"{self.name} waits for the copies")


class Event:
    """Recorded on a stream; the host waits for it."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def record(self, stream: Stream) -> None:
        self.log.append(f"recorded on {stream.name}")

    def synchronize(self) -> None:
        self.log.append("the writer waits for the copies")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Log what happens on the streams of a GPU on which every learner is."""
    found: list[str] = []
    training = Stream(found, "training")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(found, "copies"))
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(found))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: training)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    take = HostCopies.take

    def on_a_gpu(copies: HostCopies, tensors: Any, device: Any) -> Any:
        return take(copies, tensors, torch.device("cuda"))

    monkeypatch.setattr(HostCopies, "take", on_a_gpu)
    return found


def test_step_and_writer_wait_for_state_copies(tmp_path: Path, log: list[str]) -> None:
    policy, learner = Policy(), Learner(head(0), CONFIG)
    states = LearnerStates(tmp_path, {}, 1)
    learner.step(policy.samples(8), policy.heads())
    assert log == []
    expected = learner.state_dict()
    states.after_step(learner, Position(0, "run", 1))
    states._store.wait(60.0)  # type: ignore[union-attr]
    assert log == [
        "copies waits for training",
        "recorded on copies",
        "the writer waits for the copies",
    ]
    learner.step(policy.samples(8), policy.heads())
    learner.step(policy.samples(8), policy.heads())
    assert log[3:] == ["training waits for the copies"]
    found = StateStore(tmp_path / "training-state", {}).load()
    assert found is not None and found.position["draws"] == 1
    assert all(torch.equal(found.tensors[name], value) for name, value in expected.items())


def test_state_without_page_locked_memory_is_left_out(
    tmp_path: Path,
    log: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    policy, learner, saved = Policy(), Learner(head(0), CONFIG), list[int]()
    states = LearnerStates(tmp_path, {}, 1, on_saved=saved.append)
    empty = torch.empty

    def short(*size: Any, **options: Any) -> torch.Tensor:
        if "pin_memory" in options:
            raise shortage("page-locked")
        return empty(*size, **options)

    learner.step(policy.samples(8), policy.heads())
    with monkeypatch.context() as full:
        full.setattr(torch, "empty", short)
        states.after_step(learner, Position(0, "run", 1))
    assert "the training state of step 1 was not saved: CUDA error: out of memory" in caplog.text
    learner.step(policy.samples(8), policy.heads())
    states.after_step(learner, Position(0, "run", 2))
    assert states._store is not None and states._store.wait(60.0)
    assert saved == [2]


@pytest.mark.parametrize("change", ["restart_optimizer", "load"])
def test_every_weight_change_waits_for_state_copies(change: str, log: list[str]) -> None:
    learner = Learner(head(0), CONFIG)
    before = learner.state_dict()
    learner.change_after(torch.cuda.Event())
    match change:
        case "load":
            learner.load_state_dict(before)
        case _:
            getattr(learner, change)()
    assert log == ["training waits for the copies"]


def test_states_are_saved_by_time_and_after_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = {"now": 0.0}
    monkeypatch.setattr(state_module, "time", SimpleNamespace(monotonic=lambda: clock["now"]))
    policy, learner = Policy(), Learner(head(0), CONFIG)
    saved: list[int] = []
    states = LearnerStates(tmp_path, {}, 1, 120.0, saved.append)
    for draw, seconds in ((1, 0.0), (2, 119.0), (3, 120.0), (4, 121.0)):
        clock["now"] = seconds
        learner.step(policy.samples(8), policy.heads())
        states.after_step(learner, Position(0, "run", draw))
        assert states._store is not None and states._store.wait(60.0)
    assert saved == [3]
    states.save(learner, Position(1, "run", 4))
    assert states._store.wait(60.0) and saved == [3, 4]
