"""Policies adapted by the real PEFT."""

from __future__ import annotations

import peft
import pytest
import torch

from policy_bridge.config import ModulePaths
from policy_bridge.model import find_modules, stamp_of
from slipstream.errors import RefusedError
from tests.tiny import tiny_qwen3

from .conftest import batch
from .test_models import Windows, assert_same_bits, check_states, gradients


def adapted(**settings: object) -> torch.nn.Module:
    """Rank 2; adapters that begin at random, so that they change what the policy computes."""
    config = peft.LoraConfig(r=2, init_lora_weights=False, **settings)
    torch.manual_seed(0)
    return peft.get_peft_model(tiny_qwen3(), config)


@pytest.mark.parametrize(
    ("settings", "trained"),
    [({}, 2), ({"use_dora": True}, 3), ({"lora_dropout": 0.5}, 2)],
    ids=["lora", "dora", "dropout"],
)
def test_capture_changes_no_bit_and_sees_what_the_adapted_policy_computes(
    settings: dict[str, object], trained: int
) -> None:
    data = batch((9, 5, 12))
    model = adapted(target_modules=["q_proj", "down_proj"], **settings)
    torch.manual_seed(1)
    plain = gradients(model, data, None)
    windows = Windows(model)
    torch.manual_seed(1)
    assert_same_bits(plain, gradients(model, data, windows))
    assert len(plain) == trained * 2 * 3  # Of the adapters alone: of two matrices in three layers.
    if "lora_dropout" not in settings:  # whose masks another forward pass draws anew
        check_states(windows, model.base_model.model, data)
    stamp = stamp_of(windows.modules.weights())
    torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1).step()
    assert stamp_of(windows.modules.weights()) != stamp


@pytest.mark.parametrize("part", ["lm_head", "embed_tokens"])
@pytest.mark.parametrize("how", ["target_modules", "modules_to_save"])
def test_an_adapted_matrix_that_the_trainer_needs_is_refused(part: str, how: str) -> None:
    modules = {"target_modules": ["q_proj"]}
    modules[how] = [*modules.get(how, []), part]
    with pytest.raises(RefusedError, match=f"leave {part} out of the adapter"):
        find_modules(adapted(**modules), ModulePaths())
