"""Every kind of policy: the states are its own, its gradients are untouched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from policy_bridge import ModulePaths
from policy_bridge.model import find_modules
from policy_bridge.sync import policy_tensors
from slipstream.errors import RefusedError
from tests.tiny import SIZES, tiny_qwen3

from .conftest import VOCAB, batch
from .families import make
from .windows import LAYERS, Batch, Windows, assert_same_bits, gradients, hooks_on

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


def llama(**changes: object) -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**SIZES, **changes}))


def mixtral() -> PreTrainedModel:
    torch.manual_seed(0)
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(**SIZES, **experts))


def qwen3_moe(**changes: object) -> PreTrainedModel:
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**SIZES, **MOE, **changes}))


def tied() -> PreTrainedModel:
    return tiny_qwen3(tie_word_embeddings=True)


def checkpointed(reentrant: bool) -> Callable[[], PreTrainedModel]:
    def make() -> PreTrainedModel:
        model = tiny_qwen3()
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model

    return make


def check_states(windows: Windows, inner: PreTrainedModel, data: Batch) -> None:
    """What was captured in the last gradients is what the model says of itself."""
    layers = inner.model.layers
    for row in range(len(data["input_ids"])):
        kept = data["attention_mask"][row].bool()
        sample = windows.of_row(data, row)
        # The same micro-batches: a product's last bits depend on its shape.
        rows = slice(0, 2) if row < 2 else slice(2, 3)
        seen: dict[int, torch.Tensor] = {}
        hooks = [
            layers[layer].register_forward_pre_hook(
                lambda _, args, layer=layer, seen=seen: seen.__setitem__(layer, args[0])
            )
            for layer in LAYERS
        ]
        with torch.no_grad():
            out = inner.model(data["input_ids"][rows], attention_mask=data["attention_mask"][rows])
        for hook in hooks:
            hook.remove()
        final = out.last_hidden_state[row - rows.start][kept]
        assert torch.equal(sample.final_hidden, final)
        aux = torch.cat([seen[layer][row - rows.start][kept] for layer in LAYERS], -1)
        assert torch.equal(sample.aux, aux)


@pytest.mark.parametrize(
    "make",
    [llama, tiny_qwen3, mixtral, qwen3_moe, tied, checkpointed(False), checkpointed(True)],
)
def test_gradients_bit_identical_and_states_captured(
    make: Callable[[], PreTrainedModel],
) -> None:
    data = batch((9, 5, 12))
    model = make()
    plain = gradients(model, data, None)
    before = hooks_on(model)
    windows = Windows(model)
    assert_same_bits(plain, gradients(model, data, windows))
    assert len(windows.samples) == 3
    assert hooks_on(model) == before
    check_states(windows, model, data)
    # A third time without: nothing of the window is left.
    assert_same_bits(plain, gradients(model, data, None))
    assert len(windows.samples) == 3


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
    """As in NeMo Automodel's own models."""
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


class Block(nn.Module):
    """A decoder layer that knows nothing of Hugging Face and takes its input by name."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)

    def forward(self, *, x: torch.Tensor, scale: float) -> torch.Tensor:
        return x + scale * torch.tanh(self.mix(x.cumsum(1)))


class Plain(nn.Module):
    """A policy of plain modules, its layers right under it."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(VOCAB, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(3)))
        self.out = nn.Linear(width, VOCAB)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(scale=0.5, x=x)
        return self.out(x)


PLAIN = ModulePaths(decoder_layers="blocks", lm_head="out", embed_tokens="table")


def plain() -> Plain:
    return Plain()


COMPILES = CompileCounterWithBackend("aot_eager")


def compiled_layers_in_place() -> Plain:
    torch._dynamo.reset()
    model = Plain()
    for part in (*model.blocks, model.out):
        part.compile(backend=COMPILES)
    return model


def compiled_layers_around() -> Plain:
    torch._dynamo.reset()
    model = Plain()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend=COMPILES)
    return model


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
            x = self.table(ids)
            for block in self.blocks:
                x = block(scale=0.5, x=x)
            return self.norm(x)[0] @ self.out.weight.T

    model, data, told = Normed(), batch((9, 5)), list[RefusedError]()
    windows = Windows(model, paths=replace(PLAIN, final_norm="norm"))
    with windows.open(refuse=told.append) as capture:
        model(data["input_ids"]).sum().backward()
        capture.ship(**data, sampled_logprobs=torch.full((2, 9), -1.0))
    assert windows.samples == [] and "modules.final_norm" in str(told[0])


@pytest.mark.parametrize("make", [plain, compiled_layers_in_place, compiled_layers_around])
def test_gradients_bit_identical_with_compiled_layers(
    make: Callable[[], Plain],
) -> None:
    data, model = batch((9, 5, 12)), make()

    def forward(model: nn.Module, micro: Batch) -> torch.Tensor:
        return model(micro["input_ids"])

    # Compiled before the first window: what was traced knows nothing of later hooks, and must
    # not be traced again for them.
    plain = gradients(model, data, None, forward)
    entries = [block._compiled_call_impl for block in model.blocks]
    traced = COMPILES.frame_count
    windows = Windows(model, paths=PLAIN)
    assert_same_bits(plain, gradients(model, data, windows, forward))
    assert COMPILES.frame_count == traced
    assert [block._compiled_call_impl for block in model.blocks] == entries
    sample = windows.of_row(data, 2)
    with torch.no_grad():
        x = model.table(data["input_ids"][2:])
        for index, block in enumerate(model.blocks):
            if index in LAYERS:
                width = slice(16 * (index - 1), 16 * index)
                assert torch.equal(sample.aux[:, width], x[0])
            x = block(x=x, scale=0.5)
        assert torch.equal(sample.final_hidden, x[0])
        logits = model.out(x)[0, :-1].gather(-1, data["input_ids"][2, 1:, None]).squeeze(-1)
    torch.testing.assert_close(sample.sampled_logits[1:], logits)


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_push_keeps_router_bias_in_float32(dtype: torch.dtype) -> None:
    """A router's bias, of a bfloat16 policy and of float32 master weights."""
    model = make("DeepSeek-V3", dtype)
    part, biases = "e_score_correction_bias", {}
    for name, module in model.named_modules():
        if hasattr(module, part):
            biases[f"{name}.{part}"] = 34.5 + 0.01 * torch.arange(4)
            setattr(module, part, biases[f"{name}.{part}"].clone())
    assert biases
    # Of float32 master weights, whatever else this version of transformers keeps in float32.
    wide = {part, *(model._keep_in_fp32_modules_strict if dtype == torch.float32 else ())}
    for source in (model, model.state_dict()):
        cast = policy_tensors(source, "bfloat16", model)
        for name, bias in biases.items():
            assert cast[name].dtype == torch.float32 and torch.equal(cast[name], bias)
        others = {name: t for name, t in cast.items() if not any(each in name for each in wide)}
        assert {t.dtype for t in others.values()} == {torch.bfloat16}


def test_push_keeps_float32_tensor_beside_float16() -> None:
    """Of a policy that is no model of transformers."""
    given = {"w": torch.ones(3, dtype=torch.float16), "bias": torch.full((2,), 34.51)}
    cast = policy_tensors(given, "bfloat16")
    assert cast["w"].dtype == torch.bfloat16 and torch.equal(cast["bias"], given["bias"])
