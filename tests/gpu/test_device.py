"""The draft's numbers, waits, states and memory on a GPU, where there is one."""

from __future__ import annotations

import math
import time
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import sections
from benchmarks.gpu.__main__ import PARTS
from benchmarks.gpu.bench import Bench, draft_of, rollouts
from draft_trainer.config import TrainingConfig
from draft_trainer.training.learner import Learner
from draft_trainer.training.training_state import LearnerStates, Position, StateStore

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is False"
)


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(torch.device("cuda"), False, tmp_path, time.monotonic() + 300.0)


@pytest.mark.parametrize("name", ["parity", "waits", "gate"])
def test_gpu_benchmark_targets(name: str, bench: Bench) -> None:
    section = PARTS[1][name]
    figures = section.run(bench)
    for bound in section.bounds:
        assert bound.target(figures[bound.figure]).ok, (bound, figures)


def test_training_state_copy_is_consistent(bench: Bench) -> None:
    """Steps go on while it is copied and written."""
    case = bench.parity_case
    samples, heads = rollouts(case)
    learner = Learner(draft_of(case, bench.device), TrainingConfig(device="cuda", ttt_steps=5))
    states = LearnerStates(bench.folder, {}, 1)
    losses = [learner.step(samples, heads).loss for _ in range(2)]
    expected = learner.state_dict()
    states.save(learner, Position(0, "run", 2))
    losses += [learner.step(samples, heads).loss for _ in range(4)]
    assert states._store is not None and states._store.wait(60.0)
    found = StateStore(bench.folder / "training-state", {}).load()
    assert found is not None
    assert all(torch.equal(found.tensors[name], value) for name, value in expected.items())
    assert all(map(math.isfinite, losses)) and losses[-1] < losses[0]


def test_gpu_memory_drills(bench: Bench) -> None:
    # Whether a pass is halved or refused before depends on how far its chunks can shrink.
    assert sections.memory(bench)["drills survived"] == 1.0
