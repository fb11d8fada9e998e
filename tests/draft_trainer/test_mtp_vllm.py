"""Every family of MTP heads against vLLM's own modules, step by step of a served draft."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draft_trainer.drafters.batch import Batch
from draft_trainer.drafters.mtp import Mtp, MtpConfig, MtpHead
from draft_trainer.drafters.policy import PolicyHead
from tests.draft_trainer.synthetic import QWEN, assert_near, fill_randomly, logits_of, run_apart

pytestmark = [pytest.mark.contract("alignment"), pytest.mark.slow]

WIDTH, VOCAB, TOKENS, STEPS, ANCHORS = 64, 128, 12, 4, (0, 1, 7)

SIZES: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
GLM: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "use_qk_norm": True,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 4,
    "topk_group": 2,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.5,
}
_DOCUMENTS: dict[str, dict[str, Any]] = {
    "qwen3_next": QWEN | SIZES | {"head_dim": 16},
    # transformers does not know MiMo: its checkpoints bring their configuration's code.
    "mimo": {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"},
    },
    "ernie4_5_moe": {
        "architectures": ["Ernie4_5_MoeForCausalLM"],
        "model_type": "ernie4_5_moe",
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 32,
    },
    "glm4_moe": GLM,
    "glm4_moe of one group": GLM
    | {
        **{"n_group": 1, "topk_group": 1, "num_experts_per_tok": 3, "routed_scaling_factor": 1.0},
        **{"norm_topk_prob": False, "attention_bias": False, "use_qk_norm": False},
    },
}


def _head(name: str) -> MtpHead:
    """Random in everything, the norms' weights and the biases too."""
    torch.manual_seed(len(name))
    head = MtpHead(MtpConfig.from_dict(SIZES | _DOCUMENTS[name]))
    fill_randomly(head)
    return head


def _inputs() -> dict[str, Tensor]:
    """One sequence from its first token on."""
    torch.manual_seed(1)
    return {
        "embeds": torch.randn(TOKENS, WIDTH),
        "final": 3.0 * torch.randn(TOKENS, WIDTH),
        "lm_head": torch.randn(VOCAB, WIDTH),
        "anchors": torch.tensor(ANCHORS),
        "steps": torch.tensor(STEPS),
    }


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Tensor]]:
    """Run vLLM's module on each family's release."""
    pytest.importorskip("vllm")
    folder = tmp_path_factory.mktemp("families")
    releases = {name: folder / name for name in _DOCUMENTS}
    for name, path in releases.items():
        path.mkdir()
        Mtp().save(path, _head(name), torch.float32)
    save_file(_inputs(), folder / "inputs.safetensors")
    job = {
        "policy": "",
        "drafts": [str(path) for path in releases.values()],
        "inputs": str(folder / "inputs.safetensors"),
    }
    run_apart("tests.draft_trainer.vllm_head", job, 280)
    return {name: load_file(f"{path}.safetensors") for name, path in releases.items()}


@pytest.mark.parametrize("first_anchor", [0, 1])
@pytest.mark.parametrize("name", _DOCUMENTS)
def test_mtp_steps_equal_vllms(
    served: dict[str, dict[str, Tensor]], name: str, first_anchor: int
) -> None:
    """The next step's input and the logits are equal at every anchor and step."""
    head, inputs, theirs = _head(name), _inputs(), served[name]
    batch = SimpleNamespace(
        embeds=inputs["embeds"][None],
        final_hidden=inputs["final"][None],
        positions=torch.arange(TOKENS)[None],
    )
    policy = cast(PolicyHead, SimpleNamespace(lm_head_rows=inputs["lm_head"]))
    with torch.no_grad():
        for step, output in enumerate(head.unroll(cast(Batch, batch), STEPS, first_anchor)):
            logits = logits_of(head, output, policy)
            for number, anchor in enumerate(ANCHORS):
                if anchor >= first_anchor:
                    at = anchor - first_anchor
                    assert_near(output[0, at], theirs["hidden"][number, step])
                    assert_near(logits[0, at], theirs["logits"][number, step])
