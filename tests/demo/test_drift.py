"""The drift's configuration has defaults only, and its figures are what its versions say."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import torch

from draft_trainer.config import TrainerConfig
from draft_trainer.config_file import parse_config
from examples.arithmetic_grpo.grpo import GrpoBatch
from examples.arithmetic_grpo.rollouts import SpecCounters
from examples.local_services import draft_trainer
from examples.sorting_grpo.drift import SETTINGS, Version, document_of, over_seeds


def test_the_trainer_is_told_the_draft_and_the_servers_alone(tmp_path: Path) -> None:
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


def test_targets_are_of_the_part_in_which_the_policy_moved() -> None:
    def counters(length: float) -> SpecCounters:
        return SpecCounters(1000, 3000, round(1000 * (length - 1)))

    styles = [0.0, 0.5, 1.0, 1.0]
    lengths = [(4.0, 4.0), (3.5, 2.5), (3.3, 2.3), (4.0, 1.0)]
    versions = [
        Version(number, counters(adapted), counters(frozen), style, 1.0)
        for number, (style, (adapted, frozen)) in enumerate(zip(styles, lengths, strict=True))
    ]
    document = document_of(versions)
    assert document["figures"]["moving part"]["steps"] == 2
    values = [target["value"] for target in document["targets"]]
    assert values == [pytest.approx(3.4 / 2.4), pytest.approx(3.4 / 4.0), pytest.approx(1.0 / 1.6)]
    assert [target["ok"] for target in document["targets"]] == [True] * 3
    assert "(at most 1.67)" in document["targets"][0]["name"]


def test_seeds_are_pooled_with_an_interval() -> None:
    part = {"mean": 3.0, "minimum": 2.0, "over_start": 0.9, "over_frozen": 1.2, "kept": 0.5}
    runs = [
        {"whole run": {**part, "kept": None}, "moving part": {**part, "kept": kept}}
        for kept in (0.4, 0.5, 0.6)
    ]
    found = over_seeds(runs)
    assert "kept" not in found["whole run"], "nothing was lost there"
    assert found["moving part"]["mean"] == {"mean": 3.0, "half_width": 0.0}
    # Student's quantile at two degrees of freedom times 0.1 over the root of three.
    assert found["moving part"]["kept"]["half_width"] == pytest.approx(4.303 * 0.1 / 3**0.5)


def test_mini_batches_are_rows_of_the_batch() -> None:
    ids = torch.arange(12).view(4, 3)
    batch = GrpoBatch(ids, torch.ones_like(ids), ids > 1, torch.arange(4.0), ids.float())
    some = batch.rows(torch.tensor([2, 3]))
    assert torch.equal(some.input_ids, ids[2:]) and some.advantages.tolist() == [2.0, 3.0]
    assert some.old_log_probs is not None and torch.equal(some.old_log_probs, ids[2:].float())
