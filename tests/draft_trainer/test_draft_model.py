"""Draft models: transformers' own logits and gradients, their checkpoints, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from draft_trainer.drafters import DRAFTERS
from draft_trainer.drafters.draft_model import DraftModel
from draft_trainer.releases.registry import Registry
from slipstream.errors import RefusedError
from slipstream.v1 import release_pb2
from tests.draft_trainer.synthetic import HIDDEN, VOCAB, Policy, collate, logits_of

STEPS, WIDTH = 3, 24
SIZES = {
    "hidden_size": WIDTH,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
}


def models() -> dict[str, PreTrainedModel]:
    """One of each layer, the second with embeddings that are its lm_head as well."""
    torch.manual_seed(0)
    plain = {name: value for name, value in SIZES.items() if name != "head_dim"}
    made = {
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=False)),
        "llama": LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
        "qwen2": Qwen2ForCausalLM(Qwen2Config(**plain, tie_word_embeddings=False)),
    }
    with torch.no_grad():
        for model in made.values():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return {name: model.eval() for name, model in made.items()}


def policy_folder(folder: Path, **changes: object) -> Path:
    folder.mkdir()
    config = {"model_type": "x", "vocab_size": VOCAB, "hidden_size": HIDDEN} | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen2"])
def test_draft_model_logits_match_transformers(name: str, tmp_path: Path) -> None:
    model = models()[name]
    model.save_pretrained(tmp_path / "lm")
    policy = policy_folder(tmp_path / "policy")
    draft = DraftModel().read(tmp_path / "lm", policy).draft()
    assert draft.config.target_hidden_size == HIDDEN
    samples = Policy().samples(3)
    batch = collate(samples, Policy().heads(rows=torch.arange(VOCAB)))
    theirs = model(input_ids=batch.token_ids, position_ids=batch.positions).logits
    for step, output in enumerate(draft.unroll(batch, STEPS, first_anchor=2)):
        logits = logits_of(draft, output)
        for row, sample in enumerate(samples):
            last = sample.tokens - step - 2
            found = logits[row, : last - 2 + 1]
            wanted = theirs[row, 3 + step : last + step + 2]
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)


def parallel(folder: Path, token: object, **changes: object) -> Path:
    """The model of ``folder`` as one of PARD's."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"pard_token": token} | changes))
    return folder


@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen2"])
@pytest.mark.parametrize("first_anchor", [0, 2])
def test_pard_logits_match_one_pass_over_masks(
    name: str, first_anchor: int, tmp_path: Path
) -> None:
    """vLLM serves it so: after x_0 .. x_{i+1}, K - 1 times the token, in one causal pass."""
    model, mask = models()[name], 7
    model.save_pretrained(tmp_path / "lm")
    policy = policy_folder(tmp_path / "policy")
    draft = DraftModel().read(parallel(tmp_path / "lm", mask), policy).draft()
    samples = Policy().samples(2)
    batch = collate(samples, Policy().heads(rows=torch.arange(VOCAB)))
    outputs = list(draft.unroll(batch, STEPS, first_anchor=first_anchor))
    logits = torch.stack([logits_of(draft, output) for output in outputs], dim=2)
    assert logits.shape[1:3] == (batch.token_ids.shape[1] - first_anchor, STEPS)
    found, wanted = [], []
    masks = torch.full((STEPS - 1,), mask)
    for row, sample in enumerate(samples):
        for anchor in range(first_anchor, sample.tokens - 1):
            fed = torch.cat([batch.token_ids[row, : anchor + 2], masks])
            wanted.append(model(input_ids=fed[None]).logits[0, -STEPS:])
            found.append(logits[row, anchor - first_anchor])
    ours, theirs = torch.stack(found), torch.stack(wanted)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
    (ours * weights).sum().backward()
    (theirs * weights).sum().backward()
    gradients = dict(model.named_parameters())
    for key, parameter in draft.named_parameters():
        expected = gradients[key].grad
        scale = float(expected.abs().max())
        torch.testing.assert_close(parameter.grad, expected, atol=1e-3 * scale, rtol=1e-3)


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_draft_model_release_loads_in_transformers(name: str, tmp_path: Path) -> None:
    model = models()[name]
    model.save_pretrained(tmp_path / "lm")
    tensors = load_file(tmp_path / "lm" / "model.safetensors")
    # Older checkpoints have them; nobody reads them.
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, tmp_path / "lm" / "model.safetensors", {"format": "pt"})
    if name == "llama":
        # Some write the embeddings twice: releases have them once, the first one too.
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, tmp_path / "lm" / "model.safetensors")
    registry = Registry(tmp_path / "releases", DRAFTERS["draft_model"])
    registry.import_initial(tmp_path / "lm", policy_folder(tmp_path / "policy"))
    # A release says the policy's width itself.
    draft = registry.drafter.read(registry.path(0)).draft()
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.mul_(1.5)
    registry.create(draft, release_pb2.ReleaseManifest(), torch.float32)
    for version in (0, 1):
        stored = load_file(registry.path(version) / "model.safetensors")
        assert ("lm_head.weight" in stored) is (name == "qwen3")
        assert not any("inv_freq" in key for key in stored)
    again = type(model).from_pretrained(registry.path(1))
    for key, parameter in again.named_parameters():
        assert torch.equal(parameter, 1.5 * dict(model.named_parameters())[key])


def test_draft_model_stored_lm_head_overrides_tied_config(tmp_path: Path) -> None:
    """vLLM serves it so: ``ModelConfig.maybe_untie_word_embeddings``."""
    models()["llama"].save_pretrained(tmp_path / "lm")
    tensors = load_file(tmp_path / "lm" / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2
    save_file(tensors, tmp_path / "lm" / "model.safetensors")
    registry = Registry(tmp_path / "releases", DRAFTERS["draft_model"])
    registry.import_initial(tmp_path / "lm", policy_folder(tmp_path / "policy"))
    release = registry.path(0)
    draft = registry.drafter.read(release).draft()
    assert torch.equal(draft.lm_head_rows(None), tensors["lm_head.weight"])
    assert json.loads((release / "config.json").read_text())["tie_word_embeddings"] is False


def test_draft_model_unsupported_is_refused(tmp_path: Path) -> None:
    lm, drafter = tmp_path / "lm", DraftModel()
    models()["qwen3"].save_pretrained(lm)
    with pytest.raises(RefusedError, match=r"set draft\.policy"):
        drafter.read(lm)
    with pytest.raises(RefusedError, match="vocab_size: found 24, expected 99"):
        drafter.read(lm, policy_folder(tmp_path / "other", vocab_size=99))
    policy = policy_folder(tmp_path / "policy")
    config = json.loads((lm / "config.json").read_text())
    for changes, field in (
        ({"model_type": "gpt2"}, "model_type"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"quantization_config": {}}, "quantization_config"),
        ({"num_hidden_layers": 3}, "missing"),
        ({"num_hidden_layers": 1}, "unknown"),
        ({"pard_token": VOCAB}, f"pard_token: found {VOCAB}, expected a token"),
        ({"pard_token": True}, "pard_token"),
        ({"pard_token": 3, "mask_token_id": 4}, "mask_token_id"),
    ):
        (lm / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(RefusedError, match=field):
            drafter.read(lm, policy)
