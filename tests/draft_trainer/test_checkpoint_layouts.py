"""Checkpoints that speculators 0.9.0, specforge 0.2.0 and nvidia-modelopt 0.47.0 wrote.

Each trainer saved a random draft of its own for ``checkpoints/policy``, a tiny Qwen3. Beside it,
``NAME.safetensors`` holds one sequence and the logits of its first step on it, in float32.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draft_trainer.drafters.eagle3.checkpoint import Eagle3
from draft_trainer.releases.registry import Registry
from slipstream.errors import RefusedError
from slipstream.v1 import release_pb2
from tests.draft_trainer.dense_head import dense_step
from tests.draft_trainer.synthetic import logits_of

_FOLDER = Path(__file__).parent / "checkpoints"
_POLICY = _FOLDER / "policy"
_SPECULATORS = ("speculators", "speculators_qwen3")
_ALL = (*_SPECULATORS, "specforge_hf", "specforge_sglang", "modelopt")
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_NOT_THE_HEADS = {"d2t", "t2d", "embed_tokens.weight"}


@pytest.mark.parametrize("name", _ALL)
def test_checkpoint_of_other_trainer_gives_its_logits(name: str) -> None:
    """Every tensor as it is in the file, and the first step's logits as that trainer has them."""
    stored = load_file(_FOLDER / name / "model.safetensors")
    expected = load_file(_FOLDER / f"{name}.safetensors")
    checkpoint = Eagle3().read(_FOLDER / name, _POLICY)
    assert len(checkpoint.tensors) == len(stored.keys() - _NOT_THE_HEADS)
    for own_name, tensor in checkpoint.tensors.items():
        in_file = stored.get(own_name, stored.get(own_name.replace("midlayer.", "layers.0.")))
        assert in_file is not None and torch.equal(tensor, in_file), own_name
        assert tensor.dtype == in_file.dtype
    head = Eagle3().read(_FOLDER / name, _POLICY).draft()
    assert head.embed_tokens is None and (checkpoint.d2t is None) == head.config.full_vocabulary
    if checkpoint.d2t is not None:
        assert torch.equal(checkpoint.d2t, stored["d2t"])
    with torch.no_grad():
        hidden = head.fuse(expected["aux"][None])
        embeds, positions = expected["embeds"][None], expected["positions"][None]
        logits = logits_of(head, dense_step(head, hidden, embeds, positions))[0]
    error = (logits - expected["logits"]).abs().max() / expected["logits"].abs().max()
    assert error < 1e-5, f"relative error {error:.2e}"


def test_config_fields_of_other_trainers() -> None:
    configs = {name: Eagle3().read(_FOLDER / name, _POLICY).config for name in _ALL}
    assert {name: config.aux_layer_ids for name, config in configs.items()} == {
        "speculators": (2, 5, 7),
        "speculators_qwen3": (2, 5),
        # Written as (1, 4, 6), which counts layer outputs from 0; not written; (1, 4, 6).
        **dict.fromkeys(("specforge_hf", "specforge_sglang", "modelopt"), (2, 5, 7)),
    }
    assert configs["speculators"].sliding_window == 32


_UNSAID = f"{_LAYER_IDS} = [2, 5, 7]"
_ASSUMED = {
    "speculators": [],
    "speculators_qwen3": [],
    "specforge_hf": ["norm_before_residual = false"],
    "specforge_sglang": [_UNSAID, "norm_before_residual = false"],
    "modelopt": ["norm_before_residual = false"],
}


@pytest.mark.parametrize("name", _ALL)
def test_what_a_checkpoint_does_not_say_is_told(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each start logs it, and the manifest keeps it."""
    registry = Registry(tmp_path / "registry")
    for _ in range(2):
        caplog.clear()
        manifest = registry.import_initial(_FOLDER / name, _POLICY)
        assert list(manifest.assumed) == list(registry.get(0).assumed) == _ASSUMED[name]
        told = [m for m in caplog.messages if "assumed, as its config.json does not say" in m]
        assert len(told) == bool(_ASSUMED[name])
        assert all(value in told[0] for value in _ASSUMED[name])


def test_missing_rotary_base_and_activation_are_told(tmp_path: Path) -> None:
    shutil.copytree(_FOLDER / "specforge_hf", tmp_path / "draft")
    path = tmp_path / "draft" / "config.json"
    document = json.loads(path.read_text())
    for name in ("rope_theta", "rope_parameters", "hidden_act"):
        document.pop(name)
    path.write_text(json.dumps(document))
    told = Eagle3().read(tmp_path / "draft", _POLICY).assumed
    assert set(told) == {
        *("rope_theta = 10000.0", 'hidden_act = "silu"', "norm_before_residual = false"),
    }


def _no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("name", _ALL)
def test_releases_keep_layout_of_initial_checkpoint(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Release 0 is what vLLM reads as its trainer meant it; later ones are written like it."""
    registry = Registry(tmp_path / "registry")
    manifest = registry.import_initial(_FOLDER / name, _POLICY)
    with monkeypatch.context() as full_disk:
        # A start there is what applies lower bounds of what is kept.
        full_disk.setattr(os, "mkdir", _no_space)
        assert registry.import_initial(_FOLDER / name, _POLICY) == manifest
        with pytest.raises(RefusedError, match="another checkpoint than release 0"):
            registry.import_initial(_FOLDER / _ALL[_ALL.index(name) - 1], _POLICY)
    zero = registry.path(0)
    checkpoint = Eagle3().read(zero)  # without the policy: nothing is left open
    source = Eagle3().read(_FOLDER / name, _POLICY)
    assert checkpoint.config == source.config and checkpoint.as_stored
    assert checkpoint.tensors.keys() == source.tensors.keys()
    for own_name, tensor in source.tensors.items():
        assert torch.equal(checkpoint.tensors[own_name], tensor)
    written = json.loads((zero / "config.json").read_text())
    assert written[_LAYER_IDS] == list(source.config.aux_layer_ids)
    assert _LAYER_IDS not in (written.get("eagle_config") or {})
    given = json.loads((_FOLDER / name / "config.json").read_text())
    if name == "speculators":
        assert written == given
    if name == "speculators_qwen3":
        # vLLM takes three layers for granted in one of its two classes.
        given["transformer_layer_config"]["num_aux_hidden_states"] = 2
        assert written == given

    head = Eagle3().read(zero).draft()
    newer = registry.create(
        head, release_pb2.ReleaseManifest(parent_version=0, ttt_steps=3), torch.float32
    )
    path = registry.path(newer.draft_version)
    names = {spec.name for spec in manifest.tensors}
    assert {spec.name for spec in newer.tensors} == names
    assert not names & {"embed_tokens.weight", "verifier_lm_head.weight"}
    renamed = json.loads((path / "config.json").read_text())
    assert renamed.keys() == written.keys() and renamed.get("dtype") in ("float32", None)
    assert Eagle3().read(path).config == head.config


@pytest.mark.parametrize("name", _SPECULATORS)
def test_new_speculators_checkpoint_has_all_their_fields(tmp_path: Path, name: str) -> None:
    """Not every value: what a draft's function does not depend on is left to their defaults."""
    head = Eagle3().read(_FOLDER / name, _POLICY).draft()
    Eagle3().save(tmp_path, head, layout="speculators", policy=_POLICY)
    theirs = json.loads((_FOLDER / name / "config.json").read_text())
    ours = json.loads((tmp_path / "config.json").read_text())
    defaults = {"auto_map", "transformers_version", "embed_requires_grad"}
    assert theirs.keys() - ours.keys() == defaults
    verifier = ours["speculators_config"].pop("verifier")
    assert verifier["architectures"] == ["Qwen3ForCausalLM"]
    assert verifier["name_or_path"] == str(_POLICY)
    del theirs["speculators_config"]["verifier"]
    assert ours["speculators_config"] == theirs["speculators_config"]
    assert Eagle3().read(tmp_path).config == head.config


def test_speculators_checkpoint_with_verifier_weights(tmp_path: Path) -> None:
    """Copies of the policy's norm and lm_head, which vLLM has no parameters for, are left out."""
    source = _FOLDER / "speculators"
    tensors = load_file(source / "model.safetensors")
    extra = {"verifier_norm.weight": torch.ones(16), "verifier_lm_head.weight": torch.ones(16, 16)}
    save_file(tensors | extra, tmp_path / "model.safetensors")
    document = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(document))
    assert Eagle3().read(tmp_path, _POLICY).tensors.keys() == (
        Eagle3().read(source, _POLICY).tensors.keys()
    )
    document["transformer_layer_config"] |= {"norm_output": False, "fc_norm": True}
    layer = document["transformer_layer_config"]
    (tmp_path / "config.json").write_text(json.dumps(document))
    # As in vLLM, what stands around the nested object goes before what is in it.
    assert Eagle3().read(tmp_path, _POLICY).config == Eagle3().read(source, _POLICY).config
    for field, change in (
        ("norm_before_residual", {"norm_before_residual": None}),
        ("speculators_model_type", {"speculators_model_type": "peagle"}),
        ("transformer_layer_config", {"transformer_layer_config": None}),
        ("rope_scaling: found null", {"transformer_layer_config": layer | {"rope_scaling": None}}),
    ):
        (tmp_path / "config.json").write_text(json.dumps(document | change))
        with pytest.raises(RefusedError, match=field):
            Eagle3().read(tmp_path, _POLICY)


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("use_aux_hidden_state", False),
        ("use_last_layernorm", False),
        (_LAYER_IDS, []),
    ],
)
def test_modelopt_draft_other_than_eagle3_is_refused(
    tmp_path: Path, field: str, change: object
) -> None:
    source = _FOLDER / "modelopt"
    document = json.loads((source / "config.json").read_text())
    document["eagle_config"][field] = change
    (tmp_path / "config.json").write_text(json.dumps(document))
    (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    with pytest.raises(RefusedError, match=rf"eagle_config\.{field}"):
        Eagle3().read(tmp_path)
