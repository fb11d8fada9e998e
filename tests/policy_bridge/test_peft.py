"""Policies adapted by the real PEFT."""

from __future__ import annotations

from collections.abc import Callable

import peft
import pytest
import torch
from trl.trainer.utils import use_adapter

from policy_bridge import BridgeConfig, PolicyBridge
from policy_bridge.config import ModulePaths
from policy_bridge.model import find_modules
from policy_bridge.weight_watch import watched
from slipstream.errors import RefusedError
from tests.tiny import tiny_qwen3

from .conftest import batch
from .doubles import DEADLINE, FakeTrainer
from .policies import adapted, check_states
from .windows import LAYERS, Windows, assert_same_bits, gradients, gradients_in, logits_of


def test_peft_optimizer_step_counts_as_moved() -> None:
    """It writes adapters alone: no weight that is announced."""
    model = adapted()
    moved = watched(find_modules(model, ModulePaths()).weights())
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1)
    logits_of(model, batch((9, 5))).sum().backward()
    assert not moved()
    optimizer.step()
    assert moved()


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("reference", [None, "ref"])
def test_peft_reference_pass_is_not_captured(reference: str | None, late: bool) -> None:
    """A KL term has such a pass before ``ship``: with other adapters, or none."""
    data, model = batch((9, 5, 12)), tiny_qwen3()
    config = peft.LoraConfig(r=2, init_lora_weights=False, target_modules=["q_proj", "down_proj"])
    policy = peft.get_peft_model(model, config) if not late else model
    windows = Windows(policy)
    if late:
        policy = peft.get_peft_model(model, config)
        windows.modules.look_again()
    policy.add_adapter("ref", config)
    policy.eval()
    with torch.no_grad(), windows.open() as capture:
        for rows in (slice(0, 2), slice(2, 3)):
            micro = {key: value[rows] for key, value in data.items()}
            logits_of(policy, micro)
            with use_adapter(policy, reference):
                logits_of(policy, micro)
            capture.ship(**micro)
    check_states(windows, model, data)
    with torch.no_grad(), windows.open() as capture, use_adapter(policy, reference):
        logits_of(policy, data)
        with pytest.raises(RefusedError, match="the adapters off, or others on, is none"):
            capture.ship(**data)


def lora_dropout() -> torch.nn.Module:
    return adapted(lora_dropout=0.5)


def attention_dropout() -> torch.nn.Module:
    return tiny_qwen3(attention_dropout=0.5)


@pytest.mark.parametrize("make", [lora_dropout, attention_dropout])
def test_pass_with_dropout_refused_and_gradients_unchanged(
    make: Callable[[], torch.nn.Module],
) -> None:
    """Its states are not those of the policy that the rollout servers sample from."""
    data, model = batch((9, 5, 12)), make()
    torch.manual_seed(1)
    plain = gradients(model, data, None)
    windows, refused = Windows(model), []
    torch.manual_seed(1)
    assert_same_bits(plain, gradients_in(windows.open(refuse=refused.append), model, data))
    assert [(one.field, "0.5 of" in one.found) for one in refused] == [("model", True)]
    assert not windows.samples
    model.eval()
    with torch.no_grad(), windows.open() as capture:
        logits_of(model, data)
        capture.ship(**data)
    assert len(windows.samples) == 3


def test_peft_dropout_added_after_start_seen_at_next_sync() -> None:
    """TRL adds it so: ``GRPOTrainer(peft_config=...)`` is given a model that has its bridge."""
    double, model = FakeTrainer(layers=LAYERS), tiny_qwen3()
    double.vocab_ids = torch.arange(model.config.vocab_size)
    with (
        double.serve() as server,
        PolicyBridge(model, BridgeConfig(server.address, "late", ())) as bridge,
    ):
        assert bridge.wait_connected(DEADLINE)
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.5)
        peft.get_peft_model(model, config).train()
        with bridge.sync(0):
            pass
        data = batch((9, 5, 12))
        with bridge.capture() as capture:
            logits_of(model, data)
            capture.ship(**data)
        assert "lora_dropout=0" in bridge.stats().capture_off_reason
        assert bridge.flush(DEADLINE) and not double.samples


@pytest.mark.parametrize("part", ["lm_head", "embed_tokens"])
@pytest.mark.parametrize("how", ["target_modules", "modules_to_save"])
def test_peft_adapter_on_lm_head_or_embeddings_refused(part: str, how: str) -> None:
    modules = {"target_modules": ["q_proj"]}
    modules[how] = [*modules.get(how, []), part]
    with pytest.raises(RefusedError, match=f"leave {part} out of the adapter"):
        find_modules(adapted(**modules), ModulePaths())
    # After the bridge was built: at its next sync.
    model = tiny_qwen3()
    found = find_modules(model, ModulePaths())
    found.check_unsharded()
    peft.get_peft_model(model, peft.LoraConfig(**modules))
    with pytest.raises(RefusedError, match=f"leave {part} out of the adapter"):
        found.check_unsharded()
