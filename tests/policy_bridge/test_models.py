"""Every kind of policy: the states are its own, its gradients are untouched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from policy_bridge import ModulePaths
from policy_bridge.model import find_modules, unwrapped
from policy_bridge.sync import policy_tensors
from slipstream.errors import RefusedError
from tests.tiny import tiny_qwen3

from .conftest import batch
from .families import make
from .policies import COMPILES, PLAIN, POLICIES, Plain, check_states
from .windows import (
    Step,
    Windows,
    assert_same_bits,
    gradients,
    hooks_on,
    step_on_given_logprobs,
    step_on_packed_rows,
    step_without_logprobs,
)

pytestmark = pytest.mark.contract("never waits")

LOOPS: dict[str, tuple[Step, bool]] = {
    "given-logprobs": (step_on_given_logprobs, False),
    "training-pass": (step_without_logprobs, True),
    "packed-rows": (step_on_packed_rows, True),
}
"""A step, and whether its windows are of training passes."""
TRAINED = ("qwen3", "checkpointed", "checkpointed-reentrant", "lora", "plain", "compiled-in-place")


@pytest.mark.parametrize(
    ("policy", "loop"),
    [
        *((name, "given-logprobs") for name in POLICIES),
        *((name, "training-pass") for name in TRAINED),
        ("qwen3", "packed-rows"),
    ],
)
def test_gradients_bit_identical_with_capture_on_and_off(
    policy: str, loop: str, request: pytest.FixtureRequest
) -> None:
    if policy == "ddp":
        request.getfixturevalue("one_rank")
    data, model, (step, training) = batch((9, 5, 12)), POLICIES[policy](), LOOPS[loop]
    # Compiled before the first window: what was traced knows nothing of later hooks, and must
    # not be traced again for them.
    plain = gradients(model, data, None, step)
    before = hooks_on(model), COMPILES.frame_count, compiled_calls(model)
    paths = PLAIN if isinstance(model, Plain) else ModulePaths()
    windows = Windows(model, paths=paths, training=training)
    assert_same_bits(plain, gradients(model, data, windows, step))
    assert (hooks_on(model), COMPILES.frame_count, compiled_calls(model)) == before
    assert len(windows.samples) == 3
    if loop == "packed-rows":
        assert all(windows.of_row(data, row) for row in range(3))
    else:
        check_states(windows, model, data)
    # A third time without: nothing of the window is left.
    assert_same_bits(plain, gradients(model, data, None, step))
    assert len(windows.samples) == 3


@pytest.mark.parametrize("policy", [*TRAINED, "mixtral", "compiled-around"])
def test_state_after_last_layer_is_input_of_final_norm(policy: str) -> None:
    """Bit for bit, with the policy's gradients as they are without a window."""
    data, model, seen = batch((9, 5, 12)), POLICIES[policy](), list[torch.Tensor]()
    plain = gradients(model, data, None)
    windows = Windows(model, (1, 3), paths=PLAIN if isinstance(model, Plain) else ModulePaths())
    if not isinstance(model, Plain):
        norm = [*unwrapped(model)][-1].model.norm
        norm.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach().clone()))
    assert_same_bits(plain, gradients(model, data, windows))
    for row, mask in enumerate(data["attention_mask"].bool()):
        sample = windows.of_row(data, row)
        # A plain one has no norm.
        state = seen[row // 2][row % 2][mask] if seen else sample.final_hidden
        assert torch.equal(sample.aux[:, 16:], state) and bool(state.any())


def compiled_calls(model: nn.Module) -> list[object]:
    """Return what each module that was compiled in place runs."""
    return [module._compiled_call_impl for module in model.modules()]


def compiled_in_place(part: Callable[[PreTrainedModel], nn.Module]) -> nn.Module:
    model = tiny_qwen3()
    part(model).compile(backend="eager")
    return model


def compiled_forward() -> nn.Module:
    model = tiny_qwen3()
    model.forward = torch.compile(model.forward, backend="eager")
    return model


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.compile(tiny_qwen3(), backend="eager"),
        lambda: compiled_in_place(lambda model: model),
        lambda: compiled_in_place(lambda model: model.model),
        compiled_forward,
    ],
)
def test_policy_compiled_whole_refused(make: Callable[[], nn.Module]) -> None:
    with pytest.raises(RefusedError, match=r"compiled as a whole.*layer\.compile\(\)"):
        find_modules(make(), ModulePaths())


def test_layers_in_module_dict_are_found() -> None:
    """NeMo Automodel's own models have them so."""
    model = tiny_qwen3()
    layers = [*model.model.layers]
    model.model.layers = nn.ModuleDict({str(n): layer for n, layer in enumerate(layers)})
    assert list(find_modules(model, ModulePaths()).layers) == layers


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_layers_compiled_with_cuda_graphs_refused(mode: str, in_place: bool) -> None:
    model = tiny_qwen3()
    if in_place:
        model.model.layers[1].compile(mode=mode)
    else:
        model.model.layers[1] = torch.compile(model.model.layers[1], mode=mode)
    with pytest.raises(RefusedError, match=r"compiled with CUDA graphs.*no-cudagraphs"):
        find_modules(model, ModulePaths())
    model.model.layers[1] = tiny_qwen3().model.layers[1]
    model.model.layers[1].compile(mode="max-autotune-no-cudagraphs")
    find_modules(model, ModulePaths())


def test_final_norm_returning_tuple_refused_after_pass() -> None:
    """A fused norm returns the residual stream too. ``ship`` says what to set."""

    class Fused(nn.LayerNorm):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
            return super().forward(x), x

    class Normed(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.norm = Fused(16)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.norm(self.states(ids)[-1])[0] @ self.out.weight.T

    model, data, told = Normed(), batch((9, 5)), list[RefusedError]()
    windows = Windows(model, paths=replace(PLAIN, final_norm="norm"))
    with windows.open(refuse=told.append) as capture:
        model(data["input_ids"]).sum().backward()
        capture.ship(**data, sampled_logprobs=torch.full((2, 9), -1.0))
    assert windows.samples == [] and "modules.final_norm" in str(told[0])


@pytest.mark.parametrize(
    ("paths", "field"),
    [
        (ModulePaths(decoder_layers="model.blocks"), "modules.decoder_layers"),
        (ModulePaths(lm_head="head"), "modules.lm_head"),
        (ModulePaths(embed_tokens="model.wte"), "modules.embed_tokens"),
        (ModulePaths(final_norm="model.ln_f"), "modules.final_norm"),
        (ModulePaths(decoder_layers="model.norm"), "modules.decoder_layers"),
        (ModulePaths(lm_head="model.norm"), "modules.lm_head"),
    ],
)
def test_module_path_unresolved_refused_by_field(paths: ModulePaths, field: str) -> None:
    with pytest.raises(RefusedError) as refused:
        find_modules(tiny_qwen3(), paths)
    assert refused.value.field == field


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("name", ["lm_head", "embed_tokens"])
def test_quantized_matrix_is_refused_by_name(name: str, dtype: torch.dtype) -> None:
    """Its scales are kept elsewhere, as with bitsandbytes and FP8."""
    model = tiny_qwen3()
    part = model.lm_head if name == "lm_head" else model.model.embed_tokens
    part.weight = torch.nn.Parameter(part.weight.detach().to(dtype), requires_grad=False)
    with pytest.raises(RefusedError, match=rf"{name} in {dtype}, quantized"):
        find_modules(model, ModulePaths())


@pytest.mark.parametrize("family", ["DeepSeek-V3", "MiniMax-M2", "Laguna", "AFMoE"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_push_keeps_router_bias_in_float32(dtype: torch.dtype, family: str) -> None:
    """A router's bias, of a bfloat16 policy and of float32 master weights."""
    model, count = make(family, dtype), 0
    part = "expert_bias" if family == "AFMoE" else "e_score_correction_bias"
    bias = 34.5 + 0.01 * torch.arange(4)
    for name, tensor in model.state_dict(keep_vars=True).items():
        if name.endswith(part):
            tensor.data, count = bias.clone(), count + 1
    assert count
    # Of float32 master weights, whatever else this version of transformers keeps in float32.
    strict = model._keep_in_fp32_modules_strict or ()
    wide = {part, *(strict if dtype == torch.float32 else ())}
    for source in (model, model.state_dict()):
        cast = policy_tensors(source, "bfloat16", model)
        biases = [tensor for name, tensor in cast.items() if name.endswith(part)]
        assert len(biases) == count
        assert all(found.dtype == torch.float32 and torch.equal(found, bias) for found in biases)
        others = {name: t for name, t in cast.items() if not any(each in name for each in wide)}
        assert {t.dtype for t in others.values()} == {torch.bfloat16}


def test_push_keeps_float32_tensor_beside_float16() -> None:
    """The policy is not a model of transformers."""
    given = {"w": torch.ones(3, dtype=torch.float16), "bias": torch.full((2,), 34.51)}
    cast = policy_tensors(given, "bfloat16")
    assert cast["w"].dtype == torch.bfloat16 and torch.equal(cast["bias"], given["bias"])
