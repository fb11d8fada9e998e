"""Checkpoints that are refused, each by the name of what is wrong, before anything is touched."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draft_trainer.drafters.eagle3.checkpoint import Eagle3
from slipstream.errors import RefusedError
from tests.draft_trainer.checkpoint_rig import (
    WEIGHTS,
    d2t,
    edit_config,
    edit_tensors,
    policy_folder,
    saved,
)
from tests.draft_trainer.synthetic import DRAFT_VOCAB, HIDDEN, VOCAB, head


def _check_refused(folder: Path, match: str) -> None:
    """Match what is wrong; the advice, which names more fields, does not count."""
    with pytest.raises(RefusedError) as refusal:
        Eagle3().read(folder)
    reason, _, advice = str(refusal.value).partition("Next step")
    assert re.search(match, reason), reason
    assert advice


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("architectures", {"architectures": ["MistralForCausalLM"]}),
        ("architectures", {"architectures": ["LlamaForCausalLM", "Qwen3ForCausalLM"]}),
        ("architectures", {"architectures": []}),
        ("missing .*q_norm", {"architectures": ["Eagle3Qwen3ForCausalLM"]}),
        ("P-EAGLE's mask_hidden", {"architectures": ["PEagleDraftModel"]}),
        ("EAGLE-1 takes the final state", {"architectures": ["EagleLlamaForCausalLM"]}),
        ("model_type", {"model_type": "mistral"}),
        ("num_hidden_layers", {"num_hidden_layers": 2}),
        ("fc_norm", {"fc_norm": "yes"}),
        ("quantization_config", {"quantization_config": {"bits": 4}}),
        ("num_aux_hidden_states", {"num_aux_hidden_states": 4}),
        ("hidden_size", {"hidden_size": "16"}),
        ("rms_norm_eps", {"rms_norm_eps": ...}),
        ("num_attention_heads", {"num_attention_heads": 3, "num_key_value_heads": 1}),
        ("num_key_value_heads", {"num_key_value_heads": 3}),
        ("head_dim", {"head_dim": 7}),
        ("draft_vocab_size", {"draft_vocab_size": VOCAB + 1}),
        ("eagle_aux_hidden_state_layer_ids", {"eagle_aux_hidden_state_layer_ids": ...}),
        ("eagle_aux_hidden_state_layer_ids", {"eagle_aux_hidden_state_layer_ids": [2, 4, 4]}),
        ("use_aux_hidden_state", {"eagle_config": {"use_aux_hidden_state": False}}),
        (
            r"eagle_config\.eagle_aux",
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}},
        ),
        ("layer_types", {"layer_types": ["chunked_attention"]}),
        ("sliding_window", {"sliding_window": 8}),
        ("sliding_window", {"layer_types": ["sliding_attention"], "sliding_window": None}),
        ("rope_theta", {"rope_theta": 5e5}),
        ("rope_theta", {"rope_theta": None, "rope_parameters": ...}),
        ("longrope", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}),
        ("mrope_section", {"rope_parameters": {"rope_theta": 1e4, "mrope_section": [2, 1, 1]}}),
        ("factor", {"rope_scaling": {"type": "yarn"}}),
        ("type", {"rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 2.0}}),
        ("embed_tokens", {"target_hidden_size": 32}),
        ("missing .*q_proj.bias", {"attention_bias": True}),
        (r"lm_head\.weight", {"draft_vocab_size": DRAFT_VOCAB - 1}),
    ],
)
def test_invalid_draft_config_is_refused_by_field(
    tmp_path: Path, field: str, changes: dict[str, Any]
) -> None:
    saved(tmp_path)
    edit_config(tmp_path, **changes)
    _check_refused(tmp_path, field)


_OUTSIDE = torch.cat([d2t()[:-1], torch.tensor([VOCAB])])


@pytest.mark.parametrize(
    ("match", "changes"),
    [
        (r"missing \['fc.weight'\]", {"fc__weight": None}),
        ("unknown .*q_proj.bias", {"midlayer__self_attn__q_proj__bias": torch.zeros(32)}),
        ("fc.weight", {"fc__weight": torch.zeros(HIDDEN, 3 * HIDDEN - 1)}),
        (
            "norm.weight.*2 values",
            {"norm__weight": torch.tensor([torch.nan, torch.inf, *[1] * 14])},
        ),
        ("fc.weight.*int64", {"fc__weight": torch.zeros(16, 48, dtype=torch.int64)}),
        ("fc.weight is float8", {"fc__weight": torch.zeros(16, 48).to(torch.float8_e5m2)}),
        ("fc.weight_scale is a part", {"fc__weight_scale": torch.ones(1)}),
        ("d2t.*nothing", {"d2t": None}),
        ("d2t.*ascending", {"d2t": d2t() + torch.arange(DRAFT_VOCAB).flip(0)}),
        ("d2t.*ascending", {"d2t": _OUTSIDE}),
        ("d2t.*float", {"d2t": d2t().float()}),
        ("d2t.*16 ids|d2t.*15", {"d2t": d2t()[:-1]}),
        ("t2d.*1 ids", {"t2d": (torch.arange(VOCAB) % 3 != 2) ^ (torch.arange(VOCAB) == 5)}),
    ],
)
def test_invalid_draft_tensors_are_refused_by_name(
    tmp_path: Path, match: str, changes: dict[str, Tensor | None]
) -> None:
    saved(tmp_path)
    edit_tensors(tmp_path, **changes)
    _check_refused(tmp_path, match)


@pytest.mark.parametrize(
    ("field", "sizes"),
    [
        ("vocab_size", {"vocab_size": VOCAB + 8}),
        ("target_hidden_size", {"hidden_size": HIDDEN * 2}),
        ("eagle_aux_hidden_state_layer_ids", {"num_hidden_layers": 4}),
    ],
)
def test_draft_of_another_policy_is_refused(
    tmp_path: Path, field: str, sizes: dict[str, int]
) -> None:
    saved(tmp_path)
    Eagle3().read(tmp_path, policy_folder(tmp_path))
    with pytest.raises(RefusedError, match=f"the draft's {field}"):
        Eagle3().read(tmp_path, policy_folder(tmp_path, **sizes))


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["Qwen3DSparkModel"], "num_hidden_layers": 5},
        {"architectures": ["DFlashDraftModel"], "num_hidden_layers": 5},
        {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2},  # with draft_vocab_size
    ],
)
def test_draft_of_another_kind_is_not_called_a_policy(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    saved(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(RefusedError, match="found a draft of another kind") as refused:
        Eagle3().read(tmp_path)
    assert "draft.kind" in refused.value.next_step and "policy" not in refused.value.next_step


def test_unreadable_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"model\.safetensors.*neither fetched"):
        Eagle3().read(tmp_path)
    (tmp_path / "training_state.pt").write_bytes(b"PK")
    with pytest.raises(RefusedError, match=r"training_state.*specforge export"):
        Eagle3().read(tmp_path)
    saved(tmp_path)
    (tmp_path / WEIGHTS).write_bytes(b"\x08\0\0\0\0\0\0\0garbage!")
    with pytest.raises(RefusedError, match=r"model\.safetensors"):
        Eagle3().read(tmp_path)


def test_layout_that_lacks_a_field_is_not_written(tmp_path: Path) -> None:
    both = head(1, norm_before_fc=True, fc_norm=True)
    for layout, field in (("speculators", "fc_norm"), ("modelopt", "layout"), ("x", "layout")):
        with pytest.raises(RefusedError, match=field):
            Eagle3().save(tmp_path, both, layout=layout)
    assert not list(tmp_path.iterdir())
