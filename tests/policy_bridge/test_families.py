"""Policy families, tiny and random: what is shipped gives the policy's own distribution."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, FineGrainedFP8Config, Mxfp4Config

from benchmarks.publish_faults.memory_server import MemoryServer
from docs.make_families import PAGE, row
from policy_bridge import ModulePaths
from policy_bridge.logits import check_logits, form_of
from policy_bridge.sync import policy_tensors
from slipstream.errors import RefusedError
from slipstream.sampling import LogitForm
from slipstream.v1 import tensor_pb2

from .conftest import (
    HIDDEN,
    VOCAB,
    Connect,
    batch,
    deliver,
    make_model,
    sync,
)
from .doubles import DEADLINE, FakeTrainer
from .families import FAMILIES, initial, make, masses, outcome
from .policies import qwen3_moe
from .windows import LAYERS, Windows, own_logprobs

REFUSED = {
    "Gemma 3, with images and a cap": "set logit_scale=1, logit_soft_cap=0 in BridgeConfig",
    "OPT, projected": "expected 16, the input of lm_head",
    "Mamba": "modules.decoder_layers: found none of",
}
"""The families that are not trained on, and why."""

NO_INIT = {
    *("GPT-2", "Bloom", "GPT-J", "CodeGen", "RecurrentGemma", "OPT, projected", "Mamba"),
}
"""The families whose config.json or tensors ``draft-trainer init`` does not know."""
FINAL_NORMS = (".norm", ".norm_f", ".final_layernorm", ".final_layer_norm")
MEAN_NORMS = ("GPT-NeoX", "Phi (1, 1.5, 2)", "Phi-MoE", "Cohere")
"""The families whose final norm subtracts the mean, which no draft's does."""

FP8 = {
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "activation_scheme": "dynamic",
    "modules_to_not_convert": ["lm_head"],
}
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        *("model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head")
    ],
}
Stored = dict[str, torch.Tensor]


def fp8(stored: Stored) -> Stored:
    """A checkpoint with projections as DeepSeek's and Qwen's FP8 ones have them."""
    found = dict(stored)
    for name in stored:
        if name.endswith("proj.weight"):
            found[name] = stored[name].to(torch.float8_e4m3fn)
            blocks = [-(-size // 128) for size in stored[name].shape]
            found[f"{name}_scale_inv"] = torch.ones(blocks)
    return found


def mxfp4(stored: Stored) -> Stored:
    """A checkpoint with experts as GPT-OSS has them."""
    found = {}
    for name, tensor in stored.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            found[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        blocks = (experts, outputs, inputs // 32)
        found[f"{name}_blocks"] = torch.zeros(*blocks, 16, dtype=torch.uint8)
        found[f"{name}_scales"] = torch.full(blocks, 127, dtype=torch.uint8)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_family_teacher_is_policy_distribution_or_refused(
    family: str,
) -> None:
    exact, rounded = outcome(family), outcome(family, torch.bfloat16, train=False)
    # Not by how much logits are off: that depends on the processor.
    table = re.sub(r"[\d.]+%", "%", PAGE.read_text())
    line = re.sub(r"[\d.]+%", "%", row(family, exact))
    assert f"\n{line} " in table, "run python -m docs.make_families"
    if family in REFUSED:
        for found in (exact, rounded):
            assert REFUSED[family] in found.refused and "Next step: " in found.refused
        return
    for found in (exact, rounded):
        assert not found.refused
        assert found.least == pytest.approx(1.0, abs=5e-3)
        assert found.most == pytest.approx(1.0, abs=5e-3)
    # Near the logarithm of the vocabulary: the draft is random.
    assert math.isfinite(exact.loss) and 3.0 < exact.loss < 6.0


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in REFUSED])
def test_family_states_are_those_it_says_of_itself(family: str) -> None:
    model, data = make(family), batch((12, 9))
    windows = Windows(model)
    with torch.no_grad(), windows.open() as capture:
        model(data["input_ids"], attention_mask=data["attention_mask"])
        capture.ship(**data)
    own = {"input_ids": data["input_ids"], "attention_mask": data["attention_mask"]}
    with torch.no_grad():
        found = model(**own, output_hidden_states=True)
    logprobs = own_logprobs(found.logits, data["input_ids"])
    for number, mask in enumerate(data["attention_mask"].bool()):
        sample, states = (
            windows.of_row(data, number),
            [s[number][mask] for s in found.hidden_states],
        )
        torch.testing.assert_close(sample.aux, torch.cat([states[n] for n in LAYERS], -1))
        torch.testing.assert_close(sample.final_hidden, states[-1])
        given = logprobs[number][mask[1:]]
        torch.testing.assert_close(sample.sampled_logprobs[1:], given, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in NO_INIT])
def test_family_init_takes_lm_head_and_final_norm(family: str) -> None:
    model, inputs = make(family), list[torch.Tensor]()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if "norm" in name:  # no weight of 1 or 0, which is right either way
                tensor.add_(torch.rand(tensor.shape))
    for name, module in model.named_modules():
        if name.endswith(FINAL_NORMS) and ".layers." not in name:
            module.register_forward_hook(lambda _, args, out: inputs.extend((args[0], out)))
    with torch.no_grad():
        model(batch((9,))["input_ids"])
    draft, head = initial(model), model.get_output_embeddings()
    assert torch.equal(draft.lm_head.weight, head.weight)
    if family not in MEAN_NORMS:
        before, after = inputs[-2:]
        torch.testing.assert_close(draft.norm(before), after, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_family_push_equals_saved_checkpoint(family: str, tmp_path: Path) -> None:
    model = make(family)
    model.save_pretrained(tmp_path)
    stored, pushed = load_file(tmp_path / "model.safetensors"), policy_tensors(model, "")
    assert pushed.keys() == stored.keys()
    assert all(torch.equal(pushed[name], tensor) for name, tensor in stored.items())
    kept = model.state_dict()
    assert all(pushed[name].data_ptr() == kept[name].data_ptr() for name in kept.keys() & pushed)


def test_experts_are_pushed_as_checkpoint_stores_them(connect: Connect, tmp_path: Path) -> None:
    """A model of transformers 5 has all of a layer's in one tensor."""
    sizes = {"hidden_size": HIDDEN, "num_hidden_layers": 8}
    model = qwen3_moe(**sizes)
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in stored.keys() - model.state_dict()
    rollout = MemoryServer(policy=tmp_path)
    bridge = connect(model=model, rollout_servers=(rollout.address,))
    for version, source in enumerate((None, model.state_dict(), stored), 1):
        with bridge.sync(version) as window:
            window.push_policy(source)
        assert rollout.policy_version == version
        assert rollout.policy.keys() == stored.keys()
        for name, tensor in stored.items():
            assert torch.equal(rollout.policy[name], tensor.bfloat16())
    rollout.stop()
    # Wrapped, or with adapters beside what they were merged into.
    lora = peft.get_peft_model(qwen3_moe(**sizes), peft.LoraConfig(target_modules=["q_proj"]))
    assert policy_tensors(model.state_dict(), "", lora).keys() == stored.keys()
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = torch.compile(layer, backend="eager")
    assert policy_tensors(torch.compile(model, backend="eager"), "").keys() == stored.keys()


@pytest.mark.parametrize("family", ["Qwen3-MoE", "GPT-OSS"])
def test_dequantized_policy_is_pushed_unquantized(family: str, tmp_path: Path) -> None:
    """transformers would quantize it again as it saves it."""
    model = make(family).bfloat16()
    model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    quantized, changes, loading = {
        "Qwen3-MoE": (fp8, FP8, FineGrainedFP8Config(dequantize=True)),
        "GPT-OSS": (mxfp4, MXFP4, Mxfp4Config(dequantize=True)),
    }[family]
    save_file(quantized(stored), tmp_path / "model.safetensors", {"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": changes}))
    # Sizes do not matter here: 48 is no multiple of the 32 that share a scale.
    policy = AutoModelForCausalLM.from_pretrained(
        tmp_path,
        quantization_config=loading,
        dtype=torch.bfloat16,
        ignore_mismatched_sizes=True,
    )
    kept = getattr(policy, "_weight_conversions", None)
    pushed = policy_tensors(policy, "")
    kinds = [{name: tensor.dtype for name, tensor in part.items()} for part in (pushed, stored)]
    assert kinds[0] == kinds[1]
    assert getattr(policy, "_weight_conversions", None) is kept


def test_policy_tensors_calls_no_state_dict_hook() -> None:
    """FSDP2's would change the state of one rank alone."""
    model = make("Qwen3-MoE")
    tensors = dict(model.state_dict())
    model.register_state_dict_pre_hook(lambda *_: pytest.fail("a state dict was made"))
    assert policy_tensors(tensors, "", model).keys() != tensors.keys()


@pytest.mark.parametrize("fused", [False, True])
def test_large_bfloat16_logits_are_rounded_as_policy_rounds(fused: bool) -> None:
    """A step of bfloat16 is 0.25 at 40: a teacher of exact logits has masses of 0.9 to 1.1."""
    model, data = make("Llama", torch.bfloat16), batch((30, 25, 28))
    with torch.no_grad():
        model.lm_head.weight.mul_(40 / float(model(data["input_ids"]).logits.abs().max()))
    paths = ModulePaths(final_norm="model.norm") if fused else ModulePaths()
    windows = Windows(model, paths=paths)
    with torch.no_grad(), windows.open() as capture:
        hidden = model.model(data["input_ids"]).last_hidden_state if fused else None
        logits = model(data["input_ids"]).logits if hidden is None else model.lm_head(hidden)
        own = own_logprobs(logits, data["input_ids"])
        capture.ship(**data, sampled_logprobs=own)
    mass = masses(model, windows.samples, LogitForm())
    torch.testing.assert_close(mass, torch.ones_like(mass), atol=2e-3, rtol=0)
    for sample in windows.samples:
        sample.header.logits_dtype = tensor_pb2.DTYPE_FLOAT32
    exact = masses(model, windows.samples, LogitForm())
    assert float((exact - 1).abs().max()) > 0.02


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("family", ["Llama", "Phi (1, 1.5, 2)"])
def test_autocast_logits_are_rounded_as_policy_rounds(family: str, fused: bool) -> None:
    """Weights and states in float32, products of them in bfloat16."""
    model, data = make(family), batch((30, 25, 28))
    with torch.no_grad():
        model.lm_head.weight.mul_(30 / float(model(data["input_ids"]).logits.abs().max()))
    norm = "model.final_layernorm" if family.startswith("Phi") else "model.norm"
    windows = Windows(model, paths=ModulePaths(final_norm=norm) if fused else ModulePaths())
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), windows.open() as capture:
        if fused:
            hidden = model.model(data["input_ids"]).last_hidden_state
            logits = nn.functional.linear(hidden, model.lm_head.weight, model.lm_head.bias)
        else:
            logits = model(data["input_ids"]).logits
        own = own_logprobs(logits, data["input_ids"])
        capture.ship(**data, sampled_logprobs=own)
    assert {sample.logits_dtype for sample in windows.samples} == {torch.bfloat16}
    mass = masses(model, windows.samples, LogitForm())
    torch.testing.assert_close(mass, torch.ones_like(mass), atol=0.02, rtol=0)


def test_lm_head_bias_is_announced_with_version(trainer: FakeTrainer, connect: Connect) -> None:
    model = make_model()
    model.lm_head.bias = nn.Parameter(torch.randn(VOCAB))
    bridge = connect(model=model, version=1)
    trainer.wait_for(lambda: 1 in trainer.tensors)
    with torch.no_grad():
        model.lm_head.bias.mul_(2.0)
    sync(bridge, 2)
    deliver(bridge, model, batch((9,)))
    assert trainer.specs[-1].lm_head_bias
    assert trainer.chunks_sent[2] == {"lm_head.bias"}
    assert torch.equal(trainer.tensors[2]["lm_head.bias"], model.lm_head.bias[trainer.vocab_ids])


@pytest.mark.parametrize(
    ("family", "form"),
    [("Gemma 2", LogitForm(1.0, 4.0)), ("Granite", LogitForm(0.125)), ("Llama", LogitForm())],
)
def test_logit_scale_and_soft_cap_are_announced(
    trainer: FakeTrainer, connect: Connect, family: str, form: LogitForm
) -> None:
    trainer.layers = (1, 2)
    connect(model=make(family))
    assert LogitForm.of(trainer.specs[-1]) == form


class Nested:
    """A configuration that has others inside, as vision and language models do."""

    def __init__(self, **text: object) -> None:
        self._text = text

    def to_dict(self) -> dict[str, object]:
        audio = {"attention_logit_cap": 50.0, "logit_scale": 7.0}
        return {"audio_config": audio, "text_config": self._text, "top": [1, 2]}


def test_logit_form_read_from_nested_text_config() -> None:
    model = nn.Module()
    model.config = Nested(final_logit_softcapping=30.0, attn_logit_softcapping=50.0, logit_scale=2)
    assert form_of(model) == LogitForm(2.0, 30.0)
    assert form_of(model, scale=3.0, cap=0.0) == LogitForm(3.0)
    model.config = Nested(logits_scaling=16.0)
    assert form_of(model) == LogitForm(0.0625)
    model.config = Nested(logits_scaling=0.0)
    with pytest.raises(RefusedError, match=r"text_config\.logits_scaling"):
        form_of(model)
    assert form_of(model, scale=1.0) == LogitForm(1.0)


Change = Callable[[torch.Tensor], torch.Tensor]


class Changed(nn.Module):
    """A policy that does something to its logits which its configuration does not call so."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.inner, self.change = make_model(), change
        self.lm_head = self.inner.lm_head
        self.config = Nested(odd=16.0, strange=5.0)

    def forward(self, ids: torch.Tensor, **_: Any) -> torch.Tensor:
        return self.change(self.inner(ids).logits)


PATHS = ModulePaths("inner.model.layers", "inner.lm_head", "inner.model.embed_tokens")
CHANGES: dict[str, tuple[Change, str, str]] = {
    "divided": (lambda y: y / 16.0, "1 / model.config.text_config.odd", "logit_scale=0.0625"),
    "in place": (lambda y: y.div_(16.0), "text_config.odd", "logit_scale=0.0625"),
    "multiplied": (lambda y: y * 1.7, "times 1.7", "logit_scale=1.7"),
    "capped": (
        lambda y: 5.0 * torch.tanh(y / 5.0),
        "soft-capped at 5 (model.config.text_config.strange)",
        "logit_scale=1, logit_soft_cap=5",
    ),
    "shifted": (lambda y: y + torch.arange(VOCAB) / 8, "neither a factor nor", "cannot be"),
    "clipped": (lambda y: y.clamp(-1, 1), "neither a factor nor a soft cap", "cannot be captured"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_logits_changed_after_lm_head_refused_by_cause(
    trainer: FakeTrainer, connect: Connect, name: str
) -> None:
    change, cause, step = CHANGES[name]
    model, data = Changed(change), batch((12, 9))
    bridge = connect(model=model, modules=PATHS, version=1)
    for version in (2, 3):
        with torch.no_grad(), bridge.capture() as capture:
            model(data["input_ids"])
            capture.ship(**data)
        sync(bridge, version)
    reason = bridge.stats().capture_off_reason
    assert reason.startswith("model.logits: found") and cause in reason and step in reason
    assert bridge.flush(DEADLINE) and not trainer.samples
    if "=" in step:
        scale, cap = map(float, re.findall(r"logit_scale=(\S+), logit_soft_cap=(\S+)", reason)[0])
        settings: dict[str, Any] = {"logit_scale": scale, "logit_soft_cap": cap, "version": 4}
        again = connect(model=model, modules=PATHS, **settings)
        with torch.no_grad(), again.capture() as capture:
            logits = model(data["input_ids"])
            own = own_logprobs(logits, data["input_ids"])
            capture.ship(**data, sampled_logprobs=own)
        assert again.flush(DEADLINE)
        assert again.stats().capture_off_reason == "" and len(trainer.samples) == 2
        mass = masses(model.inner, list(trainer.samples.values()), LogitForm(scale, cap))
        torch.testing.assert_close(mass, torch.ones_like(mass), atol=1e-3, rtol=0)


def test_constant_added_to_every_logit_is_accepted(trainer: FakeTrainer, connect: Connect) -> None:
    model, data = Changed(lambda y: y - 3.0), batch((12,))
    bridge = connect(model=model, modules=PATHS, version=1)
    with torch.no_grad(), bridge.capture() as capture:
        model(data["input_ids"])
        capture.ship(**data)
    assert bridge.flush(DEADLINE) and bridge.stats().accepted == 1


@pytest.mark.parametrize("right", [False, True])
def test_fused_loss_logits_checked_by_logprobs(
    trainer: FakeTrainer, connect: Connect, right: bool
) -> None:
    """A policy whose lm_head is never called has no logits to compare."""
    model, data = make_model(), batch((20, 15))
    paths = ModulePaths(final_norm="model.norm")
    bridge = connect(model=model, modules=paths, version=1)
    with torch.no_grad(), bridge.capture(temperature=0.5) as capture:
        hidden = model.model(data["input_ids"]).last_hidden_state
        logits = hidden @ model.lm_head.weight.T / (0.5 if right else 1.0)
        own = own_logprobs(logits, data["input_ids"])
        capture.ship(**data, sampled_logprobs=own)
    assert bridge.flush(DEADLINE)
    assert bridge.stats().accepted == (2 if right else 0)
    reason = bridge.stats().capture_off_reason
    assert ("the log-probs' temperature" in reason) == (not right)


@pytest.mark.parametrize(
    "first",
    [{"loss_mask": torch.zeros(2, 20).bool()}, {"sampled_logprobs": torch.full((2, 20), math.nan)}],
    ids=["no loss mask", "not finite"],
)
def test_logit_check_waits_for_window_with_finite_targets(
    trainer: FakeTrainer, connect: Connect, first: dict[str, torch.Tensor]
) -> None:
    model, data = make_model(), batch((20, 15))
    bridge = connect(model=model, modules=ModulePaths(final_norm="model.norm"), version=1)
    for changes in (first, {}):
        with torch.no_grad(), bridge.capture() as capture:
            model.model(data["input_ids"])
            wrong = torch.full((2, 20), -50.0)
            capture.ship(**{**data, "sampled_logprobs": wrong, **changes})
        assert bridge.flush(DEADLINE)
    assert bridge.stats().capture_off_reason.startswith("model.logits: found sampled_logprobs")
    assert not trainer.samples


def test_logit_check_leaves_out_masked_vocabulary() -> None:
    """Otherwise every window of such a policy would be compared, and its loop wait for it."""
    own = torch.randn(4, 8)
    masked = own.clone()
    masked[:, 5:] = -math.inf
    assert check_logits(masked, own, LogitForm(), torch.float32, None)
    with pytest.raises(RefusedError, match="times 2"):
        check_logits(2 * masked, own, LogitForm(), torch.float32, None)
