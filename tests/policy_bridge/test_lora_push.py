"""Pushes of policies with PEFT's LoRA adapters."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.publish_faults.memory_server import MemoryServer
from policy_bridge.sync import policy_tensors
from slipstream.errors import RefusedError
from slipstream.tensors import bytes_of
from tests.tiny import tiny_qwen3

from .conftest import Connect, make_model
from .policies import qwen3_moe

TARGETS = ["q_proj", "down_proj"]


def lora(model: nn.Module, **settings: Any) -> Any:
    """Rank 4, alpha 3, adapters and everything else that trains away from where they begin."""
    torch.manual_seed(0)
    given = {"r": 4, "lora_alpha": 3, "target_modules": TARGETS, "lora_dropout": 0.5, **settings}
    adapted = peft.get_peft_model(model, peft.LoraConfig(**given)).train()
    train(adapted)
    return adapted


def train(model: nn.Module) -> None:
    """One optimizer step on noise."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += 0.1 * torch.randn_like(parameter)


def several() -> Any:
    model = lora(tiny_qwen3())
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
    model.base_model.set_adapter(["default", "other"])
    train(model)
    return model


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(vocab_size=64, n_positions=64, n_embd=16, n_layer=2, n_head=2)
    )


def moe() -> Any:
    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    settings = {"target_parameters": experts, "modules_to_save": ["norm"], "lora_dropout": 0.0}
    return lora(qwen3_moe(), **settings)


POLICIES: dict[str, Callable[[], Any]] = {
    "plain": lambda: lora(tiny_qwen3()),
    "rslora": lambda: lora(tiny_qwen3(), use_rslora=True),
    "dora": lambda: lora(tiny_qwen3(), use_dora=True),
    "tied": lambda: lora(tiny_qwen3(tie_word_embeddings=True), target_modules="all-linear"),
    "biases": lambda: lora(tiny_qwen3(attention_bias=True), bias="lora_only"),
    "lora-bias": lambda: lora(
        tiny_qwen3(attention_bias=True), lora_bias=True, target_modules=["q_proj"]
    ),
    "norms": lambda: lora(tiny_qwen3(), modules_to_save=["norm", "q_norm"]),
    "matrices": lambda: lora(tiny_qwen3(), target_modules=["embed_tokens", "lm_head"]),
    "dora-embeddings": lambda: lora(tiny_qwen3(), use_dora=True, target_modules=["embed_tokens"]),
    "several": several,
    "fan-in-fan-out": lambda: lora(gpt2(), target_modules=["c_attn"], fan_in_fan_out=True),
    "experts": moe,
}


@pytest.mark.parametrize("base", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", POLICIES)
def test_lora_push_equals_merge_in_float32(kind: str, base: torch.dtype) -> None:
    model = POLICIES[kind]()
    for name, parameter in model.named_parameters():
        if "lora_" not in name:  # PEFT keeps its own in float32
            parameter.data = parameter.data.to(base)
    before = copy.deepcopy(model.state_dict())
    whole = copy.deepcopy(model).float()
    merged = policy_tensors(whole.merge_and_unload().state_dict(), "", model)
    without = policy_tensors(copy.deepcopy(model).unload(), "")
    for dtype in ("", "bfloat16", "float32"):
        for source in (model, model.state_dict()):
            pushed = policy_tensors(source, dtype, model)
            assert pushed.keys() == merged.keys() == without.keys()
            for name, tensor in pushed.items():
                assert tensor.dtype == (getattr(torch, dtype) if dtype else base)
                assert torch.equal(tensor, merged[name].to(tensor.dtype)), name
            assert any(not torch.equal(pushed[name], without[name]) for name in pushed)
    after = model.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in after.items())
    assert not any(getattr(module, "merged_adapters", None) for module in model.modules())


def test_lora_push_rounds_once_where_adapters_are_bfloat16() -> None:
    """PEFT rounds a product of bfloat16 adapters, and autocast any product."""
    model = lora(tiny_qwen3()).bfloat16()
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    low, high = (getattr(layer, name)["default"].weight.float() for name in ("lora_A", "lora_B"))
    exact = layer.base_layer.weight.float() + (high @ low) * layer.scaling["default"]
    with torch.autocast("cpu", torch.bfloat16):
        pushed = policy_tensors(model, "float32")["model.layers.0.self_attn.q_proj.weight"]
    assert torch.equal(pushed, exact)


@pytest.mark.parametrize("wrapped", [False, True])
def test_base_stays_and_only_merged_matrices_are_sent(
    connect: Connect, saved_policy: Path, wrapped: bool
) -> None:
    """The bridge has PEFT's model, or the one that PEFT has changed since, as TRL does."""
    rollout, base = MemoryServer(policy=saved_policy), make_model()
    start = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    settings = {"rollout_servers": (rollout.address,)}
    early = None if wrapped else connect(model=base, **settings)
    model = lora(base)
    bridge = early or connect(model=model, **settings)
    layer = base.model.layers[0]
    pair = layer.self_attn.q_proj.weight.numel() + layer.mlp.down_proj.weight.numel()
    sent = [rollout.bytes_received]
    for version in range(1, 7):
        if version == 4:
            rollout.restart()  # it has lost every stage
            sent[-1] = rollout.bytes_received
        if version != 3:
            train(model)
        with bridge.sync(version) as window:
            window.push_policy(model.state_dict() if version == 5 else model)
        sent.append(rollout.bytes_received)
        assert rollout.policy_version == version
        expected = copy.deepcopy(model).merge_and_unload().state_dict()
        assert rollout.policy.keys() == start.keys()
        for name, tensor in rollout.policy.items():
            assert torch.equal(tensor, expected[name].bfloat16())
    whole = sum(map(len, {bytes(bytes_of(tensor)) for tensor in rollout.policy.values()}))
    changed = 8 * pair * 2
    received = [after - before for before, after in itertools.pairwise(sent)]
    assert received == [whole, changed, 0, whole, changed, changed]
    kept = {name.replace("base_layer.", ""): t for name, t in base.state_dict().items()}
    assert all(torch.equal(kept[name], tensor) for name, tensor in start.items())
    rollout.stop()


def test_lora_policy_in_fsdp2_is_pushed_merged(one_rank: None) -> None:
    model = lora(tiny_qwen3(), modules_to_save=["norm"])
    expected = policy_tensors(model, "")
    for part in (*model.base_model.model.model.layers, model):
        fully_shard(part)
    gathered = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    for source in (model, gathered):
        pushed = policy_tensors(source, "", model)
        assert pushed.keys() == expected.keys()
        assert all(torch.equal(pushed[name], tensor) for name, tensor in expected.items())


def test_what_is_merged_already_is_pushed_as_it_is() -> None:
    """A layer then computes with that alone, although another adapter is active."""
    model = lora(tiny_qwen3())
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model.base_model.set_adapter(["default", "other"])
    train(model)
    model.merge_adapter(["default"])
    in_place = copy.deepcopy(model).unload().state_dict()
    for source in (model, in_place):
        pushed = policy_tensors(source, "", model)
        assert pushed.keys() == in_place.keys()
        assert all(torch.equal(pushed[name], tensor) for name, tensor in in_place.items())


def disabled() -> Any:
    model = lora(tiny_qwen3())
    model.base_model.disable_adapter_layers()
    return model


def two_of_dora() -> Any:
    model = lora(tiny_qwen3(), use_dora=True)
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"]))
    model.base_model.set_adapter(["default", "other"])
    return model


def quantized() -> Any:
    model = lora(tiny_qwen3())
    base = model.base_model.model.model.layers[1].mlp.down_proj.base_layer
    base.weight = nn.Parameter(base.weight.to(torch.int8), requires_grad=False)
    return model


def of_bitsandbytes() -> Any:
    """PEFT's layers for quantized bases have classes of their own."""
    model = lora(tiny_qwen3())
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    module = "peft.tuners.lora.bnb"
    layer.__class__ = type("Linear4bit", (type(layer),), {"__module__": module})
    return model


def mixed(*kinds: type[Any]) -> Any:
    """Adapters of several tuners on one layer, the last one outermost."""
    configs = [kind(r=2, target_modules=["q_proj"]) for kind in kinds]
    model = peft.get_peft_model(tiny_qwen3(), configs[0], mixed=True)
    for number, config in enumerate(configs[1:]):
        model.add_adapter(f"more-{number}", config)
    model.set_adapter([*model.base_model.peft_config])
    return model


class Scaled(nn.Linear):
    """A linear layer in a module with a matrix of its own."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.inner = nn.Linear(8, 8)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.inner(super().forward(input))


def nested() -> Any:
    policy = nn.Sequential(Scaled())
    config = peft.LoraConfig(r=2, target_parameters=["0.weight"], target_modules=["inner"])
    return peft.get_peft_model(policy, config)


def compiled_base() -> Any:
    model = lora(tiny_qwen3())
    layer = model.base_model.model.model.layers[0].self_attn.q_proj
    layer.base_layer = torch.compile(layer.base_layer, backend="eager")
    return model


def other_tuner(config: peft.PeftConfig) -> Any:
    return peft.get_peft_model(tiny_qwen3(), config)


def tied(**settings: Any) -> Any:
    return lora(tiny_qwen3(tie_word_embeddings=True), **settings)


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "disabled": (disabled, "Linear at .*q_proj, its adapters disabled"),
    "two-of-dora": (two_of_dora, "DoraLinearVariant"),
    "alora": (
        lambda: lora(tiny_qwen3(), alora_invocation_tokens=[5]),
        "ALoraLinearVariant",
    ),
    "lora-bias": (lambda: lora(tiny_qwen3(), lora_bias=True), "lora_bias at .*q_proj"),
    "quantized": (quantized, "layers.1.mlp.down_proj in torch.int8, quantized"),
    "bitsandbytes": (of_bitsandbytes, "Linear4bit at .*q_proj"),
    "tied": (lambda: tied(target_modules=["embed_tokens"]), "an adapter on model.embed_tokens"),
    "tied-saved": (lambda: tied(modules_to_save=["lm_head"]), "an adapter on lm_head"),
    "tokens": (
        lambda: lora(tiny_qwen3(), trainable_token_indices=[1, 2]),
        "TrainableTokensWrapper at model.embed_tokens",
    ),
    "ia3": (
        lambda: other_tuner(
            peft.IA3Config(target_modules=TARGETS, feedforward_modules=["down_proj"])
        ),
        "ia3.layer.Linear at .*q_proj",
    ),
    "mixed": (lambda: mixed(peft.LoraConfig, peft.LoHaConfig), "loha.layer.Linear at .*q_proj"),
    "mixed-inside": (
        lambda: mixed(peft.LoHaConfig, peft.LoraConfig),
        "loha.layer.Linear at .*q_proj",
    ),
    "nested": (nested, "LoRA in peft.tuners.lora.layer.ParamWrapper at 0"),
    "compiled-base": (compiled_base, "no .*q_proj.base_layer._orig_mod.weight"),
    "prompts": (
        lambda: other_tuner(peft.PromptTuningConfig("CAUSAL_LM", num_virtual_tokens=2)),
        "PeftModelForCausalLM without LoRA",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_adapters_that_no_tensor_stands_for_refused(kind: str) -> None:
    make, found = REFUSED[kind]
    model = make()
    with pytest.raises(RefusedError, match=f"push_policy: found .*{found}"):
        policy_tensors(model, "")
    plain = dict(tiny_qwen3().state_dict())  # such as merged by hand
    assert policy_tensors(plain, "", model).keys() == plain.keys()


def test_state_dict_without_tensors_of_a_layer_refused() -> None:
    """Nothing can be pushed of adapters alone, as PEFT saves them."""
    model = lora(tiny_qwen3(), modules_to_save=["norm"])
    whole = model.state_dict()
    states = {
        r"layers\.0\..*lora_A": {n: t for n, t in whole.items() if "lora_A" not in n},
        r"q_proj\.base_layer": {n: t for n, t in whole.items() if "base_layer" not in n},
        r"layers\.0\..*base_layer": peft.get_peft_model_state_dict(model),
        r"norm\.modules_to_save": {n: t for n, t in whole.items() if "to_save" not in n},
    }
    for found, state in states.items():
        with pytest.raises(RefusedError, match=rf"no model\..*{found}.*whole state dict"):
            policy_tensors(state, "", model)


@pytest.mark.parametrize("path", ["layers.0", "layers.0.self_attn.q_proj", "norm"])
def test_compiled_parts_of_a_lora_policy_are_pushed_merged(path: str) -> None:
    model = lora(tiny_qwen3(), modules_to_save=["norm"])
    expected = policy_tensors(model, "")
    inner = model.base_model.model.model
    inner.set_submodule(path, torch.compile(inner.get_submodule(path), backend="eager"))
    for source in (model, model.state_dict()):
        pushed = policy_tensors(source, "", model)
        assert pushed.keys() == expected.keys()
        assert all(torch.equal(pushed[name], tensor) for name, tensor in expected.items())
