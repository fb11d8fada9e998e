"""The benchmark of architectures: policies in another form, targets, runs in parts."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.architectures.__main__ import Outcome, Served, _figures, _measured_before, targets
from benchmarks.architectures.policies import (
    ARITHMETIC,
    POLICIES,
    SORTING,
    as_granite,
    as_phi3,
    as_qwen3_moe,
    policy_of,
)
from benchmarks.harness import write

BEFORE, AFTER = Served(1.5, 1.51, 128), Served(3.0, 2.99, 128)
ONE = Outcome("phi3", "Phi3ForCausalLM", 128, BEFORE, AFTER)


@pytest.mark.parametrize(
    ("folder", "convert"),
    [
        (SORTING, as_phi3),
        (SORTING, as_granite),
        (ARITHMETIC, partial(as_qwen3_moe, noise=0.0)),
    ],
    ids=["phi3", "granite", "qwen3-moe"],
)
def test_a_policy_in_another_architecture_computes_the_same(
    folder: Path, convert: Callable[[PreTrainedModel], PreTrainedModel]
) -> None:
    own = AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32).eval()
    ids = torch.randint(4, 60, (2, 24))
    with torch.no_grad():
        torch.testing.assert_close(convert(own)(ids).logits, own(ids).logits, atol=1e-4, rtol=0)


def test_experts_differ_and_the_policy_is_kept_for_the_next_run(tmp_path: Path) -> None:
    made = policy_of("qwen3-moe", tmp_path, 0.0)
    assert made == tmp_path / "qwen3-moe" and (made / "tokenizer.json").exists()
    model = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
    first, second = model.model.layers[0].mlp.experts.down_proj.detach()[:2]
    assert 0.1 < float((first - second).std() / first.std()) < 0.5
    before = (made / "model.safetensors").stat().st_mtime_ns
    policy_of("qwen3-moe", tmp_path, 0.0)
    assert (made / "model.safetensors").stat().st_mtime_ns == before
    assert policy_of("llama", tmp_path, 0.0) == SORTING / "policy"


def test_targets_are_missed_by_each_thing_that_may_be_wrong() -> None:
    six = [replace(ONE, name=name) for name in POLICIES]
    assert len(six) >= 6 and all(target.ok for target in targets(six))
    for wrong in (
        replace(ONE, adapted=replace(AFTER, measured=2.0, replayed=2.0)),
        replace(ONE, adapted=replace(AFTER, replayed=3.2)),
        replace(ONE, untrained=replace(BEFORE, greedy_equal=127)),
    ):
        assert [target.ok for target in targets([*six[1:], wrong])].count(False) == 1
    assert not targets(six[:5])[0].ok


def test_a_run_of_some_architectures_keeps_the_figures_of_the_others(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    chosen = Namespace(json=path, only=["llama"])
    both = {name: replace(ONE, name=name) for name in ("phi3", "llama")}
    write(path, _figures(both), [])
    listed = [one["name"] for one in json.loads(path.read_text())["architectures"]]
    assert listed == ["llama", "phi3"]
    assert _measured_before(chosen) == {"phi3": ONE}
    assert _measured_before(Namespace(json=tmp_path / "none", only=[])) == {}
