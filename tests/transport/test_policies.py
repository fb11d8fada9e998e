"""Policy families before a real trainer: what the bridge announces and what ingest checks agree."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from policy_bridge import BridgeConfig, PolicyBridge
from tests.draft_trainer.rig import DEADLINE, make_config, running
from tests.draft_trainer.synthetic import HIDDEN, VOCAB

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
}
FAMILIES: dict[str, dict[str, object]] = {
    "Gemma2": {"final_logit_softcapping": 4.0},
    "Granite": {"logits_scaling": 8.0},
}
"""Logits with a soft cap, and with a factor."""


def make(family: str) -> PreTrainedModel:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **FAMILIES[family])
    model: PreTrainedModel = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_trainer_takes_samples_of_family(tmp_path: Path, family: str) -> None:
    """The samples are rollouts of the policy itself, captured in a pass of its own."""
    model, generator = make(family), torch.Generator().manual_seed(1)
    ids = torch.randint(1, VOCAB, (16, 4), generator=generator)
    with running(make_config(tmp_path), train=False) as (server, client):
        config = BridgeConfig(trainer=server.address, run_id="run", strict=True)
        with PolicyBridge(model, config) as bridge, torch.no_grad():
            assert bridge.wait_connected(DEADLINE)
            with bridge.sync(1):
                pass
            for _ in range(20):
                p = (model(ids).logits[:, -1].float() / 0.8).softmax(-1)
                ids = torch.cat([ids, torch.multinomial(p, 1, generator=generator)], 1)
            with bridge.capture(temperature=0.8) as capture:
                model(ids)
                capture.ship(ids, loss_mask=torch.arange(ids.shape[1]).expand(ids.shape) >= 4)
            assert bridge.flush(DEADLINE)
            stats = bridge.stats()
        assert (stats.accepted, dict(stats.refused_by_field)) == (16, {})
        assert client.status().samples_accepted == 16
