"""Training states on disk: whole or not there, sound or passed over, fitting or refused."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from draft_trainer.config import TrainingConfig
from draft_trainer.training.learner import Learner
from draft_trainer.training.training_state import (
    VERSION,
    LearnerStates,
    Position,
    StateStore,
    head_facts,
)
from slipstream.errors import RefusedError, StatusCode
from tests.draft_trainer.registry_rig import flip_bit
from tests.draft_trainer.synthetic import Policy, config, head

TENSORS = {"a": torch.arange(6.0).view(2, 3), "n": torch.tensor(7), "h": torch.ones(3).bfloat16()}
FACTS = head_facts(config())


def _saved(folder: Path, *steps: int) -> StateStore:
    store = StateStore(folder, FACTS)
    for step in steps:
        store.save({**TENSORS, "n": torch.tensor(step)}, step, {"epoch": step, "index": 1})
    return store


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_newest_two_states_are_kept(tmp_path: Path) -> None:
    assert StateStore(tmp_path, FACTS).load() is None
    _saved(tmp_path, 1, 2, 10)
    assert _names(tmp_path) == ["state-000000000002.safetensors", "state-000000000010.safetensors"]
    state = StateStore(tmp_path, FACTS).load()
    assert state is not None
    assert (state.step, state.position) == (10, {"epoch": 10, "index": 1})
    assert state.tensors.keys() == TENSORS.keys()
    assert int(state.tensors["n"]) == 10
    for name in ("a", "h"):
        assert torch.equal(state.tensors[name], TENSORS[name])
        assert state.tensors[name].dtype == TENSORS[name].dtype


def test_loaded_state_does_not_change_with_its_file(tmp_path: Path) -> None:
    store = _saved(tmp_path, 1)
    state = store.load()
    assert state is not None
    path = tmp_path / _names(tmp_path)[0]
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(state.tensors["a"], TENSORS["a"])


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def _flip_position(path: Path) -> None:
    data = path.read_bytes()
    assert data.count(rb"\"epoch\": 10") == 1
    path.write_bytes(data.replace(rb"\"epoch\": 10", rb"\"epoch\": 11"))


def _not_ours(path: Path) -> None:
    save_file(TENSORS, path)


@pytest.mark.parametrize("damage", [_cut, flip_bit, _flip_position, _not_ours])
def test_damaged_state_is_skipped_and_logged(
    tmp_path: Path, damage: object, caplog: pytest.LogCaptureFixture
) -> None:
    store = _saved(tmp_path, 9, 10)
    newest = tmp_path / "state-000000000010.safetensors"
    assert callable(damage)
    damage(newest)
    with caplog.at_level(logging.ERROR):
        state = store.load()
    assert state is not None and state.step == 9
    assert newest.name in caplog.text and "resuming from step 9" in caplog.text
    damage_both = tmp_path / "state-000000000009.safetensors"
    _cut(damage_both)
    with pytest.raises(RefusedError, match=r"state-000000000010.*state-000000000009") as refused:
        store.load()
    assert refused.value.code is StatusCode.DATA_LOSS


def test_state_of_another_draft_is_refused(tmp_path: Path) -> None:
    _saved(tmp_path, 1, 2)
    other = StateStore(tmp_path, head_facts(config(intermediate_size=64)))
    with pytest.raises(RefusedError, match=r"head\.intermediate_size.*32.*64") as refused:
        other.load()
    assert refused.value.code is StatusCode.FAILED_PRECONDITION
    with pytest.raises(RefusedError, match="recording"):
        StateStore(tmp_path, FACTS | {"recording": "b"}).load()
    assert len(_names(tmp_path)) == 2


def test_state_of_another_format_version_is_refused(tmp_path: Path) -> None:
    store = _saved(tmp_path, 1)
    path = tmp_path / _names(tmp_path)[0]
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file(load_file(path), path, metadata | {"version": str(VERSION + 1)})
    with pytest.raises(RefusedError, match=f"version.*{VERSION + 1}"):
        store.load()


def test_state_folder_removes_leftovers_of_kills(tmp_path: Path) -> None:
    store = _saved(tmp_path, 3)
    (tmp_path / ".state-000000000004.safetensors-abc123").write_bytes(b"half")
    (tmp_path / ".tmpU1Ccwu").write_bytes(b"half, as safetensors leaves it")
    (tmp_path / "notes.txt").write_text("mine")
    StateStore(tmp_path, FACTS)
    assert _names(tmp_path) == ["notes.txt", "state-000000000003.safetensors"]
    store.clear()
    assert _names(tmp_path) == ["notes.txt"]


def test_pace_that_a_gate_changed_is_saved_at_the_end(tmp_path: Path) -> None:
    policy = Policy()
    learner = Learner(head(0), TrainingConfig(warmup_steps=0, ttt_steps=2))
    states, position = LearnerStates(tmp_path, FACTS, 1), Position(0, "run", 1)
    learner.step(policy.samples(4), policy.heads())
    states.save(learner, position)
    learner.pace.settle(-0.1, 0.0, 1, learner.config)
    states.moved()
    states.save_last(learner, position)
    resumed = Learner(head(5), TrainingConfig(warmup_steps=0, ttt_steps=2))
    LearnerStates(tmp_path, FACTS, 1).resume(resumed, newest_release=0)
    assert resumed.pace == learner.pace and resumed.pace.halvings == 1
    before, after = learner.state_dict(), resumed.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
