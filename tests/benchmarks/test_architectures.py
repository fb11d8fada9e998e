"""The architectures' benchmark converts policies without changing what they compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from benchmarks.architectures.policies import (
    ARITHMETIC,
    SORTING,
    as_granite,
    as_phi3,
    as_qwen3_moe,
    policy_of,
)


@pytest.mark.parametrize(
    ("folder", "convert"),
    [
        (SORTING, as_phi3),
        (SORTING, as_granite),
        (ARITHMETIC, partial(as_qwen3_moe, noise=0.0)),
    ],
    ids=["phi3", "granite", "qwen3-moe"],
)
def test_converted_policy_computes_same_logits(
    folder: Path, convert: Callable[[PreTrainedModel], PreTrainedModel]
) -> None:
    own = AutoModelForCausalLM.from_pretrained(folder / "policy", dtype=torch.float32).eval()
    ids = torch.randint(4, 60, (2, 24))
    with torch.no_grad():
        torch.testing.assert_close(convert(own)(ids).logits, own(ids).logits, atol=1e-4, rtol=0)


def test_experts_of_moe_policy_differ(tmp_path: Path) -> None:
    made = policy_of("qwen3-moe", tmp_path, 0.0)
    model = AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32)
    first, second = model.model.layers[0].mlp.experts.down_proj.detach()[:2]
    assert 0.1 < float((first - second).std() / first.std()) < 0.5
