"""A tiny synthetic policy whose states, tokens and log-probs are exactly consistent."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from draft_trainer.drafters import Draft, batch
from draft_trainer.drafters.batch import Batch
from draft_trainer.drafters.dflash import DflashConfig, DflashHead
from draft_trainer.drafters.draft_model import POLICY_WIDTH, DraftLm, LmConfig
from draft_trainer.drafters.dspark import DsparkConfig, DsparkHead
from draft_trainer.drafters.eagle3.head import Eagle3Head, HeadConfig
from draft_trainer.drafters.expected_acceptance import expected_acceptance
from draft_trainer.drafters.mtp import MtpConfig, MtpHead
from draft_trainer.drafters.policy import PolicyHead, PolicyHeads
from draft_trainer.training.learner import Learner
from slipstream.sample import Sample

HIDDEN, VOCAB, DRAFT_VOCAB, LAYERS = 16, 24, 16, 3


QWEN = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "layer_types": ["full_attention"] * 2,
    "num_experts": 0,
    "partial_rotary_factor": 0.5,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
}
"""config.json of a policy with an MTP head."""


def config(draft_vocab: int = DRAFT_VOCAB, **changes: object) -> HeadConfig:
    """A head of two heads over one key head."""
    values: dict[str, object] = {
        "hidden_size": HIDDEN,
        "target_hidden_size": HIDDEN,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "draft_vocab_size": draft_vocab,
        "aux_layer_ids": (2, 4, 5),
    }
    return HeadConfig(**(values | changes))  # type: ignore[arg-type]


def draft_vocab_ids() -> Tensor:
    """Sixteen of twenty-four ids."""
    return torch.tensor([i for i in range(VOCAB) if i % 3 != 2])


def head(seed: int = 0, draft_vocab: int = DRAFT_VOCAB, **changes: object) -> Eagle3Head:
    """A random head."""
    torch.manual_seed(seed)
    ids = draft_vocab_ids() if draft_vocab < VOCAB else None
    return Eagle3Head(config(draft_vocab, **changes), ids)


def dflash_document(**changes: object) -> dict[str, object]:
    """config.json of a DFlash draft of two layers, two heads over one key head."""
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCAB,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "dflash_config": {"mask_token_id": 5, "target_layer_ids": [1, 3, 4]},
        **changes,
    }


def dflash_head(seed: int = 0) -> DflashHead:
    """A random DFlash draft for the auxiliary layers of ``config``."""
    torch.manual_seed(seed)
    return DflashHead(DflashConfig.from_dict(dflash_document()))


def dspark_document(**changes: object) -> dict[str, object]:
    """config.json of a DSpark draft like ``dflash_document``'s, as its authors write it."""
    block = dflash_document()
    nested = block.pop("dflash_config")
    assert isinstance(nested, dict)
    markov = {"markov_rank": 6, "markov_head_type": "vanilla"}
    confidence = {"enable_confidence_head": True, "confidence_head_with_markov": True}
    names = {"architectures": ["Qwen3DSparkModel"], "block_size": 3}
    return block | nested | names | markov | confidence | changes


def dspark_head(seed: int = 0, **changes: object) -> DsparkHead:
    """A random DSpark draft for the auxiliary layers of ``config``."""
    torch.manual_seed(seed)
    return DsparkHead(DsparkConfig.from_dict(dspark_document(**changes)))


def speculators_document(kind: str, **changes: object) -> dict[str, object]:
    """config.json of a block draft as speculators 0.9 writes it, with a vocabulary of its own."""
    around = (
        *("mask_token_id", "block_size", "markov_rank", "markov_head_type"),
        *("enable_confidence_head", "confidence_head_with_markov"),
    )
    flat = dspark_document()
    given = {name: flat.pop(name) for name in around if kind == "dspark" or name == around[0]}
    for name in ("architectures", "target_layer_ids", *around):
        flat.pop(name, None)
    proposal = {"proposal_type": "greedy", "speculative_tokens": 3}
    verifier: dict[str, object] = {"name_or_path": None, "architectures": []}
    return {
        "architectures": ["DSparkDraftModel" if kind == "dspark" else "DFlashDraftModel"],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
        "transformer_layer_config": flat,
        "draft_vocab_size": DRAFT_VOCAB,
        "target_hidden_size": None,
        "aux_hidden_state_layer_ids": [2, 4, 5],
        "sliding_window_non_causal": False,
        "sample_from_anchor": kind == "dspark",
        **given,
        **changes,
    }


def mtp_head(seed: int = 0) -> MtpHead:
    """A random MTP head."""
    torch.manual_seed(seed)
    return MtpHead(MtpConfig.from_dict(QWEN))


def draft_model_head(seed: int = 0) -> DraftLm:
    """A random draft model of two layers."""
    left = ("architectures", "num_experts", "partial_rotary_factor", "layer_types")
    document = {name: value for name, value in QWEN.items() if name not in left}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    document |= {"model_type": "qwen3", "rope_parameters": rope, POLICY_WIDTH: HIDDEN}
    torch.manual_seed(seed)
    return DraftLm(LmConfig.from_dict(document))


def collate(samples: Sequence[Sample], heads: PolicyHeads) -> Batch:
    """One batch of all sequences of samples of one policy version, in their order."""
    rows = [row for sample in samples for row in batch._segments(sample)]
    return batch._collate(rows, heads, None)


def logits_of(draft: Draft, output: Tensor, policy: PolicyHead | None = None) -> Tensor:
    """Draft-vocabulary logits [..., draft_vocab] of an output of ``Draft.unroll``, [..., H]."""
    return F.linear(draft.normed(output), draft.lm_head_rows(policy).to(output.dtype))


class Policy:
    """A second-order Markov policy: its final hidden state is a function of two tokens.

    Args:
        seed: of its weights.
        sharpness: scale of its logits.
    """

    def __init__(self, seed: int = 0, sharpness: float = 2.0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.embed = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.lm_head = torch.randn(VOCAB, HIDDEN, generator=generator) / HIDDEN**0.5
        self._mix = torch.randn(2 * HIDDEN, HIDDEN, generator=generator) / HIDDEN**0.5
        self._aux = torch.randn(HIDDEN, (LAYERS - 1) * HIDDEN, generator=generator)
        self._sharpness = sharpness

    def final_hidden(self, tokens: Tensor) -> Tensor:
        """[T] to [T, H]."""
        current = self.embed[tokens]
        previous = torch.cat([torch.zeros(1, HIDDEN), current[:-1]])
        return torch.tanh(torch.cat([current, previous], 1) @ self._mix) * self._sharpness

    def log_probs(self, tokens: Tensor, temperature: float = 1.0) -> Tensor:
        """[T] to [T, VOCAB]."""
        return (self.final_hidden(tokens) @ self.lm_head.T / temperature).log_softmax(-1)

    def transitions(self, temperature: float = 1.0) -> Tensor:
        """[VOCAB, VOCAB, VOCAB]: p(next | previous, current)."""
        pairs = torch.cartesian_prod(torch.arange(VOCAB), torch.arange(VOCAB))
        p = torch.stack([self.log_probs(pair, temperature)[-1].exp() for pair in pairs])
        return p.view(VOCAB, VOCAB, VOCAB)

    def rolls(
        self,
        generator: torch.Generator,
        count: int,
        length: int = 24,
        prompt: int = 4,
        temperature: float = 1,
    ) -> Tensor:
        """Tokens [count, length]: a uniform prompt, then samples of the policy."""
        table = self.transitions(temperature)
        tokens = torch.randint(VOCAB, (count, prompt), generator=generator)
        while tokens.shape[1] < length:
            p = table[tokens[:, -2], tokens[:, -1]]
            tokens = torch.cat([tokens, torch.multinomial(p, 1, generator=generator)], 1)
        return tokens

    def sample(
        self,
        tokens: Tensor,
        sample_id: str = "s",
        version: int = 1,
        prompt: int = 4,
        temperature: float = 1.0,
    ) -> Sample:
        """The states of ``tokens`` as one sample."""
        final = self.final_hidden(tokens)
        logits = final @ self.lm_head.T
        log_probs = (logits / temperature).log_softmax(-1)
        following = tokens[1:, None]
        zero = torch.zeros(1)
        return Sample.pack(
            sample_id=sample_id,
            policy_version=version,
            temperature=temperature,
            aux_layers=(2, 4, 5),
            token_ids=tokens,
            positions=torch.arange(len(tokens)),
            segment_ids=torch.zeros(len(tokens), dtype=torch.int64),
            loss_mask=torch.arange(len(tokens)) >= prompt,
            aux=torch.cat([final, torch.tanh(final @ self._aux)], 1),
            final_hidden=final,
            sampled_logprobs=torch.cat([zero, log_probs[:-1].gather(1, following)[:, 0]]),
            sampled_logits=torch.cat([zero, logits[:-1].gather(1, following)[:, 0]]),
        )

    def heads(self, version: int = 1, rows: Tensor | None = None) -> PolicyHeads:
        """A store with this policy as its only version."""
        store = PolicyHeads(4)
        ids = draft_vocab_ids() if rows is None else rows
        store.add(PolicyHead(version, self.lm_head[ids], self.embed))
        return store

    def samples(self, count: int, seed: int = 0, **options: float) -> list[Sample]:
        """Rollouts of differing lengths, 16 to 24 tokens, the first four the prompt."""
        temperature = float(options.get("temperature", 1.0))
        generator = torch.Generator().manual_seed(seed)
        tokens = self.rolls(generator, count, temperature=temperature)
        return [
            self.sample(row[: 16 + i % 9], f"{seed}-{i}", temperature=temperature)
            for i, row in enumerate(tokens)
        ]


def learned(
    learner: Learner, samples: Sequence[Sample], heads: PolicyHeads, draft_length: int
) -> float:
    """Acceptance length that 60 steps on samples bring, expected on them."""
    before = expected_acceptance(learner.head, samples, heads, draft_length, "probabilistic")
    for _ in range(60):
        learner.step(samples, heads)
    after = expected_acceptance(learner.snapshot(), samples, heads, draft_length, "probabilistic")
    assert len(after.accepted_per_position) == draft_length
    return after.acceptance_length - before.acceptance_length


def run_apart(module: str, job: dict[str, Any], seconds: float) -> None:
    """``python -m module JOB``: what vLLM leaves in a process does not stay in the test's."""
    command = [sys.executable, "-m", module, json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    assert done.returncode == 0, done.stderr[-4000:]


def fill_randomly(module: torch.nn.Module) -> None:
    """Make every tensor matter: vectors, such as norms and biases, are not ones or zeros."""
    for tensor in module.state_dict().values():
        if tensor.is_floating_point():
            centre = 1.0 if tensor.ndim == 1 else 0.0
            torch.nn.init.normal_(tensor, centre, 0.3 if centre else tensor.shape[1] ** -0.5)


def assert_near(ours: Tensor, theirs: Tensor) -> None:
    """Assert equality to 1e-5 of the largest value: both float32, summed in other orders."""
    error = (ours - theirs).abs().max() / theirs.abs().max()
    assert error < 1e-5, f"relative error {error:.2e}"
