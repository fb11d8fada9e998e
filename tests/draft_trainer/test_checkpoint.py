"""Checkpoints: exact round trips in the layouts that are written, and what reading decides."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from vllm.transformers_utils.configs.eagle import EAGLEConfig

from draft_trainer.drafters.eagle3.checkpoint import Eagle3
from draft_trainer.drafters.eagle3.config import HeadConfig
from draft_trainer.drafters.eagle3.head import Eagle3Head
from draft_trainer.drafters.rope import Rope
from draft_trainer.releases.registry import Registry
from slipstream.checkpoints import load_tensors, target_ids
from slipstream.errors import RefusedError
from tests.draft_trainer.checkpoint_rig import (
    CONFIG,
    WEIGHTS,
    d2t,
    edit_config,
    edit_tensors,
    policy_folder,
    saved,
)
from tests.draft_trainer.synthetic import DRAFT_VOCAB, HIDDEN, VOCAB, config, draft_vocab_ids, head

_YARN = Rope(1e4, "yarn", (("factor", 4.0), ("original_max_position_embeddings", 64)))
_VARIANTS: dict[str, dict[str, Any]] = {
    "reduced": {},
    "full": {"draft_vocab": VOCAB},
    "norms": {"norm_before_fc": True, "norm_before_residual": True, "norm_output": True},
    "fc_norm": {"fc_norm": True, "aux_layer_ids": (0, 7), "sliding_window": 32},
    "biases": {"qkv_bias": True, "mlp_bias": True, "rope": _YARN},
    "qk_norm": {"qk_norm": True, "qkv_bias": True, "rope": Rope(partial=0.5)},
    "narrow": {"target_hidden_size": 24, "own_embeddings": True, "rope": Rope(3e5)},
    "own": {"own_embeddings": True, "aux_layer_ids": (3,), "rms_norm_eps": 1e-6},
}


def test_full_vocabulary_checkpoint_has_no_d2t(tmp_path: Path) -> None:
    saved(tmp_path, draft_vocab=VOCAB)
    assert not {"d2t", "t2d"} & load_file(tmp_path / WEIGHTS).keys()
    assert Eagle3().read(tmp_path).draft().draft_vocab_ids is None
    with pytest.raises(RefusedError, match="draft_vocab_ids"):
        Eagle3().save(tmp_path, Eagle3Head(config()))


@pytest.mark.parametrize("variant", _VARIANTS)
def test_reading_draft_leaves_global_rng_untouched(tmp_path: Path, variant: str) -> None:
    """The numbers are those of the policy's seeded rollouts where both share a process."""
    model = saved(tmp_path, **_VARIANTS[variant])
    before = torch.get_rng_state()
    checkpoint = Eagle3().read(tmp_path)
    draft = checkpoint.draft()
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(draft.rotary.inverse_frequencies, model.rotary.inverse_frequencies)
    for name, tensor in draft.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name])
        # Training moves it in place; the checkpoint stays what was read.
        assert tensor.data_ptr() != checkpoint.tensors[name].data_ptr()


@pytest.mark.parametrize("layout", ["plain", "speculators"])
@pytest.mark.parametrize("variant", _VARIANTS)
def test_checkpoint_round_trip_is_exact(tmp_path: Path, layout: str, variant: str) -> None:
    """Configuration, every tensor and both maps; writing again gives the same bytes."""
    first, second, third = (tmp_path / name for name in ("first", "second", "third"))
    for folder in (first, second, third):
        folder.mkdir()
    model = saved(first, layout=layout, **_VARIANTS[variant])
    checkpoint = Eagle3().read(first)
    assert checkpoint.config == model.config and checkpoint.as_stored
    assert checkpoint.tensors.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(checkpoint.tensors[name], tensor), name
    if not model.config.full_vocabulary:
        assert checkpoint.d2t is not None and torch.equal(checkpoint.d2t, d2t())
    Eagle3().save(second, model, torch.float32, like=first)
    checkpoint.write(third)
    for name in (CONFIG, WEIGHTS):
        assert (first / name).read_bytes() == (second / name).read_bytes()
        assert (first / name).read_bytes() == (third / name).read_bytes()


def test_unknown_checkpoint_fields_are_kept(tmp_path: Path) -> None:
    """Fields, the absence of t2d and the names of a checkpoint survive being trained on."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir(), second.mkdir()
    model = saved(first)
    tensors = {
        name.replace("midlayer.", "layers.0."): tensor
        for name, tensor in load_file(first / WEIGHTS).items()
        if name != "t2d"
    }
    save_file(tensors, first / WEIGHTS)
    edit_config(first, bos_token_id=7, note="mine", dtype=..., torch_dtype="float32")
    assert Eagle3().read(first).as_stored
    Eagle3().save(second, model, like=first)
    assert load_file(second / WEIGHTS).keys() == tensors.keys()
    expected = {**json.loads((first / CONFIG).read_text()), "torch_dtype": "bfloat16"}
    assert json.loads((second / CONFIG).read_text()) == expected
    with pytest.raises(RefusedError, match="rms_norm_eps"):
        other = head(1, rms_norm_eps=0.5)
        Eagle3().save(second, other, like=first)


@pytest.mark.parametrize("draft_vocab", [DRAFT_VOCAB, VOCAB])
@pytest.mark.parametrize(
    ("model_type", "qk_norm", "given", "served"),
    [
        ("llama", False, "LlamaForCausalLM", "Eagle3LlamaForCausalLM"),
        ("qwen3", False, "LlamaForCausalLMEagle3", "LlamaForCausalLMEagle3"),
        ("qwen3", True, "Qwen3ForCausalLM", "Eagle3Qwen3ForCausalLM"),
        ("llama", True, "Eagle3Qwen3ForCausalLM", "Eagle3Qwen3ForCausalLM"),
    ],
)
def test_vllm_defaults_are_written_into_the_config(
    tmp_path: Path, draft_vocab: int, model_type: str, qk_norm: bool, given: str, served: str
) -> None:
    """SafeAILab's and AngelSlim's trainers write it so: class, base, and tied embeddings."""
    model = saved(tmp_path, qk_norm=qk_norm, draft_vocab=draft_vocab)
    absent = dict.fromkeys(("rope_parameters", "rope_theta"), ...)
    edit_config(
        tmp_path, **absent, model_type=model_type, architectures=[given], tie_word_embeddings=True
    )
    checkpoint = Eagle3().read(tmp_path)
    assert checkpoint.config == model.config and not checkpoint.as_stored
    (tmp_path / "again").mkdir()
    checkpoint.write(tmp_path / "again")
    again = Eagle3().read(tmp_path / "again")
    assert again.as_stored and again.config == model.config
    read = EAGLEConfig(AutoConfig.from_pretrained(tmp_path), method="eagle3", model_type="eagle")
    for document in (read.to_dict(), again.document):
        assert document["architectures"] == [served]
    assert read.rope_parameters["rope_theta"] == again.document["rope_theta"] == 10000.0
    assert again.document["tie_word_embeddings"] is False


def test_nemo_automodel_draft_is_read_as_its_trainer_meant_it(tmp_path: Path) -> None:
    """Its config.json is the policy's with some fields more; its tensors are below "model."."""
    model = saved(tmp_path)
    policy = policy_folder(tmp_path, num_hidden_layers=36)
    stored = load_file(tmp_path / WEIGHTS)
    top = ("lm_head.weight", "d2t", "t2d")
    named = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in stored.items()}
    theirs = {n if n in top else f"model.{n}": tensor for n, tensor in named.items()}
    theirs["model.embed_tokens.weight"] = load_file(policy / WEIGHTS)["model.embed_tokens.weight"]
    save_file(theirs, tmp_path / WEIGHTS)
    whole = {"num_hidden_layers": 36, "layer_types": ["full_attention"] * 36}
    window = {"sliding_window": 8, "use_sliding_window": False}
    flags = {"fc_norm": False, "norm_output": False, "parallel_drafting": False}
    edit_config(
        tmp_path,
        **(whole | window | flags),
        architectures=["LlamaEagle3DraftModel"],
        model_type="qwen3",
        attn_implementation="eager",
    )
    checkpoint = Eagle3().read(tmp_path, policy)
    assert checkpoint.config == model.config and not checkpoint.as_stored
    for name, tensor in model.state_dict().items():
        assert torch.equal(checkpoint.tensors[name], tensor)
    (tmp_path / "again").mkdir()
    checkpoint.write(tmp_path / "again")
    again = Eagle3().read(tmp_path / "again")
    assert again.as_stored and again.config == model.config
    assert again.document["architectures"] == ["LlamaForCausalLMEagle3"]


def test_stored_rotary_frequencies_are_left_out(tmp_path: Path) -> None:
    """vLLM computes them, and a stage would lack them."""
    model = saved(tmp_path)
    frequencies = {"midlayer__self_attn__rotary_emb__inv_freq": torch.ones(4)}
    edit_tensors(tmp_path, **frequencies)
    checkpoint = Eagle3().read(tmp_path)
    assert checkpoint.config == model.config and not checkpoint.as_stored
    assert checkpoint.tensors.keys() == model.state_dict().keys()
    registry = Registry(tmp_path / "registry")
    names = {spec.name for spec in registry.import_initial(tmp_path).tensors}
    assert names == load_tensors(tmp_path).keys() and "fc.weight" in names


def test_identity_d2t_of_full_vocabulary_is_dropped(tmp_path: Path) -> None:
    """SpecForge writes the identity, which vLLM cannot load: it is left out."""
    saved(tmp_path, draft_vocab=VOCAB)
    identity = {"d2t": torch.zeros(VOCAB, dtype=torch.int64), "t2d": torch.ones(VOCAB) > 0}
    edit_tensors(tmp_path, **identity)
    checkpoint = Eagle3().read(tmp_path)
    assert checkpoint.d2t is None and not checkpoint.as_stored
    edit_tensors(tmp_path, t2d=torch.arange(VOCAB) > 0)
    with pytest.raises(RefusedError, match="t2d"):
        Eagle3().read(tmp_path)


def test_draft_embeddings_are_dropped_kept_or_refused(tmp_path: Path) -> None:
    """A copy of the policy's is shared; others are the draft's own; without the policy, neither."""
    model = saved(tmp_path)
    theirs = torch.randn(VOCAB, HIDDEN).bfloat16()
    policy = policy_folder(tmp_path, theirs)
    edit_tensors(tmp_path, embed_tokens__weight=theirs.float())
    with pytest.raises(RefusedError, match="embed_tokens"):
        Eagle3().read(tmp_path)
    copied = Eagle3().read(tmp_path, policy)
    assert copied.config == model.config and not copied.as_stored
    assert Eagle3().read(tmp_path, policy).draft().embed_tokens is None

    edit_tensors(tmp_path, embed_tokens__weight=theirs.float() + 1)
    own = Eagle3().read(tmp_path, policy)
    assert own.config.own_embeddings and not own.as_stored
    again = tmp_path / "again"
    again.mkdir()
    own.write(again)
    # What was found out is in the file now, so that the policy is no longer needed.
    loaded = Eagle3().read(again).draft()
    assert loaded.embed_tokens is not None and Eagle3().read(again).as_stored
    assert torch.equal(loaded.embed_tokens.weight, theirs.float() + 1)
    assert not loaded.embed_tokens.weight.requires_grad


def test_nested_aux_layer_ids_are_read_by_policy_depth(tmp_path: Path) -> None:
    """Ten layers: SpecForge's and vLLM's defaults are (1, 4, 6) and (2, 5, 7)."""
    saved(tmp_path, aux_layer_ids=(2, 5, 7))
    policy = policy_folder(tmp_path)
    name = "eagle_aux_hidden_state_layer_ids"
    for nested in (None, [1, 4, 6], [2, 5, 7]):
        eagle = {} if nested is None else {"eagle_config": {name: nested, "other": 1}}
        edit_config(tmp_path, **{name: ..., **eagle})
        with pytest.raises(RefusedError, match=name):
            Eagle3().read(tmp_path)
        checkpoint = Eagle3().read(tmp_path, policy)
        assert checkpoint.config.aux_layer_ids == (2, 5, 7) and not checkpoint.as_stored
        assert checkpoint.document[name] == [2, 5, 7]
    assert checkpoint.document["eagle_config"] == {"other": 1}
    edit_config(tmp_path, eagle_config={name: [1, 4, 7]})
    with pytest.raises(RefusedError, match=name):
        Eagle3().read(tmp_path, policy)


def test_shards_are_read_through_their_index(tmp_path: Path) -> None:
    model = saved(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    (tmp_path / WEIGHTS).unlink()
    shards = {"a.safetensors": ("fc.weight", "d2t"), "b.safetensors": ()}
    shards["b.safetensors"] = tuple(tensors.keys() - set(shards["a.safetensors"]))
    for name, names in shards.items():
        save_file({n: tensors[n] for n in names}, tmp_path / name)
    weight_map = {n: shard for shard, names in shards.items() for n in names}
    index = tmp_path / f"{WEIGHTS}.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = Eagle3().read(tmp_path)
    assert torch.equal(checkpoint.tensors["fc.weight"], model.fc.weight)
    assert not checkpoint.as_stored
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(RefusedError, match="again"):
        Eagle3().read(tmp_path)


def test_target_ids_invert_d2t() -> None:
    assert target_ids(d2t()).tolist() == draft_vocab_ids().tolist()
    assert head().draft_ids_of(torch.tensor([0, 2, 3])).tolist() == [0, -1, 2]
    assert HeadConfig.from_dict(head().config.to_dict()) == head().config
