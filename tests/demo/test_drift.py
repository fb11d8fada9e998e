"""The drift's trainer has defaults only; GRPO takes mini-batches of a batch."""

from __future__ import annotations

import tomllib
from pathlib import Path

import torch

from draft_trainer.config import TrainerConfig
from draft_trainer.config_file import parse_config
from examples.arithmetic_grpo.grpo import GrpoBatch
from examples.local_services import draft_trainer
from examples.sorting_grpo.drift import SETTINGS


def test_drift_trainer_config_is_all_defaults(tmp_path: Path) -> None:
    draft_trainer(tmp_path, "127.0.0.1:3", SETTINGS, draft=tmp_path / "draft")
    given = tomllib.loads((tmp_path / "draft-trainer.toml").read_text())
    assert {name: set(keys) for name, keys in given.items()} == {
        "server": {"port", "metrics_port"},
        "draft": {"initial", "registry"},
        "publish": {"rollout_servers"},
        "economy": {"mode"},
    }
    config = parse_config(given)
    assert config.draft.initial == tmp_path / "draft"
    for section in ("replay", "training", "gate", "canary"):
        default = TrainerConfig.model_fields[section].default
        assert getattr(config, section) == default, section


def test_grpo_mini_batch_is_rows_of_batch() -> None:
    ids = torch.arange(12).view(4, 3)
    batch = GrpoBatch(ids, torch.ones_like(ids), ids > 1, torch.arange(4.0), ids.float())
    some = batch.rows(torch.tensor([2, 3]))
    assert torch.equal(some.input_ids, ids[2:]) and some.advantages.tolist() == [2.0, 3.0]
    assert some.old_log_probs is not None and torch.equal(some.old_log_probs, ids[2:].float())
