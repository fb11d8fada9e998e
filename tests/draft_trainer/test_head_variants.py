"""Every EAGLE-3 variant that vLLM serves: our head against vLLM's own module, in float32.

Each variant is written as a checkpoint, read by vLLM's configuration and weight loader, and run by
vLLM's class (``vllm_head``). Ours is compared as modules and through the unroll.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draft_trainer.drafters.batch import Batch
from draft_trainer.drafters.eagle3.checkpoint import Eagle3
from draft_trainer.drafters.eagle3.config import HeadConfig
from draft_trainer.drafters.eagle3.head import Eagle3Head
from draft_trainer.drafters.rope import Rope
from slipstream.errors import RefusedError
from tests.draft_trainer.dense_head import dense_step
from tests.draft_trainer.synthetic import assert_near, fill_randomly, logits_of, run_apart

pytestmark = pytest.mark.contract("alignment")

WIDTH, VOCAB, TOKENS, START = 192, 128, 14, 200

_BASE: dict[str, Any] = {
    "hidden_size": WIDTH,
    "target_hidden_size": WIDTH,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB,
    "draft_vocab_size": VOCAB,
    "aux_layer_ids": (2, 4, 5),
    "rms_norm_eps": 1e-3,
    "rope": Rope(5000.0),
    "max_position_embeddings": 256,
}


def _scaling(kind: str, **values: float) -> dict[str, Any]:
    return {"rope": Rope(5000.0, kind, tuple(sorted(values.items())))}


_YARN = {"factor": 4.0, "original_max_position_embeddings": 64}
_VARIANTS: dict[str, dict[str, Any]] = {
    "full vocabulary": {},
    "reduced vocabulary": {"draft_vocab_size": 96},
    "one key head": {"num_key_value_heads": 1},
    "no grouping": {"num_key_value_heads": 4},
    "one layer": {"aux_layer_ids": (4,)},
    "two layers": {"aux_layer_ids": (2, 5)},
    "four layers": {"aux_layer_ids": (1, 2, 4, 8)},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_output": {"norm_output": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "both norms before fc": {"norm_before_fc": True, "fc_norm": True, "aux_layer_ids": (2, 5)},
    "narrower than the policy": {"hidden_size": 64, "own_embeddings": True, "fc_norm": True},
    "own embeddings": {"own_embeddings": True},
    "attention_bias": {"qkv_bias": True},
    "mlp_bias": {"mlp_bias": True},
    "qk_norm": {"qk_norm": True},
    "qk_norm with bias": {"qk_norm": True, "qkv_bias": True, "aux_layer_ids": (2, 5)},
    "linear": _scaling("linear", factor=3.0),
    "dynamic": _scaling("dynamic", factor=2.0),
    "dynamic with alpha": _scaling("dynamic", factor=2.0, alpha=50.0),
    "llama3": _scaling(
        "llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    ),
    "yarn": _scaling("yarn", **_YARN),
    "yarn, every option": _scaling(
        "yarn", **_YARN, beta_fast=16, beta_slow=2, mscale=0.7, mscale_all_dim=0.4, truncate=False
    ),
    "yarn, attention factor": _scaling("yarn", **_YARN, attention_factor=0.8),
    "partial rotary": {"rope": Rope(5000.0, partial=0.5)},
    "everything": {
        **{"draft_vocab_size": 96, "norm_before_residual": True, "norm_output": True},
        **{"norm_before_fc": True, "aux_layer_ids": (2, 5)},
        **{"qkv_bias": True, "mlp_bias": True},
        "rope": Rope(5000.0, "yarn", tuple(sorted(_YARN.items())), partial=0.5),
    },
    # speculators trains with a window unless it is told not to.
    "sliding window": {"sliding_window": 5},
}
# The unroll refuses rows longer than the window: see test_sliding_window_is_not_trained_past.
_UNROLLED = [name for name in _VARIANTS if name != "sliding window"]
_IN_SPECULATORS_LAYOUT = {
    "reduced vocabulary",
    "two layers",
    "norm_before_fc",
    "own embeddings",
    "qk_norm with bias",
    "everything",
    "sliding window",
}


def _head(name: str) -> Eagle3Head:
    """Random in everything, the norms' weights and the biases too."""
    torch.manual_seed(len(name))
    config = HeadConfig(**_BASE | _VARIANTS[name])
    ids = torch.randperm(VOCAB)[: config.draft_vocab_size].sort().values
    head = Eagle3Head(config, None if config.full_vocabulary else ids)
    fill_randomly(head)
    return head


def _inputs() -> dict[str, Tensor]:
    """One sequence: T tokens, and auxiliary states and positions of all but the last two."""
    torch.manual_seed(1)
    return {
        "token_ids": torch.randint(VOCAB, (TOKENS,)),
        "positions": torch.arange(START, START + TOKENS - 2),
        "aux": 3.0 * torch.randn(TOKENS - 2, 4 * WIDTH),
        "embeds": torch.randn(TOKENS, WIDTH),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("variants")


@pytest.fixture(scope="module")
def served(folder: Path, policy_dir: Path) -> dict[str, dict[str, Tensor]]:
    """Run vLLM's module on each variant's checkpoint."""
    pytest.importorskip("vllm")
    drafts = {}
    for number, name in enumerate(_VARIANTS):
        drafts[name] = folder / str(number)
        drafts[name].mkdir()
        head = _head(name)
        layout = "speculators" if name in _IN_SPECULATORS_LAYOUT else "plain"
        Eagle3().save(drafts[name], head, torch.float32, layout=layout)
    inputs = folder / "inputs.safetensors"
    save_file(_inputs(), inputs)
    job = {
        "policy": str(policy_dir),
        "drafts": [str(path) for path in drafts.values()],
        "inputs": str(inputs),
    }
    run_apart("tests.draft_trainer.vllm_head", job, 300)
    return {name: load_file(f"{path}.safetensors") for name, path in drafts.items()}


@pytest.mark.slow
@pytest.mark.parametrize("name", _VARIANTS)
def test_modules_equal_vllms(served: dict[str, dict[str, Tensor]], folder: Path, name: str) -> None:
    """Two draft steps over the whole sequence: fused states, logits, and what is fed back."""
    theirs, inputs = served[name], _inputs()
    head = Eagle3().read(folder / str(list(_VARIANTS).index(name))).draft()
    assert head.config == _head(name).config
    columns = head.target_ids()
    assert bool(theirs["own_embeddings"]) == (head.embed_tokens is not None)
    embeds = inputs["embeds"]
    with torch.no_grad():
        if head.embed_tokens is not None:
            embeds = head.embed_tokens(inputs["token_ids"])
        hidden = head.fuse(inputs["aux"][None, :, : head.fc.in_features])
        assert_near(hidden[0], theirs["fused"])
        for step in range(2):
            given = embeds[None, step + 1 : TOKENS - 1 + step]
            output = dense_step(head, hidden, given, inputs["positions"][None] + step)
            logits, hidden = logits_of(head, output), head.feedback(output)
            assert_near(logits[0], theirs[f"logits{step}"][:, columns])
            assert_near(hidden[0], theirs[f"hidden{step}"])


@pytest.mark.parametrize("name", _UNROLLED)
def test_unrolled_steps_equal_serving_one_chain(name: str) -> None:
    """Prefill up to an anchor, then the head's own states, one token at a time; and gradients."""
    head, inputs, anchor, steps = _head(name), _inputs(), 6, 4
    batch = _batch(head, inputs)
    table = head.embed_tokens
    embeds = batch.embeds if table is None else table(batch.token_ids)
    outputs = list(head.unroll(batch, steps))
    hidden = head.fuse(batch.aux[:, : anchor + 1])
    for step, output in enumerate(outputs):
        upto = anchor + 1 + step
        dense = dense_step(head, hidden, embeds[:, 1 : upto + 1], batch.positions[:, :upto])
        assert_near(output[0, anchor], dense[0, -1])
        hidden = torch.cat([hidden, head.feedback(dense[:, -1:])], dim=1)
    sum(logits_of(head, output)[:, : anchor + 1].square().sum() for output in outputs).backward()
    for parameter_name, parameter in head.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, parameter_name


def test_sliding_window_is_not_trained_past() -> None:
    """A window over the whole row and its steps changes nothing; a shorter one is refused."""
    reach = TOKENS + 2
    plain = _head("full vocabulary")
    windowed = Eagle3Head(HeadConfig(**_BASE, sliding_window=reach))
    windowed.load_state_dict(plain.state_dict())
    with torch.no_grad():
        outputs = [
            torch.stack(list(head.unroll(_batch(head, _inputs()), 3))) for head in (plain, windowed)
        ]
        assert torch.equal(*outputs)
        with pytest.raises(RefusedError, match="sliding_window"):
            list(windowed.unroll(_batch(windowed, _inputs()), 4))


def _batch(head: Eagle3Head, inputs: dict[str, Tensor]) -> Batch:
    """Make the parts of a batch that the unroll reads; the last two positions have no meaning."""
    padding = torch.zeros(2, head.fc.in_features)
    return cast(
        Batch,
        SimpleNamespace(
            token_ids=inputs["token_ids"][None],
            positions=torch.arange(START, START + TOKENS)[None],
            aux=torch.cat([inputs["aux"][:, : head.fc.in_features], padding])[None],
            embeds=inputs["embeds"][None],
        ),
    )
