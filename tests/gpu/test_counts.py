"""The work of a GPU for the draft of an 8B policy: launches, waits, bytes and memory.

See ``emulation``: the code takes a GPU's branches, nothing is computed. The bounds are what the
code reaches, rounded up: a change that needs more of anything fails here.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draft_trainer.drafters.batch import Batch
from draft_trainer.drafters.dflash import DflashConfig, DflashHead
from draft_trainer.drafters.draft import Draft
from draft_trainer.drafters.dspark import DsparkConfig, DsparkHead
from draft_trainer.drafters.eagle3.config import HeadConfig
from draft_trainer.drafters.eagle3.head import Eagle3Head
from draft_trainer.drafters.expected_acceptance import step_acceptance
from draft_trainer.drafters.loss import Target, step_weights, ttt_objective, valid_targets
from draft_trainer.drafters.policy import PolicyHead, PolicyHeads
from tests.draft_trainer.synthetic import dflash_document, dspark_document
from tests.gpu.emulation import Counts

GB = 1e9
STEPS, VOCAB, HIDDEN = 5, 151_936, 4096


def _head(draft_vocab: int) -> Eagle3Head:
    config = HeadConfig(
        hidden_size=HIDDEN,
        intermediate_size=12_288,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        vocab_size=VOCAB,
        draft_vocab_size=draft_vocab,
        aux_layer_ids=(2, 18, 33),
        target_hidden_size=HIDDEN,
        rms_norm_eps=1e-6,
        max_position_embeddings=40_960,
    )
    with torch.device("meta"):
        return Eagle3Head(config, torch.empty(draft_vocab, dtype=torch.int64))


def _batch(rows: int, tokens: int, draft_vocab: int, temperature: float) -> Batch:
    """States on the device, masks on the CPU, where they are looked at."""

    def there(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(rows, tokens, *shape, dtype=dtype, device="meta")

    every = torch.ones(rows, tokens, dtype=torch.bool)
    weight = torch.empty(draft_vocab, HIDDEN, dtype=torch.bfloat16, device="meta")
    return Batch(
        token_ids=there(dtype=torch.int64),
        positions=there(dtype=torch.int64),
        loss_mask=every,
        anchors=every,
        aux=there(3 * HIDDEN),
        embeds=there(HIDDEN),
        final_hidden=there(HIDDEN),
        policy=PolicyHead(0, weight, weight),
        heads=PolicyHeads(1),
        logits_dtype=torch.bfloat16,
        log_z=there(dtype=torch.float32),
        teacher_known=torch.arange(tokens).lt(tokens - 1).expand(rows, -1),
        sampled_logprobs=there(dtype=torch.float32),
        temperature=torch.full((rows,), temperature),
        groups=("group",) * rows,
    )


def _block(kind: str) -> DflashHead:
    """Five layers, of the same sizes; a Markov head of rank 256."""
    sizes = {"hidden_size": HIDDEN, "intermediate_size": 12_288, "head_dim": 128}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    nested = {"mask_token_id": VOCAB - 1, "target_layer_ids": [1, 17, 32]}
    document = {**sizes, **heads, "num_hidden_layers": 5, "vocab_size": VOCAB}
    with torch.device("meta"):
        if kind == "dspark":
            document = dspark_document(**document, **nested, markov_rank=256)
            return DsparkHead(DsparkConfig.from_dict(document))
        document = dflash_document(**document, dflash_config=nested)
        return DflashHead(DflashConfig.from_dict(document))


def _pass(
    rows: int,
    tokens: int,
    draft_vocab: int,
    temperature: float = 1.0,
    head: Draft | None = None,
    target: Target = "kl",
) -> Counts:
    """One pass forward and backward of a trainer that has made one before."""
    head = head or _head(draft_vocab)
    for _ in range(2):
        counts = Counts()
        with counts:
            batch = _batch(rows, tokens, draft_vocab, temperature)
            outcome = ttt_objective(
                head,
                batch,
                valid_targets(batch, STEPS),
                weights=step_weights(STEPS, 0.8),
                compute_dtype=torch.bfloat16,
                target=target,
            )
            outcome.loss.backward()
        head.zero_grad(set_to_none=True)
    return counts


@pytest.mark.parametrize(("temperature", "moved", "peak"), [(1.0, 345, 15.5), (0.6, 356, 16.5)])
def test_training_pass_of_16384_tokens(temperature: float, moved: float, peak: float) -> None:
    """8 rows of 2,048 tokens, K = 5, 32,000 draft tokens; no wait, whatever the temperature."""
    counts = _pass(8, 2048, 32_000, temperature)
    assert counts.waits == 0
    assert counts.launches <= 1015
    assert counts.other_bytes <= moved * GB
    assert counts.product_bytes <= 86 * GB
    assert counts.peak_bytes <= peak * GB


def test_full_vocabulary_training_pass_fits_beside_policy() -> None:
    counts = _pass(1, 2048, VOCAB)
    assert counts.waits == 0
    assert counts.launches <= 850
    assert counts.peak_bytes <= 10.5 * GB


@pytest.mark.parametrize(
    ("kind", "target", "launches", "peak"),
    [("dflash", "kl", 2600, 16), ("dspark", "dspark", 2750, 18)],
)
def test_block_training_pass_waits_for_nothing(
    kind: str, target: Target, launches: int, peak: float
) -> None:
    """Six places, or DSpark's five, of five layers for each of 2,048 tokens."""
    counts = _pass(1, 2048, VOCAB, head=_block(kind), target=target)
    assert counts.waits == 0
    assert counts.launches <= launches
    assert counts.peak_bytes <= peak * GB


@pytest.mark.parametrize(
    ("draft_vocab", "gigabytes"), [(32_000, 4), (VOCAB, 6)], ids=["reduced", "full"]
)
def test_gate_memory_is_bounded(draft_vocab: int, gigabytes: int) -> None:
    """8,192 anchors; with a full vocabulary half of it is the head's and the policy's matrix."""
    head = _head(draft_vocab)
    with torch.no_grad(), Counts() as counts:
        batch = _batch(4, 2048, draft_vocab, 1.0)
        known = valid_targets(batch, STEPS)
        step_acceptance(head, batch, known, "probabilistic", torch.bfloat16)
    assert counts.peak_bytes <= gigabytes * GB
