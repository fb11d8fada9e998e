"""ERNIE 4.5's MTP head on real vLLM: swaps, and what replay says.

The policy is random, because none of the example's policies is a model of this kind: the head is
accepted a little more often than one that proposes nothing useful.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Ernie4_5_MoeConfig, Ernie4_5_MoeForCausalLM

from draft_trainer.drafters import DRAFTERS
from examples.arithmetic_grpo.make_mtp import new_head
from slipstream.v1 import rollout_server_pb2 as pb
from tests.alignment.test_replay import assert_replay
from tests.rollout_server.checkpoints import load
from tests.rollout_server.live import prompts, swap_many

pytestmark = pytest.mark.vllm
SIZES: dict[str, Any] = {
    **{"vocab_size": 128, "hidden_size": 192, "intermediate_size": 384, "num_hidden_layers": 3},
    **{"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 512},
    **{"moe_intermediate_size": 96, "moe_k": 2, "moe_num_experts": 4, "moe_num_shared_experts": 1},
    **{"moe_layer_start_index": 1, "moe_layer_end_index": 2, "tie_word_embeddings": False},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "num_nextn_predict_layers": 1},
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


def random_policy(tokenizer: Path, out: Path) -> Path:
    """Write a policy of three layers, two of them with experts; answers the new folder."""
    torch.manual_seed(0)
    shutil.copytree(tokenizer, out, ignore=shutil.ignore_patterns("*.safetensors"))
    model = Ernie4_5_MoeForCausalLM(Ernie4_5_MoeConfig(**SIZES)).float()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 0.2 if name == "lm_head.weight" else 0.05)
    model.save_pretrained(out)
    return out


def test_ernie_head_swaps_and_matches_replay(
    serve,  # type: ignore[no-untyped-def]
    policy_dir: Path,
    tmp_path: Path,
) -> None:
    policy, folder = random_policy(policy_dir, tmp_path / "policy"), tmp_path / "head"
    folder.mkdir()
    DRAFTERS["mtp"].save(folder, new_head(policy, seed=0), torch.float32)
    live = serve("--draft-kind", "mtp", policy=policy, draft=folder)
    batch = prompts(32)
    live.speculate(False)
    plain = live.generate(batch)
    live.speculate(True)
    draft = DRAFTERS["mtp"].read(folder, policy).draft()
    names = {draft.config.stored(name): name for name in draft.state_dict()}  # type: ignore[attr-defined]
    for staged in swap_many(live, load(folder), 3, scale=0.3):
        assert live.generate(batch) == plain
        draft.load_state_dict({names[name]: tensor.float() for name, tensor in staged.items()})
    state = live.stub.GetState(pb.GetStateRequest(read_back=True), timeout=60)
    assert (state.draft_version, state.not_ready) == (3, "")
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32).eval()
    assert_replay(live, model, draft, prompts(160, seed=5), least=1.1)
