"""DFlash and DSpark drafts against vLLM's own modules, in both of their layouts."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draft_trainer.drafters import DRAFTERS
from draft_trainer.drafters.batch import Batch
from draft_trainer.drafters.dflash import DflashHead
from draft_trainer.drafters.policy import PolicyHead
from tests.draft_trainer.synthetic import assert_near, fill_randomly, logits_of, run_apart

pytestmark = [pytest.mark.contract("alignment"), pytest.mark.slow]

WIDTH, VOCAB, TOKENS, STEPS, ANCHORS = 64, 128, 12, 3, (0, 1, 7)
DRAFT_VOCAB = 48
SIZES: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
BLOCK: dict[str, Any] = {"mask_token_id": 5, "target_layer_ids": [1, 3, 4]}
MARKOV: dict[str, Any] = {
    "markov_rank": 16,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
DSPARK = {"architectures": ["Qwen3DSparkModel"], **SIZES, **BLOCK, **MARKOV}


def speculators(kind: str, **changes: Any) -> dict[str, Any]:
    """config.json with everything around the sizes."""
    return {
        "architectures": [f"{kind}Speculator"],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": STEPS}],
            "verifier": {"name_or_path": None, "architectures": []},
        },
        "transformer_layer_config": SIZES,
        "draft_vocab_size": DRAFT_VOCAB,
        "aux_hidden_state_layer_ids": [2, 4, 5],
        "mask_token_id": 5,
        **(MARKOV if kind == "dspark" else {}),
        **changes,
    }


DOCUMENTS: dict[str, dict[str, dict[str, Any]]] = {
    "dflash": {
        "plain": {"architectures": ["DFlashDraftModel"], **SIZES, "dflash_config": BLOCK},
        "speculators": speculators("dflash"),
        "speculators, causal": speculators("dflash", sliding_window_non_causal=False),
        "speculators, full": speculators("dflash", draft_vocab_size=VOCAB),
    },
    "dspark": {
        "plain": DSPARK,
        "fill-in": {**DSPARK, "sample_from_anchor": False},
        "h alone": {**DSPARK, "confidence_head_with_markov": False},
        "speculators": speculators("dspark", sample_from_anchor=True),
        "speculators, fill-in": speculators("dspark"),
    },
}


def _head(kind: str, name: str) -> DflashHead:
    """Random in everything, with every other token as its vocabulary where it has its own."""
    torch.manual_seed(len(name))
    drafter = cast(Any, DRAFTERS[kind])
    config = drafter.shape.from_dict(DOCUMENTS[kind][name])
    ids = None if config.full_vocabulary else torch.arange(DRAFT_VOCAB) * 2 + 1
    head: DflashHead = drafter.module(config, ids)
    fill_randomly(head)
    return head


def _inputs() -> dict[str, Tensor]:
    torch.manual_seed(1)
    return {
        "token_ids": torch.randint(VOCAB, (TOKENS,)),
        "aux": torch.randn(TOKENS, 3 * WIDTH),
        "embed_tokens": torch.randn(VOCAB, WIDTH),
        "lm_head": torch.randn(VOCAB, WIDTH),
        "anchors": torch.tensor(ANCHORS),
        "steps": torch.tensor(STEPS),
    }


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_block_logits_equal_vllms(kind: str, tmp_path: Path) -> None:
    """And the confidence: in every layout, with a vocabulary of its own or the policy's."""
    pytest.importorskip("vllm")
    policy = tmp_path / "policy"
    policy.mkdir()
    layers = {"num_hidden_layers": 8, "architectures": ["Qwen3ForCausalLM"]}
    (policy / "config.json").write_text(json.dumps(SIZES | layers))
    inputs, releases = _inputs(), {name: tmp_path / name for name in DOCUMENTS[kind]}
    save_file(inputs, tmp_path / "inputs.safetensors")
    for name, path in releases.items():
        path.mkdir()
        DRAFTERS[kind].save(path, _head(kind, name), torch.float32)
    job = {
        "kind": kind,
        "policy": str(policy),
        "drafts": [str(path) for path in releases.values()],
        "inputs": str(tmp_path / "inputs.safetensors"),
    }
    run_apart("tests.draft_trainer.vllm_head", job, 280)
    ids = inputs["token_ids"][None]
    for name, path in releases.items():
        theirs, head = load_file(f"{path}.safetensors"), _head(kind, name)
        kept = head.target_ids()
        rows = SimpleNamespace(lm_head_rows=inputs["lm_head"], embed_tokens=inputs["embed_tokens"])
        policy_head = cast(PolicyHead, rows)
        batch = SimpleNamespace(
            token_ids=ids,
            embeds=inputs["embed_tokens"][ids],
            aux=inputs["aux"][None],
            positions=torch.arange(TOKENS)[None],
            policy=policy_head,
        )
        outside = torch.ones(VOCAB, dtype=torch.bool)
        outside[kept] = False
        assert bool(theirs["logits"][..., outside].isneginf().all())
        with torch.no_grad():
            for step, output in enumerate(head.unroll(cast(Batch, batch), STEPS)):
                logits = logits_of(head, output, policy_head)[0, list(ANCHORS)]
                assert_near(logits, theirs["logits"][:, step, kept])
                if head.confidence is None:
                    continue
                seen = head.normed(output)[0, list(ANCHORS), : head.confidence.in_features]
                said = head.confidence(seen)[:, 0].sigmoid()
                assert_near(said, theirs["confidence"][:, step])
