"""What is sent: sequences of states as large as a policy's."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from slipstream.sample import Sample

RUN = "benchmark"
POLICY_VERSION = 1
VOCAB = 64
AUX_LAYERS = (2, 18, 33)
MAX_TOKENS = 2048


@dataclass(frozen=True)
class Case:
    """Samples of one size.

    Attributes:
        hidden_size: H; a token is 8 H bytes in bfloat16.
        tokens: T.
        round_bytes: about as much is sent in a round.
    """

    hidden_size: int
    tokens: int
    round_bytes: int

    @property
    def sample_bytes(self) -> int:
        """Bytes of the states of a sample."""
        return 8 * self.hidden_size * self.tokens

    @property
    def count(self) -> int:
        """Samples in a round."""
        return max(4, self.round_bytes // self.sample_bytes)

    @property
    def label(self) -> str:
        """For tables."""
        size = self.sample_bytes
        return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def make_samples(case: Case, memory_bytes: int) -> list[Sample]:
    """Samples that together fill about ``memory_bytes``, so that no cache holds them."""
    generator = torch.Generator().manual_seed(0)
    tokens, hidden = case.tokens, case.hidden_size
    count = max(2, min(case.count, memory_bytes // case.sample_bytes))
    # One random sequence, copied: making random numbers takes longer than the benchmark.
    aux = torch.randn(tokens, 3 * hidden, generator=generator).to(torch.bfloat16)
    final = torch.randn(tokens, hidden, generator=generator).to(torch.bfloat16)
    first = Sample.pack(
        "",
        POLICY_VERSION,
        1.0,
        AUX_LAYERS,
        token_ids=torch.arange(tokens) % VOCAB,
        positions=torch.arange(tokens),
        loss_mask=torch.ones(tokens, dtype=torch.bool),
        aux=aux,
        final_hidden=final,
        sampled_logprobs=torch.full((tokens,), -1.0),
        sampled_logits=torch.zeros(tokens),
    )
    return [Sample(first.header, first.block.clone()) for _ in range(count)]
